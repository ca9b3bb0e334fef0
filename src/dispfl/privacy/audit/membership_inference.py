"""Membership inference: how well an attacker tells the samples that a model was trained on from
others.

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
    """Return how confident a network is of each sample's label y, on a scale on which it is nearly
    normal:

    phi = log(p_y / (1 - p_y)) = z_y - log sum_{c != y} exp(z_c), with the outputs z.
    """
    found = []
    for x, y in samples.batches(EVALUATION_BATCH):
        outputs = network(x).double()
        own = outputs.gather(1, y[:, None])
        others = outputs.scatter(1, y[:, None], -torch.inf).logsumexp(1)
        found.append(own[:, 0] - others)
    return np.asarray(np.nan_to_num(torch.cat(found).numpy()))  # of a network that diverged


def likelihood_ratios(observed: Scores, shadows: Scores, inside: NDArray[np.bool_]) -> Scores:
    """Return log p(observed | the sample was trained on) - log p(observed | it was not), for each
    sample.

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


def area_under_curve(members: Scores, others: Scores) -> float:
    """Return the probability that a member has a higher score than a non-member; ties count
    half."""
    ranked = np.sort(others)
    below, not_above = (
        np.searchsorted(ranked, members, "left"),
        np.searchsorted(ranked, members, "right"),
    )
    return float((below + not_above).sum() / (2 * len(members) * len(others)))


def true_positive_rate(members: Scores, others: Scores, rate: float) -> float | None:
    """Return the share of members above the threshold that at most this share of non-members is
    above.

    None where there are so few non-members that not one of them may be above it.
    """
    allowed = int(rate * len(others) + 1e-9)
    if not allowed:
        return None
    threshold = np.sort(others)[-allowed - 1] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


@dataclass(frozen=True)
class Interval:
    """A value and the interval that has it with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MembershipResult:
    """How well members are told from non-members, by one kind of model."""

    view: str
    """What the attacker looks at."""
    auc: Interval
    tpr: Mapping[str, Interval | None]
    """The share of members that is found at a rate of false positives; None with too few
    non-members."""
    per_peer: Mapping[str, float]
    """The area under the curve of each peer's own samples."""


PeerScores = Mapping[str, tuple[Scores, Scores]]
"""Of each peer the scores of its members and of its non-members."""


def _pooled(peers: Sequence[tuple[Scores, Scores]]) -> tuple[Scores, Scores]:
    members, others = zip(*peers, strict=True)
    return np.concatenate(members), np.concatenate(others)


def _resampled(peer: tuple[Scores, Scores], rng: np.random.Generator) -> tuple[Scores, Scores]:
    members, others = (rng.choice(part, len(part)) for part in peer)
    return members, others


def summarize_scores(view: str, scores: PeerScores, rng: np.random.Generator) -> MembershipResult:
    """Return the rates over all peers' samples; intervals are of a bootstrap over peers and their
    samples."""
    peers = list(scores.values())
    resampled = [
        _pooled([_resampled(peers[k], rng) for k in rng.integers(len(peers), size=len(peers))])
        for _ in range(RESAMPLES)
    ]

    def interval(measure: Callable[[Scores, Scores], float | None]) -> Interval | None:
        value = measure(*_pooled(peers))
        if value is None:
            return None
        tail = (1 - CONFIDENCE) / 2
        values = [found for one in resampled if (found := measure(*one)) is not None]
        low, high = np.quantile(values or [value], [tail, 1 - tail])
        return Interval(value, float(low), float(high))

    auc = interval(area_under_curve)
    assert auc is not None
    tpr = {
        f"{rate:g}": interval(partial(true_positive_rate, rate=rate))
        for rate in FALSE_POSITIVE_RATES
    }
    return MembershipResult(
        view, auc, tpr, {peer: area_under_curve(*found) for peer, found in scores.items()}
    )
