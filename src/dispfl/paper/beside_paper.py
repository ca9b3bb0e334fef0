"""The paper's tables with our numbers in them, and the report of an experiment that they are in."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.text import Text

from dispfl.core.metric import Measure
from dispfl.extras import can_draw
from dispfl.files import write_atomically
from dispfl.paper.mask_similarity import compare_masks, print_masks, spearman
from dispfl.paper.printed import PrintedNumber, PrintedRow, PrintedTable, errata
from dispfl.report.comparison import DISPFL, Comparison, ComparisonRow, NamedRun, compare_runs
from dispfl.report.differences import paired_over
from dispfl.report.result_tables import (
    comparison_json,
    comparison_table,
    rounds_to_each,
    write_tables,
)
from dispfl.report.runs import Budget, read_run
from dispfl.report.tables import Table, TableColumn
from dispfl.report.wording import UNKNOWN
from dispfl.terminal import number_table, print_text

T = TypeVar("T")
SHORT = {"dirichlet": "Dir", "pathological": "Path"}
"""Abbreviations that let a table with every number twice fit 80 columns."""
HEADINGS = {"density": ("den-", "sity"), "topology": ("topo-", "logy")}
LABELS = ("method", "variant", "density", "topology")
"""The labels that name the lines of a table, as far as they are needed."""


@dataclass(frozen=True)
class PaperReference:
    """The part of the paper that a row of our results is compared with."""

    labels: Mapping[str, str]
    """Data, partition, model, topology, method and density in the paper's names; drop; variant."""
    printed: PrintedRow | None = None
    targets: Sequence[float] = ()
    """Our target accuracies, in the order of the paper's."""
    mean_mb: float | None = None
    """A peer's mean download per round, where the paper does not print the busiest node's."""


@dataclass(frozen=True)
class ComparedRow:
    """A row of our results, over all seeds, and the paper's numbers for it."""

    reference: PaperReference
    row: ComparisonRow

    def __getitem__(self, key: str) -> str:
        """Return one of the reference's labels."""
        return self.reference.labels[key]

    def names(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Return several of the reference's labels."""
        return tuple(map(self.__getitem__, keys))

    @property
    def printed_accuracy(self) -> PrintedNumber | None:
        """The paper's accuracy, if it prints one."""
        if self.reference.printed is None:
            return None
        return self.reference.printed.accuracy

    def to_json(self) -> dict[str, Any]:
        """Return the row in plain units (fractions, MB, FLOPs), for other programs."""
        row = self.row
        reference = self.reference
        ours = {
            "accuracy": row.score,
            "accuracy_std": row.score_std,
            "busiest_mb": row.paper_mb,
            "mean_mb": reference.mean_mb,
            "flops": row.flops_per_peer,
            "rounds_to": rounds_to_each(reference.targets, row),
            "rounds": row.rounds,
            "runs": [str(run.path) for run in row.runs],
        }
        return {"place": dict(reference.labels), "paper": self._printed_json(), "ours": ours}

    def _printed_json(self) -> dict[str, Any] | None:
        printed = self.reference.printed
        if printed is None:
            return None
        values: dict[str, Any] = {}
        for name in ("accuracy", "accuracy_std", "comm", "flops"):
            number: PrintedNumber | None = getattr(printed, name)
            values[name] = number and number.value
        values["rounds_to"] = {f"{to.target.value:g}": to.rounds for to in printed.rounds_to}
        return values


def distinct_labels(rows: Iterable[ComparedRow], key: str) -> list[str]:
    """Return the values of a label, each once, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


TableLine = Mapping[str, ComparedRow]
"""One line of a table: its rows by partition."""


# The tables


def paper_tables(
    rows: Sequence[ComparedRow], printed: PrintedTable, against: Mapping[str, str] = DISPFL
) -> list[Table]:
    """Return one table per data set and model.

    Where rounds to a target are printed, each partition has its own.
    """
    sections: dict[tuple[str, ...], list[ComparedRow]] = {}
    for row in rows:
        key = [row["model"], row["data"]]
        if printed.rounds:
            key.append(row["partition"])
        sections.setdefault(tuple(key), []).append(row)

    tables = []
    for (model, *data), section in sections.items():
        title = f"Table {printed.number}, the paper's {model} on {', '.join(data)}"
        tables.append(_paper_table(printed, title, section, against))
    return tables


def _paper_table(
    printed: PrintedTable, title: str, rows: Sequence[ComparedRow], against: Mapping[str, str]
) -> Table:
    keys = [key for key in LABELS if key == "method" or _distinguishes(rows, key)]
    by_names: dict[tuple[str, ...], dict[str, ComparedRow]] = {}
    for row in rows:
        by_names.setdefault(row.names(keys), {})[row["partition"]] = row
    lines = list(by_names.values())

    columns = []
    for key, names in zip(keys, zip(*by_names, strict=True), strict=True):
        heading = HEADINGS.get(key, ("", key))
        columns.append(TableColumn(heading, names, text=key == "method"))
    notes: list[str] = []
    if printed.rounds:
        columns += _rounds_columns(printed, _printed_if_possible(rows), lines)
    else:
        partitions = distinct_labels(rows, "partition")
        for partition in partitions:
            columns += _accuracy_columns(partition, lines)
        columns += _cost_columns(printed, lines)
        notes += _rank_correlations(rows, partitions)
    notes += _verdicts(rows, against)
    return Table(columns, notes, title)


def _distinguishes(rows: Sequence[ComparedRow], key: str) -> bool:
    """Return whether lines of one method differ in a label, so that a table needs its column."""
    methods = set()
    values = set()
    for row in rows:
        methods.add(row["method"])
        values.add((row["method"], row[key]))
    return len(values) > len(methods)


def _printed_if_possible(rows: Sequence[ComparedRow]) -> ComparedRow:
    """Return the first row that the paper prints, or the first of all."""
    for row in rows:
        if row.reference.printed:
            return row
    return rows[0]


@dataclass
class AccuracyCells:
    """The cells of a column of accuracies, of which the highest are in bold."""

    cells: list[str] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)
    """By line, the accuracy as a fraction, with the digits that are printed."""

    def add(self, cell: str, value: float) -> None:
        self.values[len(self.cells)] = value
        self.cells.append(cell)

    def add_unknown(self) -> None:
        self.cells.append(UNKNOWN)

    def column(self, heading: tuple[str, str]) -> TableColumn:
        """Return the column."""
        highest = max(self.values.values(), default=None)
        best = frozenset(line for line, value in self.values.items() if value == highest)
        return TableColumn(heading, self.cells, best=best)


def _accuracy_columns(partition: str, lines: Sequence[TableLine]) -> Iterator[TableColumn]:
    """Yield the paper's accuracies on a partition and ours."""
    printed = AccuracyCells()
    ours = AccuracyCells()
    for line in lines:
        compared = line.get(partition)
        if compared and compared.printed_accuracy:
            accuracy = compared.printed_accuracy
            printed.add(str(accuracy), round(accuracy.value, 4))
        else:
            printed.add_unknown()

        if compared and compared.row.score is not None:
            score = compared.row.score
            ours.add(_accuracy_text(score, compared.row.score_std), round(score, 3))
        else:
            ours.add_unknown()
    yield printed.column((f"{SHORT.get(partition, partition)} %", "paper"))
    yield ours.column(("", "ours"))


def _accuracy_text(score: float, std: float | None) -> str:
    if std is None:
        return f"{100 * score:.1f}"
    return f"{100 * score:.1f}±{100 * std:.1f}"


def _cost_columns(printed: PrintedTable, lines: Sequence[TableLine]) -> Iterator[TableColumn]:
    """Yield columns of MB and FLOPs, which the paper prints once for both partitions."""
    printed_mb = []
    our_mb = []
    printed_flops = []
    flops = []
    for line in lines:
        printed_mb.append(_text(_printed(line, lambda row: row.comm)))
        our_mb.append(_three_digits(_megabytes(line, printed)))
        printed_flops.append(_text(_printed(line, lambda row: row.flops)))
        flops.append(_flops(line))
    yield TableColumn(("MB", "paper"), printed_mb)
    yield TableColumn(("", "ours"), our_mb)

    printed_unit = float(printed.flops_unit)
    smallest = min(filter(None, flops), default=printed_unit)
    our_unit = printed_unit
    if smallest < printed_unit / 10:
        our_unit = 10.0 ** (3 * floor(log10(smallest) / 3))
    our_flops = [_three_digits(amount / our_unit) for amount in flops]
    yield TableColumn((_power(printed_unit), "paper"), printed_flops)
    yield TableColumn((_power(our_unit), "ours"), our_flops)


def _rounds_columns(
    printed: PrintedTable, example: ComparedRow, lines: Sequence[TableLine]
) -> Iterator[TableColumn]:
    """Yield columns of rounds to each target; the paper's and ours are in the same order."""
    for index, target in enumerate(example.reference.targets):
        printed_cells = []
        our_cells = []
        for line in lines:
            [compared] = line.values()  # each partition has its own targets and its own table
            printed_cells.append(_printed_rounds(printed, compared, index))
            our_cells.append(_our_rounds(compared, index))
        printed_target = UNKNOWN
        if example.reference.printed:
            printed_target = str(example.reference.printed.rounds_to[index].target)
        yield TableColumn((f"to {printed_target} %", "paper"), printed_cells)
        yield TableColumn((f"to {100 * target:g} %", "ours"), our_cells)


def _printed_rounds(table: PrintedTable, compared: ComparedRow, index: int) -> str:
    if compared.reference.printed is None:
        return UNKNOWN
    rounds = compared.reference.printed.rounds_to[index].rounds
    return str(rounds or f">{table.rounds}")


def _our_rounds(compared: ComparedRow, index: int) -> str:
    rounds = compared.row.rounds_to(compared.reference.targets[index])
    if rounds is None:
        return f">{compared.row.rounds}"
    return f"{rounds:.1f}".removesuffix(".0")


def _printed(line: TableLine, number: Callable[[PrintedRow], T]) -> T | None:
    """Return a number that is printed once for the whole line."""
    for compared in line.values():
        if compared.reference.printed:
            return number(compared.reference.printed)
    return None


def _megabytes(line: TableLine, table: PrintedTable) -> float:
    if table.comm == "mean":
        return _mean_over(line, lambda compared: compared.reference.mean_mb or 0.0)
    return _mean_over(line, lambda compared: compared.row.paper_mb)


def _flops(line: TableLine) -> float:
    return _mean_over(line, lambda compared: compared.row.flops_per_peer)


def _mean_over(line: TableLine, number: Callable[[ComparedRow], float]) -> float:
    return fmean(map(number, line.values()))


def _text(printed: PrintedNumber | None) -> str:
    if printed is None:
        return UNKNOWN
    return str(printed)


def _three_digits(value: float) -> str:
    if not value:
        return UNKNOWN
    decimals = 1 if value >= 100 else 2
    return f"{value:.{decimals}f}"


def _power(unit: float) -> str:
    return f"1e{round(log10(unit))}"


# What is said below the tables


def table_legend(table: PrintedTable) -> list[str]:
    """Return the meaning of the numbers, in sentences."""
    if table.rounds:
        return [
            "to 60 %: rounds until the mean accuracy over peers is 60 %; >20: not within 20 rounds."
        ]
    mb = "mean download of a node"
    if table.comm == "busiest":
        mb = "download of the busiest node"
    accuracy = (
        "Dir, Path: accuracy on Dirichlet and pathological partitions, mean over peers, each on its"
        " own test data."
    )
    costs = (
        f"MB: {mb} per round, values only. 1e12 etc.: FLOPs of a peer's local phase, counted, not"
        " saved."
    )
    return [accuracy, costs]


def misprints(rows: Iterable[ComparedRow], table: PrintedTable) -> list[str]:
    """Return the errata that concern these rows."""
    printed_rows = []
    for row in rows:
        if row.reference.printed:
            printed_rows.append(row.reference.printed)
    sentences = []
    for erratum in errata():
        if any(erratum.concerns(row, erratum.column) for row in printed_rows):
            sentences.append(f"Misprint in Table {table.number}: {erratum.sentence}")
    return sentences


def _rank_correlations(rows: Sequence[ComparedRow], partitions: Sequence[str]) -> Iterator[str]:
    """Compare the order of the rows by accuracy, which is meaningful where numbers are not."""
    texts = []
    for partition in partitions:
        rank = _rank_correlation([row for row in rows if row["partition"] == partition])
        if rank is not None:
            texts.append(f"{partition} {rank:.2f}")
    if texts:
        yield f"Rank correlation of our accuracies with the paper's: {', '.join(texts)}."


def _rank_correlation(rows: Sequence[ComparedRow]) -> float | None:
    """Return the correlation over the rows with both accuracies; None if they are too few."""
    printed_accuracies = []
    our_accuracies = []
    for row in rows:
        if row.printed_accuracy and row.row.score is not None:
            printed_accuracies.append(row.printed_accuracy.value)
            our_accuracies.append(row.row.score)
    if len(our_accuracies) <= 2:
        return None
    return spearman(np.array(printed_accuracies), np.array(our_accuracies))


def _verdicts(rows: Sequence[ComparedRow], against: Mapping[str, str]) -> Iterator[str]:
    """Yield `Against dispfl on dirichlet, ring, in accuracy: local behind, -0.020 [...]; ...`.

    One sentence for every partition and, where a method has several, topology. Rows without a
    topology are compared with the reference of each.
    """
    keys = ["partition"]
    if _distinguishes(rows, "topology"):
        keys.append("topology")
    places = dict.fromkeys(row.names(keys) for row in rows)
    for place in places:
        if UNKNOWN in place:
            continue
        rivals = [row for row in rows if _belongs_to(row, keys, place)]
        reference = _reference(rivals, against)
        measure = reference.row.runs[0].measure
        verdicts = list(_differences(rivals, reference, measure))
        if verdicts:
            name = _name(reference, rivals)
            where = ", ".join(place)
            yield f"Against {name} on {where}, in {measure.name}: {'; '.join(verdicts)}."


def _reference(rivals: Sequence[ComparedRow], against: Mapping[str, str]) -> ComparedRow:
    """Return the row with these names; the first if none has them."""
    for row in rivals:
        if row.row.is_named(against):
            return row
    return rivals[0]


def _differences(
    rivals: Sequence[ComparedRow], reference: ComparedRow, measure: Measure
) -> Iterator[str]:
    """Yield `local behind, -0.020 [-0.031, -0.009]` for each rival with the same data."""
    for row in rivals:
        if row is reference:
            continue
        difference = row.row.difference_to(reference.row)
        if difference:
            name = _name(row, rivals)
            yield f"{name} {difference.verdict(measure)}, {difference.text(measure)}"


def _belongs_to(row: ComparedRow, keys: Sequence[str], place: Sequence[str]) -> bool:
    """Whether a row has these labels, or none, as methods without a topology have."""
    return all(row[key] in (UNKNOWN, label) for key, label in zip(keys, place, strict=True))


def _name(row: ComparedRow, rows: Sequence[ComparedRow]) -> str:
    """`dispfl`, or, where rows of one method differ, `dispfl (0.5)`."""
    details = []
    for key in ("variant", "density"):
        if _distinguishes(rows, key) and row[key] != UNKNOWN:
            details.append(row[key])
    if not details:
        return row["method"]
    return f"{row['method']} ({', '.join(details)})"


def group_accuracies(rows: Sequence[ComparedRow]) -> dict[tuple[str, str], dict[float, float]]:
    """Return the accuracy of each group of peers of one density, by partition and model."""
    by_place: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        scores: dict[float, list[float]] = {}
        for run in row.row.runs:
            for group in (run.summary or {}).get("groups", []):
                scores.setdefault(group["density"], []).append(group["mean"])
        model = row.row.runs[0].config["model"]["name"]
        means = {density: fmean(values) for density, values in scores.items()}
        by_place[row["partition"], model] = means
    return by_place


# The report of an experiment


@dataclass(frozen=True)
class ReproducedRuns:
    """The finished runs of one of the paper's tables or figures, and the folder for a report."""

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

    @property
    def targets(self) -> list[float]:
        """All target accuracies, each once."""
        targets: dict[float, None] = {}
        for reference in self.references:
            targets |= dict.fromkeys(reference.targets)
        return list(targets)


def write_report(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    """Print our numbers next to the paper's, draw the figure, and write everything.

    Returns what `results.json` contains.
    """
    results.folder.mkdir(parents=True, exist_ok=True)
    if results.caveat:
        print_text(console, results.caveat, "yellow")
    if results.figure == "masks":
        content = _report_masks(results, console)
    else:
        content = _report_numbers(results, console)
    report = {"title": results.title, "difference": results.caveat, **content}
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(results.folder / "results.json", f"{text}\n".encode())
    files = ", ".join([*content["files"], "results.json"])
    print_text(console, f"Written to {results.folder}: {files}")
    return report


def _report_masks(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    rows = []
    files = []
    for _, path in results.runs:
        masks = compare_masks(path)
        if can_draw():
            from dispfl.paper.figures import draw_masks  # matplotlib is slow to import

            file = results.folder / f"masks-{path.name}.{results.figure_format}"
            draw_masks(masks, file)
            files.append(file.name)
        print_masks(masks, console)
        rows.append(masks.to_json())
    return {"rows": rows, "files": files}


def _report_numbers(results: ReproducedRuns, console: Console) -> dict[str, Any]:
    runs = [(name, read_run(path)) for name, path in results.runs]
    comparison = compare_runs(runs, targets=results.targets, against=results.against)
    rows = list(map(ComparedRow, results.references, comparison.rows))
    files = _write_comparison(comparison, results.folder, "comparison")
    if results.table:
        tables = paper_tables(rows, results.table, comparison.against)
        for table in tables:
            _print_table(table, console)
        notes = [*table_legend(results.table), *misprints(rows, results.table)]
        if comparison.differences:
            notes.append(f"Against: {paired_over(comparison.differences)}")
        files.insert(0, _write_markdown(results, tables, notes))
    else:
        table = comparison_table(comparison)
        console.print(table.on_console(console)[0])
        notes = list(table.notes)

    if results.figure and can_draw():
        files.insert(0, f"{results.figure}.{results.figure_format}")
        _draw(results.figure, rows, results.caveat, results.folder / files[0])
    if results.figure == "groups":
        _print_groups(rows, console)
        notes.append("The accuracy of a group also depends on the data of its peers.")
    _print_notes(notes, console)

    content: dict[str, Any] = {"rows": [row.to_json() for row in rows], "files": files}
    if results.budget is not Budget.ROUNDS:
        limited = _report_at_equal_budget(results, runs, console)
        files += _write_comparison(limited, results.folder, f"comparison-{results.budget}")
        content["at_equal"] = comparison_json(limited, results.folder)
    return content


def _report_at_equal_budget(
    results: ReproducedRuns, runs: Sequence[NamedRun], console: Console
) -> Comparison:
    """Compare the same runs after equal traffic or computing, and print the table."""
    comparison = compare_runs(runs, results.budget, results.targets, results.against)
    table = comparison_table(comparison)
    console.print("", table.on_console(console)[0], sep="\n")
    _print_notes(table.notes, console)
    return comparison


def _write_comparison(comparison: Comparison, folder: Path, name: str) -> list[str]:
    """Write the tables of a comparison; return the names of the files."""
    return [path.name for path in write_tables(comparison, folder, name)]


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


def _print_table(table: Table, console: Console) -> None:
    drawn, _ = table.on_console(console)
    console.print("", Text(table.title, "bold"), drawn, sep="\n")
    for note in table.notes:
        print_text(console, note)


def _print_groups(rows: Sequence[ComparedRow], console: Console) -> None:
    """Print the bars of the figure as numbers, which the paper does not."""
    groups = group_accuracies(rows)
    densities: set[float] = set()
    headings = []
    for (partition, model), means in groups.items():
        densities |= means.keys()
        headings.append(f"{model}\n{partition} %")
    table = number_table("\ndensity", *headings)
    for density in sorted(densities):
        cells = [f"{100 * means[density]:.1f}" for means in groups.values()]
        table.add_row(f"{density:g}", *cells)
    console.print("", table, sep="\n")


def _write_markdown(results: ReproducedRuns, tables: Sequence[Table], notes: Sequence[str]) -> str:
    lines = [f"## {results.title}", ""]
    if results.caveat:
        lines += [results.caveat, ""]
    for table in tables:
        lines.append(table.markdown())
    for note in notes:
        lines.append(f"- {note}")
    file = results.folder / "beside-paper.md"
    write_atomically(file, "\n".join([*lines, ""]).encode())
    return file.name
