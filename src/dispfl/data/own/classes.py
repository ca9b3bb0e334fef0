"""From the labels of a site's samples, which are texts, to the numbers of the classes."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dispfl.errors import DataError

_WHOLE = re.compile(r"-?\d+")
_FEW = 20


def class_names(found: Iterable[str], samples: int, where: Path) -> tuple[str, ...]:
    """The classes of labels that no config lists: sorted, as numbers where all are whole numbers."""
    names = set(found)
    if len(names) > (_FEW if _measured(names) else max(_FEW, samples // 2)):
        raise DataError(
            f"{where} has {len(names):,} different labels for {samples:,} samples; a label must be a class."
        )
    if len(names) == 1:
        raise DataError(f"{where} has one class only, {names.pop()}; list all of the federation's in data.classes.")
    if all(_WHOLE.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _measured(names: Iterable[str]) -> bool:
    """Whether all are numbers and some have a fraction: a measurement, which regression would be for."""
    try:
        return not all(float(name).is_integer() for name in names)
    except ValueError:
        return False


def number(labels: Sequence[str], classes: tuple[str, ...], where: Path) -> Tensor:
    """The place of each label among the classes.

    A label is the name of a class; or its number from 0, where no class has a number for a name.
    """
    place = {name: k for k, name in enumerate(classes)}
    if not any(_WHOLE.fullmatch(name) for name in classes):
        place |= {str(k): k for k in range(len(classes))}
    try:
        return torch.tensor([place[label] for label in labels], dtype=torch.int64)
    except KeyError as stray:
        known = ", ".join(classes[:_FEW]) + (", ..." if len(classes) > _FEW else "")
        raise DataError(f"{where} has the label {stray.args[0]}, which data.classes does not list: {known}.") from None
