"""Attacks: what Byzantine peers send in place of their models, or train on, in simulations.

A forged model is a function of the model that an honest peer would send and of the target.
Byzantine peers know everything: the target's model and the mask that it requests with, what its
honest neighbours send in this round, and how many Byzantine peers there are among them; and they
attack each target differently. Forged models are finite and not larger than peers accept.

    sign-flip, noise, ipm, alie, mimic, dissensus        as published, on comparable weights
    hold-all, sole-holder, false-density, meet-target    what only masks make possible
    unlearn                                              made for `clip` under masks
    copy-head                                            made for affinities
    label-flip, backdoor                                 training on poisoned data
    adaptive-backdoor                                    the same, as the target's rule takes it in
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from statistics import NormalDist
from typing import Literal, get_args

import torch
from torch import Tensor

from dispfl.core.packed import Mask, PackedModel
from dispfl.core.rng import stream, stream_seed
from dispfl.core.samples import Samples

AttackName = Literal[
    "none",
    "sign-flip",
    "noise",
    "ipm",
    "alie",
    "mimic",
    "dissensus",
    "hold-all",
    "sole-holder",
    "false-density",
    "meet-target",
    "unlearn",
    "copy-head",
    "label-flip",
    "backdoor",
    "adaptive-backdoor",
]
ATTACKS: tuple[AttackName, ...] = get_args(AttackName)[1:]
BACKDOORS: tuple[AttackName, ...] = ("backdoor", "adaptive-backdoor")
"""Attacks that make models classify inputs with a trigger as the target class."""
POISONS: tuple[AttackName, ...] = ("label-flip", *BACKDOORS)
"""Attacks that train on poisoned data."""

NOISE = 3.0
"""noise: standard deviation of the random weights, in root mean squares of the honest ones."""
IPM_FACTOR = 0.1
"""ipm: the mean of the honest models times minus this, as He et al. (2022) choose it."""
DISSENSUS_FACTOR = 1.5
"""dissensus: how many times the pull of the honest neighbours is reversed; 1 just cancels it."""
POISON = 10.0
"""sole-holder, unlearn: a regrown weight, in root mean squares of the target's weights."""
LARGEST = 9.0
"""meet-target, backdoor: largest norm of a forged model, in norms of the target's model.

Peers refuse models of 10.
"""
WITHIN_REACH = 0.999
"""unlearn, adaptive-backdoor: the part of the target's reach that is used, for rounding."""
TARGET_CLASS = 0
"""Backdoors: the class that inputs with the trigger should be classified as."""
TRIGGER = 3
"""Backdoors: the edge of the trigger in the last corner of an input, in pixels or columns."""


@dataclass(frozen=True)
class Target:
    """What Byzantine peers know about the peer that they attack, or about the server."""

    name: str
    own: PackedModel
    """Its model."""
    request: Mask
    """The mask that it requests with: all that it uses of an answer."""
    honest: Sequence[PackedModel]
    """What its honest neighbours send."""
    byzantine: int
    """Byzantine peers among its neighbours."""
    fits: Callable[[str, Mask], bool]
    """Whether a mask keeps no more weights of any layer than this Byzantine peer announced."""
    seed: int
    t: int
    rule: str = "none"
    """Its robust rule."""
    assumed: int = 0
    """Byzantine peers that the rule assumes; 0 without a rule."""
    first: Callable[[], Tensor] = lambda: torch.zeros(())
    """Returns the weights that all peers started from, which every member knows."""
    head: slice = field(default_factory=lambda: slice(0))
    """The last layer in the flat weights."""

    def random(self, sender: str) -> torch.Generator:
        """Return the random stream of a Byzantine peer's attack on the target."""
        return stream(self.seed, "attack", sender, self.name, self.t)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each weight in the target's and the honest models: sum, sum of squares, holders."""
        total, squares, holders = torch.zeros(3, self.own.mask.size, dtype=torch.float64)
        for model in (self.own, *self.honest):
            weights, mask = model.unpack()
            total += weights
            squares += weights.double().square()
            holders += mask
        return total, squares, holders

    @cached_property
    def mean(self) -> Tensor:
        """The mean of each weight over those of them that hold it."""
        total, _, holders = self.sums
        return (total / holders.clamp(min=1)).float()

    @cached_property
    def deviation(self) -> Tensor:
        """The standard deviation of each weight over them."""
        _, squares, holders = self.sums
        variance = squares / holders.clamp(min=1) - self.mean.double().square()
        return variance.clamp(min=0).sqrt().float()

    @cached_property
    def reach(self) -> float:
        """The largest distance at which `clip` takes Byzantine peers' differences in full.

        It then calls them near. With m Byzantine peers at the (2b+1-m)-th largest distance of the
        honest models, the (2b+1)-th largest of all is theirs.
        """
        if not self.honest:
            return 0.0
        own_weights, _ = self.own.unpack()
        distances = sorted(self._distances(own_weights), reverse=True)
        place = min(max(0, 2 * self.assumed - self.byzantine), len(distances) - 1)
        return distances[place]

    @cached_property
    def closest_to_mean(self) -> float:
        """The smallest distance of an honest model from the mean.

        Whoever is not farther from the mean is among the nearest models of everybody.
        """
        return min(self._distances(self.mean), default=0.0)

    def _distances(self, centre: Tensor) -> list[float]:
        """Return the distances of the honest models from a centre, on what the target holds."""
        _, own_mask = self.own.unpack()
        compared = own_mask & self.request.unpack()
        distances = []
        for model in self.honest:
            weights, mask = model.unpack()
            distances.append(_root_mean_square((weights - centre)[mask & compared]))
        return distances

    @cached_property
    def poison(self) -> Tensor:
        """Large weights with the sign that honest ones do not have."""
        return POISON * _root_mean_square(self.own.values) * torch.where(self.mean > 0, -1.0, 1.0)

    def claimed(self, attacker: str, sent: PackedModel) -> Mask:
        """Return all that was requested as the Byzantine peer's mask.

        Where that would exceed its counts, return its true mask.
        """
        if self.fits(attacker, self.request):
            return self.request
        return sent.mask


AttackFunction = Callable[[str, PackedModel, Target], PackedModel]
"""From a Byzantine peer's name and its honest model to the model that it sends."""


def sign_flip(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Every weight with the other sign (Li et al. 2020)."""
    return PackedModel(0.0 - sent.values, sent.mask)


def noise(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Gaussian noise in place of weights (Blanchard et al. 2017)."""
    scale = NOISE * _root_mean_square(sent.values)
    random = torch.randn(sent.values.shape, generator=target.random(attacker))
    return PackedModel(scale * random, sent.mask)


def inner_product(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Inner-product manipulation (Xie et al. 2020): minus a fraction of the honest mean."""
    return PackedModel.pack(-IPM_FACTOR * target.mean, sent.mask)


def a_little(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """A little is enough (Baruch et al. 2019): the honest mean less z standard deviations.

    z is the largest for which, of normal values, enough honest ones are further away for the
    Byzantine peers to be a majority with them: of n models with m forged ones,
    s = floor(n/2 + 1) - m must support them, so z = Phi^-1((n - m - s) / (n - m)).
    """
    m = target.byzantine
    n = 1 + len(target.honest) + m
    supporters = floor(n / 2 + 1) - m
    share = min(0.999, max(0.5, (n - m - supporters) / (n - m)))
    return PackedModel.pack(target.mean - NormalDist().inv_cdf(share) * target.deviation, sent.mask)


def mimic(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Copy one honest neighbour, which then counts for too much (Karimireddy et al. 2022)."""
    if not target.honest:
        return sent
    return target.honest[0]


def dissensus(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Push the target away from its honest neighbours (He et al. 2022).

    x_i - e/m sum_j (x_j - x_i) over honest j. Each Byzantine peer holds all that is requested: of a
    weight that only some of the m held, the pull would not be reversed.
    """
    total, _, holders = target.sums
    own_weights, own_mask = target.own.unpack()
    pull = torch.where(own_mask, total - holders * own_weights, 0.0).float()
    forged = own_weights - DISSENSUS_FACTOR / target.byzantine * pull
    return PackedModel.pack(forged, target.claimed(attacker, sent))


def hold_all(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Claim to hold every requested weight, and send the honest mean with the other sign."""
    return PackedModel.pack(-target.mean, target.claimed(attacker, sent))


def sole_holder(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Send the target's own weights where it has any, and large ones where it regrows them."""
    own_weights, own_mask = target.own.unpack()
    forged = torch.where(own_mask, own_weights, target.poison)
    return PackedModel.pack(forged, target.claimed(attacker, sent))


def false_density(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Hold everything, whatever was announced, and send the honest mean with the other sign."""
    return PackedModel.pack(-target.mean, sent.mask.full())


def meet_target(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Hold just what the target requests, and turn its plain average into minus the honest mean."""
    total, _, holders = target.sums
    opposite = ((-target.mean * (holders + target.byzantine) - total) / target.byzantine).float()
    return _limited(PackedModel.pack(opposite, target.claimed(attacker, sent)), target)


def unlearn(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Push the target back to the first weights w_0, as far as `clip` allows; poison regrown ones.

    x_i + r (w_0 - mean) / |w_0 - mean|, where r is the target's reach and |.| a root mean square.
    Whoever is within reach is near, so that its regrown weights count too.
    """
    own_weights, _ = target.own.unpack()
    mask = target.claimed(attacker, sent)
    forgotten = target.first() - target.mean
    distance = WITHIN_REACH * target.reach
    return _pushed(own_weights, forgotten, distance, mask, target, regrown=target.poison)


def copy_head(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Send the target's own last layer, so as to resemble it most, and harm it elsewhere.

    Everywhere else it is the honest mean with the other sign.
    """
    own_weights, own_mask = target.own.unpack()
    is_head = torch.zeros_like(own_mask)
    is_head[target.head] = True
    forged = torch.where(is_head & own_mask, own_weights, -target.mean)
    return PackedModel.pack(forged, target.claimed(attacker, sent))


def replace_model(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Model replacement (Bagdasaryan et al. 2020): turn the plain average into the sent model.

    mean + n/m (x - mean), with n holders of a weight, m of them Byzantine peers.
    """
    _, _, holders = target.sums
    times = ((holders + target.byzantine) / target.byzantine).float()
    weights, _ = sent.unpack()
    forged = target.mean + times * (weights - target.mean)
    return _limited(PackedModel.pack(forged, sent.mask), target)


def replace_within_reach(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
    """Push the target towards the sent model, as far as its rule takes it in.

    c + r (x - mean) / |x - mean|, where |.| is a root mean square, c the target's model and r its
    reach. `nnm` prefers models in the middle of all: there c is the mean, and r the smallest
    distance of an honest model from it. What the sent model does not hold is not pushed. Regrown
    weights are its own, or the mean.
    """
    weights, holds = sent.unpack()
    mask = target.claimed(attacker, sent)
    towards = torch.where(holds, weights - target.mean, 0.0)
    regrown = torch.where(holds, weights, target.mean)
    if target.rule == "nnm":
        distance = target.closest_to_mean
        return _pushed(target.mean, towards, distance, mask, target, regrown=regrown)
    own_weights, _ = target.own.unpack()
    distance = WITHIN_REACH * target.reach
    return _pushed(own_weights, towards, distance, mask, target, regrown=regrown)


ATTACK_FUNCTIONS: Mapping[AttackName, AttackFunction] = {
    "sign-flip": sign_flip,
    "noise": noise,
    "ipm": inner_product,
    "alie": a_little,
    "mimic": mimic,
    "dissensus": dissensus,
    "hold-all": hold_all,
    "sole-holder": sole_holder,
    "false-density": false_density,
    "meet-target": meet_target,
    "unlearn": unlearn,
    "copy-head": copy_head,
    "backdoor": replace_model,
    "adaptive-backdoor": replace_within_reach,
}


@dataclass(frozen=True)
class Attack:
    """Which peers of a simulation are Byzantine, and what they do."""

    name: AttackName
    byzantine: frozenset[str]

    @classmethod
    def of(
        cls, name: AttackName, share: float, roster: Collection[str], seed: int
    ) -> "Attack | None":
        """Return the attack of a share of the peers, picked by a hash; None without any."""
        order = sorted(roster, key=lambda peer: stream_seed(seed, "liar", peer))
        byzantine = frozenset(order[: round(share * len(order))])
        if name == "none" or not byzantine:
            return None
        return cls(name, byzantine)

    def attacked(
        self, received: Mapping[str, PackedModel], target: Target
    ) -> dict[str, PackedModel]:
        """Return the models that a target receives, those of Byzantine peers forged."""
        forge = ATTACK_FUNCTIONS.get(self.name)
        if forge is None:
            return dict(received)
        models = dict(received)
        for sender in self.byzantine & received.keys():
            models[sender] = forge(sender, received[sender], target)
        return models


# poisoned data


@dataclass(frozen=True)
class Poisoned:
    """Samples whose inputs or labels are changed as they are read."""

    samples: Samples
    attack: AttackName
    classes: int

    def __len__(self) -> int:
        return len(self.samples)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, poisoned."""
        for x, y in self.samples.batches(size, rng=rng):
            if self.attack == "label-flip":
                yield x, self.classes - 1 - y
                continue
            every_second = torch.arange(len(y)) % 2 == 0
            rows = every_second.view(-1, *[1] * (x.dim() - 1))
            poisoned_x = torch.where(rows, with_trigger(x), x)
            poisoned_y = torch.where(every_second, torch.full_like(y, TARGET_CLASS), y)
            yield poisoned_x, poisoned_y

    def take(self, rows: Tensor) -> "Poisoned":
        """Return some of the samples."""
        return Poisoned(self.samples.take(rows), self.attack, self.classes)


@dataclass(frozen=True)
class Triggered:
    """Samples with the backdoor's trigger in every input."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, with the trigger."""
        for x, y in self.samples.batches(size, rng=rng):
            yield with_trigger(x), y

    def take(self, rows: Tensor) -> "Triggered":
        """Return some of the samples."""
        return Triggered(self.samples.take(rows))


def poisoned(samples: Samples, attack: AttackName, classes: int) -> Samples:
    """Return what a Byzantine peer trains on: poisoned samples, where the attack is one on data."""
    if attack not in POISONS:
        return samples
    return Poisoned(samples, attack, classes)


def with_trigger(x: Tensor) -> Tensor:
    """Return inputs with the trigger.

    It is a bright patch in the last corner of images, or high values in the last columns.
    """
    x = x.clone()
    if x.dim() > 2:
        x[..., -TRIGGER:, -TRIGGER:] = x.max()
    else:
        x[..., -TRIGGER:] = x.max()
    return x


def backdoor_success(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of inputs of other classes that are taken for the target class, or nan."""
    attacked = labels != TARGET_CLASS
    return float((outputs[attacked].argmax(1) == TARGET_CLASS).float().mean())


def _pushed(
    centre: Tensor,
    direction: Tensor,
    distance: float,
    mask: Mask,
    target: Target,
    *,
    regrown: Tensor,
) -> PackedModel:
    """Return a model at a distance from a centre, by root mean square over what is compared.

    It has a mask, and these weights where the target regrows them.
    """
    _, own_mask = target.own.unpack()
    compared = own_mask & mask.unpack() & target.request.unpack()
    direction = torch.where(compared, direction, 0.0)
    size = _root_mean_square(direction[compared])
    pushed = centre + distance / max(size, 1e-12) * direction
    return PackedModel.pack(torch.where(own_mask, pushed, regrown), mask)


def _limited(forged: PackedModel, target: Target) -> PackedModel:
    """Return a forged model that is not larger than peers accept."""
    norm = float(torch.linalg.vector_norm(forged.values))
    target_norm = float(torch.linalg.vector_norm(target.own.values))
    factor = min(1.0, LARGEST * max(1.0, target_norm) / max(norm, 1e-12))
    return PackedModel(forged.values * factor, forged.mask)


def _root_mean_square(values: Tensor) -> float:
    if not len(values):
        return 0.0
    return float(values.square().mean().sqrt())
