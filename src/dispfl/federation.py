"""The Python API: a federation of peers with their own data and one model architecture, run in ten lines."""

import contextlib
import dataclasses
import operator
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfl.core.live import LiveModel, Precision, resolve_device
from dispfl.core.packed import PackedModel
from dispfl.core.rng import forked_generators
from dispfl.core.train import Report, Task, Train, accuracy
from dispfl.data.batches import Given, samples_from
from dispfl.engines.choice import EngineName, at_work, check_engine, reach
from dispfl.engines.together import check_together
from dispfl.errors import ConfigError
from dispfl.methods.base import Method, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.roster import roster_names
from dispfl.round import Round, judge_shared
from dispfl.runs.directory import MADE_IN_PYTHON, RunDirectory, read_config
from dispfl.runs.loop import History, Progress, begin, recall, run_rounds
from dispfl.runs.reading import SavedStates
from dispfl.runs.records import Record, last, summarize, weights_sha256
from dispfl.topology import RandomRegular, Topology
from dispfl.wire.codec import Wire
from dispfl.work import Engine, Outcome, PeerData, Setting


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    setting: Setting
    states: Mapping[str, PeerState]
    """Every peer's final state, by name."""
    history: Sequence[Record]
    """What was measured in each round, as in `metrics.jsonl`."""
    personal: Mapping[str, PeerState]
    """What each peer would use from now on: its own model, or its share of a model that all share."""
    out: Path | None = None
    """The run directory, if there is one."""

    @property
    def accuracy(self) -> list[float]:
        """The metric on each peer's test data after the last round, in roster order."""
        return list(last(self.history, "accuracy")["per_peer"])

    @property
    def summary(self) -> Record:
        """The run in one object, as in `summary.json`."""
        return summarize(self.setting, self.history, {name: state.model for name, state in self.personal.items()})

    def model(self, peer: int | str) -> nn.Module:
        """The personal model of one peer, by place in the roster or by name, ready to use."""
        roster = self.setting.roster
        name = roster[peer] if isinstance(peer, int) and -len(roster) <= peer < len(roster) else str(peer)
        if name not in self.personal:
            raise ConfigError(f"There is no peer {peer}; there are {len(roster)}, from {roster[0]} to {roster[-1]}.")
        live = LiveModel(self.setting.module())
        live.load(self.personal[name].model.unpack()[0], self.personal[name].buffers)
        for parameter in live.module.parameters():
            parameter.grad = None
        return live.module.eval()


class Federation:
    """Peers that learn together: each has its own data, and all share a model architecture.

    `peers` lists (training data, test data) pairs: torch Datasets or (inputs, labels) tensors. `model` is any function
    that returns an `nn.Module`. `init` gives the weights that all start from: a module or its state dict.
    `on_round` is called with each round's metrics; `out` names a run directory. Both may be given to `run` instead.
    `together=16` trains up to as many peers as one stack, faster where models are tiny, and the same up to rounding.
    `engine="ray"` does the work in `threads` processes, on the machines of the Ray cluster at `ray_address` or here.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        peers: Sequence[tuple[Given, Given]],
        method: Method | None = None,
        topology: Topology | None = None,
        *,
        train: Train | None = None,
        wire: Wire | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = Task.loss,
        metric: Callable[[Tensor, Tensor], float] = accuracy,
        init: nn.Module | Mapping[str, Tensor] | None = None,
        seed: int = 0,
        eval_every: int = 1,
        threads: int | None = None,
        together: int = 1,
        device: str = "cpu",
        precision: Precision = "float32",
        engine: EngineName = "inprocess",
        ray_address: str | None = None,
        on_round: Callable[[Record], None] | None = None,
        out: str | Path | None = None,
    ) -> None:
        if isinstance(model, nn.Module):
            name = type(model).__name__
            raise ConfigError(f"`model` must be a function that returns a new module: give {name}, not {name}(...).")
        if not peers:
            raise ConfigError("A federation needs at least one peer; `peers` is empty.")
        topology = (topology or RandomRegular()).fitted(len(peers))
        topology.check(len(peers))
        device = resolve_device(device)
        check_engine(engine)
        together = _at_least_one("together", together)
        check_together(together, engine)
        method = method or DisPFL()
        method.densities(len(peers))
        names = roster_names(len(peers))
        self._setting = Setting(
            model=model if init is None else _starting_from(model, init),
            peers={name: _peer_data(k, pair) for k, (name, pair) in enumerate(zip(names, peers, strict=True))},
            method=method,
            topology=topology,
            train=train or Train(),
            task=Task(loss, metric),
            seed=operator.index(seed),  # a NumPy number must name the same random streams
            rounds=0,
            eval_every=_at_least_one("eval_every", eval_every),
            device=device,
            precision=precision,
            wire=wire or Wire(),
            together=together,
        )
        self.threads = None if threads is None else _at_least_one("threads", threads)
        self.engine: EngineName = engine
        self.ray_address = ray_address
        self.on_round = on_round
        self.out = out

    def run(
        self,
        rounds: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        on_round: Callable[[Record], None] | None = None,
    ) -> Run:
        """Run so many rounds. With a run directory, everything is written down, and `resume` goes on after a stop."""
        out = out or self.out
        if resume and out is None:
            raise ConfigError("resume=True needs the run directory: give it as out=.")
        setting = dataclasses.replace(self._setting, rounds=_at_least_one("rounds", rounds))
        directory = None
        reach(self.engine, self.ray_address)
        if out is not None:
            config = _describe(setting)
            directory = _resumed(Path(out), config) if resume else RunDirectory.create(Path(out), config)
        told = on_round or self.on_round
        progress = Progress(round=told) if told else Progress()
        return execute(setting, directory, self.threads, progress, self.engine, self.ray_address)


def execute(
    setting: Setting,
    directory: RunDirectory | None,
    threads: int | None,
    progress: Progress,
    engine: EngineName = "inprocess",
    ray_address: str | None = None,
) -> Run:
    """Run what is left of a run, then draw its learning curve and write its summary."""
    out = directory.path if directory else None
    with contextlib.ExitStack() as at_the_end:
        if directory is None and engine == "ray":  # a lost worker begins again from the disk
            folder = at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="dispfl-"))
            directory = RunDirectory.create(Path(folder) / "run", {})
        if directory:
            at_the_end.callback(directory.close)
        at_the_end.callback(torch.set_num_threads, torch.get_num_threads())
        if next(setting.module().buffers(), None) is not None:
            warnings.warn(
                "The model has buffers (batch norm?). They stay with each peer and are not averaged; "
                "group norm is the usual choice in federated learning.",
                stacklevel=3,
            )
        with forked_generators(setting.device):
            checkpoints = directory.checkpoints if directory else None
            started = at_the_end.enter_context(at_work(engine, setting, threads, checkpoints, ray_address))
            history = recall(setting, started, directory) if directory else begin(setting, started)
            history = run_rounds(setting, started, history, directory, progress)
            saved = SavedStates(out, setting.roster) if out and engine == "ray" else None
            states = dict(started.states) if saved is None else saved
            personal = _personal(setting, history, started) if setting.method.shares else states
        run = Run(setting, states, history.records, personal, out)
        if directory and out:
            from dispfl.analysis.plots import learning_curve  # matplotlib is slow to import

            learning_curve([directory.path], directory.path / "learning-curve.png")
            directory.write_summary(run.summary)  # last: it says that the run is finished
    return run


def _personal(setting: Setting, history: History, engine: Engine) -> Mapping[str, PeerState]:
    """The shared model that peers were judged on after the last round; judged again where a stop came in between."""
    if not engine.judged:
        nothing = Round({peer: Outcome(Report()) for peer in setting.roster}, history.server)
        judge_shared(setting, nothing, setting.rounds - 1, engine)
    return dict(engine.judged)


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:  # NumPy's whole numbers are welcome
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)


def _peer_data(k: int, pair: tuple[Given, Given]) -> PeerData:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"peers[{k}] must be a pair (training data, test data).")
    train, test = pair
    return PeerData(samples_from(train, f"Peer {k}'s training data"), samples_from(test, f"Peer {k}'s test data"))


def _starting_from(model: Callable[[], nn.Module], init: nn.Module | Mapping[str, Tensor]) -> Callable[[], nn.Module]:
    weights = {n: t.detach().clone() for n, t in (init.state_dict() if isinstance(init, nn.Module) else init).items()}

    def build() -> nn.Module:
        module = model()
        try:
            module.load_state_dict(weights)
        except RuntimeError as problem:
            raise ConfigError(f"`init` does not fit the model: {problem}") from None
        return module

    with forked_generators():  # only to see that it fits; the caller's generator stays as it is
        build()
    return build


def _describe(setting: Setting) -> dict[str, Any]:
    """The config of a federation made in Python: what can be written down; the model and the data are the caller's."""
    weights = LiveModel(setting.module()).read()
    return {
        MADE_IN_PYTHON: True,
        "seed": setting.seed,
        "rounds": setting.rounds,
        "peers": len(setting.peers),
        "eval_every": setting.eval_every,
        "device": setting.device,
        "precision": setting.precision,
        "together": setting.together,
        "metric": getattr(setting.task.metric, "__name__", "metric"),
        "samples": [len(setting.peers[peer].train) for peer in setting.roster],
        "first_weights_sha256": weights_sha256(PackedModel.pack(weights, torch.ones_like(weights, dtype=torch.bool))),
        "method": setting.method.model_dump(mode="json", exclude_none=True),
        "topology": setting.topology.model_dump(mode="json", exclude_none=True),
        "train": setting.train.model_dump(mode="json", exclude_none=True),
        "wire": setting.wire.model_dump(mode="json"),
    }


def _resumed(path: Path, config: Mapping[str, Any]) -> RunDirectory:
    """Open a run directory that must be of this federation."""
    written = {"precision": "float32", "together": 1, **read_config(path)}  # older runs do not say so
    for key, value in config.items():
        if value != written.get(key):
            raise ConfigError(f"{path} was run with {key} = {written.get(key)}, got {value}; use the same to resume.")
    return RunDirectory.open(path)
