"""Gossip with a deadline: which models are late, and the late ones that a peer keeps.

The clock tells which models arrive in time (`clock/deadline.py`), from the sizes of all messages of
a round. They follow from the masks with which the round begins. A late model is received with the
others, and kept in the receiver's state (`PeerState.late`) until it has arrived by the clock.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dispfl.clock.deadline import Exchange
from dispfl.clock.schedule import ModelMessage
from dispfl.core.packed import Mask, PackedModel
from dispfl.methods.base import PeerState
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.exchange import Graph, published_model, request_size, requested_mask


class AskedModels(NamedTuple):
    """Whose models a peer asks for in a round."""

    senders: Sequence[str]
    mask: Mask | None
    """The mask that it requests them with; None if whole models are sent."""


def asked_models(
    context: RunContext, senders: Graph, states: Mapping[str, PeerState]
) -> dict[str, AskedModels]:
    """Return what the peers with these states ask for."""
    asked = {}
    for peer, names in senders.items():
        if peer in states:
            asked[peer] = AskedModels(names, requested_mask(context, states[peer]))
    return asked


def message_sizes(
    context: RunContext, asked: Mapping[str, AskedModels], states: Mapping[str, PeerState]
) -> list[ModelMessage]:
    """Return the messages that the peers with these states send, with their sizes."""
    codec = context.codec
    messages = []
    for receiver, (senders, mask) in asked.items():
        request = request_size(codec, mask)
        for sender in senders:
            if sender not in states:
                continue
            model = published_model(context, states[sender])
            size = codec.model_size(model) if mask is None else codec.answer_size(model, mask)
            messages.append(ModelMessage(sender, receiver, size, request))
    return messages


def with_deadline(task: PeerTask, neighbours: Collection[str], exchange: Exchange) -> PeerTask:
    """Return the task of a peer that goes on without the late models."""
    others = [sender for sender in exchange.arrived if sender not in neighbours]
    return replace(
        task,
        senders=sorted([*exchange.on_time, *exchange.late]),
        requested=task.requested + len(others),
        late=exchange.late,
        arrived=exchange.arrived,
        on_the_way=exchange.on_the_way,
    )


def with_late(
    task: PeerTask, before: PeerState, after: PeerState, late: Mapping[str, PackedModel]
) -> PeerState:
    """Return a state with the late models that its peer may still average."""
    if not before.late and not late:
        return after
    kept = {sender: before.late[sender] for sender in task.on_the_way}
    return replace(after, late={**kept, **late})
