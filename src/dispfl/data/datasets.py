"""Which data set is used, where its files are, and how they become tensors.

Everything here works without torch; only `load_dataset` imports a reader.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from dispfl.data.catalogue import DATASETS, DataSpec, FileLayout, describe, nearest_name
from dispfl.data.contents import Contents
from dispfl.data.fetch import ProgressCallback, cache_folder, fetch
from dispfl.errors import ConfigError, DataError
from dispfl.extras import require
from dispfl.settings import Settings
from dispfl.user_functions import checked_name

if TYPE_CHECKING:
    from dispfl.core.task import TaskName
    from dispfl.data.labelled import InputFormat, LabelledDataset
    from dispfl.data.readers import RawDataset

__all__ = [
    "DATASETS",
    "CustomData",
    "Data",
    "DataSpec",
    "describe",
    "download",
    "load_dataset",
    "locate",
]

log = logging.getLogger("dispfl.data")

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Debian's `dataset-fashion-mnist` puts its folder `fashion-mnist`."""


class Data(Settings):
    """Settings of a data set from the catalogue; `CustomData` describes a user's own data."""

    table: ClassVar[str] = "data"
    name: str = "fashion-sample"
    """One of `dispfl data list`."""
    dir: str | None = None
    """The folder with the files; default: the first that has them of `DISPFL_DATA`, the cache
    folder (`DISPFL_CACHE`, on Linux `~/.cache/dispfl` unless set) and `/usr/share/datasets`."""
    augment: bool = True
    """Random crops, and flips where the data set allows them, in training. By default true; `dispfl
    run` has false for `fashion-sample`."""

    @property
    def describes_itself(self) -> bool:
        """Whether classes and inputs are known without reading the files."""
        return bool(describe(self.name).class_names)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in DATASETS:
            raise ValueError(f"must be a known data set, got {name!r}. {nearest_name(name)}")
        return name


class CustomData(Data):
    """Settings of a user's own data: a file, a folder, or the result of a function.

    Optional keys default to what fits the data; a key that does not apply to the data is refused.
    """

    FILE_KEYS: ClassVar[tuple[str, ...]] = (
        "label",
        "group",
        "text",
        "size",
        "colour",
        "test_share",
        "test_path",
        "standardize",
        "augment",
        "reload",
    )

    name: Literal["custom"] = "custom"
    path: str | None = None
    """A CSV file, an NPZ file, or a folder: with one sub-folder of images for each class; or with
    `images` and `masks`, of the same names, for a segmentation."""
    hub: str | None = None
    """A data set of Hugging Face `datasets`: a folder that it saved, or a name on its hub."""
    factory: str | None = None
    """`module:function`, which returns (training data, test data)."""
    dir: str | None = None
    """The folder of relative paths and of the module; default: the site's folder, or the working
    directory."""
    classes: tuple[str, ...] | None = None
    """All classes, in the order of the outputs; equal at all sites of a federation. Default: those
    found, sorted."""
    label: str | tuple[str, ...] | None = None
    """CSV, hub: the column with the class or the number, or several of numbers or labels (0 or 1);
    default: `label` if there is one, otherwise the last column of a CSV."""
    target_mean: tuple[float, ...] | None = None
    """Regression: subtracted from the targets before they are learned; with `target_std` the same
    at all sites. Default: the mean of the site's training data."""
    target_std: tuple[float, ...] | None = None
    """Regression: what the targets are then divided by. Default: their standard deviation."""
    group: str | None = None
    """CSV, hub: a column that is no input, but says where a sample comes from; set by
    `partition.column`."""
    size: int | None = Field(default=None, ge=8, le=4096)
    """Folder, hub: width and height in pixels to which images are resized; default: 32."""
    colour: bool | None = None
    """Folder, hub: three channels, or one if false; default: true."""
    text: str | None = None
    """CSV, hub: the column with texts, which are the only input."""
    tokenizer: str | None = None
    """Texts: `words`, which numbers words by their hash; or a folder or a name of a tokenizer of
    Hugging Face `transformers`. Default: words."""
    tokens: int | None = Field(default=None, ge=1, le=100_000)
    """Texts: the number of tokens to which they are cut or padded; default: 64."""
    standardize: bool = False
    """Shift and scale each column (or channel) by the mean and standard deviation of the site's
    training data."""
    test_share: float | None = Field(default=None, gt=0, lt=1)
    """The share of samples that is held out for testing, on average; default: 0.2. The content of a
    sample decides whether it is."""
    test_path: str | None = None
    """The test data, instead of a share of `path`."""
    augment: bool = False
    """Random crops in training, for images."""
    reload: bool = False
    """At a real site: use new samples of `path` from the next round on. By default they wait for
    `dispfl peer data --refresh`."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return name

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, factory: str | None) -> str | None:
        return factory and checked_name(factory)

    @field_validator("target_mean", "target_std", mode="before")
    @classmethod
    def _as_numbers(cls, numbers: Any) -> Any:
        if isinstance(numbers, (int, float)):
            return (float(numbers),)
        return numbers

    @field_validator("target_std")
    @classmethod
    def _positive(cls, std: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if std is not None and min(std, default=0.0) <= 0:
            raise ValueError(f"must be above 0, got {list(std)}.")
        return std

    @field_validator("classes", mode="before")
    @classmethod
    def _as_names(cls, classes: Any) -> Any:
        if classes is None:
            return None
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            raise ValueError(f"must be a list of at least two names, got {classes!r}.")
        names = tuple(str(name) for name in classes)  # classes may be called 0, 1, 2
        if len(names) < 2:
            raise ValueError(f"must be a list of at least two names, got {list(names)}.")

        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise ValueError(f"names {name!r} twice; give each class once.")
        for name in names:
            if not name.isprintable():
                raise ValueError(f"must be names that can be printed, got {name!r}.")
        return names

    @property
    def describes_itself(self) -> bool:
        return False

    def model_post_init(self, context: Any, /) -> None:
        """Refuse inconsistent settings."""
        sources = [key for key in ("path", "hub", "factory") if getattr(self, key)]
        if not sources:
            raise ConfigError(
                "data.path is missing: name a CSV file, an NPZ file or a folder; or give data.hub"
                " or data.factory.",
                key="data.path",
            )
        if len(sources) > 1:
            raise ConfigError(
                f"data.{sources[0]} and data.{sources[1]} exclude each other; omit one of them.",
                key=f"data.{sources[0]}",
            )
        if self.hub:
            require("hub", "data.hub")
            self.refuse(["test_path"], f"data.hub={self.hub} names its test data itself")
            self.refuse(["reload"], f"data.hub={self.hub} is no file")
        if self.test_path and self.test_share is not None:
            raise ConfigError(
                "data.test_path and data.test_share exclude each other; omit one of them.",
                key="data.test_path",
            )
        if (self.target_mean is None) != (self.target_std is None):
            missing = "target_std" if self.target_std is None else "target_mean"
            raise ConfigError(
                f"data.{missing} is missing: give the mean and the standard deviation of the"
                " targets, or neither.",
                key=f"data.{missing}",
            )
        if not self.text:
            self.refuse(
                ["tokenizer", "tokens"], "only texts have tokens; name their column in data.text"
            )
        else:
            reason = "the inputs are texts"
            self.refuse(["standardize", "augment", "size", "colour"], reason)
        if self.factory:
            reason = f"data.factory={self.factory} returns data as they are used"
            self.refuse(self.FILE_KEYS, reason)

    def refuse(self, keys: Iterable[str], why: str) -> None:
        """Refuse keys that are set although they do not apply."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"data.{key} does not apply: {why}. Omit it.", key=f"data.{key}")


def load_dataset(
    data: Data | str,
    progress: ProgressCallback | None = None,
    *,
    task: TaskName = "classification",
    site: str = "",
    seed: int = 0,
    folder: Path | None = None,
    inputs: InputFormat | None = None,
) -> LabelledDataset:
    """Find, read and check a data set: `load_dataset("cifar10")`, or one described by settings.

    `task` is what is learned from a user's own data, and decides what their labels are. `progress`
    is called while images are decoded for the first time. Of a user's own data, relative paths are
    looked up in the folder, and `inputs` is the format of a model that is trained already
    (`dispfl.data.custom.load_custom`).
    """
    if isinstance(data, str):
        data = Data(name=data)
    if isinstance(data, CustomData):
        from dispfl.data.custom import load_custom

        return load_custom(
            data, task, site=site, seed=seed, folder=folder, inputs=inputs, progress=progress
        )
    if task != "classification":
        raise ConfigError(
            f"task is {task}, but the images of {data.name} have classes; use your own data"
            " (data.path, data.hub or data.factory), or omit it.",
            key="task",
        )
    return _load_from_catalogue(data, progress)


def _load_from_catalogue(data: Data, progress: ProgressCallback | None) -> LabelledDataset:
    from dispfl.data.labelled import ImageDataset

    spec = describe(data.name)
    folder = locate(data.name, data.dir)
    try:
        raw = _read(spec, folder, progress)
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"{problem.filename or folder} cannot be read: {reason}.") from None
    classes = raw.classes or spec.class_names
    contents = Contents(len(classes), len(raw.train.labels), len(raw.test.labels))
    difference = contents.difference(spec)
    if difference:
        log.warning("%s in %s is not complete: it has %s.", spec.name, folder, difference)
    return ImageDataset(
        name=spec.name,
        train_inputs=raw.train.inputs,
        train_labels=raw.train.labels,
        test_inputs=raw.test.inputs,
        test_labels=raw.test.labels,
        classes=classes,
        mean=spec.mean,
        std=spec.std,
        flip=spec.flip,
    )


def _read(spec: DataSpec, folder: Path, progress: ProgressCallback | None) -> RawDataset:
    match spec.reader:
        case "bundled":
            from dispfl.data.readers.idx import read_bundled

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


def download(
    name: str, data_dir: str | Path | None = None, progress: ProgressCallback | None = None
) -> Path:
    """Return the data set's folder; a missing one is downloaded first.

    It is downloaded into `data_dir`, by default into the cache folder.
    """
    try:
        return locate(name, data_dir)
    except DataError:
        spec = describe(name)
        into = Path(data_dir).expanduser() if data_dir else cache_folder()
        return fetch(spec.downloads, spec.files[0].folders[0], into, progress)


def locate(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the folder with a data set's files.

    A `data_dir` is the only place searched; by default these are `DISPFL_DATA`, the cache folder
    and the system folder, in this order. Each may be the data set's folder or contain it under its
    usual name.
    """
    spec = describe(name)
    if spec.reader == "bundled":
        return Path(__file__).parent / "bundled"

    places = _places(data_dir)
    incomplete = ""
    for place in places:
        for folder, layout in _candidates(spec, place):
            missing = layout.missing(folder)
            if not missing:
                return folder
            if len(missing) < len(layout.names) and not incomplete:
                incomplete = f" {folder} has only some of them: {', '.join(missing)} missing."
    raise _not_found(spec, places, incomplete)


def _not_found(spec: DataSpec, places: list[Path], incomplete: str) -> DataError:
    file_names = ", or ".join(" ".join(layout.names) for layout in spec.files)
    packed = " (plain or .gz)" if spec.reader == "idx" else ""
    searched = ", ".join(str(place) for place in places)
    return DataError(
        f"The files of {spec.name} were not found: looked for {file_names}{packed} in"
        f" {searched}.{incomplete} Run `dispfl data get {spec.name}`, or name the folder that has"
        " them with --data-dir (in Python, Data(dir=...)) or DISPFL_DATA."
    )


def _places(data_dir: str | Path | None) -> list[Path]:
    """The folders to search, the preferred one first."""
    if data_dir:
        return [Path(data_dir).expanduser()]
    places = [cache_folder(), SYSTEM_FOLDER]
    user_folder = os.environ.get("DISPFL_DATA")
    if user_folder:
        places.insert(0, Path(user_folder).expanduser())
    return places


def _candidates(spec: DataSpec, place: Path) -> Iterator[tuple[Path, FileLayout]]:
    """Yield the folders that a data set's files may be in, each with the layout of its files."""
    for layout in spec.files:
        for folder in layout.folders:
            yield place / folder, layout
    if not _belongs_to_another(spec, place):
        for layout in spec.files:
            yield place, layout


def _belongs_to_another(spec: DataSpec, place: Path) -> bool:
    """Whether a folder is named after another data set.

    MNIST and Fashion-MNIST have the same file names, so such a folder must not be used.
    """
    path = place.resolve().as_posix()
    for dataset in DATASETS.values():
        for layout in dataset.files:
            if dataset is not spec and path.endswith(
                tuple(f"/{folder}" for folder in layout.folders)
            ):
                return True
    return False
