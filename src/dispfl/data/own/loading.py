"""From a site's settings to its training and test data."""

from pathlib import Path

import torch
from torch import Tensor

from dispfl.core.rng import stream
from dispfl.data.batches import ResidentSamples
from dispfl.data.datasets import Pictures
from dispfl.data.fetch import Progress
from dispfl.data.own.arrays import read_arrays
from dispfl.data.own.classes import class_names, number
from dispfl.data.own.folder import read_folder
from dispfl.data.own.made import load_made
from dispfl.data.own.parts import Part, demand_alike, divide
from dispfl.data.own.samples import OwnSamples, Scaling
from dispfl.data.own.settings import SIZE, TEST_SHARE, OwnData
from dispfl.data.own.table import read_table
from dispfl.errors import ConfigError, DataError

HALF = 0.5
"""Mean and deviation that take pixels to [-1, 1]: the same at every site, whatever its pictures."""


def load_own(
    settings: OwnData,
    *,
    site: str = "",
    seed: int = 0,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Pictures | OwnSamples:
    """A site's data, divided into training and test data.

    What is tested on follows from the seed and the site's name. Relative paths and modules are those of `data.dir`, or
    else of the site's folder, or else of the working directory. `progress` is called while pictures are decoded.
    """
    home = Path(settings.dir or folder or "").expanduser().absolute()
    if settings.factory:
        return load_made(settings.factory, settings.classes, home, site=site, seed=seed)
    assert settings.path is not None
    parts = _read(settings, home, settings.path, None, progress)
    if settings.test_path:
        if len(parts) > 1:
            raise ConfigError(f"{parts[0].path} has test data of its own; leave data.test_path away.")
        parts += _read(settings, home, settings.test_path, parts[0], progress)
        if len(parts) > 2:
            raise DataError(f"{parts[1].path} must hold test data alone: x and y.")
    if len(parts) > 1:
        settings.refuse(["test_share"], f"{parts[0].path} has test data of its own")
        demand_alike(*parts)
    return _assemble(settings, parts, stream(seed, "test", site))


def _read(settings: OwnData, home: Path, name: str, like: Part | None, progress: Progress | None) -> list[Part]:
    """The samples of one file or folder; of test data, like those of the training data."""
    path = home / Path(name).expanduser()
    key = "data.path" if like is None else "data.test_path"
    if not path.exists():
        elsewhere = "" if Path(name).expanduser().is_absolute() else "; data.dir names another folder to look in"
        raise DataError(f"{key} is {path}, which does not exist{elsewhere}.")
    try:
        if path.is_dir():
            settings.refuse(["label"], f"{path} is a folder, whose sub-folders are the labels")
            colour = settings.colour is not False
            return [read_folder(path, settings.size or SIZE, colour, progress)]
        settings.refuse(["size", "colour"], f"{path} is not a folder of pictures")
        match path.suffix.lower():
            case ".csv":
                label = settings.label if like is None else like.label
                return [read_table(path, label, like.columns if like else ())]
            case ".npz":
                settings.refuse(["label"], f"{path} has its labels in y")
                return read_arrays(path)
    except OSError as problem:
        raise DataError(f"{problem.filename or path} cannot be read: {problem.strerror or problem}.") from None
    raise ConfigError(f"{key} must be a .csv file, an .npz file or a folder of pictures, got {name!r}.")


def _assemble(settings: OwnData, parts: list[Part], rng: torch.Generator) -> Pictures | OwnSamples:
    """Number the classes, and divide training from test data where that is not done."""
    where = parts[0].path
    found = {label for part in parts for label in (*part.labels, *part.folders)}
    classes = settings.classes or class_names(found, sum(len(part.labels) for part in parts), where)
    labels = [number(part.labels, classes, part.path) for part in parts]
    inputs = [part.inputs for part in parts]
    if len(parts) == 1:
        rows = divide(labels[0], settings.test_share or TEST_SHARE, rng)
        if not len(rows[1]):
            raise DataError(f"{where} has no class with two samples, so none can be spared for testing; add some.")
        inputs, labels = [inputs[0][mine] for mine in rows], [labels[0][mine] for mine in rows]
    if inputs[0].dtype == torch.uint8:
        return _pictures(settings, inputs, labels, classes)
    scaling = None
    if settings.standardize:
        if inputs[0].ndim != 2:
            shape = list(inputs[0].shape[1:])
            raise ConfigError(
                f"data.standardize is for columns and pictures, but {where} has samples of shape {shape}."
            )
        scaling = Scaling.of(inputs[0])
        inputs = [scaling(part) for part in inputs]
    train, test = (ResidentSamples(x, y) for x, y in zip(inputs, labels, strict=True))
    return OwnSamples(settings.name, train, test, classes, parts[0].columns, scaling, parts[0].label)


def _pictures(settings: OwnData, inputs: list[Tensor], labels: list[Tensor], classes: tuple[str, ...]) -> Pictures:
    channels = inputs[0].shape[-1]
    mean, std = (HALF,) * channels, (HALF,) * channels
    if settings.standardize:
        mean, std = _moments(inputs[0])
    train, test = (pictures.permute(0, 3, 1, 2) for pictures in inputs)
    return Pictures(settings.name, train, labels[0], test, labels[1], classes, mean, std, flip=False)


def _moments(pictures: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, for pixels in [0, 1]; a channel of one shade is only brought to [-1, 1]."""
    shades = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in pictures.unbind(-1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        varied, shares = (counts > 0).sum() > 1, counts / counts.sum()
        mean = float((shares * shades).sum())
        means.append(mean if varied else HALF)
        stds.append(float((shares * (shades - mean) ** 2).sum().sqrt()) if varied else HALF)
    return tuple(means), tuple(stds)
