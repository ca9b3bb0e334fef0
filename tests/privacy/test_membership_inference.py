"""Membership inference by hand: confidences, likelihood ratios, and the rates that they give."""

import numpy as np
import pytest
import torch
from torch import nn

from dispfl.data.batches import ResidentSamples
from dispfl.privacy.audit.membership_inference import (
    area_under_curve,
    confidences,
    likelihood_ratios,
    summarize_scores,
    true_positive_rate,
)


def test_confidence_is_the_logit_of_the_labels_probability() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 800.0]])
    p = torch.softmax(outputs[0].double(), 0)[1]
    found = confidences(nn.Identity(), ResidentSamples(outputs, torch.tensor([1, 2])))
    assert found[0] == pytest.approx(float(torch.log(p / (1 - p))))
    assert found[1] == pytest.approx(800 - np.log(2))  # where p itself rounds to 1


def test_likelihood_ratio_of_two_samples_and_four_shadows_by_hand() -> None:
    # Sample 0: trained on by the first two shadows; sample 1: by the last two.
    shadows = np.array([[3.0, 0.0], [5.0, 2.0], [0.0, 6.0], [2.0, 8.0]])
    inside = np.array([[True, False], [True, False], [False, True], [False, True]])
    # Means: in 4 and 7, out 1 and 1. Each residual is 1 from its mean: the pooled variances are 4 *
    # 1 / (2 * 1) = 2.
    observed = np.array([4.0, 1.5])
    expected = [-(0**2) / 4 + 3**2 / 4, -(5.5**2) / 4 + 0.5**2 / 4]
    assert likelihood_ratios(observed, shadows, inside) == pytest.approx(expected)


def test_the_variances_of_inside_and_outside_differ() -> None:
    shadows = np.array([[10.0], [14.0], [-1.0], [1.0]])
    inside = np.array([[True], [True], [False], [False]])
    # In: mean 12, variance 8; out: mean 0, variance 2.
    expected = (-0.5 * np.log(8) - (6 - 12) ** 2 / 16) - (-0.5 * np.log(2) - 6**2 / 4)
    assert likelihood_ratios(np.array([6.0]), shadows, inside) == pytest.approx([expected])


def test_two_shadows_have_no_variance_and_the_nearer_one_decides() -> None:
    ratio = likelihood_ratios(
        np.array([1.0, 3.0]),
        np.array([[4.0, 4.0], [0.0, 0.0]]),
        np.array([[True] * 2, [False] * 2]),
    )
    assert ratio == pytest.approx([-(3**2) / 2 + 1 / 2, -1 / 2 + 3**2 / 2])


def test_the_area_under_the_curve_counts_pairs_and_halves_ties() -> None:
    assert area_under_curve(np.array([2.0, 3.0]), np.array([1.0, 2.0])) == (1 + 0.5 + 1 + 1) / 4
    assert area_under_curve(np.array([1.0]), np.array([2.0])) == 0


def test_the_true_positive_rate_is_taken_above_the_allowed_false_positives() -> None:
    outsiders = np.arange(100.0)  # one in a hundred may be above: the threshold is 98
    assert true_positive_rate(np.array([97.0, 98.0, 98.5, 200.0]), outsiders, 0.01) == 0.5
    assert true_positive_rate(np.array([97.0]), outsiders, 0.001) is None
    assert true_positive_rate(np.array([-5.0]), outsiders, 1.0) == 1.0


def test_an_attack_that_finds_everything_and_one_that_finds_nothing() -> None:
    rng = np.random.default_rng(0)
    perfect = {name: (np.full(200, 5.0), rng.normal(size=200)) for name in "abcd"}
    blind = {name: (rng.normal(size=500), rng.normal(size=500)) for name in "abcd"}
    found = summarize_scores("model", perfect, rng)
    assert (found.auc.value, found.auc.low, found.tpr["0.01"].value) == (1.0, 1.0, 1.0)  # type: ignore[union-attr]
    assert found.tpr["0.001"] is None  # 800 non-members
    nothing = summarize_scores("model", blind, rng)
    assert nothing.auc.low < 0.5 < nothing.auc.high
    assert nothing.auc.value == pytest.approx(0.5, abs=0.03)
    assert nothing.per_peer.keys() == blind.keys()
