"""What attackers see of a trained federation: each peer's personal model, and what a neighbour
received of it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from dispfl.core.flat_module import loaded_network
from dispfl.core.packed import PackedModel
from dispfl.engines.checkpoint import Checkpoints
from dispfl.methods.base import GossipMethod, PeerState
from dispfl.round.context import RunContext
from dispfl.round.exchange import (
    deliver,
    exchange_graph,
    gossip_senders,
    published_model,
    requested_mask,
)
from dispfl.runs.saved import SavedRun

PERSONAL, RECEIVED = "personal model", "what a neighbour received"


class TrainedFederation:
    """The models in a run directory, as attackers see them."""

    def __init__(self, path: Path, context: RunContext) -> None:
        self.context = context
        self._saved = SavedRun(path)
        self._checkpoints = Checkpoints(path / "checkpoints")

    @cached_property
    def before_last_round(self) -> Mapping[str, PeerState]:
        """Every peer's state before the last round, in which its model was sent for the last time;
        empty without it."""
        steps = self._checkpoints.load(self.context.rounds - 1)
        return {name: step.next_state for name, step in steps.items()}

    def personal(self, peer: str) -> nn.Module:
        """Return a peer's personal model at the end."""
        return self._network(self._saved.personal_state(peer))

    def received(self, peer: str) -> nn.Module | None:
        """Return the model that a neighbour can build from what it received of a peer's in the last
        round.

        The neighbour is the first that received the peer. Where it requested with its own mask, it
        has the peer's weights only where both hold them; elsewhere it takes its own. None where
        nobody received the peer.
        """
        context, states, t = self.context, self.before_last_round, self.context.rounds - 1
        graph = exchange_graph(context, t)
        hears = (
            name
            for name in sorted(graph)
            if peer in gossip_senders(context, graph, name, t, states[name])
        )
        receiver = next(hears, None)
        if receiver is None:
            return None
        own, request = states[receiver], requested_mask(context, states[receiver])
        sent = published_model(context, states[peer])
        arrived = deliver(context, context.codec, sent, request, peer, receiver, t).model
        if request is not None:
            theirs, held = arrived.restrict(request).unpack()
            weights = torch.where(held, theirs, own.model.unpack()[0])
            arrived = PackedModel.pack(weights, request)
        return loaded_network(context.module(), arrived, own.buffers)

    def views(self) -> dict[str, Callable[[str], nn.Module | None]]:
        """Return what there is to attack, by name."""
        found: dict[str, Callable[[str], nn.Module | None]] = {PERSONAL: self.personal}
        method = self.context.method
        if isinstance(method, GossipMethod) and method.communicates and self.before_last_round:
            found[RECEIVED] = self.received
        return found

    def _network(self, state: PeerState) -> nn.Module:
        return loaded_network(self.context.module(), state.model, state.buffers)
