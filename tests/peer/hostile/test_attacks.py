"""Strangers and bad members against a running federation: refused by name, counted, and honest rounds go unharmed."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.config import compose
from dispfl.errors import DispflError
from dispfl.launch import Launch
from dispfl.peer.door import Door
from dispfl.peer.identity import Identity
from dispfl.peer.limits import Limits
from dispfl.peer.transport import Ask, Refused
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.loop import Progress
from dispfl.up import gather_up

HELLO = b'POST /v1/hello HTTP/1.1\r\nhost: x\r\ndispfl-head: {"version":1,"head":{}}\r\ncontent-length: 0\r\n\r\n'
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(600)
"""How a handshake begins: a record of 512 bytes."""
FLOOD = 200
FLAT = 20.0
"""MB that a flood may take for a moment. If all 200 were let in it would be 50: TLS takes 256 kB for each."""


def no_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def refusal(asked: Any) -> str:
    """The reason for which an ask is refused."""
    with pytest.raises(Refused) as caught:
        await asked
    return caught.value.reason


def test_who_shows_no_certificate_gets_no_answer(attacked: Any, until: Any) -> None:
    assert asyncio.run(attacked.say("000", HELLO, no_certificate())) == b""
    until(lambda: attacked.at_the_door("000", "no-certificate") == 1)


def test_who_does_not_even_speak_tls_gets_no_answer(attacked: Any, until: Any) -> None:
    assert b"HTTP" not in asyncio.run(attacked.say("000", HELLO))
    until(lambda: attacked.at_the_door("000", "handshake") == 1)


def test_a_member_s_name_in_another_certificate_gets_no_answer_nor_does_a_stranger(attacked: Any, until: Any) -> None:
    for number, name in enumerate(["001", "stranger"], 1):
        context = attacked.context(Identity.make(name))
        assert asyncio.run(attacked.say("000", HELLO, context)) == b""
        until(lambda number=number: attacked.at_the_door("000", "unknown-certificate") == number)


def test_a_member_is_answered(attacked: Any) -> None:
    """So it is for the reasons given that the others are not."""

    async def scenario() -> None:
        async with attacked.guest("curious") as guest:
            reply = await guest.ask("000", attacked.model())
        assert reply.head["status"] == "model"
        assert attacked.share.codec().decode_answer(reply.body, attacked.share.first_state().next_mask)

    asyncio.run(scenario())
    assert not attacked.refused("000", "curious")


def test_who_is_revoked_while_all_run_is_refused_on_the_connection_that_it_has(attacked: Any, until: Any) -> None:
    async def scenario() -> None:
        async with attacked.guest("revoked") as guest:
            assert (await guest.ask("000", attacked.model())).head["status"] == "model"
            attacked.sites["000"].members.revoke("revoked")
            for _ in range(3):
                assert await refusal(guest.ask("000", attacked.model())) == "revoked"
            assert (await guest.ask("001", attacked.model())).head["status"] == "model"  # 001 has not revoked it
        async with attacked.guest("revoked") as again:
            assert await refusal(again.ask("000", attacked.model())) == "revoked"

    asyncio.run(scenario())
    until(lambda: attacked.at_the_door("000", "revoked", "revoked") + attacked.at_the_door("000", "revoked") == 4)


def test_a_member_with_other_terms_is_told_which_one_differs(attacked: Any, until: Any) -> None:
    terms = dict(attacked.share.terms) | {"seed": "7"}

    async def scenario() -> None:
        async with attacked.guest("foreign") as guest:
            with pytest.raises(Refused, match="seed is 0 at 000 and 7 at foreign") as caught:
                await guest.ask("000", Ask("hello", {"terms": terms, "at": 0}))
            assert caught.value.reason == "terms"
            assert await refusal(guest.ask("000", attacked.model(terms="0" * 32))) == "terms"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "foreign") == {"terms": 2})
    assert attacked.at_the_door("000", "terms", "foreign") == 0  # it was let in, and is counted once


def test_a_question_that_is_sent_twice_is_answered_once(attacked: Any, until: Any) -> None:
    async def scenario() -> None:
        question = attacked.model()
        async with attacked.guest("replaying") as guest:
            assert (await guest.ask("000", question)).head["status"] == "model"
            assert await refusal(guest.ask("000", question)) == "replayed"
        async with attacked.guest("replaying") as again:
            assert await refusal(again.ask("000", question)) == "replayed"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "replaying") == {"replayed": 2})


def test_a_round_that_the_federation_does_not_have_is_refused_and_a_later_one_is_not_there_yet(
    attacked: Any, until: Any
) -> None:
    async def scenario() -> None:
        async with attacked.guest("mistimed") as guest:
            early = asyncio.create_task(guest.ask("000", attacked.model(59)))
            for wrong in (-1, 60, 10**30):
                assert await refusal(guest.ask("000", attacked.model(wrong))) == "no-such-round"
            for wrong in ("0", True, None, 0.0):
                assert await refusal(guest.ask("000", attacked.model(wrong))) == "malformed"
            assert (await early).head["status"] == "wait"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "mistimed") == {"no-such-round": 3, "malformed": 4})


def test_a_malformed_body_is_refused_by_what_is_wrong_with_it(attacked: Any, until: Any) -> None:
    whole = attacked.model().body
    bodies = {
        b"": "too-short",
        bytes(100): "not-ours",
        whole[:-1]: "checksum",
        whole[:-1] + bytes([whole[-1] ^ 1]): "checksum",
    }

    async def scenario() -> None:
        async with attacked.guest("garbling") as guest:
            for body, reason in bodies.items():
                assert await refusal(guest.ask("000", attacked.model(0, body))) == reason
            assert await refusal(guest.ask("000", attacked.model(0, bytes(1_000_000)))) == "too-long"

    asyncio.run(scenario())
    until(lambda: sum(attacked.refused("000", "garbling").values()) == len(bodies))
    assert attacked.refused("000", "garbling") == {"too-short": 1, "not-ours": 1, "checksum": 2}
    assert attacked.at_the_door("000", "too-long", "garbling") == 1


def test_a_member_that_keeps_sending_bad_messages_is_cut_off_and_nobody_else_is(
    attacked: Any, until: Any, log: Callable[[str], str]
) -> None:
    async def scenario() -> None:
        async with attacked.guest("nuisance") as guest, attacked.guest("curious") as other:
            for _ in range(Door.STRIKES):
                assert await refusal(guest.ask("000", attacked.model(0, bytes(100)))) == "not-ours"
            for _ in range(100):
                with pytest.raises(Refused, match="nuisance was refused too often; it may come back in") as caught:
                    await guest.ask("000", attacked.model())
                assert caught.value.reason == "cut-off"
            assert (await other.ask("000", attacked.model())).head["status"] == "model"
            assert (await guest.ask("001", attacked.model())).head["status"] == "model"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "nuisance") == {"not-ours": Door.STRIKES, "cut-off": 100})
    assert log("000").count("peer=nuisance") == Door.STRIKES  # who is cut off does not fill the disk either


async def drip(connecting: Any, content: bytes) -> None:
    """Send a byte a second until the other side has had enough."""
    with contextlib.suppress(OSError):
        _, writer = await connecting
        try:
            for byte in content:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
        finally:
            writer.transport.abort()


def test_200_connections_that_send_a_byte_a_second_are_cut_and_neither_memory_nor_files_grow(
    attacked: Any, until: Any
) -> None:
    memory, files = attacked.memory("000"), attacked.open_files("000")
    certified = attacked.context(attacked.guests["slow"].identity)
    highest, most = memory, files
    greeting = Ask("hello", {"terms": dict(attacked.share.terms), "at": 0})

    async def scenario() -> None:
        nonlocal highest, most
        async with attacked.guest("curious") as regular, attacked.guest("late") as newcomer:
            await regular.ask("000", greeting)
            slow = [asyncio.create_task(drip(attacked.connect("000"), CLIENT_HELLO)) for _ in range(FLOOD // 2)]
            slow += [asyncio.create_task(drip(attacked.connect("000", certified), HELLO)) for _ in range(FLOOD // 2)]
            while not all(each.done() for each in slow):
                await asyncio.sleep(0.2)
                highest, most = max(highest, attacked.memory("000")), max(most, attacked.open_files("000"))
                assert "at" in (await regular.ask("000", greeting)).head
            await newcomer.ask("000", greeting)

    asyncio.run(scenario())
    until(lambda: attacked.at_the_door("000", "slow") >= FLOOD)
    until(lambda: attacked.open_files("000") <= files)
    assert most < files + FLOOD // 2
    assert highest - memory < FLAT
    assert attacked.memory("000") - memory < FLAT


def test_a_member_that_sends_its_bodies_too_slowly_has_four_connections_and_no_more(attacked: Any, until: Any) -> None:
    certified = attacked.context(attacked.guests["slow"].identity)
    head = HELLO.replace(b"hello", b"model").replace(b"length: 0", b"length: 1000")

    async def scenario() -> None:
        held = [await attacked.connect("000", certified) for _ in range(Limits().from_one)]
        for _, writer in held:
            writer.write(head)
        await asyncio.sleep(0.5)
        more = await asyncio.gather(*(attacked.say("000", head, certified) for _ in range(10)))
        assert all(b'"refused":"crowded"' in answer for answer in more)
        for _, writer in held:
            writer.transport.abort()

    asyncio.run(scenario())
    until(lambda: attacked.at_the_door("000", "crowded") == 10)


async def attack_once(attacked: Any, peer: str, question: Ask) -> None:
    """A little of everything."""
    stranger = attacked.context(Identity.make("000"))
    await attacked.say(peer, HELLO, no_certificate())
    await attacked.say(peer, HELLO, stranger)
    await attacked.say(peer, HELLO)
    async with attacked.guest("tireless") as guest:
        for bad in (question, attacked.model(10**9), attacked.model(-1), attacked.model(terms="none"), Ask("key", {})):
            with contextlib.suppress(DispflError):  # refused, or not there yet, or no longer
                await guest.ask(peer, bad)


async def ask_for_a_round_long_past(attacked: Any) -> None:
    while attacked.status("000")["round"] < 12:
        await asyncio.sleep(0.05)
    async with attacked.guest("mistimed") as guest:
        assert (await guest.ask("000", attacked.model(0))).head["status"] == "stale"


def test_under_attack_to_the_last_round_the_models_are_those_of_the_simulation_bit_for_bit(
    attacked: Any, until: Any, tmp_path: Path
) -> None:
    Launch.begin(compose({}, attacked.settings), tmp_path / "simulated").run(Progress())
    processes, question = attacked.processes, attacked.model()
    certified = attacked.context(attacked.guests["slow"].identity)

    async def scenario() -> None:
        slow: set[asyncio.Task[None]] = set()
        past = asyncio.create_task(ask_for_a_round_long_past(attacked))
        while len(processes.ended()) < len(processes.names):
            for peer in processes.names:
                await attack_once(attacked, peer, question)
                slow.add(asyncio.create_task(drip(attacked.connect(peer), CLIENT_HELLO)))
                slow.add(asyncio.create_task(drip(attacked.connect(peer, certified), HELLO)))
            await asyncio.sleep(0.1)
        await past
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    processes.start(processes.names[-1])
    asyncio.run(scenario())
    assert set(processes.ended().values()) == {0}
    for name in processes.names:
        status = attacked.status(name)
        assert status["state"] == "finished"
        assert {peer: found["missed"] for peer, found in status["peers"].items() if peer in processes.names} == {
            peer: 0 for peer in processes.names if peer != name
        }
        assert {"no-such-round", "terms", "unknown-question", "cut-off"} <= attacked.refused(name, "tireless").keys()
        for reason in ("no-certificate", "unknown-certificate", "handshake"):
            assert attacked.at_the_door(name, reason) >= 1
    assert attacked.refused("000", "mistimed")["stale"] == 1
    gather_up(attacked.out)
    real, simulated = read_summary(attacked.out), read_summary(tmp_path / "simulated")
    assert real
    assert simulated
    assert real["weights_sha256"] == simulated["weights_sha256"]
    for one, other in zip(read_metrics(attacked.out), read_metrics(tmp_path / "simulated"), strict=True):
        assert one["traffic"] == other["traffic"]
