"""`dispfl export` writes a peer's model as a file; `dispfl predict` uses it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.cli.completion import complete_runs
from dispfl.cli.run import TrustOption
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text, printable

if TYPE_CHECKING:
    from rich.table import Table

    from dispfl.export.card import Card
    from dispfl.export.formats import SavedModel
    from dispfl.export.predict_process import FilePredictions, Prediction


def export(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run directory, complete or not; or the folder of a real site.",
            autocompletion=complete_runs,
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
    trust: TrustOption = False,
) -> None:
    """Write the personal model of one peer of a run, or of a real site, as one file, ready to
    deploy.

    An .onnx or .pt2 maps float32 images (batch, channels, height, width) in
    [0, 1], or raw rows of a table (batch, columns), to probabilities (batch,
    classes): normalization and softmax are included. A segmentation has
    probabilities for each pixel, a regression values in the unit of its
    targets. A .safetensors contains
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
        with reading(directory):
            personal = site_model(directory, data_dir, trust=trust)
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
        with reading(directory):
            personal = personal_model(directory, peer, data_dir, trust=trust)
    card = personal.card
    saved = save_model(personal.network, card, to)
    _print_export(directory, card, to, saved)


SCALES = {
    "images": "in [0, 1]",
    "rows": "as in the table",
    "texts": "as tokens",
    "arrays": "as they are",
}
"""How inputs are given to an exported model."""


def _print_export(directory: Path, card: "Card", file: Path, saved: "SavedModel") -> None:
    score = "not evaluated then"
    if card.score is not None:
        score = f"{card.metric} {card.score:.3f} on its test data"
    rounds = f"{card.rounds} round{'' if card.rounds == 1 else 's'}"
    typer.echo(
        f"{file}: peer {card.peer} of {directory} after {rounds}, {score};"
        f" {saved.size / 1e6:.2f} MB."
    )
    if card.structure == "channels":
        typer.echo(
            f"Small network: {card.parameters:,} of the {card.whole_parameters:,} parameters of the"
            " whole one."
        )
    shape = ", ".join(map(str, card.shape))
    scale = SCALES[card.input]
    outputs = str(len(card.classes))
    if card.task == "segmentation":
        outputs += f", {card.shape[1]}, {card.shape[2]}"
    typer.echo(
        f"{card.input.capitalize()} (batch, {shape}) {scale} to {card.output} (batch, {outputs})."
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
    masks: Annotated[
        Path | None,
        typer.Option(
            help="Segmentation: write the class of each pixel as PNG files into this folder."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the model may take for a file or a batch.")
    ] = 120.0,
) -> None:
    """Show the most probable classes of images or of the rows of a table, with an exported model.

    Of a regression, show the predicted numbers; of a multi-label task, the
    probability of each label; of a segmentation, the share of the pixels of
    each class.
    Images are converted to grey or colour and resized as the model needs; a
    resize is reported. The first line of a table names its columns, in any
    order; the label's column may be among them and is ignored. A file that
    cannot be read is reported on stderr and makes the exit code 1; the others
    are shown.

    Example: dispfl predict model.onnx boot.png; dispfl predict site.onnx rows.csv
    """
    from dispfl.export.predict_process import predict_files

    results = predict_files(model, files, trust=trust, timeout=timeout, masks=masks)
    if as_json:
        key = "image" if results.input == "images" else "table"
        records = [_json(prediction, key, results.task) for prediction in results.predictions]
        typer.echo(printable(json.dumps(records, indent=2, ensure_ascii=False)))
    else:
        _print(results)
    if any(prediction.problem for prediction in results.predictions):
        raise typer.Exit(1)


def _json(prediction: "Prediction", key: str, task: str) -> dict[str, Any]:
    record: dict[str, Any] = {key: str(prediction.path)}
    if prediction.problem:
        return record | {"problem": prediction.problem}
    if prediction.line is not None:
        record["line"] = prediction.line
    match task:
        case "regression":
            record["values"] = dict(prediction.guesses)
        case "multilabel":
            record["probabilities"] = dict(prediction.guesses)
        case "segmentation":
            record["shares"] = dict(prediction.guesses)
        case _:
            top = []
            for name, probability in prediction.guesses:
                top.append({"class": name, "probability": probability})
            record["top"] = top
    if prediction.line is None:
        record["resized_from"] = prediction.resized_from
    return record


def _print(results: "FilePredictions") -> None:
    console = SafeConsole()
    if not console.is_terminal:
        console.width = 200  # keep names on one line in a pipe or a file
    readable = [prediction for prediction in results.predictions if not prediction.problem]
    if len(results.predictions) == 1 and readable:
        console.print(_outputs(readable[0], results.task))
    elif readable and results.task == "classification":
        console.print(_table(readable, results.input.rstrip("s")))
    elif readable:
        console.print(_columns(readable, results.input.rstrip("s"), results.task))

    resized = [prediction for prediction in readable if prediction.resized_from]
    if resized:
        print_text(console, _resized_note(resized, results.shape), "dim")
    for prediction in results.predictions:
        if prediction.problem:
            typer.echo(f"dispfl: {printable(prediction.problem)}", err=True)


def _resized_note(resized: "list[Prediction]", shape: Sequence[int]) -> str:
    size = f"{shape[2]}x{shape[1]}"
    first = resized[0]
    if len(resized) > 1 or first.resized_from is None:
        return f"{len(resized)} images were resized to {size}."
    width, height = first.resized_from
    return f"{first.path} was resized from {width}x{height} to {size}."


def _outputs(prediction: "Prediction", task: str) -> "Table":
    """A line for each output."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in prediction.guesses:
        table.add_row(Text(name), _number(value, task))
    return table


def _number(value: float, task: str) -> str:
    return f"{value:.6g}" if task == "regression" else f"{value:.1%}"


def _columns(predictions: "list[Prediction]", heading: str, task: str) -> "Table":
    """A column for each output."""
    from rich.table import Table
    from rich.text import Text

    names = [name for name, _ in predictions[0].guesses]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(heading, overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right")
    for prediction in predictions:
        values = dict(prediction.guesses)
        cells = [_number(values[name], task) for name in names]
        table.add_row(Text(_place(prediction)), *cells)
    return table


def _place(prediction: "Prediction") -> str:
    place = str(prediction.path)
    return place if prediction.line is None else f"{place}:{prediction.line}"


def _table(predictions: "list[Prediction]", heading: str) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(heading, overflow="fold")
    table.add_column("class")
    table.add_column("", justify="right")
    table.add_column("or")
    for prediction in predictions:
        (name, probability), *alternatives = prediction.guesses
        also = ", ".join(f"{also_name} {share:.1%}" for also_name, share in alternatives)
        table.add_row(
            Text(_place(prediction)), Text(name), f"{probability:.1%}", Text(also, style="dim")
        )
    return table
