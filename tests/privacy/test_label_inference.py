"""Guessing label histograms from masks: exact where masks say everything, blind where they say
nothing."""

import numpy as np
import torch

from dispfl.core.layout import Layout
from dispfl.core.packed import WeightMask
from dispfl.privacy.audit.label_inference import (
    guess_labels,
    kept_by_class,
    mask_products,
    unit_products,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def histograms(peers: int = 20) -> np.ndarray:  # type: ignore[type-arg]
    return np.round(100 * rng().dirichlet(np.ones(4), size=peers)) + 1


def test_masks_that_keep_the_weights_of_frequent_classes_give_the_histogram_away() -> None:
    counts = histograms()
    shares = counts / counts.sum(1, keepdims=True)
    masks = []
    for k, histogram in enumerate(shares):
        kept = np.concatenate([np.arange(400) < round(400 * share) for share in histogram])
        noise = np.random.default_rng(k).random(400) < 0.5
        masks.append(WeightMask.pack(torch.from_numpy(np.concatenate([kept, noise]))))
    guess = guess_labels("similar masks", mask_products(masks), counts, rng())
    assert guess.distance < 0.4 * guess.baseline
    assert guess.hits > guess.baseline_hits
    assert guess.p_value == 1 / 201


def test_random_masks_are_no_better_than_the_mean_of_the_others() -> None:
    counts = histograms()
    masks = [
        WeightMask.pack(torch.rand(1000, generator=torch.Generator().manual_seed(k)) < 0.5)
        for k in range(len(counts))
    ]
    guess = guess_labels("similar masks", mask_products(masks), counts, rng())
    assert guess.distance > 0.9 * guess.baseline
    assert guess.p_value > 0.05


def test_similar_units_are_those_of_which_as_many_weights_are_kept_wherever_they_are() -> None:
    layout = Layout(("weight", "bias"), ((2, 3), (2,)))
    masks = [
        WeightMask.pack(torch.tensor(flags, dtype=torch.bool))
        for flags in ([1, 1, 0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 1, 0, 0])
    ]
    assert unit_products(masks, layout).tolist() == [
        [4, 4],
        [4, 5],
    ]  # (2, 0) and (2, 1) weights kept; biases do not count
    assert mask_products(masks).tolist() == [[4, 1], [1, 3]]


def test_the_kept_weights_of_the_last_layer_are_counted_for_each_class() -> None:
    layout = Layout(("0.weight", "0.bias", "1.weight", "1.bias"), ((3, 2), (3,), (2, 4), (2,)))
    flags = torch.zeros(layout.size, dtype=torch.bool)
    flags[9:12] = True  # three of the four weights of class 0
    flags[13] = True  # one of class 1
    assert kept_by_class([WeightMask.pack(flags)], layout, 2).tolist() == [[0.75, 0.25]]  # type: ignore[union-attr]
    assert kept_by_class([WeightMask.pack(flags)], layout, 7) is None


def test_a_last_layer_that_keeps_more_for_frequent_classes_gives_the_histogram_away() -> None:
    counts = histograms()
    shares = counts / counts.sum(1, keepdims=True)
    guess = guess_labels("last layer", 0.3 + 0.4 * shares, counts, rng())
    assert guess.distance < 1e-6
    assert (guess.hits, guess.p_value) == (1.0, 1 / 201)
