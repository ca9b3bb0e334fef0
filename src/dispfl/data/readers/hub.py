"""Data sets of Hugging Face `datasets`: saved on disk, in a folder of files, or on its hub."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dispfl.core.inputs import Inputs
from dispfl.core.task import TaskName
from dispfl.data.readers import RawSamples
from dispfl.data.readers.folder import resize_image
from dispfl.data.readers.table import Texts
from dispfl.data.rows import ids_of
from dispfl.errors import DataError
from dispfl.settings import did_you_mean

LABELS = ("label", "labels")


def read_hub(
    name: str,
    home: Path,
    labels: tuple[str, ...],
    task: TaskName,
    group: str | None,
    size: int,
    colour: bool,
    texts: Texts | None = None,
) -> list[RawSamples]:
    """Read the split `train` and, if there is one, `test`; a single split is read alone."""
    splits = _load(name, home)
    if len(splits) == 1:
        chosen = list(splits.values())
    elif "train" not in splits:
        raise DataError(
            f"data.hub {name} has the splits {', '.join(splits)}, but none called train."
        )
    else:
        chosen = [splits[key] for key in ("train", "test") if key in splits]
    source = Path(name)
    parts = []
    for split in chosen:
        parts.append(_samples(source, split, labels, task, group, size, colour, texts))
    return parts


def _load(name: str, home: Path) -> dict[str, Any]:
    """Return the splits by name."""
    import datasets

    path = home / Path(name).expanduser()
    is_saved = (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()
    try:
        if is_saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.exists() else name)
    except Exception as problem:  # of the file system, the network, or a damaged file
        reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise DataError(f"data.hub {name} cannot be loaded: {reason.rstrip('.')}.") from problem
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _samples(
    source: Path,
    split: Any,
    labels: tuple[str, ...],
    task: TaskName,
    group: str | None,
    size: int,
    colour: bool,
    texts: Texts | None,
) -> RawSamples:
    columns = list(split.column_names)
    labels = labels or (_default_label(source, columns),)
    keys = [("data.label", name) for name in labels]
    text = texts.column if texts else None
    for key, name in (*keys, ("data.group", group), ("data.text", text)):
        if name is not None and name not in columns:
            raise DataError(
                f"{source} has no column {name!r}, which {key} names. {did_you_mean(name, columns)}"
            )
    input_columns = [name for name in columns if name not in (*labels, group)]
    inputs: Inputs
    names: tuple[str, ...] = ()
    file_ids = None
    if texts is not None:
        column = _texts(split, texts.column)
        inputs = texts.tokenize(column)
        file_ids = ids_of(text.encode() for text in column)
    else:
        inputs, names = _inputs(source, split, input_columns, size, colour)
    groups = () if group is None else tuple(_texts(split, group))
    if task == "classification":
        class_names = _texts(split, labels[0])
        return RawSamples(
            source, inputs, class_names, names, labels[0], groups=groups, file_ids=file_ids
        )
    targets = np.stack([_numbers(source, split, name) for name in labels], axis=1)
    numbers = torch.from_numpy(np.ascontiguousarray(targets))
    if task == "multilabel":
        numbers = numbers.to(torch.uint8)
    return RawSamples(
        source, inputs, numbers, names, targets=labels, groups=groups, file_ids=file_ids
    )


def _default_label(source: Path, columns: list[str]) -> str:
    for name in LABELS:
        if name in columns:
            return name
    raise DataError(
        f"{source} has no column called label; name one in data.label: {', '.join(columns)}."
    )


def _texts(split: Any, column: str) -> list[str]:
    """Return a column as texts; of classes, their names."""
    values = split[column]
    names = getattr(split.features[column], "names", None)
    if names:
        values = [names[value] for value in values]
    return list(map(str, values))


def _inputs(
    source: Path, split: Any, columns: list[str], size: int, colour: bool
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the images, the array, or the numbers of all columns, with their names."""
    arrays = []
    for name in columns:
        feature = type(split.features[name]).__name__
        if feature == "Image":
            return _images(split, name, size, colour), ()
        if feature != "Value":
            arrays.append(name)
    if arrays and len(columns) > 1:
        raise DataError(
            f"{source} has the inputs {', '.join(columns)}; keep one array, or columns of numbers."
        )

    numbers = [_numbers(source, split, name) for name in columns]
    if not numbers:
        raise DataError(f"{source} has no column besides the label; it needs at least one input.")
    if arrays:
        return torch.from_numpy(np.ascontiguousarray(numbers[0])), ()
    table = np.stack(numbers, axis=1)
    return torch.from_numpy(np.ascontiguousarray(table)), tuple(columns)


def _numbers(source: Path, split: Any, column: str) -> NDArray[np.float32]:
    try:
        values = np.array(split[column], dtype=np.float32)
    except (TypeError, ValueError):
        raise DataError(
            f"{source}, column {column}, is not numbers of one shape; remove it, or prepare the"
            " data in data.factory."
        ) from None
    if not np.isfinite(values).all():
        raise DataError(
            f"{source}, column {column}, has values that are missing, infinite or too large; remove"
            " them."
        )
    return values


def _images(split: Any, column: str, size: int, colour: bool) -> Tensor:
    """Return images as uint8 (N, size, size, C)."""
    mode = "RGB" if colour else "L"
    images = np.zeros((len(split), size, size, len(mode)), np.uint8)
    for row, sample in enumerate(split.select_columns([column])):
        image: Image.Image = sample[column]
        pixels = np.asarray(resize_image(image.convert(mode), size, size))
        images[row] = pixels.reshape(images.shape[1:])
    return torch.from_numpy(images)
