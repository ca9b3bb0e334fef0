"""Sites with different federation specs, on a virtual clock."""

import asyncio

from messages import refused
from simulated_world import LIMIT, ROUNDS, World, events_about, reliable

from dispfl.errors import RunError
from dispfl.peer.node import Node
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.testing.virtual_time import run


def test_a_peer_whose_spec_all_others_refuse_stops_with_their_message() -> None:
    world = World(11, reliable, peers=3)

    async def story() -> None:
        tasks = [asyncio.create_task(world.live(name)) for name in ("000", "001")]
        await asyncio.sleep(1.0)
        mismatched = with_other_spec(world, "002")
        try:
            with refused(RunError):
                await mismatched.run(0, world.start["002"])
        finally:
            await mismatched.client.transport.close()
        await asyncio.gather(*tasks)

    run(story(), LIMIT)
    assert sorted(world.finished) == ["000", "001"]
    first = next(at for at, name, event, _ in world.trace if (name, event) == ("000", "round"))
    assert (
        first < 15
    )  # a refused peer is not waited for until the end of the startup period (120 s)


def with_other_spec(world: World, name: str) -> Node:
    """A peer whose spec has one more round."""
    node = world.node(name)
    spec = {**node.ctx.versions.latest.spec, "rounds": "21"}
    node.ctx.versions = SpecVersions.single(node.ctx.run, spec)
    return node


def test_a_mismatched_site_that_starts_first_stops_and_delays_no_other() -> None:
    world = World(11, reliable, peers=3)

    async def story() -> None:
        wrong = with_other_spec(world, "002")
        stopping = asyncio.create_task(wrong.run(0, world.start["002"]))
        await asyncio.sleep(1.0)
        right = [asyncio.create_task(world.live("000"))]
        await asyncio.sleep(30.0)
        right.append(asyncio.create_task(world.live("001")))
        with refused(RunError):
            await stopping
        await wrong.client.transport.close()
        await asyncio.gather(*right)

    run(story(), LIMIT)
    assert world.stores["000"].received == {t: ["001"] for t in range(ROUNDS)}
    first = next(at for at, name, event, _ in world.trace if (name, event) == ("000", "round"))
    assert (
        first < 31 + 2 + 3 + 4
    )  # backoff, training and probe timeout after the last start, well before 120 s
    for name in ("000", "001"):
        assert events_about(world, name, "002").count("spec mismatch") == 1


def test_a_peer_that_only_reaches_a_mismatched_site_waits_for_the_startup_period() -> None:
    world = World(11, reliable, peers=3)

    async def story() -> float:
        wrong = with_other_spec(world, "002")
        waiting = asyncio.create_task(wrong.run(0, world.start["002"]))
        await asyncio.sleep(1.0)
        with refused(RunError):
            await world.live("000")
        waiting.cancel()
        await asyncio.wait([waiting])
        await wrong.client.transport.close()
        return asyncio.get_running_loop().time()

    assert run(story(), LIMIT) > 120
