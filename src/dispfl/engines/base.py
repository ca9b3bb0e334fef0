"""What all engines share: the states in one process, and a peer's step with simulated messages."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from dispfl.clock.schedule import ModelMessage
from dispfl.core.allocator import trim_heap
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.report import Report
from dispfl.core.train import Trainer
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.checkpoint_part import OpenPart
from dispfl.engines.stored_states import StoredStates
from dispfl.errors import DamagedError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round.async_gossip import with_needed, with_sent
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
    sent_in,
    sent_model,
    task_senders,
    with_buffers,
)
from dispfl.round.late_models import AskedModels, asked_models, message_sizes, with_late
from dispfl.round.ledger import MessageCost
from dispfl.round.round import first_states, peer_step, resting_result
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
    late: dict[str, PackedModel] = {}
    messages: list[MessageCost] = []
    buffers = {task.peer: state.buffers}
    senders = task_senders(task)
    for sender in senders:
        delivery = fetch(sender, mask)
        if sender in task.late:
            late[sender] = delivery.model if mask is None else delivery.model.restrict(mask)
        else:
            received[sender] = delivery.model
        buffers[sender] = delivery.buffers
        messages += exchange_costs(task.peer, sender, request, delivery.paper, delivery.wire)
    if task.arrived:
        received |= {sender: state.late[sender] for sender in task.arrived}
        received = dict(sorted(received.items()))
    accepted = accepted_models(context, task, state, received)
    if context.simulation.average_buffers and accepted:
        accepted_buffers = {name: buffers[name] for name in (task.peer, *accepted)}
        state = replace(state, buffers=_average_buffers(accepted_buffers, task.peer))
    result = peer_step(context, network, task, state, accepted, before_batch, make_trainer)
    if task.takes_part:
        result.report.received = sorted(accepted)
        result.report.missed = sorted({*senders, *task.on_the_way} - set(accepted))
    after = with_late(task, state, result.next_state, late)
    return replace(result, messages=tuple(messages), state=after)


def fetch_here(
    context: RunContext, codec: Codec, task: PeerTask, states: Mapping[str, PeerState]
) -> Fetch:
    """Return a function that fetches models from the server and the states in this process."""

    def fetch(sender: str, mask: Mask | None) -> DeliveredModel:
        model = sent_model(context, task, sender, states)
        t = sent_in(task, sender)
        delivered = deliver(context, codec, model, mask, sender, task.peer, t)
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

    Finished steps are written to the checkpoints, if there are any. Beyond `memory_limit`, in
    bytes, states are dropped from memory once they are on the disk.
    """

    def __init__(
        self,
        context: RunContext,
        checkpoints: Checkpoints | None = None,
        *,
        memory_limit: float = inf,
        shares_parts: bool = False,
    ) -> None:
        self.context = context
        self.checkpoints = checkpoints
        self.current = StoredStates()
        """The states at the beginning of the round, which neighbours receive."""
        self.next = StoredStates()
        """The next states of the peers that have finished the round."""
        self.evaluated: dict[str, PeerState] = {}
        """The state that each peer was last evaluated with, where that was a global model."""
        self._rounds = 0
        self._stepped: set[str] = set()
        """Asynchronous round: the peers that have taken a step."""
        self._memory_limit = memory_limit
        self._shares_parts = shares_parts
        """Whether a checkpoint shares the parts of earlier ones with states that are the same."""
        self._written: SimpleQueue[tuple[int, OpenPart]] = SimpleQueue()
        if checkpoints is not None and memory_limit < inf:
            checkpoints.on_written = self._note_written

    def restore(
        self, rounds: int, peers: Collection[str], run_each: Callable[..., Iterable[Any]] = map
    ) -> None:
        """Add the states of these peers after this many rounds.

        `run_each` applies a function to each peer, maybe on several threads.
        """
        self._rounds = rounds
        if rounds == 0:
            self._begin(peers, run_each)
            return
        assert self.checkpoints is not None, "only a run with a directory can be resumed"
        restored = set()
        for path, steps in self.checkpoints.load_parts(rounds, peers):
            part = OpenPart(path) if self._memory_limit < inf else None
            for peer, step in steps.items():
                if peer == SERVER:
                    continue
                restored.add(peer)
                self.current[peer] = step.next_state
                if part is not None:
                    self.current.saved(peer, part)
            self._limit_memory()
        missing = sorted(set(peers) - restored)
        if missing:
            raise DamagedError(
                f"The checkpoint after {rounds} rounds lacks peer {missing[0]}; it is damaged."
            )
        self.current.sort()

    def _begin(self, peers: Collection[str], run_each: Callable[..., Iterable[Any]]) -> None:
        """Add the first states, which follow from the seed."""
        first_state = first_states(self.context)
        names = list(peers)
        for start in range(0, len(names), STATES_AT_ONCE):
            some = names[start : start + STATES_AT_ONCE]
            for peer, state in zip(some, run_each(first_state, some), strict=True):
                self.current[peer] = state
                if self.checkpoints is not None and self._memory_limit < inf:
                    self.checkpoints.add(-1, peer, StepResult(Report(), state=state))
            self._limit_memory()
            trim_heap()
        if self._memory_limit < inf:
            self.flush(-1)

    def choices(self, t: int, graph: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """Return whom each of these peers, if it is online, requests models from in round t."""
        return choices_of(self.context, t, graph, self.current)

    def asked_models(self, senders: Mapping[str, Sequence[str]]) -> dict[str, AskedModels]:
        """Return what these peers ask for in the next round."""
        return asked_models(self.context, senders, self.current)

    def message_sizes(self, asked: Mapping[str, AskedModels]) -> list[ModelMessage]:
        """Return the messages that these peers send in the next round, with their sizes."""
        return message_sizes(self.context, asked, self.current)

    def partial_round(self, t: int, peers: Collection[str]) -> dict[str, StepResult]:
        """Add the steps of these peers that were finished in round t before an interruption."""
        if self.checkpoints is None:
            return {}
        results = {}
        for path, steps in self.checkpoints.load_parts(t + 1, peers):
            part = OpenPart(path) if self._memory_limit < inf else None
            for peer, step in steps.items():
                self.next[peer] = step.next_state
                results[peer] = step.without_state()
                if part is not None:
                    self.next.saved(peer, part)
            self._limit_memory()
        return results

    def rest(self, task: PeerTask) -> StepResult:
        """Finish the task of a peer that only keeps its state."""
        return self.finish(task, resting_result(self.current[task.peer]))

    def finish(self, task: PeerTask, result: StepResult) -> StepResult:
        """Store a peer's next state; return the result without it."""
        if task.global_model is not None:
            self.evaluated[task.peer] = result.next_state
            return result.without_state()
        if task.idle and not self.context.settings.privacy.enabled:
            self.next.share(task.peer, self.current)
            is_saved = self._shares_parts and self.checkpoints and self.checkpoints.keep(task.peer)
        else:
            self.next[task.peer] = result.next_state
            is_saved = False
        if self.checkpoints is not None and not is_saved:
            self.checkpoints.add(task.t, task.peer, result)
        self._limit_memory()
        return result.without_state()

    def sources(self, task: PeerTask) -> dict[str, PeerState]:
        """Return the states that a task reads: its peer's, and those of its senders."""
        return {name: self.current[name] for name in (task.peer, *task_senders(task))}

    def finish_step(self, task: PeerTask, result: StepResult) -> StepResult:
        """Store a peer's state after an asynchronous step; return the result without it."""
        if not task.idle:
            before = self.current[task.peer]
            after = with_sent(self.context, task, before, result.next_state)
            self.current[task.peer] = after
            self._stepped.add(task.peer)
        return result.without_state()

    def save_steps(self, t: int, needed: Mapping[str, Collection[int]]) -> None:
        """Save the states after asynchronous round t, without models that are not needed later."""
        if self.checkpoints is None:
            return
        for peer, state in self.current.items():
            is_saved = False
            if peer not in self._stepped and self._shares_parts:
                is_saved = self.checkpoints.keep(peer)
            if not is_saved:
                saved_state = with_needed(state, needed.get(peer, ()))
                self.checkpoints.add(t, peer, StepResult(Report(), state=saved_state))

    def end_steps(self, needed: Mapping[str, Collection[int]]) -> None:
        """End an asynchronous round: drop the models that are not needed later."""
        for peer, state in list(self.current.items()):
            self.current[peer] = with_needed(state, needed.get(peer, ()))
        self._stepped = set()
        self._rounds += 1

    def _note_written(self, rounds: int, path: Path) -> None:
        self._written.put((rounds, OpenPart(path)))

    def _limit_memory(self) -> None:
        """Drop states that are on the disk until those in memory are within the limit."""
        while not self._written.empty():
            rounds, part = self._written.get()
            states = {self._rounds: self.current, self._rounds + 1: self.next}.get(rounds)
            if states is not None:
                for peer in part.entries:
                    states.saved(peer, part)
        while self.current.bytes + self.next.bytes > self._memory_limit:
            if not (self.next.move_one() or self.current.move_one()):
                break  # the others are not on the disk yet

    def flush(self, t: int) -> None:
        """Write the finished steps that are not on the disk yet."""
        if self.checkpoints is not None:
            self.checkpoints.flush(t)

    def end_round(self) -> None:
        """End the round: next states become current."""
        self.current = self.next
        self.current.sort()
        self.next = StoredStates()
        self._rounds += 1

    def drop(self, peers: Collection[str]) -> None:
        """Drop the states of peers that another process keeps from now on."""
        for peer in peers:
            self.current.drop(peer)
            self.evaluated.pop(peer, None)
