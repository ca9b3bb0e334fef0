"""How alike peers are: Hamming distances between masks, cosines between label counts, and their rank correlation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Bits = NDArray[np.uint8]
"""Masks in a row each, as bits, least significant first; the unused bits of the last byte are zero."""

WORDS_AT_ONCE = 8192  # of 64 bits: a hundred peers' blocks, 6.5 MB, stay in the cache while each meets the others
SHUFFLES = 999


@dataclass(frozen=True)
class Correlation:
    """How two numbers of each pair of peers go together."""

    spearman: float
    pairs: int
    p: float
    """How often peers that are shuffled at random correlate as strongly, either way (Mantel's test).

    The pairs are not independent of each other, for each peer is in many, so the usual p-value would flatter.
    """


def hamming_distances(bits: Bits) -> NDArray[np.int64]:
    """In how many positions each two masks differ, as (peers, peers)."""
    peers, width = bits.shape
    padded = np.zeros((peers, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = bits
    words = padded.view(np.uint64)
    distances = np.zeros((peers, peers), np.int64)
    for begin in range(0, words.shape[1], WORDS_AT_ONCE):
        block = words[:, begin : begin + WORDS_AT_ONCE]
        for k in range(peers - 1):
            distances[k, k + 1 :] += np.bitwise_count(block[k + 1 :] ^ block[k]).sum(axis=1, dtype=np.uint32)
    return distances + distances.T


def cosine_similarities(counts: NDArray[np.int64]) -> Matrix:
    """The cosine between each two peers' label counts: 1 for equal distributions, 0 where no class is shared.

    Rounded to twelve digits, so that equal distributions tie whatever order they were summed in.
    """
    directions = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    return np.asarray(np.round(directions @ directions.T, 12))


def pairs_of(matrix: Matrix) -> Matrix:
    """A symmetric matrix's entries above the diagonal: one a pair."""
    return np.asarray(matrix[np.triu_indices(len(matrix), 1)])


def within_groups(sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Which pairs, in the order of `pairs_of`, are of one group."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.asarray((group[:, None] == group)[np.triu_indices(len(group), 1)])


def ranks(values: Matrix) -> Matrix:
    """The place of each value in ascending order, from 1; equal values share the mean of their places."""
    _, which, ties = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(ties) - (ties - 1) / 2)[which])


def spearman(one: Matrix, other: Matrix) -> float | None:
    """The rank correlation of two rows of numbers; None where either has one value only."""
    a, b = _standard_ranks(one), _standard_ranks(other)
    return None if a is None or b is None else float(a @ b)


def correlate(one: Matrix, other: Matrix, shuffles: int = SHUFFLES) -> Correlation | None:
    """Spearman's correlation of two symmetric matrices over the pairs; None where either has one value only."""
    a, b = (_standard_ranks(pairs_of(matrix)) for matrix in (one, other))
    if a is None or b is None:
        return None
    found = float(a @ b)
    pairs = np.triu_indices(len(one), 1)
    square = np.zeros(one.shape)
    square[pairs] = b
    square += square.T
    rng = np.random.default_rng(0)
    stronger = 0
    for _ in range(shuffles):
        order = rng.permutation(len(one))
        shuffled = float(a @ square[order][:, order][pairs])
        stronger += abs(shuffled) >= abs(found) - 1e-9  # a shuffle that changes nothing counts, rounded or not
    return Correlation(found, len(a), (1 + stronger) / (1 + shuffles))


def _standard_ranks(values: Matrix) -> Matrix | None:
    """Ranks with mean 0 and norm 1, whose scalar product is the correlation; None where all are equal."""
    centred = ranks(values) - (len(values) + 1) / 2
    norm = np.linalg.norm(centred)
    return centred / norm if norm > 0 else None


def kept_by_layer(bits: Bits, sizes: Sequence[int]) -> NDArray[np.int64]:
    """How many weights of each layer each peer keeps, as (peers, layers), without unpacking a mask."""
    byte, bit = np.divmod(np.cumsum(sizes), 8)
    kept = np.empty((len(bits), len(sizes)), np.int64)
    for k, mask in enumerate(bits):
        before = np.concatenate([[0], np.cumsum(np.bitwise_count(mask), dtype=np.int64)])
        last = np.append(mask, np.uint8(0))[byte] & ((1 << bit) - 1)  # a layer may end inside a byte
        kept[k] = np.diff(before[byte] + np.bitwise_count(last), prepend=0)
    return kept


def independent_distance(densities: Matrix, sizes: Sequence[int]) -> float:
    """The distance to expect of independent masks, mean over pairs: a position differs if one of the two keeps it.

    With densities d_i, d_j of a layer in two peers that has probability d_i (1 - d_j) + d_j (1 - d_i).
    """
    weighted = densities * (np.asarray(sizes) / np.sum(sizes))
    one_alone = weighted @ (1 - densities).T
    return float(np.mean(pairs_of(one_alone + one_alone.T)))
