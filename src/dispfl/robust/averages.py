"""Methods whose averages withstand Byzantine peers: their settings, and how they average."""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import GossipMethod, Method, ServerMethod
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
"""A number of Byzantine peers, or a share of the requested models."""
FEWEST_PROTECTED = 3
"""The fewest models of others among which a rule withstands a Byzantine one: less than half."""


class Robust(Method):
    """A method whose average can withstand Byzantine peers."""

    robust: Literal["none", "clip", "trim", "nnm"] = "none"
    """How received models are averaged: plainly (the papers), or by a rule for Byzantine peers.

    The rules are clipped differences to our own weights, trimmed means, and nearest-neighbour
    mixing before trimmed means.
    """
    byzantine: ByzantineCount = 0.2
    """With a robust rule: how many of the models requested in a round may be Byzantine.

    A share is rounded up, but always to less than half.
    """

    def assumed_byzantine(self, requested: int) -> int:
        """Return b, the number of Byzantine peers assumed among this many neighbours.

        It does not depend on how many of them respond: a Byzantine peer always does.
        """
        if isinstance(self.byzantine, int):
            return self.byzantine
        share = ceil(self.byzantine * requested - 1e-9 * requested)
        below_half = (requested - 1) // 2
        return max(0, min(share, below_half))

    def needed_models(self, requested: int) -> int:
        """Return how many of the requested models must be received for the rule to hold."""
        return 2 * self.assumed_byzantine(requested) + 1

    def report_protection(self, report: Report, requested: int, received: int) -> None:
        """Report what the average of a round withstands, and whether the rule holds."""
        if self.robust == "none" or requested == 0:
            return
        report.withstands = self.assumed_byzantine(requested)
        report.discarded = 0
        if report.withstands and received < self.needed_models(requested):
            report.discarded = received

    def robust_mix(
        self, trainer: Trainer, models: Mapping[str, PackedModel], mask: Mask
    ) -> Tensor | None:
        """Return the average of our own and the received models under our next mask.

        It reports the senders' distances. None if no Byzantine peer is assumed: then the plain
        average is right. If too few models arrive for the rule to hold, our own weights are kept.
        """
        received = len(models) - 1
        requested = max(trainer.requested, received)
        self.report_protection(trainer.report, requested, received)
        b = self.assumed_byzantine(requested)
        if self.robust == "none" or b == 0:
            return None
        own_model = models[trainer.peer]
        is_too_few = received < self.needed_models(requested)
        if not own_model.mask.kept and (is_too_few or not mask.averages_without_own):
            return PackedModel.pack(trainer.first_weights(), mask).flat()
        if is_too_few:
            return mask.average([own_model], trainer.first_weights)

        names = sorted(models)
        own_index = names.index(trainer.peer)
        ordered = [models[name] for name in names]
        affinities = trainer.report.affinities or {}
        shares = [affinities.get(name, 1.0) for name in names]
        average, trust = robust_average_of(ordered, own_index, mask, self.robust, b, shares=shares)

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
        that a peer claims to have could be false too. If too few peers of the cohort upload a model
        for the rule to hold, the present weights are kept.
        """
        requested = max(requested_uploads(self), len(uploads))
        b = self.assumed_byzantine(requested)
        if self.robust == "none" or b == 0:
            return None
        if len(uploads) < self.needed_models(requested):
            return server.flat()
        models = [uploads[name] for name in sorted(uploads)]
        average, _ = _average_around(server, models, server.mask, self.robust, b)
        return average

    def robust_start(
        self, first: Tensor, received: Mapping[str, PackedModel], requested: int
    ) -> Tensor | None:
        """Return the weights that a joining peer begins with, from the first weights.

        None if no Byzantine peer is assumed. If too few of the requested models arrive for the rule
        to hold, they are the first weights. A joining peer has no model to compare with. So the
        weights that more than 2b models hold are averaged first, and senders that are near to the
        result decide those that fewer hold. What no such sender holds keeps its first value.
        """
        b = self.assumed_byzantine(requested)
        if self.robust == "none" or b == 0:
            return None
        if len(received) < self.needed_models(requested):
            return first
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


def requested_uploads(method: Method) -> int:
    """Return how many uploads a server requests in a round; 0 without a server."""
    if not isinstance(method, ServerMethod):
        return 0
    return method.cohort or 0


# before anything runs, and for people who watch a site


def check_byzantine(method: Method, topology: Topology, peers: int) -> None:
    """Refuse more Byzantine peers than the rule tolerates where the fewest models are averaged."""
    if not isinstance(method, Robust) or method.robust == "none":
        return
    requested = fewest_requested(method, topology, peer_names(peers))
    most = max(0, requested - 1) // 2
    if method.assumed_byzantine(requested) > most:
        fix = f"Use at most {most}" if requested > 2 else "Use method.robust=none"
        raise ConfigError(
            f"method.byzantine is {method.byzantine}, but {_averaged(method, requested)} in a"
            f" round, and a rule withstands less than half of them. {fix}, or let more be"
            " received.",
            key="method.byzantine",
        )


def check_mixing_weights(method: Method, topology: Topology) -> None:
    """Refuse weights of a topology that the method's average would ignore."""
    if not topology.is_weighted or not isinstance(method, GossipMethod) or not method.gossips:
        return
    if isinstance(method, Robust) and method.robust != "none":
        raise ConfigError(
            f"topology {topology.name} has weights for the average, but method.robust is"
            f" {method.robust}, which weighs models by itself. Use method.robust=none, or"
            " topology.weights=false.",
            key="method.robust",
        )
    if not method.uses_mixing_weights:
        raise ConfigError(
            f"topology {topology.name} has weights for the average, which method {method.name} does"
            " not use; set topology.weights=false.",
            key="topology.weights",
        )


def check_protects(method: Method, topology: Topology, peers: int) -> None:
    """Refuse a rule that withstands no Byzantine peer, though some are assumed.

    Sites, whose number changes, say so in their status instead.
    """
    if not isinstance(method, Robust) or method.robust == "none" or not method.byzantine:
        return
    requested = fewest_requested(method, topology, peer_names(peers))
    if requested and not method.assumed_byzantine(requested):
        raise ConfigError(
            f"method.robust is {method.robust}, but {_averaged(method, requested)} in a round, and"
            f" a rule needs {FEWEST_PROTECTED} to withstand one Byzantine peer. Use"
            " method.robust=none, or let more be received.",
            key="method.robust",
        )


def fewest_requested(method: Method, topology: Topology, roster: Sequence[str]) -> int:
    """Return the number of models that are averaged in a round where they are fewest.

    Of peers that choose, these are the neighbours that they do not choose: others may decline.
    """
    peers = len(roster)
    if isinstance(method, ServerMethod):
        cohort = method.resolved(topology, peers).cohort
        return min(cohort or peers, peers)
    if isinstance(method, GossipMethod) and topology.offers_choice:
        choices = method.choices(topology.connections(peers), t=1, T=1)  # in the last round
        topology = topology.thinned(choices)
    return min(topology.degrees(peers))


def _averaged(method: Method, requested: int) -> str:
    """`a peer receives 4 models`."""
    receiver = "a peer receives"
    if isinstance(method, ServerMethod):
        receiver = "the server averages"
    return f"{receiver} {_counted(requested, 'model')}"


def _counted(count: int, noun: str) -> str:
    """`1 model`, or `4 models`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def withstood(method: Method, requested: int) -> int:
    """Return how many Byzantine peers among this many neighbours a method's average withstands."""
    if not isinstance(method, Robust) or method.robust == "none":
        return 0
    return method.assumed_byzantine(requested)


def protection_text(method: Method, requested: int, received: int | None = None) -> str:
    """Say in words how a peer with this many neighbours is protected, with models received."""
    if not isinstance(method, Robust) or method.robust == "none":
        return "no robust rule: any neighbour can replace the average"
    b = method.assumed_byzantine(requested)
    neighbours = _counted(requested, "neighbour")
    if b == 0:
        reason = f"of {neighbours} it withstands none, only of {FEWEST_PROTECTED} or more"
        if not method.byzantine:
            reason = "method.byzantine is 0"
        return f"{method.robust} is off: {reason}"
    if received is not None and received < method.needed_models(requested):
        return (
            f"own weights kept: {received} of {requested} models arrived, and {method.robust} needs"
            f" {method.needed_models(requested)} to withstand {b}"
        )
    return f"{method.robust} withstands {b} of {neighbours}"
