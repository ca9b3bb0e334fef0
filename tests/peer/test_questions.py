"""What one honest peer answers to a member's questions, on a virtual clock: an answer, "wait", or a refusal."""

import asyncio
from dataclasses import replace

import numpy as np
import torch
from simulated_world import LAYOUT, LIMIT, ROUNDS, World, good_weather

from dispfl.core.packed import PackedMask
from dispfl.peer.answers import Answers
from dispfl.peer.context import Context
from dispfl.peer.terms import difference, digest_of, terms_of
from dispfl.peer.transport import Ask, Refused, Reply, Unreachable
from dispfl.peer.virtual_time import run


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


def test_who_goes_on_with_the_same_answer_again_and_again_is_refused_and_counted() -> None:
    world = World(8, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    head = {"terms": digest_of(terms), "round": 0, "nonce": "recorded"}
    body = world.setting.codec(LAYOUT).encode_request(world.start["001"].next_mask)
    answers, counted = asked(world, [Ask("model", head, body), *[Ask("model", head, body, offset=1)] * 22])
    assert answers == ["model"] * 21 + ["replayed"] * 2
    assert counted == {"replayed": 2}


def test_who_goes_on_with_an_answer_may_not_change_the_question() -> None:
    world = World(8, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    head = {"terms": digest_of(terms), "round": 0, "nonce": "recorded"}
    encode = world.setting.codec(LAYOUT).encode_request
    first, other = (encode(world.start[name].next_mask) for name in ("001", "000"))
    answers, counted = asked(world, [Ask("model", head, first), Ask("model", head, other, offset=1)])
    assert (answers, counted) == (["model", "replayed"], {"replayed": 1})


def test_who_waits_long_for_a_slower_peer_may_ask_as_often_as_it_takes() -> None:
    world = World(8, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    head = {"terms": digest_of(terms), "round": 3, "hold": 1.0}
    body = world.setting.codec(LAYOUT).encode_request(world.start["001"].next_mask)
    answers, counted = asked(world, [Ask("model", {**head, "nonce": str(n)}, body) for n in range(40)])
    assert (answers, counted) == (["wait"] * 40, {})


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


def in_round_0(world: World, asks: list[Ask]) -> tuple[Context, list[Reply]]:
    """Peer 000, just started, with its first model on the shelf for 001, and what it replies to these asks of 001."""

    async def story() -> tuple[Context, list[Reply]]:
        here, state = world.node("000").here, world.start["000"]
        here.shelf.publish(0, here.method.publish(state), ["001"], lambda name: False)
        return here, [await Answers(here)("001", ask) for ask in asks]

    return run(story(), LIMIT)


def test_a_transfer_that_breaks_because_the_sender_starts_again_goes_on_with_the_same_bytes() -> None:
    world = World(8, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    body = world.setting.codec(LAYOUT).encode_request(world.start["001"].next_mask)
    question = Ask("model", {"terms": digest_of(terms), "round": 0, "nonce": "a"}, body)
    _, [begun] = in_round_0(world, [question])
    _, [gone_on_with] = in_round_0(world, [replace(question, offset=7)])  # its questions are forgotten
    assert begun.head["status"] == "model"
    assert gone_on_with == begun


def test_a_model_is_fetched_and_its_bytes_are_counted_when_it_has_left_whole() -> None:
    world = World(8, good_weather, peers=2)
    terms = terms_of("test", world.setting, LAYOUT, world.weights, 0.5)
    body = world.setting.codec(LAYOUT).encode_request(world.start["001"].next_mask)
    question = Ask("model", {"terms": digest_of(terms), "round": 0, "nonce": "a"}, body)
    here, [broken_off, whole] = in_round_0(world, [question, replace(question, offset=7)])
    neighbour = here.standing.neighbours["001"]
    assert broken_off.body == whole.body
    assert here.shelf.awaited() == {"001"}
    assert (neighbour.received_bytes, neighbour.sent_bytes) == (0, 0)
    whole.sent()
    assert here.shelf.awaited() == set()
    assert (neighbour.received_bytes, neighbour.sent_bytes) == (len(body), len(whole.body))
