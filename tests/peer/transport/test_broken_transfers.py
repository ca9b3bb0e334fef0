"""A transfer that breaks is gone on with; one that stands still is given up; nothing is ever made of two halves."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.peer.limits import Limits
from dispfl.peer.parts import CHUNK
from dispfl.peer.transport import Ask, Refused, Reply, Unreachable

Play = Callable[[Any], None]
BODY = os.urandom(3_000_000)
QUICK = Limits(backoff=0.01, stall=0.3, pace=10_000.0, farewell=0.1)


class Serving:
    """A handler that notes from which byte on it was asked, and answers with one body after another."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)
        self.offsets: list[int] = []

    async def __call__(self, sender: str, ask: Ask) -> Reply:
        self.offsets.append(ask.offset)
        assert (ask.head["nonce"], ask.body) == ("n1", b"the same mask")
        return Reply({"round": 1}, self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0])


async def fetch(network: Any, proxy_to: Any, serving: Serving, **faults: Any) -> tuple[Reply, Any]:
    """Bob's answer to alice through a proxy with these faults."""
    alice = network.join("alice", limits=QUICK)
    bob = await network.serve("bob", serving, limits=QUICK)
    try:
        async with proxy_to(network.addresses["bob"], **faults) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            try:
                return await alice.ask("bob", Ask("model", {"nonce": "n1"}, b"the same mask")), proxy
            finally:
                await alice.close()
    finally:
        await bob.close()


def test_a_broken_transfer_is_gone_on_with_and_the_body_is_the_same(network: Any, play: Play, proxy_to: Any) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        reply, proxy = await fetch(network, proxy_to, serving, cuts=[900_000, 700_000, 800_000])
        assert reply == Reply({"round": 1}, BODY)
        assert proxy.connections == 4
        assert proxy.down < len(BODY) + 4 * CHUNK  # nothing was sent twice, but for what a cut swallowed

    play(scenario)
    first, second, third, last = serving.offsets
    assert 0 == first < 500_000 < second < third < last < len(BODY)


def test_a_line_that_breaks_again_and_again_is_gone_on_with_as_long_as_it_gets_further(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        reply, proxy = await fetch(network, proxy_to, serving, cuts=[300_000] * 8)
        assert (reply.body, proxy.connections) == (BODY, 9)

    play(scenario)


def test_another_body_after_the_break_is_taken_from_its_beginning(network: Any, play: Play, proxy_to: Any) -> None:
    other = os.urandom(2_000_000)
    serving = Serving(BODY, other)

    async def scenario() -> None:
        reply, _ = await fetch(network, proxy_to, serving, cuts=[900_000])
        assert reply.body == other

    play(scenario)
    assert serving.offsets[0] == 0 < serving.offsets[1]


def test_a_shorter_body_after_the_break_is_taken_whole(network: Any, play: Play, proxy_to: Any) -> None:
    serving = Serving(BODY, BODY[:1000])

    async def scenario() -> None:
        reply, _ = await fetch(network, proxy_to, serving, cuts=[900_000])
        assert reply.body == BODY[:1000]

    play(scenario)


def test_an_ask_is_not_repeated_before_its_answer_has_begun(network: Any, play: Play, proxy_to: Any) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with pytest.raises(Unreachable, match="bob: the connection broke"):
            await fetch(network, proxy_to, serving, cuts=[6000])  # after the handshake, within the first TLS record

    play(scenario)
    assert serving.offsets == [0]


def test_a_line_that_breaks_without_getting_further_is_given_up(network: Any, play: Play, proxy_to: Any) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with pytest.raises(Unreachable, match="bob: the connection broke"):
            await fetch(network, proxy_to, serving, cuts=[900_000, *[20_000] * 20])

    play(scenario)
    assert len(serving.offsets) == 1 + Limits().attempts


def test_a_transfer_that_stands_still_is_given_up_with_a_sentence(network: Any, play: Play, proxy_to: Any) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with pytest.raises(Unreachable, match=r"the transfer stalled: fewer than 3000 bytes in 0\.3 s"):
            await fetch(network, proxy_to, serving, silence_after=20_000)

    play(scenario)
    assert len(serving.offsets) == Limits().attempts


def test_a_refusal_in_the_middle_ends_the_matter(network: Any, play: Play, proxy_to: Any) -> None:
    class Moving(Serving):
        async def __call__(self, sender: str, ask: Ask) -> Reply:
            if ask.offset:
                raise Refused("stale", "That round is over.")
            return await super().__call__(sender, ask)

    async def scenario() -> None:
        with pytest.raises(Refused, match="That round is over"):
            await fetch(network, proxy_to, Moving(BODY), cuts=[900_000])

    play(scenario)


def test_an_answer_may_take_its_time_but_must_begin(network: Any, play: Play) -> None:
    async def think(sender: str, ask: Ask) -> Reply:
        await asyncio.sleep(0.6)  # longer than a transfer may stall
        return Reply({}, b"thought through")

    async def scenario() -> None:
        patient = network.join("alice", limits=QUICK)
        hasty = network.join("carol", limits=Limits(connect=0.1, patience=0.1))
        bob = await network.serve("bob", think, limits=QUICK)
        assert (await patient.ask("bob", Ask("model", {}, b"?"))).body == b"thought through"
        with pytest.raises(Unreachable, match="bob: no answer in time"):
            await hasty.ask("bob", Ask("model", {}))
        for transport in (patient, hasty, bob):
            await transport.close()

    play(scenario)


def test_a_long_body_on_a_slow_line_is_no_reason_to_hurry(network: Any, play: Play) -> None:
    """2 MB in 64 kB every 20 ms, there and back, take longer than the stall, which brings far more than its least."""
    body = os.urandom(2_000_000)

    async def echo(sender: str, ask: Ask) -> Reply:
        return Reply({}, ask.body)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", bob.port)
            await asyncio.gather(trickle(reader, there_writer), trickle(there_reader, writer), return_exceptions=True)
            there_writer.close()
            writer.close()

        limits = Limits(stall=0.4, pace=10_000.0)
        alice, bob = network.join("alice", limits=limits), await network.serve("bob", echo, limits=limits)
        slow = await asyncio.start_server(relay, "127.0.0.1", 0)
        network.addresses["bob"] = slow.sockets[0].getsockname()[:2]
        assert (await alice.ask("bob", Ask("model", {}, body))).body == body
        await alice.close()
        await bob.close()
        slow.close()
        await slow.wait_closed()
        await asyncio.sleep(0.1)

    play(scenario)
