"""Slow and excess connections are closed and counted, and do not affect honest peers."""

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import threading
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

import pytest
from messages import refused

from dispfl.peer.transport.base import Refused, Request, Response, Unreachable
from dispfl.peer.transport.guard import AddressLimit, RequestGuard
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.listener import wait_until

Play = Callable[[Any], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEADER = b'POST /v1/model HTTP/1.1\r\nhost: bob\r\ndispfl-header: {"version":1,"header":{}}\r\n'


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender}, request.body)


async def drip(streams: Streams, raw: bytes) -> None:
    """Send a request one byte at a time until the server closes the connection."""
    with contextlib.suppress(OSError):
        for byte in raw:
            streams[1].write(bytes([byte]))
            await streams[1].drain()
            await asyncio.sleep(0.05)
    streams[1].transport.abort()


@pytest.mark.parametrize(
    "begun", [b"", HEADER + b"content-length: 999\r\n\r\n"], ids=["header", "body"]
)
def test_a_client_that_sends_one_byte_at_a_time_is_closed_and_counted(
    begun: bytes, network: Any, play: Play
) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(header_timeout=0.5, stall_timeout=0.5))
        reader, writer = streams = await network.connect_as("alice")
        writer.write(begun)
        dripping = asyncio.create_task(drip(streams, b"POST /v1/model HTTP/1.1\r\n" * 20))
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        await dripping
        assert bob.counters.refused == {"alice" if begun else "unknown": {"slow": 1}}
        await bob.close()

    play(scenario)


def test_a_client_that_does_not_read_its_response_is_closed_and_counted(
    network: Any, play: Play
) -> None:
    async def long_body(sender: str, request: Request) -> Response:
        return Response({}, bytes(30_000_000))

    async def scenario() -> None:
        bob = await network.serve("bob", long_body, limits=Limits(stall_timeout=0.3))
        _, writer = await network.connect_as("alice")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEADER + b"content-length: 0\r\n\r\n")
        await wait_until(lambda: bool(bob.counters.refused), 20)
        assert bob.counters.refused == {"alice": {"slow": 1}}
        writer.transport.abort()
        await bob.close()

    play(scenario)


def test_200_slow_connections_do_not_block_an_honest_peer(network: Any, play: Play) -> None:
    body = os.urandom(500_000)

    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve(
            "bob",
            echo,
            limits=Limits(header_timeout=1.0, connect_timeout=1.0, max_unauthenticated=16),
        )
        await alice.request("bob", Request("sync", {}))
        slow = [await asyncio.open_connection(*network.addresses["bob"]) for _ in range(180)]
        slow += [await network.connect_as("carol") for _ in range(20)]
        dripping = [
            asyncio.create_task(drip(streams, b"\x16\x03\x01\x02" * 10)) for streams in slow
        ]
        newcomer = network.join("carol")
        for _ in range(3):
            assert (await alice.request("bob", Request("model", {}, body))).body == body
            assert (await newcomer.request("bob", Request("model", {}, body))).body == body
            assert len(bob._listener.connections) <= 16 + 2
        await asyncio.gather(*dripping)
        await wait_until(lambda: len(bob._listener.connections) <= 2, 20)
        assert len(bob._listener.connections) == 2  # alice's and the newcomer's
        assert bob.counters.refused["unknown"]["slow"] >= 180
        for transport in (alice, newcomer, bob):
            await transport.close()

    play(scenario)


@pytest.mark.parametrize(
    "content", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"], ids=["no TLS", "slow"]
)
def test_a_failed_handshake_frees_its_buffers_immediately(
    content: bytes, network: Any, play: Play
) -> None:
    """They are 256 kB each: a flood must not fill the memory until the next garbage collection."""

    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(max_unauthenticated=1))
        for _ in range(10):
            _, writer = await asyncio.open_connection(*network.addresses["bob"])
            writer.write(content)
            await asyncio.sleep(0.01)
            writer.transport.abort()
        await wait_until(
            lambda: not bob._listener.connections and bob.counters.refused.total() == 10, 20
        )
        assert bob.counters.refused.total() == 10
        assert [kept for kept in gc.get_objects() if isinstance(kept, SSLProtocol)] == []
        await bob.close()

    gc.collect()
    gc.disable()
    try:
        play(scenario)
    finally:
        gc.enable()


def test_a_server_that_sends_responses_without_requests_is_disconnected(
    network: Any, play: Play
) -> None:
    """The connection stays open after a response, and unread responses would fill the memory."""
    response = (
        b'HTTP/1.1 200 OK\r\ndispfl-header: {"version":1,"header":{},"offset":0}\r\ncontent-length:'
        b" 0\r\n\r\n"
    )
    sent, idle = 0, asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await idle.wait()
        with contextlib.suppress(OSError):
            while sent < 100_000:
                writer.write(1000 * response)
                await writer.drain()
                sent += 1000
        writer.transport.abort()

    async def scenario() -> None:
        server = network.sites["bob"].context(ssl.PROTOCOL_TLS_SERVER, [network.sites["alice"]])
        listening = await asyncio.start_server(flood, "127.0.0.1", 0, ssl=server)
        network.addresses["bob"] = listening.sockets[0].getsockname()[:2]
        alice = network.join("alice")
        assert (await alice.request("bob", Request("sync", {}))).header == {}
        idle.set()
        await wait_until(lambda: not alice._peers["bob"].sockets, 20)
        assert sent < 100_000  # disconnected before
        await alice.close()
        listening.close()
        await asyncio.sleep(0.05)

    play(scenario)


def test_a_full_listener_keeps_the_connections_of_members(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve("bob", echo, limits=Limits(max_connections=3))
        await alice.request("bob", Request("sync", {}))
        unauthenticated = [
            await asyncio.open_connection(*network.addresses["bob"]) for _ in range(6)
        ]
        await wait_until(lambda: bob.counters.refused["unknown"]["slow"] == 4, 20)
        assert bob.counters.refused == {
            "unknown": {"slow": 4}
        }  # two of six unauthenticated connections are left
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
        await alice.close()
        await bob.close()
        for _, writer in unauthenticated:
            writer.transport.abort()

    play(scenario)


def test_idle_connections_of_members_do_not_lock_others_out(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(max_connections=4))
        processes = [network.join("alice") for _ in range(4)]
        for alice in processes:
            await alice.request("bob", Request("sync", {}))
        assert len(bob._listener.connections) == 4  # as many as there may be, all idle
        carol = network.join("carol")
        for _ in range(3):
            assert (await carol.request("bob", Request("sync", {}))).header == {"from": "carol"}
        assert (await processes[-1].request("bob", Request("sync", {}))).header == {"from": "alice"}
        assert len(bob._listener.connections) == 4
        assert not bob.counters.refused
        for transport in (*processes, carol, bob):
            await transport.close()

    play(scenario)


def test_the_longest_idle_connection_of_a_member_above_its_limit_is_closed(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(max_connections_from_peer=2))
        processes = [
            network.join("alice") for _ in range(4)
        ]  # a peer that was killed and restarted
        for alice in processes:
            await alice.request("bob", Request("sync", {}))
        await wait_until(lambda: len(bob._listener.connections) == 2, 20)
        assert len(bob._listener.connections) == 2
        assert not bob.counters.refused
        for transport in (*processes, bob):
            await transport.close()

    play(scenario)


def test_a_member_with_too_many_requests_in_progress_is_refused(network: Any, play: Play) -> None:
    began, finish = asyncio.Semaphore(0), asyncio.Event()

    async def hold(sender: str, request: Request) -> Response:
        began.release()
        await finish.wait()
        return Response({})

    async def scenario() -> None:
        bob = await network.serve("bob", hold, limits=Limits(max_connections_from_peer=2))
        alice, other = network.join("alice"), network.join("alice")
        pending = [asyncio.create_task(alice.request("bob", Request("sync", {}))) for _ in range(2)]
        for _ in range(2):
            await began.acquire()
        with refused(Refused) as caught:
            await other.request("bob", Request("sync", {}))
        assert caught.value.reason == "too-many-connections"
        assert bob.counters.refused == {"alice": {"too-many-connections": 1}}
        finish.set()
        await asyncio.gather(*pending)
        for transport in (alice, other, bob):
            await transport.close()

    play(scenario)


def test_the_body_of_a_member_that_has_used_up_its_requests_is_not_read(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        guard = RequestGuard()
        guard.max_bytes = 3_000_000

        async def count(sender: str, request: Request) -> Response:
            guard.charge(sender, len(request.body), is_sync=True)
            return Response({})

        alice, bob = network.join("alice"), await network.serve("bob", count, guard=guard)
        guard.MAX_SYNCS = 1  # type: ignore[misc]
        await alice.request("bob", Request("sync", {}, bytes(1_000_000)))
        for _ in range(2):
            with refused(Refused):
                await alice.request("bob", Request("sync", {}, bytes(1_000_000)))
        received = bob.counters.traffic["alice"].received
        assert received > 3_000_000
        for _ in range(20):
            with refused(Refused):
                await alice.request("bob", Request("sync", {}, bytes(1_000_000)))
        assert bob.counters.traffic["alice"].received < received + 100_000
        for transport in (alice, bob):
            await transport.close()

    play(scenario)


def test_a_member_whose_names_are_looked_up_slowly_occupies_one_thread(
    network: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup cannot be cancelled, and members may announce another name at any time, with a name
    server of theirs."""
    look_up, answered = socket.getaddrinfo, threading.Event()
    looked_up: list[str] = []

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host.endswith(".example"):
            looked_up.append(host)
            answered.wait(30)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **options)

    async def scenario() -> None:
        alice, carol = network.join("alice"), await network.serve("carol", echo)
        network.addresses["carol"] = ("localhost", carol.port)
        for number in range(5):
            network.addresses["bob"] = (f"bob-{number}.example", 7600)
            with pytest.raises((TimeoutError, Unreachable)):
                async with asyncio.timeout(0.1):
                    await alice.request("bob", Request("sync", {}))
        assert looked_up == ["bob-0.example"]
        with refused(Unreachable):
            await alice.request("bob", Request("sync", {}))
        assert (await alice.request("carol", Request("sync", {}))).header == {"from": "alice"}
        answered.set()
        await asyncio.sleep(0.1)
        with refused(Unreachable):
            await alice.request("bob", Request("sync", {}))
        assert looked_up == ["bob-0.example", "bob-4.example"]
        for transport in (alice, carol):
            await transport.close()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        play(scenario)
    finally:
        answered.set()


def test_a_banned_members_connection_is_closed_and_new_ones_from_its_address_wait_their_turn(
    network: Any, play: Play
) -> None:
    now = 100.0

    async def scenario() -> None:
        nonlocal now
        guard = RequestGuard(lambda: now)
        bob = await network.serve("bob", echo, guard=guard)
        carol = network.join("carol")
        assert (await carol.request("bob", Request("sync", {}))).header == {"from": "carol"}
        for _ in range(RequestGuard.STRIKES):
            guard.count("alice", "malformed")

        reader, writer = await network.connect_as("alice")
        writer.write((HEADER + b"content-length: 0\r\n\r\n") * 100)
        with contextlib.suppress(OSError):
            answers = await reader.read()  # until the connection is closed
            assert answers.count(b'"refused":"banned"') == 1
        writer.transport.abort()

        for _ in range(int(AddressLimit.PER_SECOND)):
            _, writer = await network.connect_as("alice")
            writer.transport.abort()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await network.connect_as("alice")

        # Members behind the same address keep their connections, and new ones are not refused.
        assert (await carol.request("bob", Request("sync", {}))).header == {"from": "carol"}
        newcomer = network.join("carol")
        request = asyncio.create_task(newcomer.request("bob", Request("sync", {})))
        await asyncio.sleep(0.1)
        assert not request.done()
        now += 1.0
        assert (await request).header == {"from": "carol"}

        # Those that wait when too many do, or when bob stops, are closed.
        for _ in range(int(AddressLimit.PER_SECOND)):
            guard.addresses.allows("127.0.0.1")
        waiting = [
            asyncio.create_task(network.connect_as("alice"))
            for _ in range(bob.limits.max_unauthenticated + 5)
        ]
        closed, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(connecting.exception(), OSError) for connecting in closed)
        for transport in (carol, newcomer, bob):
            await transport.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, OSError) for result in results)

    play(scenario)
