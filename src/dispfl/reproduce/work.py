"""How much work an experiment is, and how long that takes on this machine, from one real training batch."""

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from dispfl.config import Experiment
from dispfl.costs.estimate import Plan, network
from dispfl.costs.flops import TRAINING
from dispfl.data.catalogue import describe
from dispfl.data.datasets import Pictures
from dispfl.data.partition import Split
from dispfl.engines.inprocess import InProcess
from dispfl.grid import Cell
from dispfl.methods.base import ServerMethod
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.local import Local
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.work import Part

LONG_ENOUGH = 3.0
"""Seconds after which a measurement is not repeated."""


@dataclass(frozen=True)
class Hours:
    """What is left to do of some runs."""

    method: str
    runs: int
    hours: float


def samples_each(experiment: Experiment) -> int:
    """How many training samples a peer has."""
    asked = experiment.partition.samples
    return describe(experiment.data.name).train // experiment.peers if asked == "all" else asked


def plan_of(experiment: Experiment) -> Plan:
    """What the costs of a round follow from."""
    return Plan(
        model=experiment.model,
        data=describe(experiment.data.name),
        method=experiment.method,
        topology=experiment.topology,
        peers=experiment.peers,
        samples=samples_each(experiment),
        train=experiment.train,
        wire=experiment.wire,
        seed=experiment.seed,
    )


def samples_trained(experiment: Experiment) -> float:
    """How many samples a run passes forward and backward.

    rounds x peers that train x epochs x samples, where of a method with a server the cohort trains; and what mask
    search, fine-tuning and scoring add, the last as a third, being forward alone. FedFOMO's weighing is left out.
    """
    method, train, peers, rounds = experiment.method, experiment.train, experiment.peers, experiment.rounds
    samples = samples_each(experiment)
    training = min(method.cohort, peers) if isinstance(method, ServerMethod) else peers
    epochs = method.global_epochs + method.personal_epochs if isinstance(method, Ditto) else train.epochs
    search = min(train.batch, samples) if isinstance(method, DisPFL) and method.regrow == "gradient" else 0
    every = experiment.eval_every
    tuned = 0
    if method.tuning:
        every = method.tuning.every
        tuned = peers * method.tuning.epochs * samples
    judged = peers * experiment.partition.test_samples * (2 if isinstance(method, DisPFL) else 1) / TRAINING
    scored = -(-rounds // every)
    return rounds * training * (epochs * samples + search) + scored * (tuned + judged)


def dense_flops(experiment: Experiment) -> float:
    """The operations of a run as dense kernels do them, whatever the masks."""
    spec = describe(experiment.data.name)
    _, forward = network(experiment.model, spec.shape, spec.classes)
    return samples_trained(experiment) * TRAINING * forward.dense()


def hours_left(cells: Iterable[Cell]) -> list[Hours]:
    """How many hours the runs that are not finished take on this machine, by method."""
    pace: dict[tuple[object, ...], float] = {}
    by_method: dict[str, Hours] = {}
    for cell in cells:
        if read_summary(cell.path) is not None:
            continue
        experiment = cell.experiment
        shape = describe(experiment.data.name).shape
        alike = (
            experiment.model,
            shape,
            experiment.train.batch,
            experiment.device,
            experiment.precision,
            experiment.threads,
        )
        if alike not in pace:
            pace[alike] = seconds_a_sample(experiment)
        left = 1 - len(read_metrics(cell.path)) / experiment.rounds
        name = experiment.method.name
        before = by_method.get(name, Hours(name, 0, 0.0))
        hours = before.hours + left * samples_trained(experiment) * pace[alike] / 3600
        by_method[name] = replace(before, runs=before.runs + 1, hours=hours)
    return list(by_method.values())


def seconds_a_sample(experiment: Experiment) -> float:
    """How long a training sample takes with all threads at work, each on a batch of noise, in a real peer's step."""
    spec, batch = describe(experiment.data.name), experiment.train.batch
    workers = min(experiment.threads, experiment.peers) if experiment.device == "cpu" else 1
    inputs = torch.randint(256, (workers * batch, *spec.shape), dtype=torch.uint8)
    labels = torch.arange(workers * batch) % spec.classes
    classes = tuple(map(str, range(spec.classes)))
    noise = Pictures(spec.name, inputs, labels, inputs, labels, classes, spec.mean, spec.std, spec.flip)
    mine = torch.arange(workers * batch).reshape(workers, batch).unbind()
    alone = experiment.model_copy(
        update={"peers": workers, "method": Local(), "train": experiment.train.model_copy(update={"epochs": 1})}
    )
    setting = alone.setting(noise, Split(mine, mine))
    threads_before = torch.get_num_threads()
    with closing(InProcess(setting, experiment.threads)) as engine:
        parts = [Part(peer, 0, scoring=False) for peer in setting.roster]
        spent: list[float] = []
        while not spent or (len(spent) < 3 and sum(spent) < LONG_ENOUGH):  # the first batch also warms up
            engine.recall(0)
            began = time.perf_counter()
            for _ in engine.steps(parts):
                pass
            spent.append(time.perf_counter() - began)
    torch.set_num_threads(threads_before)
    return min(spent) / (workers * batch)
