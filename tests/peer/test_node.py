"""One peer among others, on a virtual clock: late, gone, back, new, or malicious."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from simulated_world import LAYOUT, LIMIT, ROUNDS, World, good_weather

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.errors import RunError
from dispfl.peer.terms import difference, digest_of, terms_of
from dispfl.peer.transport import Ask, Refused, Reply, Unreachable
from dispfl.peer.virtual_time import run


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


def test_while_sites_are_being_started_nobody_runs_ahead_of_those_who_wait_for_them() -> None:
    world = World(4, good_weather, peers=8)

    async def story() -> None:
        living = await everyone(world, "007")
        await asyncio.sleep(100)  # of the 120 that a first round waits; those who do not hear it could go on
        living["007"] = asyncio.create_task(world.live("007"))
        await asyncio.gather(*living.values())

    run(story(), LIMIT)
    assert not any(missed for store in world.stores.values() for missed in store.missed.values())


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


class Mallory:
    """A member that answers and asks as it should not."""

    def __init__(self, world: World, name: str, lie: str) -> None:
        self.world, self.name, self.lie = world, name, lie
        self.transport = world.network.join(name)
        self.codec = world.setting.codec(LAYOUT)
        self.rng = random.Random(0)

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


def asked(world: World, asks: list[Ask]) -> tuple[list[str], dict[str, int]]:
    """What one honest peer answers to these asks of a member, one after another, and what it counted."""
    answers: list[str] = []
    nodes = {}

    async def story() -> None:
        node = nodes["000"] = world.node("000")
        living = asyncio.create_task(node.run(0, world.start["000"]))
        transport = world.network.join("001")
        await asyncio.sleep(1)
        for ask in asks:
            try:
                reply = await transport.ask("000", ask)
                answers.append(str(reply.head.get("status", "hello")))
            except Refused as refused:
                answers.append(refused.reason)
            except Unreachable:
                answers.append("unreachable")
        living.cancel()
        await asyncio.wait([living])
        await node.asks.transport.close()
        await transport.close()

    run(story(), LIMIT)
    return answers, dict(nodes["000"].here.door.refused["001"])


def test_every_bad_question_has_its_name_and_is_counted() -> None:
    world = World(8, good_weather, peers=2)
    codec, start = world.setting.codec(LAYOUT), world.start["001"]
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    head = {"terms": digest_of(terms), "round": 0, "nonce": "a"}
    good = codec.encode_request(start.next_mask)
    denser = np.ones(LAYOUT.size, np.bool_)
    dense = codec.encode_request(PackedMask.pack(torch.from_numpy(denser)))
    answers, counted = asked(
        world,
        [
            Ask("model", head, good),
            Ask("model", head, good),
            Ask("model", {**head, "nonce": "b", "round": ROUNDS}, good),
            Ask("model", {**head, "nonce": "c", "round": "0"}, good),
            Ask("model", {**head, "nonce": "d", "terms": "other"}, good),
            Ask("model", {**head, "nonce": "e"}, good[:-1]),
            Ask("model", {**head, "nonce": "f"}, dense),
            Ask("wish", {}),
            Ask("hello", {"terms": {**terms, "rounds": "21"}}),
            Ask("hello", {"terms": dict(terms)}),
        ],
    )
    assert answers == [
        "model",
        "replayed",
        "no-such-round",
        "malformed",
        "terms",
        "checksum",
        "density",
        "unknown-question",
        "terms",
        "hello",
    ]
    assert counted == {reason: answers.count(reason) for reason in answers if reason not in ("model", "hello")}


def test_a_question_for_a_round_to_come_is_held_no_longer_than_the_asker_wishes() -> None:
    world = World(8, good_weather, peers=2)
    world.network.stall = 5.0  # seconds; without a wish it is 10 until the answer
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    head = {"terms": digest_of(terms), "round": 3}
    body = world.setting.codec(LAYOUT).encode_request(world.start["001"].next_mask)
    wishes = [{"hold": 2.0}, {"hold": -1}, {}, {"hold": 1e9}]
    answers, _ = asked(world, [Ask("model", {**head, "nonce": str(n), **wish}, body) for n, wish in enumerate(wishes)])
    assert answers == ["wait", "wait", "unreachable", "unreachable"]


def test_a_mismatch_says_which_term_differs() -> None:
    world = World(9, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    other = terms_of("test", replace(world.setting, rounds=21), LAYOUT, world.weights, 0.5)
    assert difference(terms, other) == "rounds is 20 here and 21 there."


def test_a_peer_that_keeps_offending_is_cut_off_for_a_while() -> None:
    world = World(10, good_weather, peers=2)
    answers, counted = asked(world, [Ask("wish", {})] * 12)
    assert answers == ["unknown-question"] * 10 + ["cut-off"] * 2
    assert counted == {"unknown-question": 10, "cut-off": 2}


def test_one_whom_all_who_are_there_refuse_because_of_its_terms_stops_with_their_sentence() -> None:
    world = World(11, good_weather, peers=3)

    async def story() -> None:
        tasks = [asyncio.create_task(world.live(name)) for name in ("000", "001")]
        await asyncio.sleep(1.0)
        stranger = world.node("002")
        stranger.here.terms = {**stranger.here.terms, "rounds": "21"}
        try:
            with pytest.raises(
                RunError, match=r"Nobody who is there lets us take part\. .*rounds is 20 here and 21 there"
            ):
                await stranger.run(0, world.start["002"])
        finally:
            await stranger.asks.transport.close()
        await asyncio.gather(*tasks)

    run(story(), LIMIT)
    assert sorted(world.finished) == ["000", "001"]
