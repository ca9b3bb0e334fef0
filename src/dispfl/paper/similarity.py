"""Similarity of peers: Hamming distances of masks, cosine similarities of label counts, and their
rank correlation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Bits = NDArray[np.uint8]
"""One mask per row, as bits, least significant first; the unused bits of the last byte are zero."""

BLOCK_WORDS = 8192  # of 64 bits: the blocks of a hundred peers, 6.5 MB, stay in the cache while all pairs are compared
SHUFFLES = 999


@dataclass(frozen=True)
class Correlation:
    """The rank correlation of two quantities over all pairs of peers."""

    spearman: float
    pairs: int
    p: float
    """How often randomly permuted peers correlate as strongly, in either direction (Mantel test).

    Each peer is part of many pairs, so pairs are not independent and the usual p-value would be too
    small.
    """


def hamming_distances(bits: Bits) -> NDArray[np.int64]:
    """Return the number of positions in which each two masks differ, as (peers, peers)."""
    peers, width = bits.shape
    padded = np.zeros((peers, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = bits
    words = padded.view(np.uint64)
    distances = np.zeros((peers, peers), np.int64)
    for begin in range(0, words.shape[1], BLOCK_WORDS):
        block = words[:, begin : begin + BLOCK_WORDS]
        for k in range(peers - 1):
            distances[k, k + 1 :] += np.bitwise_count(block[k + 1 :] ^ block[k]).sum(
                axis=1, dtype=np.uint32
            )
    return distances + distances.T


def cosine_similarities(counts: NDArray[np.int64]) -> Matrix:
    """Return the cosine of each two peers' label counts: 1 for equal distributions, 0 for disjoint
    classes.

    Rounded to twelve digits, so that equal distributions tie regardless of the order of summation.
    """
    directions = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    return np.asarray(np.round(directions @ directions.T, 12))


def pairs_of(matrix: Matrix) -> Matrix:
    """Return the entries of a symmetric matrix above the diagonal, one per pair."""
    return np.asarray(matrix[np.triu_indices(len(matrix), 1)])


def within_groups(sizes: Sequence[int]) -> NDArray[np.bool_]:
    """Return which pairs, in the order of `pairs_of`, belong to one group."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.asarray((group[:, None] == group)[np.triu_indices(len(group), 1)])


def ranks(values: Matrix) -> Matrix:
    """Return the ascending ranks of values, from 1; equal values share their mean rank."""
    _, which, ties = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(ties) - (ties - 1) / 2)[which])


def spearman(one: Matrix, other: Matrix) -> float | None:
    """Return the rank correlation of two vectors; None if either is constant."""
    a, b = _standard_ranks(one), _standard_ranks(other)
    return None if a is None or b is None else float(a @ b)


def correlate(one: Matrix, other: Matrix, shuffles: int = SHUFFLES) -> Correlation | None:
    """Return Spearman's correlation of two symmetric matrices over all pairs; None if either is
    constant."""
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
        stronger += (
            abs(shuffled) >= abs(found) - 1e-9
        )  # rounding must not exclude the identity permutation
    return Correlation(found, len(a), (1 + stronger) / (1 + shuffles))


def _standard_ranks(values: Matrix) -> Matrix | None:
    """Return ranks with mean 0 and norm 1, whose scalar product is the correlation; None if all are
    equal."""
    centred = ranks(values) - (len(values) + 1) / 2
    norm = np.linalg.norm(centred)
    return centred / norm if norm > 0 else None


def kept_by_layer(bits: Bits, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of kept weights in each layer of each peer, as (peers, layers), without
    unpacking masks."""
    byte, bit = np.divmod(np.cumsum(sizes), 8)
    kept = np.empty((len(bits), len(sizes)), np.int64)
    for k, mask in enumerate(bits):
        before = np.concatenate([[0], np.cumsum(np.bitwise_count(mask), dtype=np.int64)])
        last = np.append(mask, np.uint8(0))[byte] & (
            (1 << bit) - 1
        )  # a layer may end inside a byte
        kept[k] = np.diff(before[byte] + np.bitwise_count(last), prepend=0)
    return kept


def independent_distance(densities: Matrix, sizes: Sequence[int]) -> float:
    """Return the expected distance of independent masks, mean over pairs.

    Where a layer has densities d_i and d_j in two peers, a position differs with probability
    d_i (1 - d_j) + d_j (1 - d_i).
    """
    weighted = densities * (np.asarray(sizes) / np.sum(sizes))
    only_one = weighted @ (1 - densities).T
    return float(np.mean(pairs_of(only_one + only_one.T)))
