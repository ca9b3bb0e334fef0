"""What all engines share: the states in one process, and a peer's step with simulated messages."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dispfl.core.allocator import trim_heap
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.train import Trainer
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import DamagedError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.exchange import (
    DeliveredModel,
    accepted_models,
    checked_part,
    choices_of,
    deliver,
    exchange_costs,
    request_size,
    requested_mask,
    sent_model,
    task_senders,
    with_buffers,
)
from dispfl.round.ledger import MessageCost
from dispfl.round.round import first_states, peer_step
from dispfl.wire.codec import Codec

STATES_AT_ONCE = 32
"""First states between two calls that return the memory of what was computed for them."""
Fetch = Callable[[str, Mask | None], DeliveredModel]
"""Fetches a sender's model, requested with a mask or whole."""


def simulated_step(
    context: RunContext,
    codec: Codec,
    network: FlatModule,
    task: PeerTask,
    state: PeerState,
    fetch: Fetch,
    before_batch: Callable[[], None] = lambda: None,
    make_trainer: Callable[..., Trainer] = Trainer,
) -> StepResult:
    """Take one peer's step with the models that the codec would deliver.

    The result records every message with its length.
    """
    mask = requested_mask(context, state)
    request = request_size(codec, mask)
    received: dict[str, PackedModel] = {}
    messages: list[MessageCost] = []
    buffers = {task.peer: state.buffers}
    senders = task_senders(task)
    for sender in senders:
        delivery = fetch(sender, mask)
        received[sender] = delivery.model
        buffers[sender] = delivery.buffers
        messages += exchange_costs(task.peer, sender, request, delivery.paper, delivery.wire)
    accepted = accepted_models(context, task, state, received)
    if context.simulation.average_buffers and accepted:
        accepted_buffers = {name: buffers[name] for name in (task.peer, *accepted)}
        state = replace(state, buffers=_average_buffers(accepted_buffers, task.peer))
    result = peer_step(context, network, task, state, accepted, before_batch, make_trainer)
    if task.takes_part:
        result.report.received = sorted(accepted)
        result.report.missed = sorted(set(senders) - set(accepted))
    return replace(result, messages=tuple(messages))


def fetch_here(
    context: RunContext, codec: Codec, task: PeerTask, states: Mapping[str, PeerState]
) -> Fetch:
    """Return a function that fetches models from the server and the states in this process."""

    def fetch(sender: str, mask: Mask | None) -> DeliveredModel:
        model = sent_model(context, task, sender, states)
        delivered = deliver(context, codec, model, mask, sender, task.peer, task.t)
        if context.simulation.average_buffers:
            return with_buffers(delivered, states[sender].buffers)
        return delivered

    return fetch


def _average_buffers(buffers: Mapping[str, Mapping[str, Tensor]], peer: str) -> dict[str, Tensor]:
    """Return a peer's buffers, averaged with those of the senders in roster order.

    Whole numbers stay its own.
    """
    averages = {}
    for name, own_buffer in buffers[peer].items():
        averages[name] = own_buffer
        if own_buffer.is_floating_point():
            in_order = [buffers[sender][name] for sender in sorted(buffers)]
            averages[name] = torch.stack(in_order).mean(0)
    return averages


def deliver_upload(
    context: RunContext, codec: Codec, task: PeerTask, result: StepResult
) -> tuple[StepResult, DeliveredModel | None]:
    """Deliver a step's upload, if any, to the server.

    Return the step with the delivered model, and the delivery.
    """
    state = result.next_state
    if state.upload is None:
        return result, None
    upload = checked_part(context, state.upload, "step")
    delivery = deliver(context, codec, upload, None, task.peer, SERVER, task.t)
    message = MessageCost(task.peer, SERVER, delivery.paper, delivery.wire)
    state = replace(state, upload=delivery.model)
    return replace(result, state=state, messages=(*result.messages, message)), delivery


class PeerStates:
    """The states of some peers in this process.

    Finished steps are written to the checkpoints, if there are any.
    """

    def __init__(self, context: RunContext, checkpoints: Checkpoints | None = None) -> None:
        self.context = context
        self.checkpoints = checkpoints
        self.current: dict[str, PeerState] = {}
        """The states at the beginning of the round, which neighbours receive."""
        self.next: dict[str, PeerState] = {}
        """The next states of the peers that have finished the round."""
        self.evaluated: dict[str, PeerState] = {}
        """The state that each peer was last evaluated with, where that was a global model."""

    def restore(
        self, rounds: int, peers: Collection[str], run_each: Callable[..., Iterable[Any]] = map
    ) -> None:
        """Add the states of these peers after this many rounds.

        `run_each` applies a function to each peer, maybe on several threads.
        """
        if rounds == 0:
            self._begin(peers, run_each)
            return
        assert self.checkpoints is not None, "only a run with a directory can be resumed"
        steps = self.checkpoints.load(rounds, peers)
        missing = sorted(set(peers) - set(steps))
        if missing:
            raise DamagedError(
                f"The checkpoint after {rounds} rounds lacks peer {missing[0]}; it is damaged."
            )
        for peer, step in steps.items():
            self.current[peer] = _without_upload(step.next_state)

    def _begin(self, peers: Collection[str], run_each: Callable[..., Iterable[Any]]) -> None:
        """Add the first states, which follow from the seed."""
        first_state = first_states(self.context)
        names = list(peers)
        for start in range(0, len(names), STATES_AT_ONCE):
            some = names[start : start + STATES_AT_ONCE]
            for peer, state in zip(some, run_each(first_state, some), strict=True):
                self.current[peer] = state
            trim_heap()

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each of these peers, if it is online, requests models from in round t."""
        return choices_of(self.context, t, graph, self.current)

    def partial_round(self, t: int, peers: Collection[str]) -> dict[str, StepResult]:
        """Add the steps of these peers that were finished in round t before an interruption."""
        if self.checkpoints is None:
            return {}
        results = {}
        for peer, step in self.checkpoints.load(t + 1, peers).items():
            self.next[peer] = step.next_state
            results[peer] = step.without_state()
        return results

    def finish(self, task: PeerTask, result: StepResult) -> StepResult:
        """Store a peer's next state; return the result without it."""
        if task.global_model is not None:
            self.evaluated[task.peer] = result.next_state
        else:
            self.next[task.peer] = result.next_state
            if self.checkpoints is not None:
                self.checkpoints.add(task.t, task.peer, result)
        return result.without_state()

    def flush(self, t: int) -> None:
        """Write the finished steps that are not on the disk yet."""
        if self.checkpoints is not None:
            self.checkpoints.flush(t)

    def end_round(self) -> None:
        """End the round: next states become current."""
        self.current = {peer: _without_upload(state) for peer, state in sorted(self.next.items())}
        self.next = {}

    def drop(self, peers: Collection[str]) -> None:
        """Drop the states of peers that another process keeps from now on."""
        for peer in peers:
            self.current.pop(peer, None)
            self.evaluated.pop(peer, None)


def _without_upload(state: PeerState) -> PeerState:
    """Return a state without its upload, which the server has; a checkpoint still has it."""
    if state.upload is None:
        return state
    return replace(state, upload=None)
