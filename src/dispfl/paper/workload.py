"""How long experiments take on this machine, and how they differ from the paper's."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from dispfl.core.train import Train
from dispfl.costs.estimate import network
from dispfl.costs.flops import TRAINING
from dispfl.data.catalogue import describe
from dispfl.data.labelled import ImageDataset
from dispfl.data.partition import Pathological
from dispfl.data.split import Split
from dispfl.engines.inprocess import InProcess
from dispfl.experiment import Experiment
from dispfl.methods.base import ServerMethod
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.local import Local
from dispfl.round.context import PeerTask
from dispfl.runs.directory import read_metrics
from dispfl.runs.grid import GridRun, RunState
from dispfl.runs.prepare import experiment_context
from dispfl.topology import RandomRegular

LONG_ENOUGH = 3.0
"""Seconds after which a measurement is not repeated."""
MAX_REPEATS = 3
NAMES = ("data", "model")
"""Properties in `differences` that are names; the others are counts."""


@dataclass(frozen=True)
class RemainingHours:
    """The estimated time of a method's unfinished runs."""

    method: str
    runs: int
    hours: float


def samples_trained(experiment: Experiment) -> float:
    """Return how many samples a run passes forward and backward.

    rounds x training peers x epochs x samples, where only the cohort of a server method trains;
    plus mask search, fine-tuning and evaluation. FedFOMO's weighing is not counted.
    """
    method = experiment.method
    train = experiment.train
    samples = experiment.training_samples

    peers = experiment.peers
    if isinstance(method, ServerMethod):
        peers = min(method.cohort or peers, peers)
    search = 0
    if isinstance(method, DisPFL) and method.searches_by_gradient:
        search = min(train.batch_size, samples)

    spec = describe(experiment.data.name)
    layout, _ = network(experiment.model, spec.shape, spec.classes)
    samples_per_peer = search
    for passes in method.training_passes(train, samples, layout, layout.sizes):
        samples_per_peer += passes.samples
    return experiment.rounds * peers * samples_per_peer + samples_evaluated(experiment)


def samples_evaluated(experiment: Experiment) -> float:
    """Return the samples of fine-tuning and evaluation.

    Those of evaluation count a third, because it is forward only.
    """
    method = experiment.method
    peers = experiment.peers
    interval = experiment.eval_every
    fine_tuned = 0
    if method.fine_tuning:
        interval = method.fine_tuning.every
        fine_tuned = peers * method.fine_tuning.epochs * experiment.training_samples
    evaluated = peers * experiment.partition.test_samples_per_peer / TRAINING
    if isinstance(method, DisPFL):  # also after mixing
        evaluated *= 2
    evaluations = -(-experiment.rounds // interval)
    return evaluations * (fine_tuned + evaluated)


def dense_flops(cells: Iterable[GridRun]) -> float:
    """Return the FLOPs of runs by dense kernels, regardless of masks."""
    total = 0.0
    for cell, samples in _samples_of_each(cells):
        spec = describe(cell.experiment.data.name)
        _, forward = network(cell.experiment.model, spec.shape, spec.classes)
        total += samples * TRAINING * forward.dense()
    return total


def _samples_of_each(cells: Iterable[GridRun]) -> Iterator[tuple[GridRun, float]]:
    """Yield how many samples each run passes; of several that share a training, one trains."""
    trained: set[str] = set()
    for cell in cells:
        if cell.training in trained:
            yield cell, samples_evaluated(cell.experiment)
        else:
            yield cell, samples_trained(cell.experiment)
        trained.add(cell.training)


def remaining_hours(cells: Iterable[GridRun]) -> list[RemainingHours]:
    """Estimate the hours that unfinished runs take on this machine, by method."""
    measured: dict[tuple[object, ...], float] = {}
    by_method: dict[str, RemainingHours] = {}
    unfinished = (cell for cell in cells if cell.state is not RunState.DONE)
    for cell, samples in _samples_of_each(unfinished):
        experiment = cell.experiment
        workload = _workload(experiment)
        if workload not in measured:
            measured[workload] = seconds_per_sample(experiment)
        share_left = 1 - len(read_metrics(cell.path)) / experiment.rounds
        seconds = share_left * samples * measured[workload]

        name = experiment.method.name
        before = by_method.get(name, RemainingHours(name, 0, 0.0))
        hours = before.hours + seconds / 3600
        by_method[name] = replace(before, runs=before.runs + 1, hours=hours)
    return list(by_method.values())


def _workload(experiment: Experiment) -> tuple[object, ...]:
    """Return what the time of a sample depends on."""
    return (
        experiment.model,
        describe(experiment.data.name).shape,
        experiment.train.batch_size,
        experiment.device,
        experiment.precision,
        experiment.memory_format,
        experiment.workers,
    )


def seconds_per_sample(experiment: Experiment) -> float:
    """Measure the time of a training sample in an ordinary peer step, with all workers busy.

    A step of few seconds is measured whole, because with small networks its fixed costs count; of a
    longer one a batch.
    """
    train = experiment.train
    samples = experiment.training_samples
    one_batch = train.model_copy(update={"epochs": 1, "steps": None})
    batch_seconds = _step_seconds(experiment, one_batch, train.batch_size)
    if train.local_steps(samples) * batch_seconds > LONG_ENOUGH:
        return batch_seconds / train.batch_size
    return _step_seconds(experiment, train, samples) / train.samples_trained(samples)


def training_speed(experiment: Experiment) -> float:
    """Measure the floating-point operations per second that this machine reaches in training.

    It is the `speed` of a device like it: with all workers busy, and the dense network.
    """
    spec = describe(experiment.data.name)
    layout, forward = network(experiment.model, spec.shape, spec.classes)
    alone = experiment.model_copy(update={"classes": {}, "fleet": None})
    return forward.training(layout.sizes, 1) / seconds_per_sample(alone)


def _step_seconds(experiment: Experiment, train: Train, samples: int) -> float:
    """Return the shortest of a few times in which every worker trains on noise, per worker."""
    spec = describe(experiment.data.name)
    workers = 1
    if experiment.device == "cpu":
        workers = min(experiment.workers, experiment.peers)
    inputs = torch.randint(256, (workers * samples, *spec.shape), dtype=torch.uint8)
    labels = torch.arange(workers * samples) % spec.classes
    classes = tuple(map(str, range(spec.classes)))
    noise = ImageDataset(
        spec.name, inputs, labels, inputs, labels, classes, spec.mean, spec.std, spec.flip
    )
    indices = torch.arange(workers * samples).reshape(workers, samples).unbind()
    alone = experiment.model_copy(update={"peers": workers, "method": Local(), "train": train})
    context = experiment_context(alone, noise, Split(indices, indices))

    threads_before = torch.get_num_threads()
    times: list[float] = []
    with closing(InProcess(context, experiment.workers)) as engine:
        tasks = [PeerTask(peer, 0, evaluate=False) for peer in context.roster]
        while len(times) < MAX_REPEATS and sum(times) < LONG_ENOUGH:  # the first also warms up
            engine.restore(0)
            start = time.perf_counter()
            for _ in engine.run_tasks(tasks):
                pass
            times.append(time.perf_counter() - start)
    torch.set_num_threads(threads_before)
    return min(times) / workers


def differences(ours: Iterable[Experiment], papers: Iterable[Experiment]) -> str:
    """Return `Not the paper's experiment: cnn instead of resnet18; 20 instead of 100 peers; ...`.

    The text is empty if they do not differ.
    """
    our_values = _distinct_values(ours)
    paper_values = _distinct_values(papers)
    texts = []
    for name, values in our_values.items():
        if name in paper_values and values != paper_values[name]:
            text = f"{_join_or(values)} instead of {_join_or(paper_values[name])}"
            if name not in NAMES:
                text += f" {name}"
            texts.append(text)
    if not texts:
        return ""
    return f"Not the paper's experiment: {'; '.join(texts)}."


def _distinct_values(experiments: Iterable[Experiment]) -> dict[str, list[str]]:
    """Return the distinct values of each property, in order of appearance."""
    distinct: dict[str, list[str]] = {}
    for experiment in experiments:
        for name, value in _properties(experiment).items():
            values = distinct.setdefault(name, [])
            if value not in values:
                values.append(value)
    return distinct


def _properties(experiment: Experiment) -> dict[str, str]:
    """Return the properties by which experiments are compared, as far as this one has them."""
    topology = experiment.topology
    properties = {
        "data": experiment.data.name,
        "model": experiment.model.name,
        "peers": str(experiment.peers),
    }
    if experiment.method.gossips and isinstance(topology, RandomRegular):
        properties["neighbours"] = str(topology.degree)
    properties["rounds"] = str(experiment.rounds)
    properties["samples per peer"] = str(experiment.training_samples)
    if isinstance(experiment.partition, Pathological):
        properties["classes per peer"] = str(experiment.partition.classes)
    properties["local training"] = experiment.train.duration
    properties["samples per batch"] = str(experiment.train.batch_size)
    return properties


def _join_or(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    return f"{', '.join(values[:-1])} or {values[-1]}"
