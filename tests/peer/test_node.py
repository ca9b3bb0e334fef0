"""One peer among others, on a virtual clock: late, gone, back, new, or malicious."""

import asyncio
import itertools
import random

import pytest
import torch
from simulated_world import LAYOUT, LIMIT, ROUNDS, Pretender, World, good_weather, told_of

from dispfl.core.packed import PackedModel
from dispfl.errors import RunError
from dispfl.peer.memory import MemoryTransport
from dispfl.peer.transport import JSON, Ask, Handler, Refused, Reply
from dispfl.peer.virtual_time import run
from dispfl.work import Step, Work


async def everyone(world: World, *but: str) -> dict[str, "asyncio.Task[None]"]:
    return {name: asyncio.create_task(world.live(name)) for name in world.names if name not in but}


def test_a_peer_that_was_killed_for_a_minute_is_back_within_two_rounds_of_the_others() -> None:
    world = World(1, good_weather)

    async def story() -> None:
        living = await everyone(world)
        while (world.stores["003"].last or (0, None))[0] < 4:
            await asyncio.sleep(0.5)
        living["003"].cancel()
        await asyncio.wait([living["003"]])
        done = len(world.stores["003"].rounds)
        await asyncio.sleep(60)
        living["003"] = asyncio.create_task(world.live("003"))
        while len(world.stores["003"].rounds) == done:
            await asyncio.sleep(0.1)
        assert world.stores["003"].rounds[-1] > 4 + 2  # it did not do again what the others are through with
        assert world.federation_round("003") - world.stores["003"].rounds[-1] <= 2
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert all(store.last is not None and store.last[0] == ROUNDS for store in world.stores.values())


def test_a_dead_peer_costs_the_others_one_deadline_and_then_a_glance() -> None:
    world = World(2, good_weather)

    async def story() -> float:
        living = await everyone(world, "007")  # it never starts
        await asyncio.gather(*living.values())
        return asyncio.get_running_loop().time()

    took = run(story(), LIMIT)
    assert set(world.finished) == set(world.names) - {"007"}
    # The first round waits 120 s. Then rounds are of 0.5 to 3 s of learning, and some a glance of 4 s longer.
    assert took < 120 + ROUNDS * (3 + 1 + 4) + 20 * 3


class Unheard(MemoryTransport):
    """Reaches everyone, but whoever asks it waits in vain."""

    async def serve(self, handler: Handler) -> None:
        async def never(sender: str, ask: Ask) -> Reply:
            await asyncio.sleep(LIMIT)
            raise AssertionError

        await super().serve(never)


def test_a_peer_that_asks_but_never_answers_costs_the_others_one_deadline_and_then_a_glance() -> None:
    world = World(2, good_weather, peers=4)

    async def story() -> None:
        living = await everyone(world, "003")
        unheard = world.node("003")
        unheard.asks.transport = Unheard(world.network, "003")
        asking = asyncio.create_task(unheard.run(0, world.start["003"]))
        await asyncio.gather(*living.values())
        asking.cancel()
        await asyncio.wait([asking])
        await unheard.asks.transport.close()

    run(story(), LIMIT)
    for name in world.names[:3]:
        ends = [at for at, peer, event, _ in world.trace if (peer, event) == (name, "round")]
        assert len(ends) == ROUNDS
        # The first round waits for it. Then rounds are of 0.5 to 3 s of learning and a glance of 4 s; a deadline is 20.
        assert max(after - before for before, after in itertools.pairwise(ends)) < 4 + 3 + 1
        heard = [peers for t, peers in world.stores[name].heard.items() if t > 0]
        assert heard == [[other for other in world.names[:3] if other != name]] * (ROUNDS - 1)


def test_while_sites_are_being_started_nobody_runs_ahead_of_those_who_wait_for_them() -> None:
    world = World(4, good_weather, peers=8)

    async def story() -> None:
        living = await everyone(world, "007")
        await asyncio.sleep(100)  # of the 120 that a first round waits; those who do not hear it could go on
        living["007"] = asyncio.create_task(world.live("007"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert not any(missed for store in world.stores.values() for missed in store.missed.values())


class Stuck(Pretender):
    """Learns for ever in round 3."""

    async def step(self, work: Work) -> Step:
        await asyncio.sleep(LIMIT if work.t == 3 else 0)
        return await super().step(work)


def test_one_that_says_wait_and_then_dies_is_not_waited_for_as_one_that_is_being_started() -> None:
    world = World(2, good_weather, peers=2)

    async def story() -> None:
        living = asyncio.create_task(world.live("000"))
        stuck = world.node("001")
        stuck.learner = Stuck(world, random.Random(0))
        dying = asyncio.create_task(stuck.run(0, world.start["001"]))
        await asyncio.sleep(40.0)  # it has said "wait" meanwhile, and sites may be started for 120 s
        dying.cancel()
        await asyncio.wait([dying])
        await stuck.asks.transport.close()
        await living

    run(story(), LIMIT)
    rounds = [(when, facts) for when, name, event, facts in world.trace if (name, event) == ("000", "round")]
    [waited] = [when for when, facts in rounds if "'round': 4" in facts]
    assert 40 < waited < 60


def test_one_that_never_comes_and_one_that_dies_and_returns_are_told_of_once_each() -> None:
    world = World(12, good_weather, peers=4)

    async def story() -> None:
        living = await everyone(world, "003")
        while (world.stores["002"].last or (0, None))[0] < 2:
            await asyncio.sleep(0.5)
        living["002"].cancel()
        await asyncio.wait([living["002"]])
        await asyncio.sleep(40)
        living["002"] = asyncio.create_task(world.live("002"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    for name in ("000", "001"):
        assert told_of(world, name, "003") == ["waiting", "gone"]
        assert [event for event in told_of(world, name, "002") if event in ("gone", "back")] == ["gone", "back"]
        assert all("003" in missed for missed in world.stores[name].missed.values())


def test_two_halves_go_on_alone_and_exchange_again_after_the_partition() -> None:
    world = World(5, good_weather, peers=8, rounds=20)
    left, right = set(world.names[:4]), set(world.names[4:])

    async def story() -> tuple[float, float]:
        living = await everyone(world)
        await asyncio.sleep(6)
        world.network.partition(left, right)
        parted = world.federation_round("")
        await asyncio.sleep(60)
        world.network.heal()
        healed = world.federation_round("")
        await asyncio.gather(*living.values())
        return parted, healed

    parted, healed = run(story(), LIMIT)
    assert healed >= parted + 2  # both sides went on
    across = [
        sender
        for name, store in world.stores.items()
        for t, heard in store.heard.items()
        if t > healed + 2
        for sender in heard
        if (name in left) != (sender in left)
    ]
    assert across


def test_a_new_peer_joins_late_and_starts_from_its_neighbours_average_under_its_own_mask() -> None:
    world = World(6, good_weather)
    world.members.joins["015"] = ROUNDS  # nobody knows of it yet
    world.members.newcomers.append("015")
    given = {}

    async def story() -> None:
        living = await everyone(world, "015")
        while world.federation_round("015") < 7:
            await asyncio.sleep(0.5)
        make = world.node

        def watched(name: str):  # type: ignore[no-untyped-def]
            node = make(name)
            step = node.learner.step

            async def noted(work):  # type: ignore[no-untyped-def]
                given.setdefault(work.t, work)
                return await step(work)

            node.learner.step = noted
            return node

        world.node = watched  # type: ignore[method-assign]
        living["015"] = asyncio.create_task(world.live("015"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    first = given[min(given)]
    assert min(given) >= 7
    assert world.members.joins["015"] == min(given)
    assert first.heard
    assert first.state.model.mask.kept == 0  # nothing of its own goes into its first average
    assert world.stores["015"].last is not None
    heard_by_others = [t for name, store in world.stores.items() for t, heard in store.heard.items() if "015" in heard]
    assert min(heard_by_others) > min(given)  # it is heard once it has a model


def test_one_that_comes_in_the_last_round_is_told_that_it_is_too_late() -> None:
    world = World(6, good_weather, peers=6)
    world.members.joins["005"] = ROUNDS
    world.members.newcomers.append("005")

    async def story() -> None:
        living = await everyone(world, "005")
        async with asyncio.timeout(600):
            while min((world.stores[name].last or (0, None))[0] for name in living) < ROUNDS - 1:
                await asyncio.sleep(0.05)
        with pytest.raises(RunError, match=r"in its last round \(20 of 20\); 005 comes too late to join it"):
            await world.live("005")
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert world.members.joins["005"] == ROUNDS  # it was not announced
    assert sorted(world.finished) == world.names[:5]


class Mallory:
    """A member that answers and asks as it should not."""

    def __init__(self, world: World, name: str, lie: str) -> None:
        self.world, self.name, self.lie = world, name, lie
        self.transport = world.network.join(name)
        self.codec = world.setting.codec(LAYOUT)
        self.rng = random.Random(0)
        self.refused: list[JSON] = []

    async def answer(self, sender: str, ask: Ask) -> Reply:
        if ask.what == "hello":
            return Reply({"terms": {}, "at": 0, "members": None})
        t, nonce = ask.head["round"], ask.head["nonce"]
        request = self.codec.decode_request(ask.body)
        model = self.world.start[self.name].model
        if self.lie == "huge":
            model = PackedModel(model.values * 1e6, model.mask)
        frame = bytearray(self.codec.encode_answer(model, request, rng=torch.Generator()))
        if self.lie == "noise":
            frame = bytearray(self.rng.randbytes(len(frame)))
        elif self.lie == "cut":
            frame = frame[:-3]
        elif self.lie == "another round":
            t = int(t) + 1  # type: ignore[arg-type]
        elif self.lie == "another nonce":
            nonce = "0" * 32
        return Reply({"status": "model", "round": t, "nonce": nonce, "at": 10**9}, bytes(frame))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("noise", "not-ours"),
        ("cut", "checksum"),
        ("huge", "norm"),
        ("another round", "mixed-up"),
        ("another nonce", "mixed-up"),
    ],
)
def test_bad_answers_are_left_out_and_counted_and_honest_peers_go_on(lie: str, reason: str) -> None:
    world = World(7, good_weather, peers=6, rounds=6)
    nodes = {}

    async def story() -> None:
        mallory = Mallory(world, "002", lie)
        await mallory.transport.serve(mallory.answer)
        make = world.node

        def noted(name: str):  # type: ignore[no-untyped-def]
            nodes[name] = make(name)
            return nodes[name]

        world.node = noted  # type: ignore[method-assign]
        living = await everyone(world, "002")
        await asyncio.gather(*living.values())
        await mallory.transport.close()

    run(story(), LIMIT)
    assert set(world.finished) == set(world.names) - {"002"}
    assert not any("002" in heard for store in world.stores.values() for heard in store.heard.values())
    counted = [node.here.door.refused["002"][reason] for node in nodes.values() if "002" in node.here.door.refused]
    assert sum(counted) > 0


class Forgetful(Mallory):
    """Refuses the first question of each round as one that it has answered before."""

    async def answer(self, sender: str, ask: Ask) -> Reply:
        if ask.what == "model" and ask.head["round"] not in self.refused:
            self.refused.append(ask.head["round"])
            raise Refused("replayed", "You have gone on with this answer 20 times already.")
        return await super().answer(sender, ask)


def test_who_may_no_longer_go_on_with_an_answer_asks_anew_in_the_same_round() -> None:
    world = World(7, good_weather, peers=2, rounds=3)
    for t in range(3):
        world.published["001", t].append(world.start["001"].model.unpack())

    async def story() -> None:
        other = Forgetful(world, "001", "none")
        await other.transport.serve(other.answer)
        await world.live("000")
        await other.transport.close()
        assert other.refused == [0, 1, 2]

    run(story(), LIMIT)
    assert world.stores["000"].heard == {t: ["001"] for t in range(3)}
