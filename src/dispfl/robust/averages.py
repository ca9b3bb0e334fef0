"""Methods whose averages withstand Byzantine peers: their settings, and how they average."""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import Method, ServerMethod
from dispfl.robust.rules import Rule, Trust, robust_average_of
from dispfl.topology import Topology, peer_names


def _check_byzantine(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(
            "must be a number of Byzantine peers, such as 2, or a share below 0.5, such as 0.2;"
            f" got {value!r}."
        )
    if isinstance(value, float) and value >= 0.5:
        hint = ""
        if value >= 1 and value == int(value):
            hint = f" For {value:g} Byzantine peers write {int(value)}."
        raise ValueError(f"must be a whole number or a share below 0.5, got {value:g}.{hint}")
    return value


ByzantineCount = Annotated[int | float, BeforeValidator(_check_byzantine)]
"""A number of Byzantine peers, or a share of the received models."""


class Robust(Method):
    """A method whose average can withstand Byzantine peers."""

    robust: Literal["none", "clip", "trim", "nnm"] = "none"
    """How received models are averaged: plainly (the papers), or by a rule for Byzantine peers.

    The rules are clipped differences to our own weights, trimmed means, and nearest-neighbour
    mixing before trimmed means.
    """
    byzantine: ByzantineCount = 0.2
    """With a robust rule: how many of the models averaged in a round may be Byzantine.

    A share is rounded up, but always to less than half.
    """

    def assumed_byzantine(self, received: int) -> int:
        """Return b, the number of Byzantine peers assumed among this many models of others."""
        if isinstance(self.byzantine, int):
            return self.byzantine
        share = ceil(self.byzantine * received - 1e-9 * received)
        below_half = (received - 1) // 2
        return max(0, min(share, below_half))

    def robust_mix(
        self, trainer: Trainer, models: Mapping[str, PackedModel], mask: Mask
    ) -> Tensor | None:
        """Return the average of our own and the received models under our next mask.

        It reports the senders' distances. None if no Byzantine peer is assumed: then the plain
        average is right.
        """
        b = self.assumed_byzantine(len(models) - 1)
        if self.robust == "none" or b == 0:
            return None
        if not models[trainer.peer].mask.kept and not mask.averages_without_own:
            return PackedModel.pack(trainer.first_weights(), mask).values

        names = sorted(models)
        own_index = names.index(trainer.peer)
        ordered = [models[name] for name in names]
        average, trust = robust_average_of(ordered, own_index, mask, self.robust, b)

        trusted_masks = []
        trainer.report.distances = {}
        trainer.report.far = []
        for index, name in enumerate(names):
            if index == own_index:
                trusted_masks.append(models[name].mask)
                continue
            distance = trust.distances[index]
            trainer.report.distances[name] = distance if isfinite(distance) else None
            if trust.near[index]:
                trusted_masks.append(models[name].mask)
            else:
                trainer.report.far.append(name)
        mask.start_unheld_(average, trusted_masks, trainer.first_weights)
        return average

    def robust_aggregate(
        self, server: PackedModel, uploads: Mapping[str, PackedModel]
    ) -> Tensor | None:
        """Return the server's next weights from the uploads, centred at its present ones.

        None if no Byzantine peer is assumed. Every upload counts the same: the number of samples
        that a peer claims to have could be false too.
        """
        b = self.assumed_byzantine(len(uploads))
        if self.robust == "none" or b == 0:
            return None
        models = [uploads[name] for name in sorted(uploads)]
        average, _ = _average_around(server, models, server.mask, self.robust, b)
        return average

    def robust_start(self, first: Tensor, received: Mapping[str, PackedModel]) -> Tensor | None:
        """Return the weights that a joining peer begins with, from the first weights.

        None if no Byzantine peer is assumed. A joining peer has no model to compare with. So the
        weights that more than 2b models hold are averaged first, and senders that are near to the
        result decide those that fewer hold. What no such sender holds keeps its first value.
        """
        b = self.assumed_byzantine(len(received))
        if self.robust == "none" or b == 0:
            return None
        models = [PackedModel.pack(*received[name].unpack()) for name in sorted(received)]
        masks = [model.mask.unpack() for model in models]
        everything = torch.ones(len(first), dtype=torch.bool)
        full = WeightMask.pack(everything)
        holders = sum(masks, torch.zeros(len(first), dtype=torch.int32))
        enough = holders > 2 * b

        empty = PackedModel(torch.zeros(0), WeightMask.pack(~everything))
        centre, _ = _average_around(empty, models, full, self.robust, b)
        middle = PackedModel.pack(centre, enough)
        held_by_few, trust = _average_around(middle, models, full, "clip", b)

        by_near_senders = torch.zeros_like(everything)
        for mask, factor in zip(masks, trust.regrown, strict=False):
            if factor > 0:
                by_near_senders |= mask
        return torch.where(enough, centre, torch.where(by_near_senders, held_by_few, first))


def _average_around(
    centre: PackedModel, models: Sequence[PackedModel], mask: Mask, rule: Rule, b: int
) -> tuple[Tensor, Trust]:
    """Average models by a rule whose centre is not averaged itself, such as a server's model."""
    rows = [*models, centre]
    return robust_average_of(rows, len(models), mask, rule, b, averages_own=False)


def check_byzantine(method: Method, topology: Topology, peers: int) -> None:
    """Refuse more Byzantine peers than the rule tolerates where the fewest models are averaged."""
    if not isinstance(method, Robust) or method.robust == "none":
        return
    if isinstance(method, ServerMethod):
        cohort = method.resolved(topology, peers).cohort
        received = min(cohort or peers, peers)
        receiver = "the server averages"
    else:
        neighbours = topology.neighbours(0, 0, peer_names(peers))
        received = min(map(len, neighbours.values()))
        receiver = "a peer receives"

    most = max(0, received - 1) // 2
    if method.assumed_byzantine(received) > most:
        fix = f"Use at most {most}" if received > 2 else "Use method.robust=none"
        models = "1 model" if received == 1 else f"{received} models"
        raise ConfigError(
            f"method.byzantine is {method.byzantine}, but {receiver} {models} in a round, and a"
            f" rule withstands less than half of them. {fix}, or let more be received.",
            key="method.byzantine",
        )
