"""`dispfl data`: list data sets, find their files, download them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.errors import DataError
from dispfl.terminal import SafeConsole

if TYPE_CHECKING:
    from dispfl.data.catalogue import DataSpec
    from dispfl.data.contents import Contents

app = typer.Typer(help="List data sets, find their files, download them.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder with the files; default: $DISPFL_DATA, the cache and the system folder.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_datasets(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the data sets and where their files are.

    Example: dispfl data list --data-dir ~/data
    """
    from rich.table import Table

    from dispfl.data.datasets import DATASETS

    if as_json:
        records = [_record(spec, _folder(spec, data_dir)) for spec in DATASETS.values()]
        typer.echo(json.dumps(records, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "images", "classes", "size", "where"):
        table.add_column(heading)
    for spec in DATASETS.values():
        folder = _folder(spec, data_dir)
        contents = _contents(spec, folder)
        images = f"{contents.train:,} + {contents.test:,}"
        size = "x".join(map(str, spec.shape))
        place = _place(spec, folder)
        difference = contents.difference(spec)
        if difference:
            place += f" (not complete: {difference})"
        table.add_row(spec.name, images, str(contents.classes), size, place)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"
    console = SafeConsole()
    if not console.is_terminal:
        console.width = 300  # keep paths on one line in a pipe or a file
    console.print(table)


@app.command()
def path(name: str, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Print the folder that holds a data set.

    Example: dispfl data path cifar10
    """
    from dispfl.data.datasets import locate

    folder = str(locate(name, data_dir))
    typer.echo(json.dumps({"name": name, "path": folder}) if as_json else folder)


@app.command()
def get(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names from `dispfl data list`.")
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Download into this folder instead of the cache folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Download data sets that are not found, verify them, and print their folders.

    Example: dispfl data get cifar10 tiny-imagenet
    """
    from dispfl.data.datasets import describe

    for name in names:
        describe(name)  # check all names before the first download
    for name in names:
        typer.echo(str(_download_with_bar(name, data_dir)))


def _download_with_bar(name: str, data_dir: Path | None) -> Path:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dispfl.data.datasets import download

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=SafeConsole(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task(name, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return download(name, data_dir, update)


def _folder(spec: "DataSpec", data_dir: Path | None) -> Path | None:
    """The folder of a data set, if it is found."""
    from dispfl.data.datasets import locate

    try:
        return locate(spec.name, data_dir)
    except DataError:
        return None


def _contents(spec: "DataSpec", folder: Path | None) -> "Contents":
    """What a data set has in its folder; what it should have, where that is not known."""
    from dispfl.data.contents import Contents, count_contents

    counted = None
    if folder is not None:
        counted = count_contents(spec, folder)
    return counted or Contents.complete(spec)


def _place(spec: "DataSpec", folder: Path | None) -> str:
    if spec.reader == "bundled":
        return "bundled"
    if folder is None:
        return f"not found: dispfl data get {spec.name} ({spec.download_size / 1e6:.0f} MB)"
    return str(folder)


def _record(spec: "DataSpec", folder: Path | None) -> dict[str, object]:
    contents = _contents(spec, folder)
    return {
        "name": spec.name,
        "title": spec.title,
        "shape": spec.shape,
        "classes": contents.classes,
        "train": contents.train,
        "test": contents.test,
        "complete": not contents.difference(spec),
        "origin": spec.origin,
        "download_bytes": spec.download_size,
        "path": str(folder) if folder else None,
    }
