"""How much masks tell about labels: guesses of a peer's label histogram from its mask alone.

The attacker knows the masks of all peers and the histograms of all but one, as if these had told it
theirs, and guesses the last one's. It makes three guesses: by ridge regression on the whole masks
and on how many weights they keep of each channel or hidden unit, and by linear regression on how
many they keep of each class in the last layer. Better guesses may exist: this is a lower bound.
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
    """Guess every peer's histogram from its mask and everybody else's, and compare with the label
    counts.

    The features are inner products of all pairs of peers, or, of the last layer, a number for each
    peer and class.
    """
    truth = counts / counts.sum(1, keepdims=True)
    guess = _guess_by_class if how == "last layer" else _guess_by_similarity
    guessed, mean = guess(features, truth), _others_mean(truth)
    distance = float(_distance(guessed, truth))
    as_close = 0
    for _ in range(PERMUTATIONS):
        shuffled = truth[rng.permutation(len(truth))]
        as_close += _distance(guess(features, shuffled), shuffled) <= distance
    return LabelGuess(
        how,
        distance,
        float(_distance(mean, truth)),
        _hits(guessed, truth),
        _hits(mean, truth),
        float((1 + as_close) / (1 + PERMUTATIONS)),
    )


def mask_products(masks: Sequence[Mask]) -> Array:
    """Return for each pair of masks the number of weights that both keep: their inner product."""
    return np.array([[mine.overlap(theirs) for theirs in masks] for mine in masks], np.float64)


def unit_products(masks: Sequence[Mask], layout: Layout) -> Array:
    """Return the inner products of how many weights the masks keep of each output of each layer."""
    layers = [k for k, shape in enumerate(layout.shapes) if len(shape) > 1]
    kept = []
    for mask in masks:
        views = layout.views(mask.unpack())
        kept.append(np.concatenate([views[k].flatten(1).sum(1).double().numpy() for k in layers]))
    counts = np.array(kept)
    return np.asarray(counts @ counts.T)


def kept_by_class(masks: Sequence[Mask], layout: Layout, classes: int) -> Array | None:
    """Return the share of the last layer's weights that each mask keeps for each class; None
    without such a layer."""
    found = [k for k, shape in enumerate(layout.shapes) if len(shape) > 1 and shape[0] == classes]
    if not found:
        return None
    return np.array(
        [
            layout.views(mask.unpack())[found[-1]].float().flatten(1).mean(1).tolist()
            for mask in masks
        ]
    )


def _guess_by_similarity(products: Array, truth: Array) -> Array:
    """Ridge regression on all others, for each peer; its penalty is the one that guesses these
    others best."""
    guessed = np.empty_like(truth)
    for k in range(len(truth)):
        others = np.arange(len(truth)) != k
        among, to_k = products[np.ix_(others, others)], products[others, k]
        rows, total = among.mean(1), among.mean()
        kernel = among - rows[:, None] - rows + total  # of features whose mean over the others is 0
        target = truth[others].mean(0)
        y, scale = truth[others] - target, max(np.trace(kernel) / len(kernel), 1e-12)
        solved = [
            np.linalg.inv(kernel + penalty * scale * np.eye(len(kernel))) for penalty in PENALTIES
        ]
        # The error of leaving one of the others out, without fitting again: residual / (1 -
        # leverage).
        errors = [np.square(inverse @ y / np.diag(inverse)[:, None]).sum() for inverse in solved]
        guessed[k] = (
            target + (to_k - to_k.mean() - rows + total) @ solved[int(np.argmin(errors))] @ y
        )
    return _as_histograms(guessed)


def _guess_by_class(features: Array, truth: Array) -> Array:
    """A class's share as a linear function of its feature, with one slope for all classes, fitted
    on all others."""
    guessed = np.empty_like(truth)
    for k in range(len(truth)):
        others = np.arange(len(truth)) != k
        means, shares = features[others].mean(0), truth[others].mean(0)
        x, y = features[others] - means, truth[others] - shares
        slope = (x * y).sum() / max((x * x).sum(), 1e-12)
        guessed[k] = shares + slope * (features[k] - means)
    return _as_histograms(guessed)


def _others_mean(truth: Array) -> Array:
    return np.asarray((truth.sum(0) - truth) / (len(truth) - 1))


def _as_histograms(guessed: Array) -> Array:
    positive = np.maximum(guessed, 1e-9)
    return np.asarray(positive / positive.sum(1, keepdims=True))


def _distance(guessed: Array, truth: Array) -> float:
    return float(np.abs(guessed - truth).sum(1).mean() / 2)


def _hits(guessed: Array, truth: Array) -> float:
    return float((guessed.argmax(1) == truth.argmax(1)).mean())
