"""The Python API: a federation of peers with their own data and one model architecture."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dispfl.config import MADE_IN_PYTHON
from dispfl.core.flat_module import FlatModule, Precision, resolve_device
from dispfl.core.metric import MetricLike
from dispfl.core.optimizers import OptimizerFactory
from dispfl.core.packed import PackedModel
from dispfl.core.rng import forked_generators
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.data.batches import DatasetLike, samples_from
from dispfl.errors import ConfigError
from dispfl.experiment import EngineName, check_average_buffers, check_engine, check_vmap_peers
from dispfl.methods.base import Method
from dispfl.methods.dispfl import DisPFL
from dispfl.privacy.steps import Privacy
from dispfl.registry import choose
from dispfl.robust.attacks import ATTACKS, POISONS, Attack, AttackName, poisoned
from dispfl.robust.averages import check_byzantine
from dispfl.round.context import PeerData, RunContext
from dispfl.runs.callbacks import OnRound, as_callbacks, check_callbacks
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.execute import connect_engine, execute, why_not_extended
from dispfl.runs.metrics import weights_sha256
from dispfl.runs.progress import python_progress
from dispfl.runs.run import Run
from dispfl.topology import RandomRegular, Topology, peer_names
from dispfl.wire.codec import Wire

C = TypeVar("C", Method, Topology)
S = TypeVar("S", Train, Wire, Privacy)


class Federation:
    """Peers that train together: each has its own data, and all share a model architecture.

    `peers` lists (training data, test data) pairs, or (training data, validation data, test data)
    triples: torch Datasets or (inputs, labels) tensors; `Dirichlet().peers(data, 100)` divides a
    data set into such a list. `model` is any function that returns an `nn.Module`. `method` and
    `topology` are objects, or what a config says: a name (`"ring"`), a reference
    (`"my_module:Star"`) or a dict (`{"name": "dispfl", "density": 0.2}`). `metric` is a `Metric`,
    the name of a built-in one (`"macro_f1"`), a function whose name says whether a higher value is
    better, or a list of these, the main one first; without it, the accuracy of a classification.
    `optimizer` is a function from flat weights and their `Layout` to a `torch.optim.Optimizer` of
    them, in place of `train.optimizer`; its learning rate follows the schedule of `train`.
    `privacy=Privacy(epsilon=4)` makes training differentially private. `init` gives the weights
    that all start from: a module or its state dict. Every model is evaluated on `global_test` too,
    if it is given, and with `eval_train=True` on its peer's training data. `unseen` lists peers as
    `peers` does; they join after the last round for `unseen_steps` local steps.
    `attack="sign-flip", byzantine=0.2` makes a fifth of the peers lie, to measure how well a method
    withstands them.

    `on_round` is a function, or a list of them, that is called after each round with the `Run` so
    far, and may stop it (`StopRun`); `out` names a run directory. Both may be given to `run`
    instead. `average_buffers=True` also averages the buffers of the received models, such as batch
    norm's running statistics; by default they stay with each peer. `vmap_peers=16` trains up to 16
    peers as one stack: faster where models are tiny, and equal up to rounding. `engine="ray"` runs
    the peers in `workers` processes, on the machines of the Ray cluster at `ray_address` or here.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        peers: Sequence[tuple[DatasetLike, ...]],
        method: Method | str | Mapping[str, Any] = "dispfl",
        topology: Topology | str | Mapping[str, Any] = "random",
        *,
        train: Train | Mapping[str, Any] | None = None,
        wire: Wire | Mapping[str, Any] | None = None,
        privacy: Privacy | Mapping[str, Any] | None = None,
        attack: AttackName = "none",
        byzantine: float = 0.0,
        loss: Callable[[Tensor, Tensor], Tensor] = Task.loss,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        optimizer: OptimizerFactory | None = None,
        global_test: DatasetLike | None = None,
        unseen: Sequence[tuple[DatasetLike, ...]] = (),
        unseen_steps: int = 20,
        init: nn.Module | Mapping[str, Tensor] | None = None,
        seed: int = 0,
        eval_every: int = 1,
        eval_train: bool = False,
        workers: int | None = None,
        vmap_peers: int = 1,
        average_buffers: bool = False,
        device: str = "cpu",
        precision: Precision = "float32",
        engine: EngineName = "inprocess",
        ray_address: str | None = None,
        on_round: OnRound | Sequence[OnRound] | None = None,
        out: str | Path | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            kind = type(model)
            name = (
                f"lambda: {kind.__name__}(...)"
                if kind.__module__.startswith("torch.")
                else kind.__name__
            )
            raise ConfigError(
                f"`model` must be a function that returns a new module: give {name}, not"
                f" {kind.__name__}(...).",
                key="model",
            )
        if not isinstance(peers, Sequence):
            got = f"a {type(peers).__name__}" if isinstance(peers, Collection) else repr(peers)
            raise ConfigError(
                f"`peers` must be a list of pairs (training data, test data), got {got}.",
                key="peers",
            )
        if not peers:
            raise ConfigError(
                "A federation needs at least one peer; `peers` is empty.", key="peers"
            )
        _check_seed(seed)
        method = _component(Method, method, DisPFL())
        topology = _component(Topology, topology, RandomRegular()).resolved(len(peers))
        topology.check(len(peers))
        device = resolve_device(device)
        self.engine = check_engine(engine)
        vmap_peers = _at_least_one("vmap_peers", vmap_peers)
        check_vmap_peers(vmap_peers, engine)
        method.densities(len(peers))
        check_average_buffers(average_buffers, method, engine)
        check_byzantine(method, topology, len(peers))
        names, seed = (
            peer_names(len(peers)),
            operator.index(seed),
        )  # a NumPy number must name the same random streams
        byzantine_peers = _attack(attack, byzantine, names, seed)
        data = {
            name: _peer_data(k, pair)
            for k, (name, pair) in enumerate(zip(names, peers, strict=True))
        }
        self._context = RunContext(
            model=model if init is None else _starting_from(model, init),
            peers=_poisoned_peers(data, byzantine_peers),
            method=method,
            topology=topology,
            train=_table(Train, train),
            task=Task.of(loss, metric),
            seed=seed,
            attack=byzantine_peers,
            rounds=0,
            eval_every=_at_least_one("eval_every", eval_every),
            eval_train=eval_train,
            device=device,
            precision=precision,
            wire=_table(Wire, wire),
            privacy=_table(Privacy, privacy),
            vmap_peers=vmap_peers,
            average_buffers=average_buffers,
            optimizer=optimizer,
            global_test=(
                None if global_test is None else samples_from(global_test, "The global test data")
            ),
            unseen={
                f"new-{k:03d}": _peer_data(k, given, "unseen") for k, given in enumerate(unseen)
            },
            unseen_steps=_at_least_one("unseen_steps", unseen_steps),
        )
        self.workers = None if workers is None else _at_least_one("workers", workers)
        self.ray_address = ray_address
        self.on_round = as_callbacks(on_round)
        self.out = out

    def run(
        self,
        rounds: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        on_round: OnRound | Sequence[OnRound] | None = None,
        progress: bool | None = None,
    ) -> Run:
        """Run this many rounds. With a run directory everything is saved.

        `resume` continues the run in that directory, if there is one; with more rounds than before
        it extends the run, also a finished one. A progress bar is shown on terminals and in
        notebooks, unless `progress` is False.
        """
        out = out or self.out
        if resume and out is None:
            raise ConfigError("resume=True needs the run directory: give it as out=.", key="out")
        context = dataclasses.replace(self._context, rounds=_at_least_one("rounds", rounds))
        functions = as_callbacks(on_round) or self.on_round
        context.check()
        check_callbacks(
            functions, any(data.validation is not None for data in context.peers.values())
        )
        connect_engine(self.engine, self.ray_address)
        config, directory = _describe(context), None
        if out is not None:
            path = Path(out)
            resume = resume and (path / "config.toml").exists()
            directory = (
                _open_same(path, config, context) if resume else RunDirectory.create(path, config)
            )
        with python_progress(progress, context.method.name, context.rounds) as callbacks:
            return execute(
                context,
                directory,
                self.workers,
                callbacks,
                self.engine,
                self.ray_address,
                on_round=functions,
                config=config,
            )


def _component(kind: Any, value: C | str | Mapping[str, Any], default: C) -> C:
    """Return a method or topology: an object, or what a config says (`"ring"`, `"my_module:Star"`,
    a dict)."""
    chosen = choose(kind.table, value, default) if isinstance(value, (str, Mapping)) else value
    if not isinstance(chosen, kind):
        raise ConfigError(
            f"`{kind.table}` must be a name, a dict or a {kind.__name__} object, got {value!r}.",
            key=kind.table,
        )
    return cast(C, chosen)


def _table(kind: type[S], value: S | Mapping[str, Any] | None) -> S:
    """Return settings: an object, or a dict as in a config."""
    if value is None or isinstance(value, Mapping):
        return kind(**(value or {}))
    if not isinstance(value, kind):
        raise ConfigError(
            f"`{kind.table}` must be a dict or a {kind.__name__} object, got {value!r}.",
            key=kind.table,
        )
    return value


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ConfigError(f"seed must be a whole number, got {seed!r}.", key="seed")


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:  # NumPy's integers are accepted
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.", key=name)
    return int(value)


def _peer_data(k: int, given: tuple[DatasetLike, ...], kind: str = "peers") -> PeerData:
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise ConfigError(
            f"{kind}[{k}] must be a pair (training data, test data), or (training data, validation"
            " data, test data).",
            key=kind,
        )
    train, *validation, test = given
    return PeerData(
        samples_from(train, f"Peer {k}'s training data"),
        samples_from(test, f"Peer {k}'s test data"),
        samples_from(validation[0], f"Peer {k}'s validation data") if validation else None,
    )


def _attack(name: AttackName, share: float, names: Sequence[str], seed: int) -> Attack | None:
    if name not in ("none", *ATTACKS):
        raise ConfigError(
            f"attack must be 'none' or one of {', '.join(ATTACKS)}; got {name!r}.", key="attack"
        )
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share < 1:
        raise ConfigError(
            f"byzantine must be a share of the peers in [0, 1), such as 0.2; got {share!r}.",
            key="byzantine",
        )
    if share and name == "none":
        raise ConfigError(
            f"byzantine is {share:g}, but attack is none; say how they lie: attack='sign-flip'.",
            key="byzantine",
        )
    if name != "none" and not share:
        raise ConfigError(
            f"attack is {name!r}, but byzantine is 0; say how many of the peers lie: byzantine=0.2.",
            key="attack",
        )
    return Attack.of(name, float(share), names, seed)


def _poisoned_peers(peers: dict[str, PeerData], attack: Attack | None) -> dict[str, PeerData]:
    """Return the data of all peers, where an attack poisons data that of Byzantine peers
    poisoned."""
    if attack is None or attack.name not in POISONS:
        return peers
    classes = 1 + max(int(y.max()) for data in peers.values() for _, y in data.train.batches(1024))
    byzantine_peers = {
        name: poisoned(peers[name].train, attack.name, classes) for name in attack.byzantine
    }
    return peers | {
        name: dataclasses.replace(peers[name], train=train)
        for name, train in byzantine_peers.items()
    }


def _starting_from(
    model: Callable[[], nn.Module], init: nn.Module | Mapping[str, Tensor]
) -> Callable[[], nn.Module]:
    weights = {
        n: t.detach().clone()
        for n, t in (init.state_dict() if isinstance(init, nn.Module) else init).items()
    }

    def build() -> nn.Module:
        module = model()
        try:
            module.load_state_dict(weights)
        except RuntimeError as problem:
            raise ConfigError(f"`init` does not fit the model: {problem}", key="init") from None
        return module

    with forked_generators():  # only to check that it fits; the caller's generator is not advanced
        build()
    return build


def _describe(context: RunContext) -> dict[str, Any]:
    """Return the config of a federation made in Python: what can be written; model and data are the
    caller's."""
    weights = FlatModule(context.module()).read()
    return {
        MADE_IN_PYTHON: True,
        "seed": context.seed,
        "rounds": context.rounds,
        "peers": len(context.peers),
        "eval_every": context.eval_every,
        "eval_train": context.eval_train,
        "device": context.device,
        "precision": context.precision,
        "vmap_peers": context.vmap_peers,
        "average_buffers": context.average_buffers,
        "metric": [metric.name for metric in context.task.metrics],
        "optimizer": (
            _function_name(context.optimizer) if context.optimizer else context.train.optimizer
        ),
        "unseen_steps": context.unseen_steps,
        "samples": [len(context.peers[peer].train) for peer in context.roster],
        "data_sha256": context.data_digest(),
        "initial_weights_sha256": weights_sha256(
            PackedModel.pack(weights, torch.ones_like(weights, dtype=torch.bool))
        ),
        "method": context.method.model_dump(mode="json", exclude_none=True),
        "topology": context.topology.model_dump(mode="json", exclude_none=True),
        "train": context.train.model_dump(mode="json", exclude_none=True),
        "wire": context.wire.model_dump(mode="json"),
        "privacy": context.privacy.model_dump(mode="json", exclude_none=True),
        "attack": context.attack.name if context.attack else "none",
        "byzantine": len(context.byzantine) / len(context.peers),
    }


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _open_same(path: Path, config: Mapping[str, Any], context: RunContext) -> RunDirectory:
    """Open a run directory that must be of this federation; more rounds extend its run."""
    written = read_config(path)
    for key, now in config.items():
        was: Any = written.get(key)
        if key == "data_sha256" and now != was:
            raise ConfigError(
                f"The peers' data are not those that {path} was run with; use the same to resume.",
                key="peers",
            )
        why = why_not_extended(was, now, context) if key == "rounds" else ""
        if now != was and (key != "rounds" or why):
            why = f" ({why})" if why else ""
            raise ConfigError(
                f"{path} was run with {key} = {was}, got {now}{why}; use the same to resume.",
                key=key,
            )
    directory = RunDirectory.open(path)
    if context.rounds > written["rounds"]:
        with directory.closed_on_failure():
            directory.extend(config)
    return directory
