"""Data sets of Hugging Face `datasets`: saved on disk, in a folder of files, or on its hub."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dispfl.data.readers import RawSamples
from dispfl.data.readers.folder import resize_image
from dispfl.errors import DataError
from dispfl.settings import did_you_mean

LABELS = ("label", "labels")


def read_hub(
    name: str, home: Path, label: str | None, group: str | None, size: int, colour: bool
) -> list[RawSamples]:
    """Read a data set: its splits `train` and, if there is one, `test`; a single split is read
    alone."""
    splits = _load(name, home)
    train = splits.get("train") if len(splits) > 1 else next(iter(splits.values()))
    if train is None:
        raise DataError(
            f"data.hub {name} has the splits {', '.join(splits)}, but none called train."
        )
    parts = [train, *([splits["test"]] if "test" in splits and splits["test"] is not train else [])]
    return [_samples(Path(name), part, label, group, size, colour) for part in parts]


def _load(name: str, home: Path) -> dict[str, Any]:
    """Return the splits by name."""
    import datasets

    path = home / Path(name).expanduser()
    saved = path.is_dir() and any(
        (path / file).exists() for file in ("dataset_dict.json", "dataset_info.json")
    )
    try:
        found = (
            datasets.load_from_disk(str(path))
            if saved
            else datasets.load_dataset(str(path) if path.exists() else name)
        )
    except Exception as problem:  # of the file system, the network, or a damaged file
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise DataError(f"data.hub {name} cannot be loaded: {reason.rstrip('.')}.") from problem
    return dict(found) if isinstance(found, dict) else {"train": found}


def _samples(
    where: Path, split: Any, label: str | None, group: str | None, size: int, colour: bool
) -> RawSamples:
    columns = list(split.column_names)
    label = label or next((name for name in LABELS if name in columns), None)
    if label is None:
        raise DataError(
            f"{where} has no column called label; name one in data.label: {', '.join(columns)}."
        )
    for key, name in (("data.label", label), ("data.group", group)):
        if name is not None and name not in columns:
            raise DataError(
                f"{where} has no column {name!r}, which {key} names. {did_you_mean(name, columns)}"
            )
    inputs, used = _inputs(
        where, split, [name for name in columns if name not in (label, group)], size, colour
    )
    groups = () if group is None else tuple(_texts(split, group))
    return RawSamples(where, inputs, _texts(split, label), used, label, groups=groups)


def _texts(split: Any, column: str) -> list[str]:
    """Return a column as texts; of classes, their names."""
    names = getattr(split.features[column], "names", None)
    return [str(names[value] if names else value) for value in split[column]]


def _inputs(
    where: Path, split: Any, columns: list[str], size: int, colour: bool
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the images, the array, or the numbers of all columns, with their names."""
    kinds = {name: type(split.features[name]).__name__ for name in columns}
    if images := [name for name, kind in kinds.items() if kind == "Image"]:
        return _images(split, images[0], size, colour), ()
    arrays = [name for name, kind in kinds.items() if kind != "Value"]
    if len(arrays) > 1 or (arrays and len(columns) > 1):
        raise DataError(
            f"{where} has the inputs {', '.join(columns)}; keep one array, or columns of numbers."
        )
    numbers = [_numbers(where, split, name) for name in columns]
    if not numbers:
        raise DataError(f"{where} has no column besides the label; it needs at least one input.")
    inputs = numbers[0] if arrays else np.stack(numbers, axis=1)
    return torch.from_numpy(np.ascontiguousarray(inputs)), () if arrays else tuple(columns)


def _numbers(where: Path, split: Any, column: str) -> NDArray[np.float32]:
    try:
        values = np.array(split[column], dtype=np.float32)
    except (TypeError, ValueError):
        raise DataError(
            f"{where}, column {column}, is not numbers of one shape; remove it, or prepare the data"
            " in data.factory."
        ) from None
    if not np.isfinite(values).all():
        raise DataError(
            f"{where}, column {column}, has values that are missing, infinite or too large; remove"
            " them."
        )
    return values


def _images(split: Any, column: str, size: int, colour: bool) -> Tensor:
    """Return images as uint8 (N, size, size, C)."""
    mode = "RGB" if colour else "L"
    images = np.zeros((len(split), size, size, len(mode)), np.uint8)
    for row, sample in enumerate(split.select_columns([column])):
        image: Image.Image = sample[column]
        images[row] = np.asarray(resize_image(image.convert(mode), size, size)).reshape(
            images.shape[1:]
        )
    return torch.from_numpy(images)
