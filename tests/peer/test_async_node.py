"""Sites that wait for nobody, on a virtual clock: who ends when, and with whose models."""

import asyncio
from collections.abc import Sequence

import pytest
from simulated_world import LIMIT, LONGEST_STEP, Liar, World, reliable

from dispfl.methods.base import PeerState
from dispfl.peer.async_node import AsyncNode
from dispfl.peer.node import Node
from dispfl.peer.server import Server
from dispfl.peer.state.status import FINISHED
from dispfl.peer.transport.base import JSON, Request, Response
from dispfl.round.exchange import published_model
from dispfl.testing.virtual_time import run

ROUNDS = 60
SLOW = "007"
SLOWNESS = 20.0


def a_world(seed: int = 1) -> World:
    """Eight sites, of which one is 20 times slower."""
    world = World(seed, reliable, peers=8, rounds=ROUNDS, mode="async")
    world.slowness[SLOW] = SLOWNESS
    return world


async def ends(world: World, names: Sequence[str]) -> dict[str, float]:
    """Run these sites to their ends, and return when each has ended."""
    times: dict[str, float] = {}

    async def live(name: str) -> None:
        await world.live(name)
        times[name] = asyncio.get_running_loop().time()

    await asyncio.gather(*map(live, names))
    return times


def nodes_of(world: World, site: str) -> list[Node]:
    """The nodes that a site gets from now on."""
    nodes = []
    make = world.node

    def noted(name: str) -> Node:
        node = make(name)
        if name == site:
            nodes.append(node)
        return node

    world.node = noted  # type: ignore[method-assign]
    return nodes


def test_a_slow_site_ends_with_the_others_and_averages_their_models_until_the_end() -> None:
    world = a_world(4)
    nodes = nodes_of(world, SLOW)
    times = run(ends(world, world.names), LIMIT)
    last_of_others = max(time for name, time in times.items() if name != SLOW)
    # The rest of the step in which they end, and the last one.
    assert times[SLOW] - last_of_others <= 2 * SLOWNESS * LONGEST_STEP

    slow_store = world.stores[SLOW]
    assert slow_store.rounds[-1] == ROUNDS - 1
    assert len(slow_store.rounds) <= 8
    for t in slow_store.rounds[1:]:
        assert len(slow_store.received[t]) >= 3, t
    # The others serve their last models when it is still in the step before its last one.
    last_models = [t for (name, _), t in world.newest.items() if name == SLOW]
    assert last_models.count(ROUNDS) >= 3
    assert nodes[0].ctx.status.state == FINISHED

    for name in world.names:
        if name != SLOW:
            assert len(world.stores[name].rounds) >= 0.9 * ROUNDS, name


def test_a_minority_that_lies_moves_nobody_beyond_the_others() -> None:
    """That nobody skips a step which most others have not begun is checked in every step."""
    world = a_world()
    liars = world.names[:3]
    world.claims = dict.fromkeys(liars, 10**6)

    async def story() -> dict[str, float]:
        for name in liars:
            liar = Liar(world, name, 10**6)
            await liar.transport.serve(liar.answer)
        return await ends(world, world.names[3:])

    times = run(story(), LIMIT)
    for name in world.names[3:-1]:
        # With three liars of seven it takes one honest site to be followed: the fastest.
        assert len(world.stores[name].rounds) >= 0.8 * ROUNDS, name
        assert times[name] > 0.5 * ROUNDS * LONGEST_STEP / 2
    assert world.stores[SLOW].rounds[-1] == ROUNDS - 1


def test_one_site_that_claims_the_last_round_changes_nothing() -> None:
    world = World(2, reliable, peers=8, rounds=20, mode="async")
    world.claims = {"000": 10**6}

    async def story() -> None:
        liar = Liar(world, "000", 10**6)
        await liar.transport.serve(liar.answer)
        await ends(world, world.names[1:])

    run(story(), LIMIT)
    for name in world.names[1:]:  # without a liar some skip two steps of 20, too
        assert len(world.stores[name].rounds) >= 18, name


def test_a_slow_site_that_is_killed_goes_on_in_the_federations_round() -> None:
    world = a_world(3)

    store = world.stores[SLOW]

    async def story() -> tuple[int, float]:
        living = asyncio.create_task(world.live(SLOW))
        others = asyncio.create_task(ends(world, world.names[:-1]))
        while not store.rounds:
            await asyncio.sleep(1.0)
        await asyncio.sleep(5.0)  # it is in its second step
        living.cancel()
        await asyncio.wait([living])
        await asyncio.sleep(20.0)
        steps_before = len(store.rounds)
        federation_round = world.federation_round(SLOW)
        await world.live(SLOW)
        await others
        return steps_before, federation_round

    steps_before, federation_round = run(story(), LIMIT)
    assert steps_before == 1
    assert 20 < federation_round < ROUNDS - 10
    assert abs(store.rounds[1] - federation_round) <= 2
    assert store.rounds[-1] == ROUNDS - 1


def test_a_site_that_finds_nobody_after_a_restart_ends_alone_unless_it_was_there_for_long() -> None:
    for killed_at, states in ((8.0, {"finished alone"}), (75.0, {FINISHED})):
        world = World(4, reliable, peers=4, rounds=ROUNDS, mode="async")

        async def story(world: World = world, killed_at: float = killed_at) -> str:
            living = asyncio.create_task(world.live("000"))
            others = asyncio.create_task(ends(world, world.names[1:]))
            await asyncio.sleep(killed_at)
            living.cancel()
            await asyncio.wait([living])
            await others
            node = world.node("000")
            node.ctx.status.company_until = max(world.stores["000"].received) + 1
            last = world.stores["000"].last
            assert last is not None
            await node.run(*last)
            await node.client.transport.close()
            return node.ctx.status.state

        assert {run(story(), LIMIT)} == states
        assert world.stores["000"].rounds[-1] == ROUNDS - 1


def test_the_first_site_waits_for_the_second_and_later_ones_join_in_their_round() -> None:
    world = World(8, reliable, peers=4, rounds=ROUNDS, mode="async")

    async def story() -> None:
        running = []
        for name in world.names:
            running.append(asyncio.create_task(world.live(name)))
            await asyncio.sleep(40.0)  # started by hand, one after another
        await asyncio.gather(*running)

    run(story(), LIMIT)
    first_steps = [world.stores[name].rounds[0] for name in world.names]
    assert first_steps[:2] == [0, 0]
    assert 15 < first_steps[2] < first_steps[3] < ROUNDS - 1
    logged = [(event, facts) for _, name, event, facts in world.trace if name == "000"]
    assert ("waiting", "{'round': 0, 'detail': 'no member answers'}") in logged
    assert ("continuing", "{'round': 0}") in logged


def test_a_site_that_nobody_joins_in_the_startup_period_begins_alone() -> None:
    world = World(9, reliable, peers=4, rounds=5, mode="async")
    [end] = run(ends(world, ["000"]), LIMIT).values()
    assert world.stores["000"].rounds == list(range(5))
    assert 120.0 <= end <= 120.0 + 60.0


def test_a_new_site_whose_operator_names_the_round_begins_there_with_the_models_of_others() -> None:
    world = World(10, reliable, peers=5, rounds=ROUNDS, mode="async")

    async def story() -> None:
        others = [asyncio.create_task(world.live(name)) for name in world.names[:2]]
        await asyncio.sleep(60.0)
        node = world.node("004")
        await node.run(0, world.start["004"], 30)
        await node.client.transport.close()
        await asyncio.gather(*others)

    run(story(), LIMIT)
    store = world.stores["004"]
    assert store.rounds[0] == 30
    assert store.received[30]
    assert not world.published["004", 30]
    assert world.published["004", 31]


def test_a_few_fast_sites_end_earlier_and_are_not_missed_by_the_others() -> None:
    world = World(6, reliable, peers=8, rounds=30, mode="async")
    fast, slow = world.names[:3], world.names[3:]
    world.slowness = dict.fromkeys(slow, 5.0)
    times = run(ends(world, world.names), LIMIT)
    assert max(times[name] for name in fast) < min(times[name] for name in slow) / 2
    first_end = min(times[name] for name in slow)
    assert max(times[name] for name in slow) - first_end <= 2 * 5 * LONGEST_STEP
    for name in slow:
        missed = world.stores[name].missed
        assert not any(missed.values()), name


# how stale a model is


def staleness_of_a_model(age: JSON | None, *, steps_before: int, steps_after: int) -> int:
    """Let a site begin steps every ten seconds before and after another one finishes a model, then
    fetch the model; the other site says another `age` of it, if one is given."""
    world = World(5, reliable, peers=2, rounds=ROUNDS, mode="async")

    async def story() -> int:
        receiver = world.node("000")
        owner = world.node("001")
        assert isinstance(receiver, AsyncNode)
        server = Server(owner.ctx)

        async def answer(sender: str, request: Request) -> Response:
            response = await server(sender, request)
            if age is not None:
                return Response({**response.header, "age": age}, response.body)
            return response

        await owner.client.transport.serve(answer)
        state: PeerState = world.start["001"]
        model = published_model(world.context, state)
        for t in range(steps_before):
            receiver.newest.take(t)
            await asyncio.sleep(10.0)
        now = asyncio.get_running_loop().time()
        owner.ctx.published.publish(7, model, (), (), finished=now)
        t = steps_before
        for t in range(steps_before, steps_before + steps_after):
            await asyncio.sleep(10.0)
            receiver.newest.take(t)
        await asyncio.sleep(0.1)
        receiver.newest.request(t, world.start["000"])
        await receiver.newest.settle(5.0)
        staleness = receiver.newest.take(t + 1).staleness
        await owner.client.transport.close()
        return staleness.get("001", -1)

    return run(story(), LIMIT)


@pytest.mark.parametrize(("steps_before", "steps_after"), [(1, 0), (1, 1), (3, 2), (0, 8)])
def test_staleness_is_the_number_of_steps_begun_since_the_model_was_finished(
    steps_before: int, steps_after: int
) -> None:
    """Whenever it was requested: here after all of them."""
    staleness = staleness_of_a_model(None, steps_before=steps_before, steps_after=steps_after)
    assert staleness == steps_after


def test_a_model_is_dropped_if_nine_steps_have_begun_since_it_was_finished() -> None:
    assert staleness_of_a_model(None, steps_before=0, steps_after=9) == -1


@pytest.mark.parametrize("age", ["old", -3, True, [1], 10**400])
def test_an_age_that_makes_no_sense_is_that_of_the_request(age: JSON) -> None:
    assert staleness_of_a_model(age, steps_before=1, steps_after=3) == 0
