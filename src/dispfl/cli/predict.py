"""`dispfl predict`: what an exported model makes of pictures, or of the rows of a table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dispfl.export.card import Card
    from dispfl.export.classifier import Prediction

SHOWN = 3
"""How many classes of each picture or row."""


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A file that `dispfl export` wrote.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What the model is for: pictures (PNG, JPEG, ...) or tables (CSV)."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list with an object for each picture or row.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Open a .pt2 file, which can hide code, because you know who made it.")
    ] = False,
) -> None:
    """Show the most probable classes of pictures or of a table's rows, by an exported model.

    Pictures are made grey or coloured as the model wants them and stretched
    to its size; a resize is said. A table names its columns in its first
    line, in any order; the column that was learned may be among them. A file
    that cannot be read gets a sentence on stderr, and the exit code is 1; the
    others are shown.

    Example: dispfl predict model.onnx boot.png; dispfl predict site.onnx rows.csv
    """
    from dispfl.export.formats import load

    classifier = load(model, trust=trust)
    predictions = classifier.predict(files)
    if as_json:
        key = "table" if classifier.card.columns else "picture"
        typer.echo(json.dumps([_json(one, key) for one in predictions], indent=2, ensure_ascii=False))
    else:
        _print(predictions, classifier.card)
    if any(one.problem for one in predictions):
        raise typer.Exit(1)


def _json(one: "Prediction", key: str) -> dict[str, Any]:
    if one.problem:
        return {key: str(one.path), "problem": one.problem}
    top = [{"class": name, "probability": share} for name, share in one.guesses[:SHOWN]]
    if one.line is not None:
        return {key: str(one.path), "line": one.line, "top": top}
    return {key: str(one.path), "top": top, "resized_from": one.resized_from}


def _print(predictions: "list[Prediction]", card: "Card") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 200  # a name in a pipe or a file stays in one piece
    fine = [one for one in predictions if not one.problem]
    if fine:
        console.print(_top_classes(fine[0]) if len(predictions) == 1 else _table(fine, card.input.rstrip("s")))
    if resized := [(one.path, one.resized_from) for one in fine if one.resized_from]:
        [(picture, (width, height)), *others] = resized
        what = f"{len(resized)} pictures were resized" if others else f"{picture} was resized from {width}x{height}"
        note = f"{what} to {card.shape[2]}x{card.shape[1]}."
        console.print(note, style="dim", soft_wrap=True, highlight=False, markup=False)
    for one in predictions:
        if one.problem:
            typer.echo(f"dispfl: {one.problem}", err=True)


def _top_classes(one: "Prediction") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, share in one.guesses[:SHOWN]:
        table.add_row(Text(name), f"{share:.1%}")
    return table


def _table(predictions: "list[Prediction]", what: str) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(what, overflow="fold")
    table.add_column("class")
    table.add_column("", justify="right")
    table.add_column("or")
    for one in predictions:
        (name, share), *others = one.guesses[:SHOWN]
        rest = ", ".join(f"{other} {less:.1%}" for other, less in others)
        where = str(one.path) if one.line is None else f"{one.path}:{one.line}"
        table.add_row(Text(where), Text(name), f"{share:.1%}", Text(rest, style="dim"))
    return table
