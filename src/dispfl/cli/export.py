"""`dispfl export`: one peer's model as a file to deploy."""

from pathlib import Path
from typing import Annotated

import typer

from dispfl.errors import ConfigError


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run directory, finished or cut; or the folder of a real site.")
    ],
    *,
    peer: Annotated[
        str | None, typer.Option(help="Whose model: a place in the roster (3) or a name (003). A site has its own.")
    ] = None,
    to: Annotated[Path, typer.Option(help="The file to write: .safetensors, .onnx or .pt2.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data set's files are, in the cases above that need them.")
    ] = None,
) -> None:
    """Write the personal model of one peer of a run, or of a real site, as one file, ready to deploy.

    An .onnx or .pt2 takes float32 pictures (batch, channels, height, width)
    in [0, 1], or rows (batch, columns) as they stand in a table, and gives
    probabilities (batch, classes): normalization and softmax are inside. A
    .safetensors holds the weights by name. Class names, picture shape or
    columns, normalization and origin are in the metadata of all three. The
    file is read back and compared with torch before it is kept.

    Methods that fine-tune (-ft) need the data set: the peer's model is tuned
    again, as in the run. So do data sets whose files name the classes.

    Example: dispfl export runs/mine --peer 3 --to model.onnx; dispfl export alice --to model.onnx
    """
    from dispfl.export.formats import check_writable, save
    from dispfl.export.of_site import is_site, site_model
    from dispfl.export.personal import personal_model

    check_writable(to)
    if is_site(directory):
        personal = site_model(directory, data_dir)
        if peer not in (None, personal.card.peer):
            raise ConfigError(
                f"{directory} is the site {personal.card.peer} and has no model of {peer}; leave --peer away."
            )
    elif peer is None:
        raise ConfigError(f"--peer is missing: {directory} has a model for each peer; say whose.")
    else:
        personal = personal_model(directory, peer, data_dir)
    saved = save(personal.network, personal.card, to)
    card = personal.card
    score = "not scored then" if card.accuracy is None else f"accuracy {card.accuracy:.3f} on its own test data"
    rounds = f"{card.rounds} round{'' if card.rounds == 1 else 's'}"
    typer.echo(f"{to}: peer {card.peer} of {directory} after {rounds}, {score}; {saved.size / 1e6:.2f} MB.")
    shape = ", ".join(map(str, card.shape))
    scale = "as they stand in a table" if card.columns else "in [0, 1]"
    typer.echo(f"{card.input.capitalize()} (batch, {shape}) {scale} to probabilities (batch, {len(card.classes)}).")
    typer.echo(f"Largest difference from torch: {saved.difference:.1e}.")
