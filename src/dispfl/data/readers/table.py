"""CSV tables (a header, then one line per sample) and NPZ arrays (`x` and `y`)."""

import csv
import logging
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.data.readers import RawSamples
from dispfl.errors import DataError
from dispfl.settings import did_you_mean

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
    label: str | None
    """The name of the label's column, if there is one."""
    labels: list[str]
    groups: tuple[str, ...] = ()


def read_table(
    path: Path, label: str | None = None, columns: tuple[str, ...] = (), group: str | None = None
) -> RawSamples:
    """Read a table for training or testing; if `columns` are given, it must have these, and takes
    their order.

    The column `group` is not an input.
    """
    rows = _read(path, lambda header: _label_place(path, header, label, group), group)
    for line, given in zip(rows.lines, rows.labels, strict=True):
        if not given:
            raise DataError(f"{path}, line {line}, has no label in column {rows.label}.")
    samples = RawSamples(
        path, rows.inputs, rows.labels, rows.columns, rows.label, groups=rows.groups
    )
    return _in_order(samples, columns) if columns else samples


def read_rows(path: Path, columns: tuple[str, ...], label: str | None = None) -> TableRows:
    """Read a table for prediction: it must have these columns, in any order; the label's column is
    ignored."""

    def place_of_label(header: list[str]) -> int | None:
        # Names are printed with repr: one from a foreign model file must not send escape codes to
        # the terminal.
        if missing := sorted(set(columns) - set(header), key=columns.index):
            raise DataError(
                f"{path} has no column {missing[0]!r}, which the model requires; add it."
            )
        if unknown := sorted(set(header) - {*columns, label}, key=header.index):
            raise DataError(
                f"{path} has a column {unknown[0]!r}, which the model does not know; remove it."
            )
        return header.index(label) if label in header else None

    try:
        rows = _read(path, place_of_label)
    except FileNotFoundError:
        raise DataError(f"The table {path} does not exist.") from None
    except OSError as problem:
        raise DataError(
            f"The table {path} cannot be read: {problem.strerror or problem}."
        ) from None
    places = [rows.columns.index(name) for name in columns]
    return rows._replace(inputs=rows.inputs[:, places], columns=columns)


def _read(
    path: Path, place_of_label: Callable[[list[str]], int | None], group: str | None = None
) -> TableRows:
    try:
        with path.open(
            newline="", encoding="utf-8-sig"
        ) as file:  # -sig: spreadsheets write a byte order mark
            return _parse(path, file, place_of_label, group)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; save it as CSV in UTF-8.") from None
    except csv.Error as problem:
        raise DataError(f"{path} cannot be read as CSV: {problem}.") from None


def _parse(
    path: Path, file: TextIO, place_of_label: Callable[[list[str]], int | None], group: str | None
) -> TableRows:
    separator = max(SEPARATORS, key=file.readline().count)
    file.seek(0)
    reader = csv.reader(file, delimiter=separator)
    header = _header(path, next(reader, []))
    place = place_of_label(header)
    group_place = None if group is None else header.index(group)
    columns = [name for k, name in enumerate(header) if k not in (place, group_place)]
    values, lines, labels, groups = array("d"), array("q"), [], []
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {reader.line_num}, has {len(row)} cells; its header has"
                f" {len(header)}."
            )
        if place is not None:
            labels.append(row[place].strip())
        if group_place is not None:
            groups.append(row[group_place].strip())
        inputs_of_row = [cell for k, cell in enumerate(row) if k not in (place, group_place)]
        try:
            values.extend(map(float, inputs_of_row))
        except ValueError:
            raise _not_a_number(path, reader.line_num, columns, inputs_of_row) from None
        lines.append(reader.line_num)
    if not lines:
        raise DataError(f"{path} has a header but no samples.")
    with np.errstate(over="ignore"):  # values too large for float32 are reported below
        inputs = (
            np.frombuffer(values, np.float64).reshape(len(lines), len(columns)).astype(np.float32)
        )
    if not np.isfinite(inputs).all():
        row_number, column = np.argwhere(~np.isfinite(inputs))[0]
        where = f"line {lines[row_number]}, column {columns[column]}"
        raise DataError(
            f"{path}, {where}: the value is missing, infinite or too large; fill it in or remove"
            " the line."
        )
    label = None if place is None else header[place]
    return TableRows(torch.from_numpy(inputs), lines, tuple(columns), label, labels, tuple(groups))


def _header(path: Path, names: Sequence[str]) -> list[str]:
    header = [name.strip() for name in names]
    if not header:
        raise DataError(f"{path} is empty; its first line must name the columns.")
    if all(_is_number(name) for name in header):
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


def _label_place(path: Path, header: list[str], label: str | None, group: str | None) -> int:
    if group is not None and group not in header:
        raise DataError(
            f"{path} has no column {group!r}, which data.group names. {did_you_mean(group, header)}"
        )
    if len(header) < 2 + (group is not None):
        raise DataError(
            f"{path} has only one column, {header[0]}; it needs a label and at least one more."
        )
    if label is not None:
        if label not in header:
            raise DataError(
                f"{path} has no column {label!r}, which data.label names."
                f" {did_you_mean(label, header)}"
            )
        if label == group:
            raise DataError(
                f"data.label and data.group both name the column {label!r} of {path}; they must"
                " differ."
            )
        return header.index(label)
    if "label" in header and group != "label":
        return header.index("label")
    last = [name for name in header if name != group][-1]
    log.warning(
        "%s has no column called label, so its last column, %s, is used; set data.label to use"
        " another.",
        path,
        last,
    )
    return header.index(last)


def _in_order(samples: RawSamples, columns: tuple[str, ...]) -> RawSamples:
    """Put the columns in the order of the training data."""
    if set(samples.columns) != set(columns):
        odd = sorted(set(samples.columns) ^ set(columns))[0]
        whose = "only the training data have" if odd in columns else "the training data lack"
        raise DataError(
            f"{samples.path} and the training data must have the same columns; {whose} {odd}."
        )
    places = [samples.columns.index(name) for name in columns]
    return samples._replace(inputs=samples.inputs[:, places], columns=columns)


def _not_a_number(path: Path, line: int, columns: Sequence[str], row: Sequence[str]) -> DataError:
    column, text = next(
        (name, text) for name, text in zip(columns, row, strict=True) if not _is_number(text)
    )
    where = f"{path}, line {line}, column {column}"
    if not text.strip():
        return DataError(f"{where}: the value is missing; fill it in or remove the line.")
    return DataError(
        f"{where}: {text!r} is not a number; write it as one, such as 3.5, or remove the column."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


WHOLE = ("x", "y")
SPLIT = ("x_train", "y_train", "x_test", "y_test")


def read_arrays(path: Path) -> list[RawSamples]:
    """Read the file: all samples, or training and test data where it separates them."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{path} contains one unnamed array; save x and y with numpy.savez."
                )
            names = next(
                (names for names in (SPLIT, WHOLE) if set(names) <= set(archive.files)), None
            )
            if names is None:
                there = ", ".join(archive.files) or "nothing"
                raise DataError(
                    f"{path} must contain x and y, or {', '.join(SPLIT)}; it contains {there}."
                )
            arrays = {name: archive[name] for name in names}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as problem:
        objects = "Object arrays" in str(problem)
        why = (
            "contains Python objects, which can hide code; save plain numbers"
            if objects
            else f"is damaged: {problem}"
        )
        raise DataError(f"{path} {why.rstrip('.')}.") from None
    return [_samples(path, arrays, x, y) for x, y in zip(names[::2], names[1::2], strict=True)]


def _samples(path: Path, arrays: dict[str, NDArray[Any]], x: str, y: str) -> RawSamples:
    if not arrays[x].size:
        raise DataError(f"{x} in {path} is empty.")
    inputs, labels = _inputs(f"{x} in {path}", arrays[x]), _labels(f"{y} in {path}", arrays[y])
    if len(inputs) != len(labels):
        raise DataError(
            f"{path} has {len(inputs):,} samples in {x} but {len(labels):,} labels in {y}."
        )
    return RawSamples(path, inputs, labels)


def _inputs(what: str, array: NDArray[Any]) -> Tensor:
    shape = list(array.shape)
    if array.dtype == np.uint8:
        if array.ndim not in (3, 4):
            wanted = "(N, H, W) or (N, H, W, C)"
            raise DataError(
                f"{what} has shape {shape}; uint8 means images, {wanted}. Save other numbers as"
                " float32."
            )
        images = array if array.ndim == 4 else array[..., np.newaxis]
        return torch.from_numpy(np.ascontiguousarray(images))
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(
            f"{what} must be uint8 images or floats, got {array.dtype}; use .astype('float32')."
        )
    if array.ndim < 2:
        raise DataError(
            f"{what} has shape {shape}; it must have one row for each sample, (N, ...)."
        )
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(floats).reshape(len(floats), -1).all(axis=1)
    if not finite.all():
        raise DataError(
            f"{what} has a value that is nan, infinite or too large in sample"
            f" {int(finite.argmin())}."
        )
    return torch.from_numpy(floats)


def _labels(what: str, array: NDArray[Any]) -> list[str]:
    if array.ndim != 1:
        raise DataError(
            f"{what} has shape {list(array.shape)}; it must have one label for each sample, (N,)."
        )
    match array.dtype.kind:
        case "b" | "i" | "u":
            return [str(int(label)) for label in array.tolist()]
        case "U":
            return [str(label) for label in array.tolist()]
    raise DataError(f"{what} must be integers or strings, got {array.dtype}; use .astype('int64').")
