"""In what an experiment that was run is not the paper's, in one line."""

from collections.abc import Iterable, Mapping, Sequence

from dispfl.config import Experiment
from dispfl.data.partition import Pathological
from dispfl.methods.base import GossipMethod
from dispfl.reproduce.work import samples_each
from dispfl.topology import RandomRegular

Facts = Mapping[str, Sequence[str]]
NAMED = ("data", "model")
"""Facts that are names; the others are numbers of something."""


def difference(ours: Iterable[Experiment], papers: Iterable[Experiment]) -> str:
    """`Not the paper's experiment: cnn instead of resnet18, 20 instead of 100 peers, ...`; empty if it is the same."""
    here, there = _facts(ours), _facts(papers)
    parts = [
        f"{_list(here[what])} instead of {_list(there[what])}{'' if what in NAMED else f' {what}'}"
        for what in here
        if what in there and here[what] != there[what]
    ]
    return f"Not the paper's experiment: {'; '.join(parts)}." if parts else ""


def _facts(experiments: Iterable[Experiment]) -> Facts:
    """What there is of each kind in some experiments, in the order in which it comes."""
    found: dict[str, dict[str, None]] = {}
    for experiment in experiments:
        method, topology, partition = experiment.method, experiment.topology, experiment.partition
        hears = isinstance(method, GossipMethod) and method.hears
        facts = {
            "data": experiment.data.name,
            "model": experiment.model.name,
            "peers": str(experiment.peers),
            "neighbours": str(topology.degree) if hears and isinstance(topology, RandomRegular) else None,
            "rounds": str(experiment.rounds),
            "samples a peer": str(samples_each(experiment)),
            "classes a peer": str(partition.classes) if isinstance(partition, Pathological) else None,
            "epochs": str(experiment.train.epochs),
            "samples a batch": str(experiment.train.batch),
        }
        for what, value in facts.items():
            if value is not None:
                found.setdefault(what, {})[value] = None
    return {what: list(values) for what, values in found.items()}


def _list(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
