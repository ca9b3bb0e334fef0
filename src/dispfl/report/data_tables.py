"""One table of several comparisons: a row for each method, columns for each data set."""

from collections.abc import Sequence

from dispfl.errors import RunError
from dispfl.report.comparison import (
    Comparison,
    ComparisonRow,
    compare_runs,
    in_percent,
    with_reference,
)
from dispfl.report.labels import distinguishing_keys, short_setting
from dispfl.report.result_tables import SCORE, comparison_table, comparison_values
from dispfl.report.runs import Budget, RecordedRun, run_labels
from dispfl.report.tables import NEEDED, Table, TableColumn, csv_text
from dispfl.report.wording import UNKNOWN


def compare_by_data(
    runs: Sequence[RecordedRun],
    budget: Budget = Budget.ROUNDS,
    targets: Sequence[float] = (),
    against: str | None = None,
    percent: bool = False,
) -> dict[str, Comparison]:
    """Compare the runs on each data set, by a label of the data set.

    Runs have the same data if all settings of data, partition and peers are the same. A reference
    that a data set lacks is the first row there, but one of them must have it.
    """
    by_data: dict[tuple[tuple[str, str], ...], list[RecordedRun]] = {}
    for run in runs:
        if not run.records:
            raise RunError(f"{run.path} has no finished round to compare; run it first.")
        by_data.setdefault(tuple(sorted(run.data.items())), []).append(run)

    comparisons = []
    for of_data in by_data.values():
        names = [{"method": label} for label in run_labels(of_data)]
        comparisons.append(compare_runs(zip(names, of_data, strict=True), budget, targets))
    if against is not None:
        comparisons = with_reference(comparisons, against)
    if percent:
        comparisons = list(map(in_percent, comparisons))
    return dict(zip(_data_labels(list(map(dict, by_data))), comparisons, strict=True))


def _data_labels(data: Sequence[dict[str, str]]) -> list[str]:
    """Return a label of each data set: by the settings in which they differ, its name first."""
    keys = distinguishing_keys(data)
    if len(data) == 1:
        keys = ["data.name"]
    elif "data.name" in keys:
        keys.remove("data.name")
        keys.insert(0, "data.name")
    labels = []
    for settings in data:
        parts = [short_setting(key, settings[key]) for key in keys if key in settings]
        labels.append(", ".join(parts) or UNKNOWN)
    return labels


def data_table(comparisons: dict[str, Comparison], columns: Sequence[str] = ()) -> Table:
    """Return the rows of all comparisons, with these columns of each: by default its scores."""
    keys = list(columns) or [SCORE]
    labels: dict[str, None] = {}
    for comparison in comparisons.values():
        labels |= dict.fromkeys(row.label for row in comparison.rows)

    shown = [TableColumn(("method", ""), list(labels), text=True)]
    notes: dict[str, None] = {}
    captions = []
    for data, comparison in comparisons.items():
        table = comparison_table(comparison, keys)
        captions.append(table.caption)
        notes |= dict.fromkeys(table.notes)
        for column in table.columns:
            if column.key:
                shown.append(_of_data(column, data, comparison.rows, list(labels), len(keys) > 1))
    return Table(shown, list(notes), caption=captions[0], is_chosen=True)


def _of_data(
    column: TableColumn,
    data: str,
    rows: Sequence[ComparisonRow],
    labels: Sequence[str],
    with_title: bool,
) -> TableColumn:
    """Return a column of one data set for the rows of all: those that it lacks have a dash."""
    cells = [UNKNOWN] * len(labels)
    best = set()
    for number, row in enumerate(rows):
        position = labels.index(row.label)
        cells[position] = column.cells[number]
        if number in column.best:
            best.add(position)
    first, second = column.heading
    title = " ".join(filter(None, (first, second.removeprefix("over seeds"))))
    heading = (data, title if with_title else "")
    return TableColumn(heading, cells, NEEDED, column.key, best=frozenset(best))


def data_csv(comparisons: dict[str, Comparison]) -> str:
    """Return one line for each row of each data set, with plain numbers in plain units."""
    lines = []
    fields: dict[str, None] = {}
    for data, comparison in comparisons.items():
        for values in comparison_values(comparison):
            line = {"data": data, **values}
            fields |= dict.fromkeys(line)
            lines.append(line)
    return csv_text([{field: line.get(field) for field in fields} for line in lines])
