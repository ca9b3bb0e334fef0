"""A peer that receives no model: it waits for the federation, and never runs ahead alone."""

import asyncio
import itertools

import pytest
from messages import refused
from simulated_world import LIMIT, ROUNDS, Liar, World, reliable

from dispfl.errors import RunError
from dispfl.peer.node import Node
from dispfl.peer.transport.base import Request, Response
from dispfl.testing.virtual_time import run


def nodes_of(world: World) -> dict[str, Node]:
    """The nodes that the world makes from now on, by name."""
    nodes: dict[str, Node] = {}
    make = world.node

    def noted(name: str) -> Node:
        nodes[name] = make(name)
        return nodes[name]

    world.node = noted  # type: ignore[method-assign]
    return nodes


async def until_round(world: World, name: str, t: int) -> None:
    while (world.stores[name].last or (0, None))[0] < t:
        await asyncio.sleep(0.1)


def events(world: World, name: str, event: str) -> list[str]:
    return [facts for _, peer, logged, facts in world.trace if (peer, logged) == (name, event)]


def test_a_peer_that_is_cut_off_waits_and_continues_in_the_federations_round() -> None:
    world = World(1, reliable, peers=5, rounds=60)
    nodes = nodes_of(world)

    async def story() -> tuple[int, int]:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        await until_round(world, "000", 5)
        world.network.partition({"000"}, set(world.names[1:]))
        await asyncio.sleep(100)
        cut = world.stores["000"].rounds[-1]
        status = nodes["000"].ctx.status
        assert (status.state, status.waiting) == ("waiting", "no member answers")
        assert status.line == f"Round {cut + 1} of 60, waiting: no member answers"
        world.network.heal()
        met = int(world.federation_round("000"))
        await asyncio.gather(*living)
        return cut, met

    cut, met = run(story(), LIMIT)
    store = world.stores["000"]
    assert cut <= 6  # the round that was under way, not a race to the last one
    assert met >= cut + 10
    [resumed] = [after for before, after in itertools.pairwise(store.rounds) if after > before + 1]
    assert abs(resumed - met) <= 3
    assert all(store.received.values())
    assert len(events(world, "000", "waiting")) == 1
    assert len(events(world, "000", "continuing")) == 1
    assert store.rounds[-1] == 59
    assert nodes["000"].ctx.status.state == "finished"


def test_two_peers_that_wait_for_each_other_continue_in_the_same_round() -> None:
    world = World(2, reliable, peers=2)

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        for _ in range(3):
            await asyncio.sleep(10)
            world.network.partition({"000"}, {"001"})
            await asyncio.sleep(300)
            world.network.heal()
        await asyncio.gather(*living)

    run(story(), LIMIT)
    for name, other in (("000", "001"), ("001", "000")):
        assert world.stores[name].received == {t: [other] for t in range(ROUNDS)}


def test_alone_rounds_limits_how_far_a_peer_trains_alone() -> None:
    world = World(3, reliable, peers=3)
    world.alone_rounds = 4
    nodes = nodes_of(world)

    async def story() -> None:
        living = [asyncio.create_task(world.live(name)) for name in world.names]
        await until_round(world, "000", 3)
        world.network.partition({"000"}, {"001", "002"})
        await asyncio.sleep(1000)
        alone = [t for t, received in world.stores["000"].received.items() if not received]
        assert len(alone) == 4
        status = nodes["000"].ctx.status
        assert (status.alone_rounds, status.alone_in_a_row) == (4, 4)
        for task in living:
            task.cancel()
        await asyncio.wait(living)

    run(story(), LIMIT)


def test_a_waiting_peer_serves_its_model() -> None:
    world = World(4, reliable, peers=2)
    nodes = nodes_of(world)

    async def story() -> Response:
        living = asyncio.create_task(world.live("000"))
        await asyncio.sleep(200)  # after the startup period
        assert nodes["000"].ctx.status.state == "waiting"
        other = world.node("001")
        mask = world.start["001"].next_mask
        header = {"spec": other.ctx.versions.at(0).digest, "round": 0, "nonce": "n"}
        body = world.context.codec.encode_request(mask)
        request = Request("model", header, body)  # type: ignore[arg-type]
        response = await other.client.transport.request("000", request)
        living.cancel()
        await asyncio.wait([living])
        return response

    assert run(story(), LIMIT).header["status"] == "model"


def test_a_peer_without_members_and_a_method_without_requests_train_as_ever() -> None:
    world = World(5, reliable, peers=3)
    world.members.joins |= {"001": ROUNDS, "002": ROUNDS}  # never
    run(world.live("000"), LIMIT)
    assert world.stores["000"].rounds == list(range(ROUNDS))

    quiet = World(5, reliable, peers=3)
    node = quiet.node("000")
    node.ctx.participants.senders = lambda t, state: []  # type: ignore[method-assign]
    quiet.members.is_fixed = False
    run(node.run(0, quiet.start["000"]), LIMIT)
    assert quiet.stores["000"].rounds == list(range(ROUNDS))


def test_where_all_neighbours_of_a_round_are_dead_other_members_stand_in() -> None:
    """Ten peers with two neighbours each; three are alive, fewer than half."""
    world = World(6, reliable, peers=10)
    world.context = world.context.changed(
        topology=world.context.settings.topology.model_copy(update={"degree": 2})
    )
    alive = world.names[:3]

    async def story() -> None:
        await asyncio.gather(*(world.live(name) for name in alive))

    run(story(), LIMIT)
    for name in alive:
        store = world.stores[name]
        assert store.rounds == list(range(ROUNDS))
        assert all(store.received.values())


def test_a_peer_whose_only_company_restarts_a_round_ahead_does_not_wait_for_ever() -> None:
    world = World(7, reliable, peers=2)

    async def story() -> None:
        living = {name: asyncio.create_task(world.live(name)) for name in world.names}
        await until_round(world, "000", 5)
        await until_round(world, "001", 5)
        for task in living.values():
            task.cancel()
        await asyncio.wait(living.values())
        t, state = world.stores["000"].last or (0, None)
        assert state is not None
        world.stores["000"].last = (t + 1, state)  # a round ahead, and only its model of that round
        await asyncio.gather(*(world.live(name) for name in world.names))

    run(story(), LIMIT)
    assert set(world.finished) == set(world.names)
    for store in world.stores.values():
        alone = [t for t, received in store.received.items() if not received]
        assert len(alone) <= 2


def test_a_peer_that_joins_a_waiting_one_and_the_waiting_one_continue_together() -> None:
    world = World(8, reliable, peers=2)
    world.alone_rounds = 7

    async def story() -> None:
        living = asyncio.create_task(world.live("000"))
        await asyncio.sleep(1000)
        assert world.stores["000"].rounds == list(range(7))
        world.alone_rounds = 0
        await asyncio.gather(living, world.live("001"))

    run(story(), LIMIT)
    assert set(world.finished) == set(world.names)
    assert world.stores["000"].received[ROUNDS - 1] == ["001"]


@pytest.mark.parametrize("restarts", [False, True], ids=["joins", "restarts"])
def test_one_member_that_lies_about_its_round_moves_nobody(restarts: bool) -> None:
    """001 is stopped, and 002 claims the last round."""
    world = World(9, reliable, peers=3, rounds=500)
    nodes = nodes_of(world)

    async def story() -> None:
        honest = {}
        if restarts:
            honest = {name: asyncio.create_task(world.live(name)) for name in ("000", "001")}
            await until_round(world, "000", 5)
            await until_round(world, "001", 5)
            for task in honest.values():
                task.cancel()
            await asyncio.wait(honest.values())
        before = list(world.stores["000"].rounds)
        liar = Liar(world, "002", 499)
        await liar.transport.serve(liar.answer)
        alice = asyncio.create_task(world.live("000"))
        await asyncio.sleep(3000)
        assert world.stores["000"].rounds == before
        status = nodes["000"].ctx.status
        assert status.state == "waiting"
        assert status.waiting == (
            "1 of 2 members reports round 499 or later; more than half must agree, or start with"
            " --round 499"
        )
        bob = asyncio.create_task(world.live("001"))
        await until_round(world, "000", 12)
        for task in (alice, bob):
            task.cancel()
        await asyncio.wait([alice, bob])
        await liar.transport.close()

    run(story(), LIMIT)
    assert world.stores["000"].rounds[:12] == list(range(12))


def test_a_new_peer_that_sees_a_minority_starts_where_its_operator_says() -> None:
    world = World(10, reliable, peers=6, rounds=40)
    world.members.joins["005"] = 40
    nodes = nodes_of(world)

    async def story() -> None:
        others = [asyncio.create_task(world.live(name)) for name in ("000", "001")]
        await until_round(world, "000", 20)
        joiner = asyncio.create_task(world.live("005"))
        await asyncio.sleep(5)
        assert (nodes["005"].ctx.status.waiting or "").startswith("2 of 5 members report round 2")
        joiner.cancel()
        await asyncio.wait([joiner])

        current = int(world.federation_round("005")) if False else world.stores["000"].rounds[-1]
        node = world.node("005")
        await node.run(0, world.start["005"], current + 2)
        await node.client.transport.close()
        await asyncio.gather(*others)
        assert world.members.joins["005"] == current + 2

    run(story(), LIMIT)
    store = world.stores["005"]
    assert store.rounds[0] >= 20
    assert all(store.received.values())


def test_the_operators_round_is_one_that_the_site_has_not_trained() -> None:
    world = World(11, reliable, peers=2)
    for named in (3, ROUNDS):
        with refused(RunError):
            run(world.node("000").run(4, world.start["000"], named), LIMIT)


def test_a_slow_peer_finishes_its_last_rounds_alone_after_the_others_have_left() -> None:
    world = World(12, reliable, peers=5)
    make = world.node

    def unchecked(name: str) -> Node:
        node = make(name)  # whose rounds may exceed twice their deadline
        return Node(node.ctx, node.client, node.training, node.store)

    world.node = unchecked  # type: ignore[method-assign]
    nodes = nodes_of(world)

    async def story() -> None:
        living = {name: asyncio.create_task(world.live(name)) for name in world.names}
        await until_round(world, "000", ROUNDS - 2)
        step = nodes["000"].training.step

        async def slow_step(*arguments):  # type: ignore[no-untyped-def]
            await asyncio.sleep(600)  # longer than any deadline
            return await step(*arguments)

        nodes["000"].training.step = slow_step  # type: ignore[method-assign]
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    store = world.stores["000"]
    assert store.rounds[-1] == ROUNDS - 1
    assert not store.received[ROUNDS - 1]
    assert nodes["000"].ctx.status.state == "finished"
    assert len(events(world, "000", "alone")) == 1


def test_a_peer_that_was_alone_in_most_rounds_does_not_count_as_finished() -> None:
    world = World(13, reliable, peers=2)
    world.alone_rounds = ROUNDS
    nodes = nodes_of(world)
    run(world.live("000"), LIMIT)
    assert nodes["000"].ctx.status.state == "finished alone"
