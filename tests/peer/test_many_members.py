"""A federation of many members on a virtual clock: they start, join late, leave, are revoked, and
finish.

`DISPFL_MEMBERS=1000 pytest -s tests/peer/test_many_members.py` prints what a thousand members cost
(docs/scaling.md).
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from simulated_world import LIMIT, ROUNDS, World, reliable

from dispfl.peer import member_sync
from dispfl.testing.memory_transport import Delivery
from dispfl.testing.virtual_time import run

MEMBERS = int(os.environ.get("DISPFL_MEMBERS", "40"))
SOME = MEMBERS // 20
"""Members that join late; as many leave, and as many are revoked."""


def test_many_members_start_join_leave_are_revoked_and_finish_twenty_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    max_greeted = min(member_sync.MAX_GREETED, MEMBERS // 4)
    monkeypatch.setattr(member_sync, "MAX_GREETED", max_greeted)
    requests: Counter[tuple[str, str]] = Counter()

    def counted(delivery: Delivery, rng: random.Random) -> Sequence[float]:
        requests[delivery.sender, delivery.kind] += not delivery.is_response
        return reliable(delivery, rng)

    world = World(1, counted, peers=MEMBERS)
    names, world.members.is_fixed = list(world.names), False
    late, leaving, revoked = (
        names[:SOME],
        set(names[SOME : 2 * SOME]),
        set(names[2 * SOME : 3 * SOME]),
    )
    for name in late:
        world.members.joins[name] = ROUNDS

    async def story() -> Counter[tuple[str, str]]:
        living = {name: asyncio.create_task(world.live(name)) for name in names if name not in late}
        await asyncio.sleep(2)
        greetings = requests.copy()
        while world.federation_round(names[0]) < 5:
            await asyncio.sleep(1)
        living |= {name: asyncio.create_task(world.live(name)) for name in late}
        for name in sorted(leaving):
            living.pop(name).cancel()
        world.members.names = [name for name in names if name not in revoked]
        await asyncio.gather(*living.values())
        return greetings

    began = time.process_time()
    greetings = run(story(), LIMIT)
    seconds = time.process_time() - began
    assert set(world.finished) == set(names) - leaving
    staying, first_round = set(names) - leaving - revoked, world.members.joins
    assert {first_round[name] for name in late} <= set(range(5, 10))
    for name in staying:
        store = world.stores[name]
        assert store.rounds == list(range(first_round.get(name, 0), ROUNDS)), (
            name
        )  # no round was skipped
        for t in store.rounds:
            missed = staying.intersection(
                store.missed[t]
            )  # nobody, but late members have no model of their first round
            assert not [peer for peer in missed if peer not in late or t > first_round[peer]], (
                name,
                t,
            )
            assert t < ROUNDS / 2 or not revoked.intersection(store.received[t]), (name, t)
    assert (
        max(greetings[name, "sync"] for name in names) <= 2 * max_greeted
    )  # two requests each, if there are records
    steps, greeted = MEMBERS * ROUNDS, sum(greetings.values()) / MEMBERS
    each = f"{1000 * seconds / steps:.1f} ms and {sum(requests.values()) / steps:.1f} requests"
    print(
        f"{MEMBERS} members: {each} for a member and round; {greeted:.0f} requests for a member's"
        " start"
    )
