"""A broken transfer is resumed, a stalled one is given up, and parts of different bodies are never
combined."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from messages import refused

from dispfl.peer.transport.bandwidth import MAX_TURN
from dispfl.peer.transport.base import Refused, Request, Response, Unreachable
from dispfl.peer.transport.http import Limits

Play = Callable[[Any], None]
BODY = os.urandom(3_000_000)
QUICK = Limits(backoff=0.01, stall_timeout=0.3, min_rate=10_000.0, shutdown_grace=0.1)


class Serving:
    """A handler that records the requested offsets and responds with one body after another."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)
        self.offsets: list[int] = []

    async def __call__(self, sender: str, request: Request) -> Response:
        self.offsets.append(request.offset)
        assert (request.header["nonce"], request.body) == ("n1", b"the same mask")
        return Response(
            {"round": 1}, self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]
        )


async def fetch(
    network: Any, proxy_to: Any, serving: Serving, **faults: Any
) -> tuple[Response, Any]:
    """Bob's response to alice through a proxy with these faults."""
    alice = network.join("alice", limits=QUICK)
    bob = await network.serve("bob", serving, limits=QUICK)
    try:
        async with proxy_to(network.addresses["bob"], **faults) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            try:
                return await alice.request(
                    "bob", Request("model", {"nonce": "n1"}, b"the same mask")
                ), proxy
            finally:
                await alice.close()
    finally:
        await bob.close()


def test_a_broken_transfer_is_resumed_and_the_body_is_complete(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        response, proxy = await fetch(
            network, proxy_to, serving, breaks=[900_000, 700_000, 800_000]
        )
        assert response == Response({"round": 1}, BODY)
        assert proxy.connections == 4
        assert (
            proxy.down < len(BODY) + 4 * MAX_TURN
        )  # nothing was sent twice except what was lost in a break

    play(scenario)
    first, second, third, last = serving.offsets
    assert 0 == first < 500_000 < second < third < last < len(BODY)


def test_a_connection_that_breaks_repeatedly_is_resumed_as_long_as_it_makes_progress(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        response, proxy = await fetch(network, proxy_to, serving, breaks=[300_000] * 8)
        assert (response.body, proxy.connections) == (BODY, 9)

    play(scenario)


def test_a_different_body_after_the_break_is_received_from_the_beginning(
    network: Any, play: Play, proxy_to: Any
) -> None:
    other = os.urandom(2_000_000)
    serving = Serving(BODY, other)

    async def scenario() -> None:
        response, _ = await fetch(network, proxy_to, serving, breaks=[900_000])
        assert response.body == other

    play(scenario)
    assert serving.offsets[0] == 0 < serving.offsets[1]


def test_a_shorter_body_after_the_break_is_received_completely(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY, BODY[:1000])

    async def scenario() -> None:
        response, _ = await fetch(network, proxy_to, serving, breaks=[900_000])
        assert response.body == BODY[:1000]

    play(scenario)


def test_a_request_is_not_repeated_before_its_response_has_begun(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with refused(Unreachable):
            await fetch(
                network, proxy_to, serving, breaks=[6000]
            )  # after the handshake, within the first TLS record

    play(scenario)
    assert serving.offsets == [0]


def test_a_connection_that_breaks_without_progress_is_given_up(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with refused(Unreachable):
            await fetch(network, proxy_to, serving, breaks=[900_000, *[20_000] * 20])

    play(scenario)
    assert len(serving.offsets) == 1 + Limits().max_attempts


def test_a_stalled_transfer_is_given_up_with_a_message(
    network: Any, play: Play, proxy_to: Any
) -> None:
    serving = Serving(BODY)

    async def scenario() -> None:
        with refused(Unreachable):
            await fetch(network, proxy_to, serving, silence_after=20_000)

    play(scenario)
    assert len(serving.offsets) == Limits().max_attempts


def test_a_refusal_of_the_resumed_request_is_final(network: Any, play: Play, proxy_to: Any) -> None:
    class RefusingToResume(Serving):
        async def __call__(self, sender: str, request: Request) -> Response:
            if request.offset:
                raise Refused("stale", "That round is over.")
            return await super().__call__(sender, request)

    async def scenario() -> None:
        with refused(Refused):
            await fetch(network, proxy_to, RefusingToResume(BODY), breaks=[900_000])

    play(scenario)


def test_a_response_must_begin_within_the_response_timeout(network: Any, play: Play) -> None:
    async def respond_late(sender: str, request: Request) -> Response:
        await asyncio.sleep(0.6)  # longer than a transfer may stall
        return Response({}, b"late")

    async def scenario() -> None:
        patient = network.join("alice", limits=QUICK)
        hasty = network.join("carol", limits=Limits(connect_timeout=0.1, response_timeout=0.1))
        bob = await network.serve("bob", respond_late, limits=QUICK)
        assert (await patient.request("bob", Request("model", {}, b"?"))).body == b"late"
        with refused(Unreachable):
            await hasty.request("bob", Request("model", {}))
        for transport in (patient, hasty, bob):
            await transport.close()

    play(scenario)


def test_a_long_body_on_a_slow_connection_is_transferred_completely(
    network: Any, play: Play
) -> None:
    """2 MB at 64 kB per 20 ms, in both directions, take longer than the stall timeout, but exceed
    the minimum rate.

    The client learns that the server is alive before each of the two transfers.
    """
    body, alive = os.urandom(2_000_000), list[tuple[int, int]]()

    async def echo(sender: str, request: Request) -> Response:
        return Response({}, request.body)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", bob.port)
            await asyncio.gather(
                trickle(reader, server_writer),
                trickle(server_reader, writer),
                return_exceptions=True,
            )
            server_writer.close()
            writer.close()

        limits = Limits(stall_timeout=0.4, min_rate=10_000.0)
        alice, bob = (
            network.join("alice", limits=limits),
            await network.serve("bob", echo, limits=limits),
        )
        slow = await asyncio.start_server(relay, "127.0.0.1", 0)
        network.addresses["bob"] = slow.sockets[0].getsockname()[:2]
        count = alice.counters.counter("bob")
        request = Request(
            "model", {}, body, on_alive=lambda: alive.append((count.body_sent, count.body_received))
        )
        assert (await alice.request("bob", request)).body == body
        assert alive == [(0, 0), (2_000_000, 0)]
        await alice.close()
        await bob.close()
        slow.close()
        await slow.wait_closed()
        await asyncio.sleep(0.1)

    play(scenario)
