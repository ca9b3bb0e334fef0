"""The Python API: runs of config files, and federations of a user's own data and model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfl.config import MADE_IN_PYTHON, check_keys, compose_values, read_toml
from dispfl.core.flat_module import FlatModule
from dispfl.core.metric import MetricLike
from dispfl.core.names import check_names
from dispfl.core.optimizers import OptimizerFactory
from dispfl.core.packed import PackedModel
from dispfl.core.rng import forked_generators
from dispfl.core.samples import PeerData
from dispfl.core.task import Loss, Task
from dispfl.costs.capacity import with_fitted_densities
from dispfl.data.batches import DatasetLike, samples_from
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment, Simulation
from dispfl.methods.base import Method
from dispfl.robust.attacks import POISONS
from dispfl.round.context import RunContext, RunData
from dispfl.runs.callbacks import Callback, check_callbacks
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.execute import MAY_DIFFER, connect_engine, execute, why_not_extended
from dispfl.runs.fastest import find_fastest, saved_format
from dispfl.runs.metrics import weights_sha256
from dispfl.runs.prepare import unseen_names, with_poisoned_data
from dispfl.runs.progress import python_progress, show_in_python
from dispfl.runs.run import Run
from dispfl.topology import GraphTopology, Topology, is_graph

PeerDatasets = Sequence[tuple[DatasetLike, ...]]
"""For each peer (training data, test data), or (training data, validation data, test data)."""
NamedDatasets = Mapping[str, tuple[DatasetLike, ...]]
"""The same by the names of the peers."""


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    fast: bool = False,
    **overrides: Any,
) -> Run:
    """Run an experiment, as `dispfl run` does: `run("my.toml", rounds=5, train={"lr": 0.01})`.

    `config` is a TOML file or such a dict; without one, the defaults are used. Keywords override
    its keys, those of a table as a dict. With a run directory, `out`, everything is saved, and
    `resume` continues the run there. `callbacks`, `progress` and `fast` are as in
    `Federation.run`.
    """
    if config is None:
        config = {}
    elif not isinstance(config, Mapping):
        config = read_toml(Path(config))
    experiment = Experiment(**compose_values(Experiment, config, overrides))
    return experiment.run(out, resume=resume, callbacks=callbacks, progress=progress, fast=fast)


class Federation:
    """Peers that train together: each has its own data, and all share a model architecture.

    Args:
        model: any function that returns a new `nn.Module`.
        peers: for each peer a pair (training data, test data), or a triple (training data,
            validation data, test data), of torch Datasets or (inputs, labels) tensors.
            `Dirichlet().peers(data, 100)` divides a data set into such a list. Or a dict of these
            by the peers' names; the names' alphabetical order is that of the roster.
        method: an object (`DisPFL(density=0.2)`), or as in a config file a name (`"dispfl"`), a
            reference (`"my_module:Mine"`) or a dict (`{"name": "dispfl", "density": 0.2}`).
        topology: in the same ways: `Ring()`, `"ring"`, ... Or a graph, in which rows receive from
            columns: an adjacency matrix, a networkx graph, or a list of these, one for each round.
        loss: a function of outputs and labels; by default that of `task="classification"`,
            `"regression"`, `"multilabel"` or `"segmentation"`. Labels are used as they are.
        metric: a `Metric`, the name of a built-in one (`"macro_f1"`), a function whose name says
            whether a higher value is better, or a list of these, the main one first. By default
            those of the task.
        optimizer: a function from flat weights and their `Layout` to a `torch.optim.Optimizer` of
            them, in place of `train.optimizer`; its learning rate follows the schedule of `train`.
        init: the weights that all peers start from, as a module or its state dict.
        global_test: data on which every model is evaluated too.
        unseen_peers: the data of peers that do not take part, as `peers`; they join after the last
            round for `unseen_steps` local steps.
        ray_address: the Ray cluster of `engine="ray"`; by default, processes on this machine.
        settings: all other settings of a simulated run, with the names and the defaults of a config
            file; tables as dicts or objects: `rounds=20`, `seed=1`, `train={"lr": 0.01}`,
            `privacy=Privacy(epsilon=4)`, `attack="sign-flip", byzantine=0.2`, ... `dispfl explain
            KEY` prints what a setting means; docs/reference/settings.md lists all.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        peers: PeerDatasets | NamedDatasets,
        method: Method | str | Mapping[str, Any] = "dispfl",
        topology: Topology | str | Mapping[str, Any] | Any = "random",
        *,
        loss: Loss | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        optimizer: OptimizerFactory | None = None,
        init: nn.Module | Mapping[str, Tensor] | None = None,
        global_test: DatasetLike | None = None,
        unseen_peers: PeerDatasets = (),
        ray_address: str | None = None,
        **settings: Any,
    ) -> None:
        _check_model(model)
        if isinstance(peers, Mapping):
            by_name = {str(name): data for name, data in peers.items()}
            settings["names"] = check_names(peers, "peers")
            peers = [by_name[name] for name in settings["names"]]
        _check_peers("peers", peers)
        _check_peers("unseen_peers", unseen_peers)
        if not peers:
            raise ConfigError(
                "A federation needs at least one peer; `peers` is empty.", key="peers"
            )
        check_keys(Simulation, settings)
        if is_graph(topology):
            topology = GraphTopology(topology)
        settings |= {"method": method, "topology": topology}
        simulation = Simulation(**settings, peers=len(peers), unseen_peers=len(unseen_peers))
        task = Task.of(loss, metric, simulation.task)
        metrics = tuple(metric.name for metric in task.metrics)  # also those of the user's own

        data = _peers_data(peers, simulation.roster)
        attack = simulation.attack_among(list(data))
        if attack is not None and attack.name in POISONS:
            data = with_poisoned_data(data, attack, _count_classes(data))
        unseen = _peers_data(unseen_peers, unseen_names(len(unseen_peers)))
        global_samples = None
        if global_test is not None:
            global_samples = samples_from(global_test, "The global test data")
        if init is not None:
            model = _starting_from(model, init)

        context = RunContext(
            settings=simulation.model_copy(update={"metric": metrics}),
            data=RunData(peers=data, unseen=unseen, global_test=global_samples),
            model=model,
            task=task,
            optimizer=optimizer,
        )
        self._context = with_fitted_densities(context)
        self._ray_address = ray_address

    def run(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        fast: bool = False,
    ) -> Run:
        """Run all rounds. With a run directory, `out`, everything is saved.

        `resume` continues the run in that directory, if there is one; if this federation has more
        rounds, it extends the run, also a finished one. `callbacks` are called after each round
        with the `Run` so far, and may stop it (`StopRun`). A progress bar is shown on terminals and
        in notebooks, unless `progress` is False. With `fast`, the precision and the memory format
        that are the fastest here, of those that the settings leave open, are found in a few
        seconds and become settings of the run; a resumed run keeps its own.
        """
        if resume and out is None:
            raise ConfigError("resume=True needs the run directory: give it as out=.", key="out")
        context = self._context
        context.check()
        has_validation = any(data.validation is not None for data in context.data.peers.values())
        check_callbacks(callbacks, has_validation)
        connect_engine(context.simulation, self._ray_address)
        path = Path(out) if out is not None else None
        is_resumed = resume and path is not None and (path / "config.toml").exists()
        if fast and is_resumed:
            assert path is not None
            context = context.changed(**saved_format(read_config(path), context.settings))
        elif fast:
            fastest = find_fastest(context)
            show_in_python(progress, fastest.sentence)
            context = context.changed(**fastest.settings)
        config = _describe(context)
        directory = None
        if path is not None:
            if is_resumed:
                directory = _open_same(path, config, context)
            else:
                directory = RunDirectory.create(path, config)
        rounds = context.settings.rounds
        with python_progress(progress, context.method.name, rounds) as observer:
            return execute(
                context,
                directory,
                observer,
                callbacks=callbacks,
                ray_address=self._ray_address,
                config=config,
            )


def _check_model(model: object) -> None:
    """Refuse a module in place of a function that builds one."""
    if not isinstance(model, nn.Module):
        return
    cls = type(model)
    name = cls.__name__
    function = name
    if cls.__module__.startswith("torch."):
        function = f"lambda: {name}(...)"
    raise ConfigError(
        f"`model` must be a function that returns a new module: give {function}, not {name}(...).",
        key="model",
    )


def _check_peers(key: str, peers: object) -> None:
    """Refuse anything but a list of pairs or triples."""
    if not isinstance(peers, Sequence):
        value = f"a {type(peers).__name__}" if isinstance(peers, Collection) else repr(peers)
        raise ConfigError(
            f"`{key}` must be a list of pairs (training data, test data), got {value}.", key=key
        )
    for index, data in enumerate(peers):
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            raise ConfigError(
                f"{key}[{index}] must be a pair (training data, test data), or (training data,"
                " validation data, test data).",
                key=key,
            )


def _peers_data(peers: PeerDatasets, names: Sequence[str]) -> dict[str, PeerData]:
    """Return the data of each peer, by name."""
    data = {}
    for name, (train, *validation, test) in zip(names, peers, strict=True):
        owner = f"Peer {name}"
        peer_data = PeerData(
            samples_from(train, f"{owner}'s training data"),
            samples_from(test, f"{owner}'s test data"),
        )
        if validation:
            samples = samples_from(validation[0], f"{owner}'s validation data")
            peer_data = replace(peer_data, validation=samples)
        data[name] = peer_data
    return data


def _count_classes(peers: Mapping[str, PeerData]) -> int:
    """Return the number of classes, from the largest label of the training data."""
    largest = 0
    for data in peers.values():
        for _, labels in data.train.batches(1024):
            largest = max(largest, int(labels.max()))
    return 1 + largest


def _starting_from(
    model: Callable[[], nn.Module], init: nn.Module | Mapping[str, Tensor]
) -> Callable[[], nn.Module]:
    """Return a function that builds the model with these weights; refuse those that do not fit."""
    if isinstance(init, nn.Module):
        init = init.state_dict()
    weights = {name: tensor.detach().clone() for name, tensor in init.items()}

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
    """Return the config of a run made in Python: its settings, and digests of data and network."""
    weights = FlatModule(context.module()).read()
    first_model = PackedModel.pack(weights, torch.ones_like(weights, dtype=torch.bool))
    peers = context.data.peers
    config = {
        MADE_IN_PYTHON: True,
        **context.settings.model_dump(mode="json", exclude_none=True),
        "samples": [len(peers[peer].train) for peer in context.roster],
        "data_sha256": context.data.digest(),
        "initial_weights_sha256": weights_sha256(first_model),
    }
    if context.optimizer is not None:
        class_name = type(context.optimizer).__name__
        config["optimizer"] = getattr(context.optimizer, "__name__", class_name)
    return config


def _open_same(path: Path, config: Mapping[str, Any], context: RunContext) -> RunDirectory:
    """Open a run directory that must be of this federation; more rounds extend its run."""
    written = read_config(path)
    if config["data_sha256"] != written.get("data_sha256"):
        raise ConfigError(
            f"The peers' data are not those that {path} was run with; use the same to resume.",
            key="peers",
        )
    for key in {**written, **config}:
        earlier = written.get(key)
        present = config.get(key)
        if present == earlier or key in MAY_DIFFER:
            continue
        reason = ""
        if key == "rounds":
            reason = why_not_extended(written["rounds"], config["rounds"], context.settings)
            if not reason:
                continue
            reason = f" ({reason})"
        raise ConfigError(
            f"{path} was run with {key} = {earlier}, got {present}{reason}; use the same to"
            " resume.",
            key=key,
        )
    directory = RunDirectory.open(path)
    if config["rounds"] > written["rounds"]:
        with directory.closed_on_failure():
            directory.extend(config)
    return directory
