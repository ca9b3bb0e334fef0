"""From settings to a run that can start: its data, who gets which samples, and its context."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from dispfl.core.names import peer_names, roster_of
from dispfl.core.rng import stream
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import TaskName
from dispfl.costs.capacity import with_fitted_densities
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.fetch import ProgressCallback
from dispfl.data.labelled import LabelledDataset
from dispfl.data.shift import FeatureShift, ShiftName, check_shift
from dispfl.data.split import Split
from dispfl.errors import ConfigError, PartitionError
from dispfl.experiment import Experiment, NamedSettings
from dispfl.models.settings import CustomModel
from dispfl.robust.attacks import Attack, poisoned
from dispfl.round.context import RunContext, RunData


def prepare(
    experiment: Experiment, decoding: ProgressCallback | None = None
) -> tuple[LabelledDataset, Split, RunContext]:
    """Return an experiment's data, its split, and its context.

    Refuse a model that does not fit data or method.
    """
    dataset = load_dataset(experiment.data, decoding, task=experiment.task)
    split = split_dataset(experiment, dataset)
    context = experiment_context(experiment, dataset, split)
    context.check()
    return dataset, split, context


def split_dataset(experiment: Experiment, dataset: LabelledDataset) -> Split:
    """Return which samples each peer gets."""
    rng = stream(experiment.seed, "partition")
    everyone = experiment.peers + experiment.unseen_peers
    try:
        split = experiment.partition.split_data(dataset, everyone, rng=rng)
    except PartitionError as problem:
        if not experiment.unseen_peers:
            raise
        counts = f"peers={experiment.peers} and unseen_peers={experiment.unseen_peers}"
        raise PartitionError(f"{problem} These are {counts}.") from None
    return split.without_last(experiment.unseen_peers)


def experiment_context(
    experiment: Experiment, dataset: LabelledDataset, split: Split
) -> RunContext:
    """Return the context of an experiment's rounds, with the data divided by a split."""
    train, test = dataset.samples(augment=experiment.data.augment)
    experiment = experiment.named(split.names)
    roster = experiment.roster
    check_shift(experiment.partition.shift, getattr(train, "inputs", None), experiment.task)
    peers = _peer_data(experiment, roster, split, train, test)
    attack = experiment.attack_among(roster)
    if attack is not None:
        peers = with_poisoned_data(peers, attack, len(dataset.classes))
    data = RunData(peers)
    if split.unseen is not None:
        names = unseen_names(experiment.unseen_peers)
        data = replace(data, unseen=_peer_data(experiment, names, split.unseen, train, test))
    if split.global_test is not None:
        data = replace(data, global_test=test.take(split.global_test))
    return with_fitted_densities(named_context(experiment, dataset, data))


def named_context(
    settings: NamedSettings, dataset: LabelledDataset, data: RunData, folder: Path | None = None
) -> RunContext:
    """Return the context of a run with the model and the metrics that its settings name.

    A user's own ones are imported from the folder, and the network is checked on two samples first.
    """
    if settings.privacy.enabled and isinstance(settings.data, CustomData):
        _check_private_data(settings.data, settings.task)
    folder = folder or Path.cwd()  # a Ray worker has another current directory
    model = settings.model
    shape = dataset.shape
    classes = len(dataset.classes)
    task = settings.make_task(folder)
    if dataset.unit is not None:
        task = task.with_unit(dataset.unit)
    model.check_task(settings.task)
    context = RunContext(
        settings=settings,
        data=data,
        model=lambda: model.network(shape, classes, folder),
        task=task,
    )
    if isinstance(model, CustomModel):
        model.check_network(context.example(), classes, folder, settings.task)
    return context


def _check_private_data(data: CustomData, task: TaskName) -> None:
    """Refuse settings that let a single row be seen in what a private run publishes."""
    if data.standardize:
        raise ConfigError(
            "privacy does not cover data.standardize, which computes means from the training"
            " data; scale the data by constants instead, and leave it false.",
            key="privacy",
        )
    if task == "regression" and data.target_mean is None:
        raise ConfigError(
            "privacy does not cover the mean of the targets, which is computed from the training"
            " data; declare data.target_mean and data.target_std instead, such as the middle and a"
            " quarter of their range.",
            key="data.target_mean",
        )
    if data.classes is None and task in ("classification", "segmentation"):
        raise ConfigError(
            "privacy needs data.classes: without it the classes are read from the data, and a class"
            " that a single row has is announced to all members. List all classes, such as"
            ' data.classes=["well","ill"].',
            key="data.classes",
        )


def unseen_names(count: int) -> list[str]:
    """Return the names of peers that do not take part: `new-000`, `new-001`, ..."""
    return [f"new-{name}" for name in peer_names(count)]


def with_poisoned_data(
    peers: Mapping[str, PeerData], attack: Attack, classes: int
) -> dict[str, PeerData]:
    """Return the data of all peers; of Byzantine ones what they train on, if the attack poisons."""
    attacked = dict(peers)
    for name in attack.byzantine:
        train = poisoned(peers[name].train, attack.name, classes)
        attacked[name] = replace(peers[name], train=train)
    return attacked


def _peer_data(
    experiment: Experiment, names: Sequence[str], split: Split, train: Samples, test: Samples
) -> dict[str, PeerData]:
    """Return the samples of each peer, in the order of the split, as it sees them."""
    peers = {}
    for index, name in enumerate(names):

        def part(samples: Samples, rows: Tensor, name: str = name) -> Samples:
            return experiment.partition.as_seen(samples.take(rows), experiment.seed, name)

        validation = part(train, split.validation[index]) if split.validation else None
        peers[name] = PeerData(
            part(train, split.train[index]), part(test, split.test[index]), validation
        )
    return peers


def shift_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return how the images of each peer differ in a run with this config; empty if they do not."""
    name = config.get("partition", {}).get("shift", "none")
    if name not in get_args(ShiftName) or name == "none":
        return {}
    texts = {}
    for peer in roster_of(config):
        texts[peer] = FeatureShift.of(name, config["seed"], peer).text()
    return texts
