"""Reproducing the paper: how long experiments take here, how they differ from the paper's, and
their report."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from dispfl.core.train import Train
from dispfl.costs.estimate import network
from dispfl.costs.flops import TRAINING
from dispfl.data.catalogue import describe
from dispfl.data.labelled import ImageDataset
from dispfl.data.partition import Pathological
from dispfl.data.split import Split
from dispfl.engines.inprocess import InProcess
from dispfl.experiment import Experiment
from dispfl.extras import can_draw
from dispfl.files import write_atomically
from dispfl.methods.base import GossipMethod, ServerMethod
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.local import Local
from dispfl.paper.comparison import (
    ComparedRow,
    ComparisonTable,
    PaperReference,
    comparison_tables,
    group_accuracies,
    misprints,
    row_as_json,
    table_legend,
)
from dispfl.paper.mask_similarity import compare_masks, print_masks
from dispfl.paper.printed import PrintedTable
from dispfl.report.comparison import compare
from dispfl.report.differences import paired_over
from dispfl.report.result_tables import (
    comparison_json,
    comparison_table,
    legend,
    write_tables,
)
from dispfl.report.runs import Budget
from dispfl.round.context import PeerTask
from dispfl.runs.directory import read_metrics
from dispfl.runs.grid import GridRun, RunState
from dispfl.terminal import number_table, print_text
from dispfl.topology import RandomRegular

LONG_ENOUGH = 3.0
"""Seconds after which a measurement is not repeated."""
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
    method, train, peers, rounds = (
        experiment.method,
        experiment.train,
        experiment.peers,
        experiment.rounds,
    )
    samples = experiment.training_samples
    training = min(method.cohort or peers, peers) if isinstance(method, ServerMethod) else peers
    epochs = (
        method.global_epochs + method.personal_epochs
        if isinstance(method, Ditto) and not train.steps
        else None
    )
    search = (
        min(train.batch_size, samples)
        if isinstance(method, DisPFL) and method.searches_by_gradient
        else 0
    )
    return rounds * training * (
        train.samples_trained(samples, epochs) + search
    ) + samples_evaluated(experiment)


def samples_evaluated(experiment: Experiment) -> float:
    """Return the samples of fine-tuning and evaluation, the latter at a third because it is forward
    only."""
    method, peers, samples = experiment.method, experiment.peers, experiment.training_samples
    every, tuned = experiment.eval_every, 0
    if method.fine_tuning:
        every = method.fine_tuning.every
        tuned = peers * method.fine_tuning.epochs * samples
    evaluated = (
        peers
        * experiment.partition.test_samples_per_peer
        * (2 if isinstance(method, DisPFL) else 1)
        / TRAINING
    )
    evaluations = -(-experiment.rounds // every)
    return evaluations * (tuned + evaluated)


def dense_flops(cells: Iterable[GridRun]) -> float:
    """Return the FLOPs of runs by dense kernels, regardless of masks."""
    total = 0.0
    for cell, samples in _samples_of_each(cells):
        spec = describe(cell.experiment.data.name)
        _, forward = network(cell.experiment.model, spec.shape, spec.classes)
        total += samples * TRAINING * forward.dense()
    return total


def _samples_of_each(cells: Iterable[GridRun]) -> Iterator[tuple[GridRun, float]]:
    """Yield how many samples each run passes; of several that share a training, only the first
    trains."""
    trained: set[str] = set()
    for cell in cells:
        shared = cell.training in trained
        trained.add(cell.training)
        yield cell, (samples_evaluated if shared else samples_trained)(cell.experiment)


def remaining_hours(cells: Iterable[GridRun]) -> list[RemainingHours]:
    """Estimate the hours that unfinished runs take on this machine, by method. Runs may share a
    training."""
    measured: dict[tuple[object, ...], float] = {}
    by_method: dict[str, RemainingHours] = {}
    for cell, samples in _samples_of_each(
        cell for cell in cells if cell.state is not RunState.DONE
    ):
        experiment = cell.experiment
        shape = describe(experiment.data.name).shape
        kind = (
            experiment.model,
            shape,
            experiment.train.batch_size,
            experiment.device,
            experiment.precision,
            experiment.workers,
        )
        if kind not in measured:
            measured[kind] = seconds_per_sample(experiment)
        left = 1 - len(read_metrics(cell.path)) / experiment.rounds
        name = experiment.method.name
        before = by_method.get(name, RemainingHours(name, 0, 0.0))
        hours = before.hours + left * samples * measured[kind] / 3600
        by_method[name] = replace(before, runs=before.runs + 1, hours=hours)
    return list(by_method.values())


def seconds_per_sample(experiment: Experiment) -> float:
    """Measure the time of a training sample in an ordinary peer step, with all workers busy.

    A step of few seconds is measured whole, because with small networks its fixed costs count; of a
    longer one a batch.
    """
    batch, samples = experiment.train.batch_size, experiment.training_samples
    one_batch = experiment.train.model_copy(update={"epochs": 1, "steps": None})
    measured = _step_seconds(experiment, one_batch, batch)
    whole = experiment.train.local_steps(samples) * measured
    if whole > LONG_ENOUGH:
        return measured / batch
    return _step_seconds(experiment, experiment.train, samples) / experiment.train.samples_trained(
        samples
    )


def _step_seconds(experiment: Experiment, train: Train, samples: int) -> float:
    """Return the shortest of up to three times in which every worker trains on noise, divided by
    the workers."""
    spec = describe(experiment.data.name)
    workers = min(experiment.workers, experiment.peers) if experiment.device == "cpu" else 1
    inputs = torch.randint(256, (workers * samples, *spec.shape), dtype=torch.uint8)
    labels = torch.arange(workers * samples) % spec.classes
    classes = tuple(map(str, range(spec.classes)))
    noise = ImageDataset(
        spec.name, inputs, labels, inputs, labels, classes, spec.mean, spec.std, spec.flip
    )
    indices = torch.arange(workers * samples).reshape(workers, samples).unbind()
    alone = experiment.model_copy(update={"peers": workers, "method": Local(), "train": train})
    context = alone.split_context(noise, Split(indices, indices))
    threads_before = torch.get_num_threads()
    with closing(InProcess(context, experiment.workers)) as engine:
        tasks = [PeerTask(peer, 0, evaluate=False) for peer in context.roster]
        times: list[float] = []
        while not times or (
            len(times) < 3 and sum(times) < LONG_ENOUGH
        ):  # the first one also warms up
            engine.restore(0)
            start = time.perf_counter()
            for _ in engine.run_tasks(tasks):
                pass
            times.append(time.perf_counter() - start)
    torch.set_num_threads(threads_before)
    return min(times) / workers


def differences(ours: Iterable[Experiment], papers: Iterable[Experiment]) -> str:
    """Return `Not the paper's experiment: cnn instead of resnet18; 20 instead of 100 peers; ...`,
    or an empty text."""
    here, there = _properties(ours), _properties(papers)
    texts = [
        f"{_join(here[name])} instead of {_join(there[name])}{'' if name in NAMES else f' {name}'}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    return f"Not the paper's experiment: {'; '.join(texts)}." if texts else ""


def _properties(experiments: Iterable[Experiment]) -> Mapping[str, Sequence[str]]:
    """Return the distinct values of each property, in order of appearance."""
    found: dict[str, dict[str, None]] = {}
    for experiment in experiments:
        method, topology, partition = experiment.method, experiment.topology, experiment.partition
        communicates = isinstance(method, GossipMethod) and method.communicates
        properties = {
            "data": experiment.data.name,
            "model": experiment.model.name,
            "peers": str(experiment.peers),
            "neighbours": (
                str(topology.degree)
                if communicates and isinstance(topology, RandomRegular)
                else None
            ),
            "rounds": str(experiment.rounds),
            "samples per peer": str(experiment.training_samples),
            "classes per peer": (
                str(partition.classes) if isinstance(partition, Pathological) else None
            ),
            "local training": experiment.train.duration,
            "samples per batch": str(experiment.train.batch_size),
        }
        for name, value in properties.items():
            if value is not None:
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _join(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


@dataclass(frozen=True)
class ReproducedRuns:
    """The finished runs of one of the paper's tables or figures, and the folder for their
    report."""

    title: str
    """`Table 1: All nine methods ...`"""
    caveat: str
    """How they differ from the paper's experiment, in one line; empty if they do not."""
    table: PrintedTable | None
    """The paper's numbers, if any."""
    figure: str | None
    runs: Sequence[tuple[Mapping[str, str], Path]]
    """The name of each run, and its directory."""
    references: Sequence[PaperReference]
    """One for each row of the comparison, in the order of the runs."""
    folder: Path
    figure_format: str = "png"
    budget: Budget = Budget.ROUNDS
    """What is held equal in another table below."""
    against: Mapping[str, str] | None = None
    """The names of the row that the others are compared with."""


def write_report(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    """Print our numbers next to the paper's, draw the figure, write everything, and return it as
    JSON data."""
    results.folder.mkdir(parents=True, exist_ok=True)
    if results.caveat:
        print_text(console, results.caveat, "yellow")
    found = _masks(results, console) if results.figure == "masks" else _numbers(results, console)
    report = {"title": results.title, "difference": results.caveat, **found}
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(results.folder / "results.json", f"{text}\n".encode())
    print_text(
        console, f"Written to {results.folder}: {', '.join([*found['files'], 'results.json'])}"
    )
    return report


def _masks(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    rows, files = [], []
    for _, path in results.runs:
        found = compare_masks(path)
        file = results.folder / f"masks-{path.name}.{results.figure_format}"
        if can_draw():
            from dispfl.paper.figures import draw_masks  # matplotlib is slow to import

            draw_masks(found, file)
            files.append(file.name)
        print_masks(found, console)
        rows.append(found.to_json())
    return {"rows": rows, "files": files}


def _numbers(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    targets = dict.fromkeys(
        target for reference in results.references for target in reference.targets
    )
    comparison = compare(results.runs, targets=list(targets), against=results.against)
    rows = [
        ComparedRow(reference, row)
        for reference, row in zip(results.references, comparison.rows, strict=True)
    ]
    folder = results.folder
    files = [path.name for path in write_tables(comparison, folder)]
    if results.table:
        tables = comparison_tables(rows, results.table, comparison.against)
        for table in tables:
            _print_table(table, console)
        notes = [*table_legend(results.table), *misprints(rows, results.table)]
        notes += (
            [f"Against: {paired_over(comparison.differences)}"] if comparison.differences else []
        )
        files.insert(0, _write_markdown(results, tables, notes))
    else:
        console.print(comparison_table(comparison).on_console(console)[0])
        notes = legend(comparison)
    if results.figure and can_draw():
        files.insert(0, f"{results.figure}.{results.figure_format}")
        _draw(results.figure, rows, results.caveat, results.folder / files[0])
    if results.figure == "groups":
        _print_groups(rows, console)
        notes.append("The accuracy of a group also depends on the data of its peers.")
    _print_notes(notes, console)
    found = {"rows": [row_as_json(row) for row in rows], "files": files}
    if results.budget is not Budget.ROUNDS:
        limited = compare(results.runs, results.budget, list(targets), results.against)
        files += [
            path.name for path in write_tables(limited, folder, f"comparison-{results.budget}")
        ]
        console.print("", comparison_table(limited).on_console(console)[0], sep="\n")
        _print_notes(legend(limited), console)
        found["at_equal"] = comparison_json(limited, folder)
    return found


def _print_notes(notes: Iterable[str], console: Console) -> None:
    console.print()
    for note in notes:
        print_text(console, note, "dim")


def _draw(figure: str, rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    from dispfl.paper import figures  # matplotlib is slow to import

    draw = {
        "costs": figures.draw_costs,
        "curves": figures.draw_curves,
        "drop": figures.draw_drop,
        "groups": figures.draw_groups,
        "sparsity": figures.draw_sparsity,
    }
    draw[figure](rows, caveat, to)


def _print_table(found: ComparisonTable, console: Console) -> None:
    table = number_table(*(f"{first}\n{second}" for first, second in found.headings))
    for i, line in enumerate(found.lines):
        table.add_row(
            *(Text(cell, "bold" if (i, j) in found.best else "") for j, cell in enumerate(line))
        )
    console.print("", Text(found.title, "bold"), table, sep="\n")
    for note in found.notes:
        print_text(console, note)


def _print_groups(rows: Sequence[ComparedRow], console: Console) -> None:
    """Print the bars of the figure as numbers, which the paper does not."""
    groups = group_accuracies(rows)
    table = number_table("\ndensity", *(f"{model}\n{partition} %" for partition, model in groups))
    for density in sorted({density for group in groups.values() for density in group}):
        table.add_row(f"{density:g}", *(f"{100 * group[density]:.1f}" for group in groups.values()))
    console.print("", table, sep="\n")


def _write_markdown(
    results: ReproducedRuns, tables: Sequence[ComparisonTable], notes: Sequence[str]
) -> str:
    file = results.folder / "beside-paper.md"
    head = [f"## {results.title}", "", *([results.caveat, ""] if results.caveat else [])]
    below = [*(f"- {note}" for note in notes), ""]
    write_atomically(
        file, "\n".join([*head, *(table.markdown() for table in tables), *below]).encode()
    )
    return file.name
