"""A response counts as sent once the system has accepted all of it, so a server that waits for that
loses none."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.http import Limits

Play = Callable[[Any], None]
BODY = os.urandom(20_000_000)
"""More than the socket buffers hold."""
CHUNK = 65_536


class Serving:
    """Responds with a long body and counts how often it was sent."""

    def __init__(self) -> None:
        self.times = 0
        self.was_sent = asyncio.Event()

    async def __call__(self, sender: str, request: Request) -> Response:
        return Response({}, BODY, self._sent)

    def _sent(self) -> None:
        self.times += 1
        self.was_sent.set()


class SlowProxy:
    """A proxy with small buffers that forwards a chunk at a time, most of them only once `open` is
    set."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.has_begun = asyncio.Event()

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[tuple[str, int]]:
        """Run the proxy; yields its address."""
        async with asyncio.TaskGroup() as tasks:
            server = await asyncio.start_server(
                lambda *streams: tasks.create_task(self._connect(*streams)), "127.0.0.1", 0
            )
            async with server:
                yield server.sockets[0].getsockname()[:2]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
        server.setblocking(False)
        await asyncio.get_running_loop().sock_connect(server, self.target)
        server_reader, server_writer = await asyncio.open_connection(sock=server, limit=CHUNK)
        up = asyncio.create_task(self._forward_up(reader, server_writer))
        forwarded = 0
        with contextlib.suppress(OSError):
            while data := await server_reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
                forwarded += len(data)
                if forwarded > 4 * CHUNK:  # the handshake is complete and the response has begun
                    self.has_begun.set()
                    await self.open.wait()
                    await asyncio.sleep(0.001)
        up.cancel()
        await asyncio.wait([up])
        for end in (writer, server_writer):
            end.close()

    async def _forward_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()


def test_a_response_counts_as_sent_once_the_client_has_received_it(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        serving = Serving()
        alice, bob = network.join("alice"), await network.serve("bob", serving)
        proxy = SlowProxy(network.addresses["bob"])
        async with proxy.started() as network.addresses["bob"]:
            pending = asyncio.create_task(alice.request("bob", Request("model", {})))
            await proxy.has_begun.wait()
            await asyncio.sleep(0.2)
            assert serving.times == 0
            proxy.open.set()
            assert (await pending).body == BODY
            await serving.was_sent.wait()
            await alice.close()
            await bob.close()
        assert serving.times == 1

    play(scenario)


def test_closing_after_a_response_is_sent_does_not_truncate_it(network: Any, play: Play) -> None:
    async def scenario() -> None:
        serving = Serving()
        alice, bob = network.join("alice"), await network.serve("bob", serving)
        proxy = SlowProxy(network.addresses["bob"])
        proxy.open.set()
        async with proxy.started() as network.addresses["bob"]:
            pending = asyncio.create_task(alice.request("bob", Request("model", {})))
            await serving.was_sent.wait()
            await bob.close()
            assert (await pending).body == BODY
            await alice.close()

    play(scenario)


def test_a_resumed_response_counts_as_sent_once(network: Any, play: Play, proxy_to: Any) -> None:
    async def scenario() -> None:
        serving, limits = Serving(), Limits(backoff=0.01, shutdown_grace=0.1)
        alice, bob = (
            network.join("alice", limits=limits),
            await network.serve("bob", serving, limits=limits),
        )
        async with proxy_to(network.addresses["bob"], breaks=[900_000]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            assert (await alice.request("bob", Request("model", {}))).body == BODY
            await serving.was_sent.wait()
            await alice.close()
        await bob.close()
        assert (serving.times, proxy.connections) == (1, 2)

    play(scenario)


def test_a_connection_whose_handshake_has_not_begun_is_closed_with_the_server(
    network: Any, play: Play
) -> None:
    """As one that is accepted, or comes by a relay, in the moment in which a site stops."""

    async def scenario() -> None:
        bob = await network.serve("bob", Serving())
        ours, theirs = socket.socketpair()
        with theirs:
            bob._listener.adopt(ours, "wss://relay.example.org")
            await bob.close()
            theirs.setblocking(False)
            assert theirs.recv(1) == b""

    play(scenario)


def test_a_connection_that_arrives_while_the_server_closes_is_not_accepted(
    network: Any, play: Play
) -> None:
    """The listening socket is closed before the event loop has seen that it is readable."""

    async def scenario() -> None:
        bob = await network.serve("bob", Serving())
        await asyncio.sleep(0.01)  # the server waits for connections
        with socket.create_connection(("127.0.0.1", bob._listener.port)) as client:
            await asyncio.sleep(0)  # continues beside what the loop does with the connection
            await bob.close()
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
            assert bob._listener.connections == {}

    play(scenario)
