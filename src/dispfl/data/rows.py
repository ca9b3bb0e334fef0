"""Which rows of a user's data are test data: each row decides for itself, by its own content.

A row's id is a hash of its inputs, and its id says where it goes. So a new row moves no other row
between training and test data, equal rows are always on the same side, and the same row is test
data in a simulation and at every site. The label has no part in it: a row whose label is corrected
stays where it is.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PURPOSE = b"dispfl row"
_HALF = 32
"""Bits of an id that decide about test data, and bits that decide about validation data."""


class RowIds(NamedTuple):
    """The ids (int64) of training rows and test rows."""

    train: Tensor
    test: Tensor


def content_id(content: bytes) -> int:
    """Return the id of a row with this content: a file of an image, or the inputs as bytes."""
    digest = hashlib.blake2b(content, digest_size=8, person=_PURPOSE).digest()
    return int.from_bytes(digest, "little", signed=True)


def ids_of(contents: Iterable[bytes]) -> Tensor:
    """Return the ids of rows with these contents."""
    return torch.tensor([content_id(content) for content in contents], dtype=torch.int64)


def input_ids(inputs: Tensor) -> Tensor:
    """Return the ids of the rows of a tensor, as they are before any scaling."""
    if inputs.is_floating_point():
        inputs = inputs + 0.0  # -0.0 and 0.0 are the same number
    rows = inputs.contiguous().flatten(1).numpy()
    return ids_of(row.tobytes() for row in rows)


def are_test_rows(ids: Tensor, share: float) -> Tensor:
    """Return which rows are test data, of which there is this share on average."""
    return torch.from_numpy(_bits(ids) >> _HALF < share * 2**_HALF)


def are_validation_rows(ids: Tensor, share: float) -> Tensor:
    """Return which training rows are validation data, of which there is this share on average."""
    return torch.from_numpy(_bits(ids) % 2**_HALF < share * 2**_HALF)


def _bits(ids: Tensor) -> NDArray[np.uint64]:
    bits: NDArray[np.uint64] = ids.numpy().view(np.uint64)
    return bits
