"""Membership inference: how well an attacker tells training samples from others.

The likelihood-ratio attack (LiRA, online, with a pooled variance; Carlini et al. 2022) compares how
confident the attacked model is of a sample with how confident models are that were trained with it,
and without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dispfl.core.samples import Samples
from dispfl.core.train import EVALUATION_BATCH

Scores = NDArray[np.float64]
FALSE_POSITIVE_RATES = (0.01, 0.001)
SMALLEST_VARIANCE = 1e-12
RESAMPLES = 500
CONFIDENCE = 0.95


@torch.no_grad()
def confidences(network: nn.Module, samples: Samples) -> Scores:
    """Return how confident a network is of each sample's label y, on a nearly normal scale.

    With the outputs z:

        phi = log(p_y / (1 - p_y)) = z_y - log sum_{c != y} exp(z_c)
    """
    phi = []
    for x, y in samples.batches(EVALUATION_BATCH):
        outputs = network(x).double()
        z_y = outputs.gather(1, y[:, None])[:, 0]
        other_classes = outputs.scatter(1, y[:, None], -torch.inf)
        phi.append(z_y - other_classes.logsumexp(1))
    return np.asarray(np.nan_to_num(torch.cat(phi).numpy()))  # of a network that diverged


def likelihood_ratios(observed: Scores, shadows: Scores, inside: NDArray[np.bool_]) -> Scores:
    """Return log p(observed | trained on the sample) - log p(observed | not trained on it).

    `shadows` are the confidences of models (rows) of samples (columns), and `inside` says which
    samples each of them was trained on. For every sample both are normal distributions, with means
    over these models; the variances are pooled over all samples, because with few models those of
    single samples are not known (Carlini et al., VI-C).
    """
    densities = []
    for member in (inside, ~inside):
        count = member.sum(0)
        mean = np.where(member, shadows, 0.0).sum(0) / np.maximum(count, 1)
        residuals = np.where(member, shadows - mean, 0.0)
        freedom = (count - 1).clip(min=0).sum()
        variance = max((residuals**2).sum() / freedom, SMALLEST_VARIANCE) if freedom else 1.0
        densities.append(-0.5 * np.log(variance) - (observed - mean) ** 2 / (2 * variance))
    return np.asarray(densities[0] - densities[1])


def area_under_curve(members: Scores, outsiders: Scores) -> float:
    """Return the probability that a member scores higher than a non-member; ties count half."""
    ranked = np.sort(outsiders)
    below = np.searchsorted(ranked, members, "left")
    not_above = np.searchsorted(ranked, members, "right")
    return float((below + not_above).sum() / (2 * len(members) * len(outsiders)))


def true_positive_rate(members: Scores, outsiders: Scores, rate: float) -> float | None:
    """Return the share of members above the threshold with this false positive rate.

    None where there are so few non-members that not one of them may be above it.
    """
    allowed = int(rate * len(outsiders) + 1e-9)
    if not allowed:
        return None
    threshold = -np.inf
    if allowed < len(outsiders):
        threshold = np.sort(outsiders)[-allowed - 1]
    return float((members > threshold).mean())


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MembershipResult:
    """How well members are told from non-members, by one view of the models."""

    view: str
    """What the attacker looks at."""
    auc: Interval
    tpr: Mapping[str, Interval | None]
    """The share of members that is found at a rate of false positives; None with too few
    non-members."""
    per_peer: Mapping[str, float]
    """The area under the curve of each peer's own samples."""


MemberScores = tuple[Scores, Scores]
"""The scores of members and of non-members."""


def summarize_scores(
    view: str, scores: Mapping[str, MemberScores], rng: np.random.Generator
) -> MembershipResult:
    """Return the rates over all samples, from the scores of each peer's.

    Intervals are of a bootstrap over peers and their samples.
    """
    pooled = _pooled(list(scores.values()))
    bootstrap = [_resampled(list(scores.values()), rng) for _ in range(RESAMPLES)]
    auc = _interval(area_under_curve, pooled, bootstrap)
    assert auc is not None
    tpr = {}
    for rate in FALSE_POSITIVE_RATES:
        measure = partial(true_positive_rate, rate=rate)
        tpr[f"{rate:g}"] = _interval(measure, pooled, bootstrap)
    per_peer = {peer: area_under_curve(*peer_scores) for peer, peer_scores in scores.items()}
    return MembershipResult(view, auc, tpr, per_peer)


def _pooled(peers: Sequence[MemberScores]) -> MemberScores:
    members, outsiders = zip(*peers, strict=True)
    return np.concatenate(members), np.concatenate(outsiders)


def _resampled(peers: Sequence[MemberScores], rng: np.random.Generator) -> MemberScores:
    """Draw as many peers, and of each as many samples, with replacement."""
    drawn = []
    for k in rng.integers(len(peers), size=len(peers)):
        members, outsiders = peers[k]
        members = rng.choice(members, len(members))
        outsiders = rng.choice(outsiders, len(outsiders))
        drawn.append((members, outsiders))
    return _pooled(drawn)


def _interval(
    measure: Callable[[Scores, Scores], float | None],
    pooled: MemberScores,
    bootstrap: Sequence[MemberScores],
) -> Interval | None:
    value = measure(*pooled)
    if value is None:
        return None
    values = []
    for resampled in bootstrap:
        resampled_value = measure(*resampled)
        if resampled_value is not None:
            values.append(resampled_value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values or [value], [tail, 1 - tail])
    return Interval(value, float(low), float(high))
