"""CSV: a line of names, then a line for each sample; one column is the label, all others are numbers."""

import csv
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from dispfl.data.own.parts import Part
from dispfl.errors import DataError
from dispfl.settings import did_you_mean

log = logging.getLogger("dispfl.data")

SEPARATORS = ",;\t"
"""Spreadsheets write one or another, depending on the country; the header's most frequent one is it."""


class Rows(NamedTuple):
    """The numbers of a table, and where they stand in it."""

    inputs: Tensor
    """float32 (N, columns)"""
    lines: Sequence[int]
    """In which line of the file each row ends; the header is line 1."""
    columns: tuple[str, ...]
    label: str | None
    """What the label is called, if there is one."""
    labels: list[str]


def read_table(path: Path, label: str | None = None, columns: tuple[str, ...] = ()) -> Part:
    """Read a table to learn from; `columns` are those that it must have, in this order, if any are given."""
    rows = _read(path, lambda header: _label_place(path, header, label))
    for line, given in zip(rows.lines, rows.labels, strict=True):
        if not given:
            raise DataError(f"{path}, line {line}, has no label in column {rows.label}.")
    part = Part(path, rows.inputs, rows.labels, rows.columns, rows.label)
    return _in_order(part, columns) if columns else part


def read_rows(path: Path, columns: tuple[str, ...], label: str | None = None) -> Rows:
    """Read a table to predict from: these columns in whatever order, and the label's, which is not looked at."""

    def place_of_label(header: list[str]) -> int | None:
        # Names as Python writes them: one that came with a model from elsewhere must not steer a terminal.
        if missing := sorted(set(columns) - set(header), key=columns.index):
            raise DataError(f"{path} has no column {missing[0]!r}, which the model wants; add it.")
        if unknown := sorted(set(header) - {*columns, label}, key=header.index):
            raise DataError(f"{path} has a column {unknown[0]!r}, which the model does not know; leave it out.")
        return header.index(label) if label in header else None

    try:
        rows = _read(path, place_of_label)
    except FileNotFoundError:
        raise DataError(f"The table {path} does not exist.") from None
    except OSError as problem:
        raise DataError(f"The table {path} cannot be read: {problem.strerror or problem}.") from None
    places = [rows.columns.index(name) for name in columns]
    return rows._replace(inputs=rows.inputs[:, places], columns=columns)


def _read(path: Path, place_of_label: Callable[[list[str]], int | None]) -> Rows:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets put a mark before the text
            return _parse(path, file, place_of_label)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text in UTF-8; save it as CSV in UTF-8.") from None
    except csv.Error as problem:
        raise DataError(f"{path} cannot be read as CSV: {problem}.") from None


def _parse(path: Path, file: TextIO, place_of_label: Callable[[list[str]], int | None]) -> Rows:
    separator = max(SEPARATORS, key=file.readline().count)
    file.seek(0)
    reader = csv.reader(file, delimiter=separator)
    header = _header(path, next(reader, []))
    place = place_of_label(header)
    columns = [name for k, name in enumerate(header) if k != place]
    values, lines, labels = array("d"), array("q"), []
    for row in reader:
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            raise DataError(f"{path}, line {reader.line_num}, has {len(row)} cells; its header names {len(header)}.")
        if place is not None:
            labels.append(row.pop(place).strip())
        try:
            values.extend(map(float, row))
        except ValueError:
            raise _not_a_number(path, reader.line_num, columns, row) from None
        lines.append(reader.line_num)
    if not lines:
        raise DataError(f"{path} has a header but no samples.")
    with np.errstate(over="ignore"):  # what is too large for a float32 is found below
        inputs = np.frombuffer(values, np.float64).reshape(len(lines), len(columns)).astype(np.float32)
    if not np.isfinite(inputs).all():
        row_number, column = np.argwhere(~np.isfinite(inputs))[0]
        where = f"line {lines[row_number]}, column {columns[column]}"
        raise DataError(
            f"{path}, {where}: the value is missing, infinite or too large; fill it in or leave the line out."
        )
    return Rows(torch.from_numpy(inputs), lines, tuple(columns), None if place is None else header[place], labels)


def _header(path: Path, names: Sequence[str]) -> list[str]:
    header = [name.strip() for name in names]
    if not header:
        raise DataError(f"{path} is empty; its first line must name the columns.")
    if all(_is_number(name) for name in header):
        raise DataError(f"{path} begins with numbers; its first line must name the columns.")
    name, count = Counter(header).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} names {count} columns {name!r}; give each its own name.")
    return header


def _label_place(path: Path, header: list[str], label: str | None) -> int:
    if len(header) < 2:
        raise DataError(f"{path} has one column only, {header[0]}; a label and at least one more are needed.")
    if label is not None:
        if label not in header:
            raise DataError(f"{path} has no column {label!r}, which data.label names. {did_you_mean(label, header)}")
        return header.index(label)
    if "label" in header:
        return header.index("label")
    log.warning(
        "%s has no column called label, so its last one, %s, is taken for it; data.label names another.",
        path,
        header[-1],
    )
    return len(header) - 1


def _in_order(part: Part, columns: tuple[str, ...]) -> Part:
    """The same columns in another order: the order of the training data counts."""
    if set(part.columns) != set(columns):
        odd = sorted(set(part.columns) ^ set(columns))[0]
        whose = "only the training data have" if odd in columns else "the training data lack"
        raise DataError(f"{part.path} and the training data must have the same columns; {whose} {odd}.")
    places = [part.columns.index(name) for name in columns]
    return part._replace(inputs=part.inputs[:, places], columns=columns)


def _not_a_number(path: Path, line: int, columns: Sequence[str], row: Sequence[str]) -> DataError:
    column, text = next((name, text) for name, text in zip(columns, row, strict=True) if not _is_number(text))
    where = f"{path}, line {line}, column {column}"
    if not text.strip():
        return DataError(f"{where}: the value is missing; fill it in or leave the line out.")
    return DataError(f"{where}: {text!r} is not a number; write it as one, such as 3.5, or leave the column out.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
