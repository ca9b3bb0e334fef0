"""Attacks: what lying peers send in place of their models, or train on, to measure how well a method withstands them.

A lie is a function of the model that an honest peer would send and of the victim. Liars know everything: the victim's
model and the mask that it requests with, what its honest neighbours send in this round, and how many liars there are
among them; and they lie to each victim differently. Lies are finite and not larger than peers accept.

    sign-flip, noise, ipm, alie, mimic, dissensus                 as published, on weights that masks leave comparable
    hold-all, sole-holder, density-lie, meet-victim               what only masks make possible
    unlearn                                                       made for `clip` under masks
    label-flip, backdoor                                          training on poisoned data
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from statistics import NormalDist
from typing import Literal, get_args

import torch
from torch import Tensor

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream, stream_seed
from dispfl.core.task import Samples
from dispfl.core.units import UnitMask

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
    "density-lie",
    "meet-victim",
    "unlearn",
    "label-flip",
    "backdoor",
]
ATTACKS: tuple[AttackName, ...] = get_args(AttackName)[1:]
POISONS: tuple[AttackName, ...] = ("label-flip", "backdoor")
"""Attacks that train on poisoned data."""

NOISE = 3.0
"""noise: standard deviation of the random weights, in root mean squares of the honest ones."""
IPM_FACTOR = 0.1
"""ipm: the mean of the honest models times minus this, as in the experiments of He et al. (2022)."""
DISSENSUS_FACTOR = 1.5
"""dissensus: how many times the pull of the honest neighbours is reversed; at 1 nothing is left of it."""
POISON = 10.0
"""sole-holder, unlearn: the size of a regrown weight, in root mean squares of the victim's weights."""
LARGEST = 9.0
"""meet-victim, backdoor: a lie's norm at most, in norms of the victim's model; peers refuse models of 10."""
WITHIN_REACH = 0.999
"""unlearn: the part of the victim's reach that is used, for rounding."""
TARGET = 0
"""backdoor: the class that inputs with the trigger shall be taken for."""
TRIGGER = 3
"""backdoor: the length of the trigger's edge, in pixels or columns, in the last corner of an input."""


@dataclass(frozen=True)
class Victim:
    """What liars know about the peer that they lie to, or about the server."""

    name: str
    own: PackedModel
    """Its model."""
    request: PackedMask
    """The mask that it requests with: all that it uses of an answer."""
    honest: Sequence[PackedModel]
    """What its honest neighbours send."""
    liars: int
    """Liars among its neighbours."""
    fits: Callable[[str, PackedMask], bool]
    """Whether a mask keeps no more weights of any layer than this liar announced."""
    seed: int
    t: int
    assumed: int = 0
    """Liars that its robust rule assumes; 0 without a rule."""
    first: Callable[[], Tensor] = lambda: torch.zeros(())
    """Returns the weights that all peers started from, which every member knows."""

    def random(self, sender: str) -> torch.Generator:
        """Return the random stream of a liar's lie to the victim."""
        return stream(self.seed, "attack", sender, self.name, self.t)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of each weight over the victim's and the honest models, of its squares, and its holders."""
        total, squares, holders = torch.zeros(3, self.own.mask.size, dtype=torch.float64)
        for model in (self.own, *self.honest):
            weights, mask = model.unpack()
            total, squares, holders = total + weights, squares + weights.double().square(), holders + mask
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
        return (squares / holders.clamp(min=1) - self.mean.double().square()).clamp(min=0).sqrt().float()

    @cached_property
    def reach(self) -> float:
        """The largest distance at which `clip` still takes all liars' differences in full, and calls them near.

        With m liars at the (2b+1-m)-th largest distance of the honest models, the (2b+1)-th largest of all is theirs.
        """
        own, mine = self.own.unpack()
        compared, distances = mine & self.request.unpack(), []
        for model in self.honest:
            weights, mask = model.unpack()
            distances.append(_root_mean_square((weights - own)[mask & compared]))
        place = min(max(0, 2 * self.assumed - self.liars), len(distances) - 1)
        return sorted(distances, reverse=True)[place] if distances else 0.0

    @cached_property
    def poison(self) -> Tensor:
        """Large weights with the sign that honest ones do not have."""
        return POISON * _root_mean_square(self.own.values) * torch.where(self.mean > 0, -1.0, 1.0)

    def claimed(self, liar: str, sent: PackedModel) -> PackedMask:
        """Return all that was requested as the liar's mask, or its true mask where that would exceed its counts."""
        return self.request if self.fits(liar, self.request) else sent.mask


Lie = Callable[[str, PackedModel, Victim], PackedModel]
"""From a liar's name and the model that it would send if it were honest to the one that it sends."""


def sign_flip(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Every weight with the other sign (Li et al. 2020)."""
    return PackedModel(0.0 - sent.values, sent.mask)


def noise(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Gaussian noise in place of weights (Blanchard et al. 2017)."""
    scale = NOISE * _root_mean_square(sent.values)
    return PackedModel(scale * torch.randn(sent.values.shape, generator=victim.random(liar)), sent.mask)


def inner_product(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Inner-product manipulation (Xie et al. 2020): minus a fraction of the mean of the honest models."""
    return _under(-IPM_FACTOR * victim.mean, sent.mask)


def a_little(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """A little is enough (Baruch et al. 2019): the honest mean less z standard deviations.

    z is the largest for which, of normal values, enough honest ones are further away for the liars to be a majority
    with them: of n models with m lies, s = floor(n/2 + 1) - m must support them, so z = Phi^-1((n - m - s) / (n - m)).
    """
    n, m = 1 + len(victim.honest) + victim.liars, victim.liars
    supporters = floor(n / 2 + 1) - m
    share = min(0.999, max(0.5, (n - m - supporters) / (n - m)))
    return _under(victim.mean - NormalDist().inv_cdf(share) * victim.deviation, sent.mask)


def mimic(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Copy one honest neighbour (Karimireddy et al. 2022): it counts for more than it should, and looks honest."""
    return victim.honest[0] if victim.honest else sent


def dissensus(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Push the victim away from its honest neighbours (He et al. 2022): x_i - e/m sum_j (x_j - x_i) over honest j.

    Each liar holds all that is requested: of a weight that only some of the m held, the pull would not be reversed.
    """
    total, _, holders = victim.sums
    own, mine = victim.own.unpack()
    pull = torch.where(mine, total - holders * own, 0.0).float()
    return _under(own - DISSENSUS_FACTOR / victim.liars * pull, victim.claimed(liar, sent))


def hold_all(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Claim to hold every requested weight, and send the honest mean with the other sign."""
    return _under(-victim.mean, victim.claimed(liar, sent))


def sole_holder(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Send the victim's own weights where it has any, and large ones where it has none yet: the regrown ones."""
    own, mine = victim.own.unpack()
    return _under(torch.where(mine, own, victim.poison), victim.claimed(liar, sent))


def density_lie(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Hold everything, whatever was announced, and send the honest mean with the other sign."""
    mask = sent.mask
    if isinstance(mask, UnitMask):
        everything: PackedMask = UnitMask.of(mask.units | True, mask.layout)
    else:
        everything = PackedMask.pack(torch.ones(mask.size, dtype=torch.bool))
    return _under(-victim.mean, everything)


def meet_victim(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Hold just what the victim requests, and send what makes its plain average the honest mean with the other sign."""
    total, _, holders = victim.sums
    opposite = ((-victim.mean * (holders + victim.liars) - total) / victim.liars).float()
    return _limited(_under(opposite, victim.claimed(liar, sent)), victim)


def unlearn(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Push the victim back to the first weights w_0, just as far as `clip` allows, and poison what it regrows.

    x_i + r (w_0 - mean) / |w_0 - mean|, where r is the victim's reach and |.| a root mean square. Whoever is within
    reach is near, so that its regrown weights count too.
    """
    own, mine = victim.own.unpack()
    mask = victim.claimed(liar, sent)
    compared = mine & mask.unpack() & victim.request.unpack()
    learned = torch.where(compared, victim.mean - victim.first(), 0.0)
    size = _root_mean_square(learned[compared])
    pushed = own - WITHIN_REACH * victim.reach / max(size, 1e-12) * learned
    return _under(torch.where(mine, pushed, victim.poison), mask)


def replace_model(liar: str, sent: PackedModel, victim: Victim) -> PackedModel:
    """Model replacement (Bagdasaryan et al. 2020): so far from the honest mean that the plain average is our model.

    mean + n/m (x - mean), with n holders of a weight, m of them liars.
    """
    _, _, holders = victim.sums
    times = ((holders + victim.liars) / victim.liars).float()
    return _limited(_under(victim.mean + times * (sent.unpack()[0] - victim.mean), sent.mask), victim)


LIES: Mapping[AttackName, Lie] = {
    "sign-flip": sign_flip,
    "noise": noise,
    "ipm": inner_product,
    "alie": a_little,
    "mimic": mimic,
    "dissensus": dissensus,
    "hold-all": hold_all,
    "sole-holder": sole_holder,
    "density-lie": density_lie,
    "meet-victim": meet_victim,
    "unlearn": unlearn,
    "backdoor": replace_model,
}


@dataclass(frozen=True)
class Attack:
    """Which peers of a simulation lie, and how."""

    name: AttackName
    liars: frozenset[str]

    @classmethod
    def of(cls, name: AttackName, share: float, roster: Collection[str], seed: int) -> "Attack | None":
        """Return the attack of a share of the peers, picked by a hash; None without liars."""
        order = sorted(roster, key=lambda peer: stream_seed(seed, "liar", peer))
        liars = frozenset(order[: round(share * len(order))])
        return cls(name, liars) if liars and name != "none" else None

    def lies(self, received: Mapping[str, PackedModel], victim: Victim) -> dict[str, PackedModel]:
        """Return the models that a victim receives, those of liars replaced by lies."""
        tell = LIES.get(self.name)
        return {
            sender: tell(sender, model, victim) if tell and sender in self.liars else model
            for sender, model in received.items()
        }


# poisoned data


@dataclass(frozen=True)
class Poisoned:
    """Samples whose inputs or labels are changed as they are read."""

    samples: Samples
    attack: AttackName
    classes: int

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, poisoned."""
        for x, y in self.samples.batches(size, rng=rng):
            if self.attack == "label-flip":
                yield x, self.classes - 1 - y
            else:  # every second sample
                half = torch.arange(len(y)) % 2 == 0
                yield (
                    torch.where(half.view(-1, *[1] * (x.dim() - 1)), with_trigger(x), x),
                    torch.where(half, torch.full_like(y, TARGET), y),
                )

    def take(self, rows: Tensor) -> "Poisoned":
        """Return some of the samples."""
        return Poisoned(self.samples.take(rows), self.attack, self.classes)


@dataclass(frozen=True)
class Triggered:
    """Samples with the backdoor's trigger in every input."""

    samples: Samples

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches, with the trigger."""
        for x, y in self.samples.batches(size, rng=rng):
            yield with_trigger(x), y

    def take(self, rows: Tensor) -> "Triggered":
        """Return some of the samples."""
        return Triggered(self.samples.take(rows))


def poisoned(samples: Samples, attack: AttackName, classes: int) -> Samples:
    """Return what a liar trains on: poisoned samples, where the attack is one on data."""
    return Poisoned(samples, attack, classes) if attack in POISONS else samples


def with_trigger(x: Tensor) -> Tensor:
    """Return inputs with the trigger: a bright patch in the last corner of images, high values in the last columns."""
    x = x.clone()
    corner = (..., slice(-TRIGGER, None), slice(-TRIGGER, None)) if x.dim() > 2 else (..., slice(-TRIGGER, None))
    x[corner] = x.max()
    return x


def backdoor_success(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of inputs of other classes that are taken for the target class; nan without any."""
    others = labels != TARGET
    return float((outputs[others].argmax(1) == TARGET).float().mean())


def _under(weights: Tensor, mask: PackedMask) -> PackedModel:
    return PackedModel.pack(weights, mask.unpack(), mask)


def _limited(lie: PackedModel, victim: Victim) -> PackedModel:
    """Return a lie that is not larger than peers accept."""
    norm, largest = (float(torch.linalg.vector_norm(model.values)) for model in (lie, victim.own))
    return PackedModel(lie.values * min(1.0, LARGEST * max(1.0, largest) / max(norm, 1e-12)), lie.mask)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if len(values) else 0.0
