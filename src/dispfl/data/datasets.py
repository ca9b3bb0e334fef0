"""The data sets: where their files are found, and how they become tensors.

`DATASETS`, `describe` and `locate` work without torch; only `load` imports a reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import field_validator

from dispfl.data.catalogue import DATASETS, DataSpec, Files, describe, nearest_name
from dispfl.data.fetch import Progress, cache_folder, fetch
from dispfl.errors import DataError
from dispfl.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from dispfl.data.batches import ResidentSamples
    from dispfl.data.own.samples import OwnSamples
    from dispfl.data.readers import Reading

__all__ = ["DATASETS", "Data", "DataSpec", "Pictures", "describe", "get", "load", "locate"]

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Debian's `dataset-fashion-mnist` puts its folder `fashion-mnist`."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set in memory. `mean` and `std` are per channel, for pixels scaled to [0, 1]."""

    name: str
    train_inputs: Tensor
    """uint8; N, C, H, W"""
    train_labels: Tensor
    """int64; N"""
    test_inputs: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    """Whether a mirrored picture still shows its class: true of photographs, not of digits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a picture."""
        return tuple(self.train_inputs.shape[1:])

    def samples(self, *, augment: bool = False) -> tuple[ResidentSamples, ResidentSamples]:
        """Training and test data as batches; the training data cropped and mirrored at random, if they may be."""
        from dispfl.data.batches import PictureTransform, ResidentSamples

        transform = PictureTransform(self.mean, self.std, crop=augment, flip=augment and self.flip)
        train, test = (inputs.permute(0, 2, 3, 1).contiguous() for inputs in (self.train_inputs, self.test_inputs))
        return (
            ResidentSamples(train, self.train_labels, transform=transform),
            ResidentSamples(test, self.test_labels, transform=transform),
        )


class Data(Settings):
    """Which data set, and where its files are. A site's own data are described by `dispfl.data.own.settings`."""

    table: ClassVar[str] = "data"
    name: str = "fashion-sample"
    """One of `dispfl data list`."""
    dir: str | None = None
    """The folder with the files, instead of `DISPFL_DATA`, the cache and the system's place."""
    augment: bool = True
    """Random crops, and flips where the data set allows them, in training."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in DATASETS:
            raise ValueError(f"must be a known data set, got {name!r}. {nearest_name(name)}")
        return name


def load(data: Data, progress: Progress | None = None) -> Pictures | OwnSamples:
    """Find, read and check a data set. `progress` is called while pictures are decoded for the first time."""
    from dispfl.data.own.settings import OwnData

    if isinstance(data, OwnData):
        from dispfl.data.own.loading import load_own

        return load_own(data, progress=progress)
    spec = describe(data.name)
    folder = locate(data.name, data.dir)
    try:
        reading = _read(spec, folder, progress)
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"{problem.filename or folder} cannot be read: {reason}.") from None
    return Pictures(
        name=spec.name,
        train_inputs=reading.train.inputs,
        train_labels=reading.train.labels,
        test_inputs=reading.test.inputs,
        test_labels=reading.test.labels,
        classes=reading.classes or spec.class_names,
        mean=spec.mean,
        std=spec.std,
        flip=spec.flip,
    )


def _read(spec: DataSpec, folder: Path, progress: Progress | None) -> Reading:
    match spec.reader:
        case "bundled":
            from dispfl.data.readers.bundled import read_bundled

            return read_bundled(spec.classes)
        case "idx":
            from dispfl.data.readers.idx import read_idx

            return read_idx(folder, spec.classes)
        case "cifar":
            from dispfl.data.readers.cifar import read_cifar

            return read_cifar(folder, spec.classes)
        case "tiny-imagenet":
            from dispfl.data.readers.tiny_imagenet import read_tiny_imagenet

            return read_tiny_imagenet(folder, progress)


def get(name: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The data set's folder, after downloading it into `data_dir` or the cache if it is not found."""
    try:
        return locate(name, data_dir)
    except DataError:
        spec = describe(name)
        into = Path(data_dir).expanduser() if data_dir else cache_folder()
        return fetch(spec.downloads, spec.files[0].folders[0], into, progress)


def locate(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder with a data set's files.

    A `data_dir` is the only place to look; without it these are `DISPFL_DATA`, the cache folder and the system's
    place, in this order. Each may be the data set's own folder or hold it under its usual name.
    """
    spec = describe(name)
    if spec.reader == "bundled":
        return Path(__file__).parent / "bundled"
    places = _places(data_dir)
    incomplete = ""
    for place in places:
        for folder, files in _candidates(spec, place):
            missing = files.missing(folder)
            if not missing:
                return folder
            if len(missing) < len(files.names):
                incomplete = incomplete or f" {folder} has only some of them: {', '.join(missing)} missing."
    wanted = ", or ".join(" ".join(files.names) for files in spec.files)
    packed = " (plain or .gz)" if spec.reader == "idx" else ""
    where = ", ".join(str(place) for place in places)
    fix = f"Run `dispfl data get {name}`, or name the folder that has them with --data-dir or DISPFL_DATA."
    raise DataError(f"The files of {name} were not found: looked for {wanted}{packed} in {where}.{incomplete} {fix}")


def _places(data_dir: str | Path | None) -> list[Path]:
    if data_dir:
        return [Path(data_dir).expanduser()]
    named = os.environ.get("DISPFL_DATA")
    return [*([Path(named).expanduser()] if named else []), cache_folder(), SYSTEM_FOLDER]


def _candidates(spec: DataSpec, place: Path) -> Iterator[tuple[Path, Files]]:
    for files in spec.files:
        for folder in files.folders:
            yield place / folder, files
    # MNIST and Fashion-MNIST have files of the same names: a folder that is called after the one is not the other.
    others = (
        folder for other in DATASETS.values() if other is not spec for files in other.files for folder in files.folders
    )
    if not any(place.resolve().as_posix().endswith(f"/{folder}") for folder in others):
        for files in spec.files:
            yield place, files
