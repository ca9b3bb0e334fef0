"""Settings of the methods whose averages can withstand lies, and how they average
(robust/rules.py)."""

from collections.abc import Mapping
from functools import reduce
from math import ceil, isfinite
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from dispfl.channels.block_average import robust_block_average
from dispfl.channels.units import UnitMask
from dispfl.core.averaging import robust_average_of
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import Method, ServerMethod
from dispfl.topology import Topology, peer_names


def _check_byzantine(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(
            "must be a number of Byzantine peers, such as 2, or a share below 0.5, such as 0.2;"
            f" got {value!r}."
        )
    if isinstance(value, float) and value >= 0.5:
        whole = (
            f" For {value:g} Byzantine peers write {int(value)}."
            if value >= 1 and value == int(value)
            else ""
        )
        raise ValueError(f"must be a whole number or a share below 0.5, got {value:g}.{whole}")
    return value


ByzantineCount = Annotated[int | float, BeforeValidator(_check_byzantine)]
"""A number of Byzantine peers, or a share of the received models."""


class Robust(Method):
    """A method whose average can withstand Byzantine peers."""

    robust: Literal["none", "clip", "trim", "nnm"] = "none"
    """How received models are averaged: plainly (the papers), or by a rule that tolerates some
    Byzantine peers: clipped differences to our own weights, trimmed means, or nearest-neighbour
    mixing before trimmed means.
    """
    byzantine: ByzantineCount = 0.2
    """With a robust rule: the Byzantine peers among the models that a peer or the server averages
    in a round; a share is rounded up, but always to less than half.
    """

    def assumed_byzantine(self, received: int) -> int:
        """Return b, the number of Byzantine peers assumed among this many models of others."""
        if isinstance(self.byzantine, int):
            return self.byzantine
        return max(0, min(ceil(self.byzantine * received - 1e-9 * received), (received - 1) // 2))

    def robust_mix(
        self, trainer: Trainer, models: Mapping[str, PackedModel], mask: Tensor | UnitMask
    ) -> Tensor | None:
        """Return the average of our own and the received models under our next mask, and report the
        senders' distances.

        None if no lie is assumed: then the plain average is right.
        """
        b, names = self.assumed_byzantine(len(models) - 1), sorted(models)
        if self.robust == "none" or b == 0:
            return None
        ordered, own = [models[name] for name in names], names.index(trainer.peer)
        if isinstance(mask, UnitMask):
            average, trust = robust_block_average(
                ordered, own, mask, trainer.first_weights(), self.robust, b
            )
        else:
            average, trust = robust_average_of(ordered, own, mask, self.robust, b)
        if trust is not None:
            senders = [j for j in range(len(names)) if j != own]
            known = {
                j: distance for j, distance in enumerate(trust.distances) if isfinite(distance)
            }
            trainer.report.distances = {names[j]: known.get(j) for j in senders}
            trainer.report.far = [names[j] for j in senders if not trust.near[j]]
        return average

    def robust_aggregate(
        self, server: PackedModel, uploads: Mapping[str, PackedModel]
    ) -> Tensor | None:
        """Return the server's next weights from the uploads, centred at its present ones; None if
        no lie is assumed.

        Every upload counts the same: the number of samples that a peer claims to have could be a
        lie too.
        """
        b = self.assumed_byzantine(len(uploads))
        if self.robust == "none" or b == 0:
            return None
        models, mask = [*(uploads[name] for name in sorted(uploads)), server], server.mask.unpack()
        return robust_average_of(models, len(uploads), mask, self.robust, b, averages_own=False)[0]

    def robust_start(self, first: Tensor, received: Mapping[str, PackedModel]) -> Tensor | None:
        """Return the weights that a joining peer begins with, from the first weights; None if no
        lie is assumed.

        It has no model to compare with. So the weights that more than 2b models hold are averaged
        first, and senders that are near to the result decide those that fewer hold. What no such
        sender holds keeps its first value.
        """
        b = self.assumed_byzantine(len(received))
        if self.robust == "none" or b == 0:
            return None
        models = [PackedModel.pack(*received[name].unpack()) for name in sorted(received)]
        everything, held = (
            torch.ones(len(first), dtype=torch.bool),
            [model.mask.unpack() for model in models],
        )
        enough = sum(held, torch.zeros(len(first), dtype=torch.int32)) > 2 * b
        nothing = PackedModel(torch.zeros(0), PackedMask.pack(~everything))
        centre, _ = robust_average_of(
            [*models, nothing], len(models), everything, self.robust, b, averages_own=False
        )
        middle = PackedModel.pack(centre, enough)
        others, trust = robust_average_of(
            [*models, middle], len(models), everything, "clip", b, averages_own=False
        )
        trusted = (mask for mask, factor in zip(held, trust.regrown, strict=False) if factor > 0)
        known = reduce(torch.logical_or, trusted, torch.zeros_like(everything))
        return torch.where(enough, centre, torch.where(known, others, first))


def check_byzantine(method: Method, topology: Topology, peers: int) -> None:
    """Refuse a number of Byzantine peers that the fewest models which a peer, or the server,
    averages in a round cannot bear."""
    if not isinstance(method, Robust) or method.robust == "none":
        return
    if isinstance(method, ServerMethod):
        resolved = method.resolved(topology, peers)
        assert isinstance(resolved, ServerMethod)
        received, who = min(resolved.cohort or peers, peers), "the server averages"
    else:
        received, who = (
            min(map(len, topology.neighbours(0, 0, peer_names(peers)).values())),
            "a peer receives",
        )
    if method.assumed_byzantine(received) > max(0, received - 1) // 2:
        fix = f"Use at most {(received - 1) // 2}" if received > 2 else "Use method.robust=none"
        models = f"{received} {'model' if received == 1 else 'models'}"
        raise ConfigError(
            f"method.byzantine is {method.byzantine}, but {who} {models} in a round, and a rule"
            f" withstands less than half of them. {fix}, or let more be received.",
            key="method.byzantine",
        )
