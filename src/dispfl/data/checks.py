"""Checks of samples for values that no training can use; they name the sample."""

import torch
from torch import Tensor

from dispfl.errors import DataError

LARGEST = torch.finfo(torch.float32).max


def check_finite(values: Tensor, subject: str, what: str, index: Tensor | None = None) -> None:
    """Refuse samples with a value that is nan, infinite, or too large for float32.

    `values` has a row for each sample; `index` has their numbers where these are not the first
    ones. `what` is "input" or "label".
    """
    if not values.is_floating_point() or not values.numel():
        return
    # The extremes are nan if any value is: one pass, without a copy.
    extremes = torch.stack(torch.aminmax(values.detach()))
    if _is_usable(extremes).all():
        return

    rows = (~_is_usable(values.detach().flatten(1) if values.ndim > 1 else values[:, None])).any(1)
    row = int(rows.nonzero()[0])
    value = _first_unusable(values[row])
    number = row if index is None else int(index[row])
    others = int(rows.sum()) - 1
    more = f" ({others:,} more samples likewise)" if others else ""
    raise DataError(
        f"{subject}: sample {number} has the {what} {value:g}{more}; correct or remove it. Samples"
        " count from 0."
    )


def _is_usable(values: Tensor) -> Tensor:
    return values.abs() <= LARGEST  # false for nan


def _first_unusable(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(flat[~_is_usable(flat)][0])
