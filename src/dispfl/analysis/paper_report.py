"""What is to be said of finished runs beside the paper: tables on the terminal and in files, and the paper's figure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispfl import paper
from dispfl.analysis import formats, paper_figures
from dispfl.analysis.beside_paper import Sheet, as_json, legend, misprints, sheets
from dispfl.analysis.comparison import compare
from dispfl.analysis.heatmaps import draw_masks
from dispfl.analysis.mask_tables import print_masks
from dispfl.analysis.paper_columns import Entry, Place
from dispfl.analysis.run_masks import masks_of_run
from dispfl.runs.files import write_atomically

FIGURES: dict[str, Callable[[Sequence[Entry], str, Path], None]] = {
    "curves": paper_figures.draw_curves,
    "drop": paper_figures.draw_drop,
    "groups": paper_figures.draw_groups,
    "sparsity": paper_figures.draw_sparsity,
}


@dataclass(frozen=True)
class Results:
    """The finished runs of one of the paper's tables or figures, and where what is said of them goes."""

    title: str
    """`Table 1: All nine methods ...`"""
    caveat: str
    """In what it is not the paper's experiment, in one line; empty if it is."""
    table: paper.Table | None
    """The paper's numbers, where it prints any."""
    figure: str | None
    runs: Sequence[tuple[Mapping[str, str], Path]]
    """What makes each differ from the others, and its directory."""
    places: Sequence[Place]
    """Of each row of the runs, in the order in which they come."""
    folder: Path


def report(results: Results, console: Console) -> dict[str, Any]:
    """Print our numbers beside the paper's, draw the figure, write all of it, and give back what the JSON says."""
    results.folder.mkdir(parents=True, exist_ok=True)
    if results.caveat:
        _say(console, results.caveat, "yellow")
    found = _masks(results, console) if results.figure == "masks" else _numbers(results, console)
    whole = {"title": results.title, "difference": results.caveat, **found}
    text = json.dumps(whole, indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(results.folder / "results.json", f"{text}\n".encode())
    _say(console, f"Written to {results.folder}: {', '.join([*found['files'], 'results.json'])}")
    return whole


def _masks(results: Results, console: Console) -> dict[str, Any]:
    rows, files = [], []
    for _, path in results.runs:
        found = masks_of_run(path)
        picture = results.folder / f"masks-{path.name}.png"
        draw_masks(found, picture)
        print_masks(found, console)
        rows.append(found.to_json())
        files.append(picture.name)
    return {"rows": rows, "files": files}


def _numbers(results: Results, console: Console) -> dict[str, Any]:
    comparison = compare(results.runs)
    entries = [Entry(place, row) for place, row in zip(results.places, comparison.rows, strict=True)]
    files = [path.name for path in formats.write_all(comparison, results.folder)]
    if results.table:
        found = sheets(entries, results.table)
        for sheet in found:
            _print_sheet(sheet, console)
        notes = [*legend(results.table), *misprints(entries, results.table)]
        files.insert(0, _write_markdown(results, found, notes))
    else:
        console.print(formats.rich_table(comparison, console)[0])
        notes = formats.legend(comparison)
    if results.figure:
        files.insert(0, f"{results.figure}.png")
        FIGURES[results.figure](entries, results.caveat, results.folder / files[0])
    if results.figure == "groups":
        _print_groups(entries, console)
        notes.append("A group's accuracy depends on the data of its own peers too.")
    console.print()
    for note in notes:
        _say(console, note, "dim")
    return {"rows": [as_json(entry) for entry in entries], "files": files}


def _say(console: Console, sentence: str, style: str | None = None) -> None:
    console.print(sentence, style=style, soft_wrap=True, highlight=False, markup=False)


def _table(headings: Sequence[str]) -> Table:
    """An empty table; all columns but the first are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _print_sheet(sheet: Sheet, console: Console) -> None:
    table = _table([f"{first}\n{second}" for first, second in sheet.headings])
    for i, line in enumerate(sheet.lines):
        table.add_row(*(Text(cell, "bold" if (i, j) in sheet.best else "") for j, cell in enumerate(line)))
    console.print("", Text(sheet.title, "bold"), table, sep="\n")
    for note in sheet.notes:
        _say(console, note)


def _print_groups(entries: Sequence[Entry], console: Console) -> None:
    """The bars of the figure as numbers; the paper draws them without."""
    groups = paper_figures.group_accuracies(entries)
    table = _table(["\ndensity", *(f"{model}\n{partition} %" for partition, model in groups)])
    for density in sorted({density for group in groups.values() for density in group}):
        table.add_row(f"{density:g}", *(f"{100 * group[density]:.1f}" for group in groups.values()))
    console.print("", table, sep="\n")


def _write_markdown(results: Results, found: Sequence[Sheet], notes: Sequence[str]) -> str:
    file = results.folder / "beside-paper.md"
    head = [f"## {results.title}", "", *([results.caveat, ""] if results.caveat else [])]
    below = [*(f"- {note}" for note in notes), ""]
    write_atomically(file, "\n".join([*head, *(sheet.markdown() for sheet in found), *below]).encode())
    return file.name
