"""Sites whose terms differ, on a virtual clock: who stops, who goes on, and who waits for whom."""

import asyncio

import pytest
from simulated_world import LIMIT, ROUNDS, World, good_weather, told_of

from dispfl.errors import RunError
from dispfl.peer.node import Node
from dispfl.peer.terms import digest_of
from dispfl.peer.virtual_time import run


def test_one_whom_all_who_are_there_refuse_because_of_its_terms_stops_with_their_sentence() -> None:
    world = World(11, good_weather, peers=3)

    async def story() -> None:
        tasks = [asyncio.create_task(world.live(name)) for name in ("000", "001")]
        await asyncio.sleep(1.0)
        stranger = world.node("002")
        stranger.here.terms = {**stranger.here.terms, "rounds": "21"}
        try:
            with pytest.raises(
                RunError, match=r"Nobody who is there lets us take part\. .*rounds is 20 at 000 and 21 at 002"
            ):
                await stranger.run(0, world.start["002"])
        finally:
            await stranger.asks.transport.close()
        await asyncio.gather(*tasks)

    run(story(), LIMIT)
    assert sorted(world.finished) == ["000", "001"]
    first = next(at for at, name, event, _ in world.trace if (name, event) == ("000", "round"))
    assert first < 15  # who has been refused, and has stopped, is not waited for until 120 s have passed


def of_other_terms(world: World, name: str) -> Node:
    """A peer whose site was made for one round more."""
    node = world.node(name)
    node.here.terms = {**node.here.terms, "rounds": "21"}
    node.here.digest = digest_of(node.here.terms)
    return node


def test_a_wrong_site_that_is_started_first_stops_itself_and_keeps_nobody_waiting() -> None:
    world = World(11, good_weather, peers=3)

    async def story() -> None:
        wrong = of_other_terms(world, "002")
        stopping = asyncio.create_task(wrong.run(0, world.start["002"]))
        await asyncio.sleep(1.0)
        right = [asyncio.create_task(world.live("000"))]
        await asyncio.sleep(30.0)
        right.append(asyncio.create_task(world.live("001")))
        with pytest.raises(RunError, match="Nobody who is there lets us take part"):
            await stopping
        await wrong.asks.transport.close()
        await asyncio.gather(*right)

    run(story(), LIMIT)
    assert world.stores["000"].heard == {t: ["001"] for t in range(ROUNDS)}
    first = next(at for at, name, event, _ in world.trace if (name, event) == ("000", "round"))
    assert first < 31 + 2 + 3 + 4  # a pause, learning and a glance after the last one started, and not at 120 s
    for name in ("000", "001"):
        assert told_of(world, name, "002").count("disagrees") == 1


def test_who_meets_only_a_wrong_site_waits_for_the_others_as_long_as_sites_are_started() -> None:
    world = World(11, good_weather, peers=3)

    async def story() -> float:
        wrong = of_other_terms(world, "002")
        waiting = asyncio.create_task(wrong.run(0, world.start["002"]))
        await asyncio.sleep(1.0)
        with pytest.raises(RunError, match=r"lets us take part.*rounds is 2\d at 00\d and 2\d at 00\d"):
            await world.live("000")
        waiting.cancel()
        await asyncio.wait([waiting])
        await wrong.asks.transport.close()
        return asyncio.get_running_loop().time()

    assert run(story(), LIMIT) > 120
