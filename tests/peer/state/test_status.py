"""A node's view of the other peers: rounds, reachability and traffic."""

import asyncio
from collections.abc import Mapping
from math import inf, nan
from typing import Any

import pytest
from simulated_world import LIMIT, FakeTraining, World, reliable

from dispfl.core.packed import PackedModel
from dispfl.methods.base import PeerState
from dispfl.peer.member_sync import agreed_round
from dispfl.peer.model_fetch import RoundResponses
from dispfl.peer.node import Node
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.state.status import NodeStatus, announced_privacy
from dispfl.privacy.steps import Privacy
from dispfl.round.context import PeerTask, StepResult
from dispfl.testing.virtual_time import run


def test_a_round_is_agreed_on_by_more_than_half_of_all_members_not_of_those_that_answer() -> None:
    def agreed(*claims: int, members: int, t: int = 0) -> int | None:
        silent = [-1] * (members - len(claims))
        return agreed_round(t, [*claims, *silent])

    assert agreed(members=4) == agreed(0, 1, 0, members=4) == 0
    assert agreed(19, members=4) is None  # the only one that answers
    assert agreed(4999, members=2, t=33) is None
    assert agreed(4999, 34, members=2, t=33) == 33
    assert agreed(19, 0, members=4) is None
    assert agreed(19, 0, 0, members=4) == 0
    assert agreed(19, 7, members=4) is None
    assert agreed(19, 7, 8, members=4) == 7  # three of four have reached it
    assert agreed(19, 7, 8, 0, members=4) == 7
    assert agreed(19, 18, 17, 0, 0, members=5) == 17
    assert agreed(19, 18, 0, 0, 0, members=5) == 0
    assert agreed(7, members=1) == 7


def test_a_skip_needs_more_than_half_of_the_requested_peers() -> None:
    def is_stale(stale: int, requested: int) -> bool:
        names = [f"{number:03d}" for number in range(requested)]
        return RoundResponses(names, stale=names[:stale]).is_stale

    assert [is_stale(k, 2) for k in range(3)] == [False, False, True]
    assert [is_stale(k, 3) for k in range(4)] == [False, False, True, True]
    assert not is_stale(0, 0)


def test_a_request_of_an_unreachable_peer_does_not_make_it_reachable() -> None:
    status = NodeStatus()
    bob = status.peers["bob"]
    bob.mark_unreachable()
    assert (bob.unreachable, bob.silent, status.silent_peers) == (True, True, {"bob"})
    bob.mark_seen(3, now=1.0)  # its own request
    assert (bob.unreachable, bob.silent, status.silent_peers) == (True, False, set())
    bob.mark_replied()
    assert (bob.unreachable, bob.silent) == (False, False)


def test_bytes_sent_by_one_site_are_bytes_received_by_the_other() -> None:
    world = World(3, reliable, peers=2, rounds=3)
    nodes: dict[str, Node] = {}

    async def live(name: str) -> None:
        nodes[name] = world.node(name)
        await nodes[name].run(0, world.start[name])

    async def story() -> None:
        await asyncio.gather(*(live(name) for name in world.names))

    run(story(), LIMIT)
    first = nodes["000"].ctx.status.peers["001"]
    second = nodes["001"].ctx.status.peers["000"]
    assert first.answered == second.answered == 3
    assert 0 < first.sent_bytes == second.received_bytes
    assert 0 < first.received_bytes == second.sent_bytes


class Exhausted(FakeTraining):
    """Has a budget for two rounds."""

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        step = await super().step(task, state, received)
        step.report.exhausted = task.t >= 2
        if step.report.exhausted:
            step.report.failure = "It no longer trains."
        return step


def test_the_others_see_a_sites_privacy_and_whether_its_budget_is_used_up() -> None:
    """Of three sites 001 is private. 002 does not announce anything, as a site of an older
    version."""
    world = World(3, reliable, peers=3, rounds=5)
    nodes: dict[str, Node] = {}
    seen: set[bool] = set()

    async def live(name: str) -> None:
        node = nodes[name] = world.node(name)
        if name == "001":
            private = world.context.changed(privacy=Privacy(epsilon=4.0))
            node.ctx.versions = SpecVersions.single(private, node.ctx.versions.latest.spec)
            node.training = Exhausted(world, world.rng)
        await node.run(0, world.start[name])

    async def watch() -> None:
        while True:
            if "000" in nodes and (known := nodes["000"].ctx.status.peers["001"].privacy):
                seen.add(bool(known["left"]))
            await asyncio.sleep(0.01)

    async def story() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(live(name) for name in world.names))
        watching.cancel()

    run(story(), LIMIT)
    assert seen == {True, False}  # first left, then used up
    status = nodes["001"].ctx.status
    assert (status.failed_steps, status.last_failure) == (0, None)  # nothing has failed
    events = [event for _, name, event, _ in world.trace if name == "001"]
    assert events.count("budget spent") == 1
    assert "step failed" not in events
    for name in ("000", "002"):
        peers = nodes[name].ctx.status.as_json()["peers"]
        assert peers["001"]["privacy"] == {"epsilon": 4.0, "delta": 1e-5, "left": False}
        assert peers["000" if name == "002" else "002"]["privacy"] is None


@pytest.mark.parametrize(
    "said",
    [
        None,
        "private",
        [],
        {},
        {"epsilon": "4" * 10_000, "delta": 1e-5, "left": True},
        {"epsilon": 10**400, "delta": 1e-5, "left": True},
        {"epsilon": nan, "delta": 1e-5, "left": True},
        {"epsilon": -1, "delta": 1e-5, "left": True},
        {"epsilon": True, "delta": 1e-5, "left": True},
        {"epsilon": 4, "delta": inf, "left": True},
        {"epsilon": 4, "delta": 1e-5, "left": "yes"},
        {"epsilon": 4, "left": True},
    ],
)
def test_an_announcement_of_privacy_that_is_not_of_its_form_counts_as_none(said: Any) -> None:
    assert announced_privacy(said) is None


def test_of_an_announcement_of_privacy_only_its_numbers_are_kept() -> None:
    kept = {"epsilon": None, "delta": 1e-5, "left": True}
    assert announced_privacy(kept | {"more": "x" * 60_000}) == kept
