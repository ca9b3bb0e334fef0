"""Rosters that shrink and grow while a federation runs."""

import asyncio
import json
from collections.abc import Sequence
from typing import ClassVar
from unittest import mock

import pytest
from simulated_world import LIMIT, View, World, reliable

from dispfl.errors import RunError
from dispfl.peer.membership.sync import SyncMessage
from dispfl.peer.server import Server
from dispfl.peer.setup.spec import federation_spec
from dispfl.peer.transport.base import JSON, Request
from dispfl.registry import TOPOLOGIES
from dispfl.testing.virtual_time import run
from dispfl.topology import Topology


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "file"])
def test_a_node_runs_to_the_end_while_all_others_are_revoked_and_accepted_again(
    topology: str,
) -> None:
    world = World(5, reliable, peers=6, rounds=20)
    world.context = world.context.changed(topology=TOPOLOGIES[topology](name=topology))
    everybody, world.members.is_fixed = list(world.names), False

    async def story() -> None:
        living = {name: asyncio.create_task(world.live(name)) for name in everybody}
        for left in (5, 3, 2, 1, 2, 6):
            await asyncio.sleep(4)
            world.members.names = everybody[:left]
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert set(world.finished) == set(everybody)
    received = world.stores["000"].received
    assert sorted(received) == list(range(20))
    assert [] in received.values()  # it was alone for a while
    assert received[19]


class Broken(Topology):
    """A user's own topology, which fails for a while."""

    problem: ClassVar[Exception | None] = None

    def neighbours(self, seed: int, t: int, roster: Sequence[str]) -> dict[str, list[str]]:
        if Broken.problem is not None and t >= 4:
            raise Broken.problem
        return {"000": ["001"], "001": ["002"], "002": ["000"]}


def test_a_node_whose_topology_fails_waits_and_says_so() -> None:
    world = World(5, reliable, peers=3, rounds=12)
    world.context = world.context.changed(topology=Broken())

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        with mock.patch.object(Broken, "problem", KeyError("hub")):
            await asyncio.sleep(100)
            assert world.stores["000"].rounds == [0, 1, 2, 3]  # no round without neighbours
        await asyncio.gather(*living)

    run(story(), LIMIT)
    assert sorted(world.finished) == world.names
    assert world.stores["000"].received == {t: ["001"] for t in range(12)}
    waits = [facts for _, name, event, facts in world.trace if (name, event) == ("000", "waiting")]
    assert len(waits) == 1
    assert "no neighbours: topology Broken, round 4: " in waits[0]
    assert "Broken.neighbours (test_rosters.py" in waits[0]
    assert "raised KeyError: 'hub'." in waits[0]


def test_a_member_list_that_cannot_be_read_ends_no_node() -> None:
    world = World(5, reliable, peers=3, rounds=6)

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        await asyncio.sleep(6)

        def unreadable(self: object, t: int) -> list[str]:
            raise RunError("members.json cannot be read: Input/output error.")

        with mock.patch.object(View, "participants", unreadable):
            await asyncio.sleep(4)
        await asyncio.gather(*living)

    run(story(), LIMIT)
    assert len(world.finished) == 3
    problems = [
        facts for _, name, event, facts in world.trace if (name, event) == ("000", "problem")
    ]
    assert len(problems) == 1
    assert "Input/output error" in problems[0]


def test_a_record_with_a_first_round_beyond_the_federations_is_an_offence_and_not_merged() -> None:
    world, merged = World(8, reliable, peers=2, rounds=20), list[JSON]()

    def record(first_round: int) -> JSON:
        return {
            "record": {"name": "002", "first_round": first_round},
            "chain": [],
            "signature": str(first_round),
        }

    spec = federation_spec("test", world.context, world.context.layout, world.weights, 0.5)
    body = json.dumps({"records": [record(20), record(21), record(2**53)]}).encode()
    ctx = world.node("000").ctx

    async def story() -> None:
        with mock.patch.object(ctx.membership, "merge", merged.extend):
            await Server(ctx)("001", Request("sync", {"spec": dict(spec)}, body))

    run(story(), LIMIT)
    assert merged == [record(20)]  # the round after the last: a member that never takes part
    assert ctx.guard.refused == {"001": {"malformed": 1}}


class Record(dict[str, JSON]):
    """A record that counts how often it is compared with others."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def test_records_with_an_invalid_first_round_are_not_compared_with_each_other() -> None:
    """Which would take the square of their number, while the node answers nobody else."""
    world = World(8, reliable, peers=2, rounds=20)
    ctx = world.node("000").ctx
    records = [
        Record(record={"name": "002", "first_round": 21}, signature=str(k)) for k in range(100)
    ]

    async def story() -> None:
        with mock.patch.object(
            SyncMessage, "read", return_value=SyncMessage(records=list(records))
        ):
            await ctx.read_sync("001", b"")

    run(story(), LIMIT)
    assert ctx.guard.refused == {"001": {"malformed": 1}}
    assert Record.compared == 0
