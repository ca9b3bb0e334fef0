"""`dispfl export` writes one peer's model as a file; `dispfl predict` classifies images or table
rows with it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.errors import ConfigError
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.table import Table

    from dispfl.export.card import Card
    from dispfl.export.classifier import Prediction

SHOWN = 3
"""The number of classes to show for each image or row."""


def export(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A run directory, complete or not; or the folder of a real site."
        ),
    ],
    *,
    peer: Annotated[
        str | None,
        typer.Option(help="The peer of a run, by index (3) or name (003). Not needed for a site."),
    ] = None,
    to: Annotated[Path, typer.Option(help="The file to write: .safetensors, .onnx or .pt2.")],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data set's files, where they are needed (see above)."
        ),
    ] = None,
) -> None:
    """Write the personal model of one peer of a run, or of a real site, as one file, ready to
    deploy.

    An .onnx or .pt2 maps float32 images (batch, channels, height, width) in
    [0, 1], or raw rows of a table (batch, columns), to probabilities (batch,
    classes): normalization and softmax are included. A .safetensors contains
    the weights by name. Class names, image shape or columns, normalization
    and origin are in the metadata of all three. The file is read back and
    compared with torch before it is written. With method.structure=channels
    it contains the peer's small network: smaller and faster.

    The data set's files are needed for methods that fine-tune (-ft), as the
    model is fine-tuned again, and where only the files name the classes.

    Example: dispfl export runs/mine --peer 3 --to model.onnx; dispfl export alice --to model.onnx
    """
    from dispfl.export.formats import check_writable, save_model
    from dispfl.export.personal import personal_model, site_model
    from dispfl.files import is_site

    check_writable(to)
    if is_site(directory):
        personal = site_model(directory, data_dir)
        if peer not in (None, personal.card.peer):
            raise ConfigError(
                f"{directory} is the site {personal.card.peer} and has no model of {peer}; omit"
                " --peer."
            )
    elif peer is None:
        raise ConfigError(
            f"--peer is missing: {directory} has a model for each peer; choose one.", key="--peer"
        )
    else:
        personal = personal_model(directory, peer, data_dir)
    saved = save_model(personal.network, personal.card, to)
    card = personal.card
    score = (
        "not evaluated then"
        if card.score is None
        else f"{card.metric} {card.score:.3f} on its test data"
    )
    rounds = f"{card.rounds} round{'' if card.rounds == 1 else 's'}"
    typer.echo(
        f"{to}: peer {card.peer} of {directory} after {rounds}, {score}; {saved.size / 1e6:.2f} MB."
    )
    if card.structure == "channels":
        typer.echo(
            f"Small network: {card.parameters:,} of the {card.whole_parameters:,} parameters of the"
            " whole one."
        )
    shape = ", ".join(map(str, card.shape))
    scale = "as in the table" if card.columns else "in [0, 1]"
    typer.echo(
        f"{card.input.capitalize()} (batch, {shape}) {scale} to probabilities (batch,"
        f" {len(card.classes)})."
    )
    typer.echo(f"Largest difference from torch: {saved.difference:.1e}.")


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A file that `dispfl export` wrote.")
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Images (PNG, JPEG, ...) or tables (CSV), depending on the model.",
        ),
    ],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: a list with one object for each image or row."),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Open a .pt2 file, which can run code: only if you trust its origin."
        ),
    ] = False,
) -> None:
    """Show the most probable classes of images or of the rows of a table, with an exported model.

    Images are converted to grey or colour and resized as the model needs; a
    resize is reported. The first line of a table names its columns, in any
    order; the label's column may be among them and is ignored. A file that
    cannot be read is reported on stderr and makes the exit code 1; the others
    are shown.

    Example: dispfl predict model.onnx boot.png; dispfl predict site.onnx rows.csv
    """
    from dispfl.export.formats import load_model

    classifier = load_model(model, trust=trust)
    predictions = classifier.predict(files)
    if as_json:
        key = "table" if classifier.card.columns else "image"
        typer.echo(
            json.dumps([_json(one, key) for one in predictions], indent=2, ensure_ascii=False)
        )
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
        console.width = 200  # keep names on one line in a pipe or a file
    fine = [one for one in predictions if not one.problem]
    if fine:
        console.print(
            _top_classes(fine[0]) if len(predictions) == 1 else _table(fine, card.input.rstrip("s"))
        )
    if resized := [(one.path, one.resized_from) for one in fine if one.resized_from]:
        [(image, (width, height)), *others] = resized
        what = (
            f"{len(resized)} images were resized"
            if others
            else f"{image} was resized from {width}x{height}"
        )
        note = f"{what} to {card.shape[2]}x{card.shape[1]}."
        print_text(console, note, "dim")
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
