"""How much masks tell about labels: guesses of a peer's label histogram from its mask alone.

The attacker knows the masks of all peers and the histograms of all but one, as if these had
revealed theirs, and guesses the remaining one. It makes three guesses: by ridge regression on the
whole masks and on how many weights they keep of each channel or hidden unit, and by linear
regression on how many they keep of each class in the last layer. Better guesses may exist: this is
a lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dispfl.core.layout import Layout
from dispfl.core.packed import Mask

Array = NDArray[np.float64]
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0, 1e9)
"""Ridge penalties to choose from, in mean squared lengths of the features; the last one leaves the
mean."""
PERMUTATIONS = 200
Guess = Literal["similar masks", "kept of each unit", "last layer"]


@dataclass(frozen=True)
class LabelGuess:
    """How well peers' label histograms are guessed, on average over peers."""

    how: Guess
    distance: float
    """Total variation distance between the guess and the truth: 0 is exact, 1 is as wrong as
    possible."""
    baseline: float
    """The same for the mean of the other peers' histograms, which needs no mask."""
    hits: float
    """The share of peers whose most frequent class is guessed."""
    baseline_hits: float
    p_value: float
    """How often guesses are as close if masks and histograms are paired at random."""


def guess_labels(
    how: Guess, features: Array, counts: Array, rng: np.random.Generator
) -> LabelGuess:
    """Guess every peer's histogram from all masks, and compare with the label counts.

    The features are inner products of all pairs of peers, or, of the last layer, a number for each
    peer and class.
    """
    truth = counts / counts.sum(1, keepdims=True)
    guess = _guess_by_class if how == "last layer" else _guess_by_similarity
    guessed = guess(features, truth)
    baseline = _mean_of_other_peers(truth)
    distance = float(_distance(guessed, truth))
    as_close = 0
    for _ in range(PERMUTATIONS):
        shuffled = truth[rng.permutation(len(truth))]
        as_close += _distance(guess(features, shuffled), shuffled) <= distance
    return LabelGuess(
        how,
        distance,
        float(_distance(baseline, truth)),
        _hits(guessed, truth),
        _hits(baseline, truth),
        float((1 + as_close) / (1 + PERMUTATIONS)),
    )


def mask_products(masks: Sequence[Mask]) -> Array:
    """Return for each pair of masks the number of weights that both keep: their inner product."""
    products = np.empty((len(masks), len(masks)))
    for i, m_i in enumerate(masks):
        for j, m_j in enumerate(masks):
            products[i, j] = m_i.overlap(m_j)
    return products


def unit_products(masks: Sequence[Mask], layout: Layout) -> Array:
    """Return the inner products of how many weights the masks keep of each output of each layer."""
    counts = np.array([_kept_by_unit(mask, layout) for mask in masks])
    return np.asarray(counts @ counts.T)


def _kept_by_unit(mask: Mask, layout: Layout) -> Array:
    """Return how many weights a mask keeps of each output of each layer."""
    counts = []
    for weights in layout.views(mask.unpack()):
        if weights.ndim > 1:
            counts.append(weights.flatten(1).sum(1).double().numpy())
    return np.concatenate(counts)


def kept_by_class(masks: Sequence[Mask], layout: Layout, classes: int) -> Array | None:
    """Return the share of the last layer's weights that each mask keeps for each class.

    None without a layer that has an output for each class.
    """
    last_layer = None
    for number, shape in enumerate(layout.shapes):
        if len(shape) > 1 and shape[0] == classes:
            last_layer = number
    if last_layer is None:
        return None
    shares = []
    for mask in masks:
        weights = layout.views(mask.unpack())[last_layer]
        shares.append(weights.float().flatten(1).mean(1).tolist())
    return np.array(shares)


def _guess_by_similarity(products: Array, truth: Array) -> Array:
    """Ridge regression on all other peers; its penalty is the one that guesses these best."""
    guessed = np.empty_like(truth)
    for k in range(len(truth)):
        not_k = np.arange(len(truth)) != k
        among = products[np.ix_(not_k, not_k)]
        row_means = among.mean(1)
        total_mean = among.mean()
        # Kernels of features whose mean over the other peers is 0.
        kernel = among - row_means[:, None] - row_means + total_mean
        to_k = products[not_k, k]
        kernel_k = to_k - to_k.mean() - row_means + total_mean

        mean_histogram = truth[not_k].mean(0)
        y = truth[not_k] - mean_histogram
        guessed[k] = mean_histogram + kernel_k @ _best_inverse(kernel, y) @ y
    return _as_histograms(guessed)


def _best_inverse(kernel: Array, y: Array) -> Array:
    """Return (kernel + penalty)^-1 with the penalty that guesses each y best from the others."""
    scale = max(np.trace(kernel) / len(kernel), 1e-12)
    inverses = []
    errors = []
    for penalty in PENALTIES:
        inverse = np.linalg.inv(kernel + penalty * scale * np.eye(len(kernel)))
        # The error of leaving one peer out, without fitting again: residual / (1 - leverage).
        errors.append(np.square(inverse @ y / np.diag(inverse)[:, None]).sum())
        inverses.append(inverse)
    return np.asarray(inverses[int(np.argmin(errors))])


def _guess_by_class(features: Array, truth: Array) -> Array:
    """A class's share as a linear function of its feature.

    One slope for all classes is fitted on all other peers.
    """
    guessed = np.empty_like(truth)
    for k in range(len(truth)):
        not_k = np.arange(len(truth)) != k
        mean_features = features[not_k].mean(0)
        mean_shares = truth[not_k].mean(0)
        x = features[not_k] - mean_features
        y = truth[not_k] - mean_shares
        slope = (x * y).sum() / max((x * x).sum(), 1e-12)
        guessed[k] = mean_shares + slope * (features[k] - mean_features)
    return _as_histograms(guessed)


def _mean_of_other_peers(truth: Array) -> Array:
    return np.asarray((truth.sum(0) - truth) / (len(truth) - 1))


def _as_histograms(guessed: Array) -> Array:
    positive = np.maximum(guessed, 1e-9)
    return np.asarray(positive / positive.sum(1, keepdims=True))


def _distance(guessed: Array, truth: Array) -> float:
    return float(np.abs(guessed - truth).sum(1).mean() / 2)


def _hits(guessed: Array, truth: Array) -> float:
    return float((guessed.argmax(1) == truth.argmax(1)).mean())
