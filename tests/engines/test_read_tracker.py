"""States are released as soon as no task reads them."""

from collections.abc import Callable

import torch

from dispfl.core.packed import PackedModel
from dispfl.engines.inprocess import ReadTracker
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import PeerTask, RunContext
from dispfl.topology import RandomRegular, Ring

MakeContext = Callable[..., RunContext]


def tasks_of(context: RunContext) -> list[PeerTask]:
    received = context.settings.topology.online_neighbours(context.settings.seed, 0, context.roster)
    return [PeerTask(peer, 0, received[peer]) for peer in context.roster]


def test_in_a_ring_a_state_is_released_when_its_peer_and_both_neighbours_are_done(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=4, topology=Ring())
    tasks = tasks_of(context)
    tracker = ReadTracker(tasks)
    released = [sorted(tracker.released_by(task)) for task in tasks]
    assert released == [[], [], ["001"], ["000", "002", "003"]]


def most_at_once(order: list[PeerTask]) -> int:
    """How many states there are at most, this round's and the next one's."""
    tracker = ReadTracker(order)
    now, most = len(order), 0
    for done, task in enumerate(order, 1):
        most = max(most, now + done)
        now -= len(tracker.released_by(task))
    assert now == 0
    return most


def test_the_order_keeps_fewer_states_than_roster_order(make_context: MakeContext) -> None:
    context = make_context(peers=40, topology=RandomRegular(degree=4))
    tasks = tasks_of(context)
    order = ReadTracker(tasks).ordered()
    assert sorted(task.peer for task in order) == context.roster
    assert most_at_once(order) < most_at_once(tasks) < 80


def test_nothing_is_released_while_peers_are_only_evaluated(make_context: MakeContext) -> None:
    context = make_context(peers=3, method=DisPFL())
    shared = PackedModel.pack(torch.zeros(67), torch.ones(67, dtype=torch.bool))
    tasks = [PeerTask(peer, 0, global_model=shared, idle=True) for peer in context.roster]
    tracker = ReadTracker(tasks)
    assert [tracker.released_by(task) for task in tasks] == [[], [], []]
    assert [task.peer for task in tracker.ordered()] == context.roster
