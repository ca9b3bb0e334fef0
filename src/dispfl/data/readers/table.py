"""CSV tables (a header, then one line per sample) and NPZ arrays (`x` and `y`)."""

import csv
import io
import logging
import lzma
import math
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.core.inputs import Inputs
from dispfl.core.memory import memory
from dispfl.core.task import TaskName
from dispfl.data.checks import check_finite
from dispfl.data.readers import RawSamples, mask_labels
from dispfl.data.rows import ids_of
from dispfl.errors import DataError
from dispfl.files import open_regular
from dispfl.settings import did_you_mean
from dispfl.terminal import printable

log = logging.getLogger("dispfl.data")

SEPARATORS = ",;\t"
"""Spreadsheets write one of these, depending on the locale; the most frequent one in the header is
used."""


class TableRows(NamedTuple):
    """The numbers of a table and their line numbers."""

    inputs: Tensor
    """float32 (N, columns)"""
    lines: Sequence[int]
    """The line of the file in which each row ends; the header is line 1."""
    columns: tuple[str, ...]
    texts: Mapping[str, list[str]]
    """The cells of columns that are not numbers, by name."""

    def numbers(self, names: Sequence[str]) -> Tensor:
        """Return some columns, in this order."""
        return self.inputs[:, [self.columns.index(name) for name in names]]


def read_table(
    path: Path, label: str | None = None, columns: tuple[str, ...] = (), group: str | None = None
) -> RawSamples:
    """Read a table for training or testing; the column `group` is not an input.

    If `columns` are given, the table must have these, and takes their order.
    """

    def texts(header: list[str]) -> list[str]:
        return _without_none([header[_label_index(path, header, label, group)], group])

    rows = _read(path, texts)
    label = next(iter(rows.texts))
    for line, text in zip(rows.lines, rows.texts[label], strict=True):
        if not text:
            raise DataError(f"{path}, line {line}, has no label in column {label}.")
    samples = RawSamples(
        path, rows.inputs, rows.texts[label], rows.columns, label, groups=_groups(rows, group)
    )
    return _in_order(samples, columns) if columns else samples


def read_targets(
    path: Path,
    targets: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    group: str | None = None,
    *,
    binary: bool = False,
) -> RawSamples:
    """Read a table whose labels are numbers: the columns `targets`, by default one as for classes.

    `binary` labels are 0 or 1.
    """

    def texts(header: list[str]) -> list[str]:
        nonlocal targets
        targets = targets or (header[_label_index(path, header, None, group)],)
        for name in targets:
            _label_index(path, header, name, group)
        return _without_none([group])

    rows = _read(path, texts)
    inputs = tuple(name for name in rows.columns if name not in targets)
    if not inputs:
        raise DataError(f"{path} has no column besides the targets; it needs at least one input.")
    labels = rows.numbers(targets)
    if binary:
        _check_binary(path, rows, labels, targets)
        labels = labels.to(torch.uint8)
    samples = RawSamples(
        path, rows.numbers(inputs), labels, inputs, targets=targets, groups=_groups(rows, group)
    )
    return _in_order(samples, columns) if columns else samples


class Texts(NamedTuple):
    """Which column of a table has texts, and how they become numbers."""

    column: str
    tokenize: Callable[[Sequence[str]], Inputs]


def read_texts(
    path: Path, texts: Texts, labels: tuple[str, ...], task: TaskName, group: str | None = None
) -> RawSamples:
    """Read a table with a column of texts, which is the only input; other columns are ignored."""

    def text_columns(header: list[str]) -> list[str]:
        nonlocal labels
        if texts.column not in header:
            raise DataError(
                f"{path} has no column {texts.column!r}, which data.text names."
                f" {did_you_mean(texts.column, header)}"
            )
        rest = [name for name in header if name != texts.column]
        labels = labels or (rest[_label_index(path, [*rest, texts.column], None, group)],)
        for name in labels:
            _label_index(path, header, name, group)
        return [name for name in header if task == "classification" or name not in labels]

    rows = _read(path, text_columns)
    column = rows.texts[texts.column]
    samples = RawSamples(
        path,
        texts.tokenize(column),
        [],
        groups=_groups(rows, group),
        file_ids=ids_of(text.encode() for text in column),
    )
    if task == "classification":
        return samples._replace(labels=rows.texts[labels[0]], label=labels[0])
    numbers = rows.numbers(labels)
    if task == "multilabel":
        _check_binary(path, rows, numbers, labels)
        numbers = numbers.to(torch.uint8)
    return samples._replace(labels=numbers, targets=labels)


def read_text_rows(path: Path, texts: Texts) -> tuple[Inputs, Sequence[int]]:
    """Read the texts of a table for prediction, and their lines; other columns are ignored."""

    def text_columns(header: list[str]) -> list[str]:
        if texts.column not in header:
            raise DataError(
                f"{path} has no column {texts.column!r}, which the model requires; add it."
            )
        return header

    try:
        rows = _read(path, text_columns)
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"The table {path} cannot be read: {reason}.") from None
    return texts.tokenize(rows.texts[texts.column]), rows.lines


def _groups(rows: TableRows, group: str | None) -> tuple[str, ...]:
    return () if group is None else tuple(rows.texts[group])


def _without_none(names: Sequence[str | None]) -> list[str]:
    return [name for name in names if name is not None]


def _check_binary(path: Path, rows: TableRows, labels: Tensor, names: Sequence[str]) -> None:
    wrong = ((labels != 0) & (labels != 1)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"{path}, line {rows.lines[row]}, column {names[column]}: a label must be 0 or 1, got"
            f" {float(labels[row, column]):g}."
        )


def read_rows(path: Path, columns: tuple[str, ...], labels: Sequence[str] = ()) -> TableRows:
    """Read a table for prediction: it must have these columns, in any order.

    The columns of labels are ignored.
    """

    def texts(header: list[str]) -> list[str]:
        # Names are printed with repr: one from an untrusted model file must not send escape codes
        # to the terminal.
        for name in columns:
            if name not in header:
                raise DataError(f"{path} has no column {name!r}, which the model requires; add it.")
        for name in header:
            if name not in columns and name not in labels:
                raise DataError(
                    f"{path} has a column {name!r}, which the model does not know; remove it."
                )
        return [name for name in labels if name in header]

    try:
        rows = _read(path, texts)
    except FileNotFoundError:
        raise DataError(f"The table {path} does not exist.") from None
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"The table {path} cannot be read: {reason}.") from None
    return rows._replace(inputs=rows.numbers(columns), columns=columns)


TextColumns = Callable[[list[str]], list[str]]
"""Returns which columns of a header are not numbers; refuses columns that do not fit."""


def _read(path: Path, text_columns: TextColumns) -> TableRows:
    try:
        # utf-8-sig: spreadsheets write a byte order mark.
        with (
            open_regular(path) as content,
            io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file,
        ):
            return _parse(path, file, text_columns)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; save it as CSV in UTF-8.") from None
    except csv.Error as problem:
        raise DataError(f"{path} cannot be read as CSV: {problem}.") from None


def _parse(path: Path, file: TextIO, text_columns: TextColumns) -> TableRows:
    separator = max(SEPARATORS, key=file.readline().count)
    file.seek(0)
    reader = csv.reader(file, delimiter=separator)
    header = _header(path, next(reader, []))
    texts: dict[str, list[str]] = {name: [] for name in text_columns(header)}
    text_indices = {name: header.index(name) for name in texts}
    columns = [name for name in header if name not in texts]
    number_indices = [header.index(name) for name in columns]

    values = array("d")
    lines = array("q")
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {reader.line_num}, has {len(row)} cells; its header has"
                f" {len(header)}."
            )
        for name, index in text_indices.items():
            texts[name].append(row[index].strip())
        cells = [row[index] for index in number_indices]
        try:
            values.extend(map(float, cells))
        except ValueError:
            raise _not_a_number(path, reader.line_num, columns, cells) from None
        lines.append(reader.line_num)
    if not lines:
        raise DataError(f"{path} has a header but no samples.")

    table = np.frombuffer(values, np.float64).reshape(len(lines), len(columns))
    with np.errstate(over="ignore"):  # values too large for float32 are reported below
        inputs = table.astype(np.float32)
    if not np.isfinite(inputs).all():
        row_number, column = np.argwhere(~np.isfinite(inputs))[0]
        raise DataError(
            f"{path}, line {lines[row_number]}, column {columns[column]}: the value is missing,"
            " infinite or too large; fill it in or remove the line."
        )
    return TableRows(torch.from_numpy(inputs), lines, tuple(columns), texts)


def _header(path: Path, names: Sequence[str]) -> list[str]:
    header = [name.strip() for name in names]
    if not header:
        raise DataError(f"{path} is empty; its first line must name the columns.")
    if all(map(_is_number, header)):
        raise DataError(f"{path} begins with numbers; its first line must name the columns.")
    if "" in header:
        raise DataError(
            f"{path} has no name for column {1 + header.index('')}. If it is the index of a pandas"
            " table, write it with to_csv(index=False); otherwise name it."
        )
    name, count = Counter(header).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} has {count} columns called {name!r}; give each a different name.")
    return header


def _label_index(path: Path, header: list[str], label: str | None, group: str | None) -> int:
    if group is not None and group not in header:
        raise DataError(
            f"{path} has no column {group!r}, which data.group names. {did_you_mean(group, header)}"
        )
    if len(header) < 2 + (group is not None):
        raise DataError(
            f"{path} has only one column, {header[0]}; it needs a label and at least one more."
        )
    if label is None:
        return _default_label_index(path, header, group)
    if label not in header:
        raise DataError(
            f"{path} has no column {label!r}, which data.label names. {did_you_mean(label, header)}"
        )
    if label == group:
        raise DataError(
            f"data.label and data.group both name the column {label!r} of {path}; they must differ."
        )
    return header.index(label)


def _default_label_index(path: Path, header: list[str], group: str | None) -> int:
    """The column called label, or the last one, with a warning."""
    if "label" in header and group != "label":
        return header.index("label")
    last = len(header) - 1
    if header[last] == group:
        last -= 1
    log.warning(
        "%s has no column called label, so its last column, %s, is used; set data.label to use"
        " another.",
        path,
        printable(header[last]),
    )
    return last


def _in_order(samples: RawSamples, columns: tuple[str, ...]) -> RawSamples:
    """Put the columns in the order of the training data."""
    differing = sorted(set(samples.columns) ^ set(columns))
    if differing:
        name = differing[0]
        whose = "only the training data have" if name in columns else "the training data lack"
        raise DataError(
            f"{samples.path} and the training data must have the same columns; {whose} {name}."
        )
    indices = [samples.columns.index(name) for name in columns]
    return samples._replace(inputs=samples.inputs[:, indices], columns=columns)


def _not_a_number(path: Path, line: int, columns: Sequence[str], cells: Sequence[str]) -> DataError:
    """The error for the first cell of a row that is not a number."""
    index = list(map(_is_number, cells)).index(False)
    place = f"{path}, line {line}, column {columns[index]}"
    if not cells[index].strip():
        return DataError(f"{place}: the value is missing; fill it in or remove the line.")
    return DataError(
        f"{place}: {cells[index]!r} is not a number; write it as one, such as 3.5, or remove the"
        " column."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


NPY_MAGIC = b"\x93NUMPY"
DAMAGED_NPZ = (
    ValueError,
    EOFError,
    KeyError,
    SyntaxError,
    RuntimeError,  # also RecursionError and NotImplementedError
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What zipfile and numpy raise for a damaged file."""
SHARE_OF_MEMORY = 0.5
"""The largest part of the available memory that the arrays of a file may need."""
WHOLE = [("x", "y")]
SPLIT = [("x_train", "y_train"), ("x_test", "y_test")]
"""The names of inputs and labels in an NPZ file: of all samples, or of training and test data."""


def read_arrays(path: Path, task: TaskName = "classification") -> list[RawSamples]:
    """Read the file: all samples, or training and test data where it separates them."""
    try:
        with open_regular(path) as file:
            if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
                raise DataError(
                    f"{path} contains one unnamed array; save x and y with numpy.savez."
                )
            with zipfile.ZipFile(file) as archive:
                pairs = _array_names(path, _stored_names(archive))
                _check_size(path, archive, list(chain(*pairs)))
                samples = []
                for x, y in pairs:
                    arrays = (_array(archive, x), _array(archive, y))
                    samples.append(_samples(path, (x, y), arrays, task))
                return samples
    except DAMAGED_NPZ as problem:
        reason = f"is damaged: {problem}"
        if "Object arrays" in str(problem):
            reason = "contains Python objects, which can hide code; save plain numbers"
        raise DataError(f"{path} {reason.rstrip('.')}.") from None


def _stored_names(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the arrays in an NPZ file."""
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _check_size(path: Path, archive: zipfile.ZipFile, names: Sequence[str]) -> None:
    """Refuse arrays that contradict their headers, or do not fit into memory, before any is read.

    A few bytes of a zip file, or of a header, can stand for any number of them.
    """
    total = sum(_check_header(archive, name) for name in names)
    available = memory()[1]
    if total > available * SHARE_OF_MEMORY:
        raise DataError(
            f"{path} needs {total / 1e9:.1f} GB of memory, and copies need as much again;"
            f" {available / 1e9:.1f} GB are available. Use a part of the data."
        )


def _check_header(archive: zipfile.ZipFile, name: str) -> int:
    """Return the bytes of an array by its header, if the file has as many."""
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        shape, _, dtype = read_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError("Object arrays")
    size = math.prod(shape) * dtype.itemsize
    if start + size != entry.file_size:
        raise ValueError(f"{name} has {entry.file_size - start:,} bytes instead of {size:,}")
    return size


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _array_names(path: Path, names: list[str]) -> list[tuple[str, str]]:
    """The names of the inputs and the labels, by part."""
    for pairs in (SPLIT, WHOLE):
        if set(chain(*pairs)) <= set(names):
            return pairs
    present = ", ".join(names) or "nothing"
    raise DataError(
        f"{path} must contain x and y, or {', '.join(chain(*SPLIT))}; it contains {present}."
    )


def _samples(
    path: Path, names: tuple[str, str], arrays: tuple[NDArray[Any], NDArray[Any]], task: TaskName
) -> RawSamples:
    x, y = names
    x_array, y_array = arrays
    if not x_array.size:
        raise DataError(f"{x} in {path} is empty.")
    inputs = _inputs(f"{x} in {path}", x_array)
    labels: list[str] | Tensor
    match task:
        case "classification":
            labels = _labels(f"{y} in {path}", y_array)
        case "segmentation":
            labels = _masks(f"{y} in {path}", y_array)
        case _:
            labels = _targets(f"{y} in {path}", y_array, binary=task == "multilabel")
    if len(inputs) != len(labels):
        raise DataError(
            f"{path} has {len(inputs):,} samples in {x} but {len(labels):,} labels in {y}."
        )
    return RawSamples(path, inputs, labels)


def _inputs(subject: str, array: NDArray[Any]) -> Tensor:
    shape = list(array.shape)
    if array.dtype == np.uint8:
        if array.ndim == 3:
            array = array[..., np.newaxis]
        if array.ndim != 4:
            raise DataError(
                f"{subject} has shape {shape}; uint8 means images, (N, H, W) or (N, H, W, C). Save"
                " other numbers as float32."
            )
        return torch.from_numpy(np.ascontiguousarray(array))
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"{subject} must be uint8 images or floats, got {array.dtype}; use .astype('float32')."
        )
    if array.ndim < 2:
        raise DataError(
            f"{subject} has shape {shape}; it must have one row for each sample, (N, ...)."
        )
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(floats).reshape(len(floats), -1).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{subject} has a value that is nan, infinite or too large in sample"
            f" {int(finite.argmin())}."
        )
    return torch.from_numpy(floats)


def _targets(subject: str, array: NDArray[Any], *, binary: bool) -> Tensor:
    """Return numbers (N, targets)."""
    if array.ndim not in (1, 2) or array.dtype.kind not in "biuf":
        raise DataError(
            f"{subject} must be numbers, one or several for each sample, (N,) or (N, targets), got"
            f" {array.dtype} of shape {list(array.shape)}."
        )
    table = torch.from_numpy(array.reshape(len(array), -1).astype(np.float32))
    if binary:
        wrong = ((table != 0) & (table != 1)).any(1)
        if wrong.any():
            raise DataError(f"{subject}, sample {int(wrong.nonzero()[0])}: labels must be 0 or 1.")
        return table.to(torch.uint8)
    check_finite(table, subject, "label")
    return table


def _masks(subject: str, array: NDArray[Any]) -> Tensor:
    """Return the class of each pixel, (N, H, W)."""
    if array.ndim != 3 or array.dtype.kind not in "biu":
        raise DataError(
            f"{subject} must be the class of each pixel, integers (N, H, W), got {array.dtype} of"
            f" shape {list(array.shape)}."
        )
    return mask_labels(array)


def _labels(subject: str, array: NDArray[Any]) -> list[str]:
    if array.ndim != 1:
        raise DataError(
            f"{subject} has shape {list(array.shape)}; it must have one label for each sample,"
            " (N,)."
        )
    match array.dtype.kind:
        case "b" | "i" | "u":
            return [str(int(label)) for label in array.tolist()]
        case "U":
            return list(map(str, array.tolist()))
    raise DataError(
        f"{subject} must be integers or strings, got {array.dtype}; use .astype('int64')."
    )
