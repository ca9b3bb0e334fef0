"""A reply counts as sent when all of it has left; so who stays until then leaves nobody with half of it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from dispfl.peer.limits import Limits
from dispfl.peer.transport import Ask, Reply

Play = Callable[[Any], None]
BODY = os.urandom(20_000_000)
"""More than the system keeps for a reader that does not read."""
PIECE = 65_536


class Serving:
    """Answers with a long body, and notes how often it was sent."""

    def __init__(self) -> None:
        self.times = 0
        self.was_sent = asyncio.Event()

    async def __call__(self, sender: str, ask: Ask) -> Reply:
        return Reply({}, BODY, self._sent)

    def _sent(self) -> None:
        self.times += 1
        self.was_sent.set()


class SlowLine:
    """A line to a site that takes a piece at a time, none of them before it is `open`, and keeps little of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.has_begun = asyncio.Event()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[tuple[str, int]]:
        """Where it begins."""
        async with asyncio.TaskGroup() as ends:
            server = await asyncio.start_server(lambda *line: ends.create_task(self._connect(*line)), "127.0.0.1", 0)
            async with server:
                yield server.sockets[0].getsockname()[:2]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = socket.socket()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        there.setblocking(False)
        await asyncio.get_running_loop().sock_connect(there, self.target)
        there_reader, there_writer = await asyncio.open_connection(sock=there, limit=PIECE)
        up = asyncio.create_task(self._pass_up(reader, there_writer))
        passed = 0
        with contextlib.suppress(OSError):
            while data := await there_reader.read(PIECE):
                writer.write(data)
                await writer.drain()
                passed += len(data)
                if passed > 4 * PIECE:  # the handshake is over, and the answer has begun
                    self.has_begun.set()
                    await self.open.wait()
                    await asyncio.sleep(0.001)
        up.cancel()
        await asyncio.wait([up])
        for end in (writer, there_writer):
            end.close()

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                writer.write(data)
                await writer.drain()


def test_a_reply_is_sent_when_the_other_side_has_taken_it(network: Any, play: Play) -> None:
    async def scenario() -> None:
        serving = Serving()
        alice, bob = network.join("alice"), await network.serve("bob", serving)
        line = SlowLine(network.addresses["bob"])
        async with line.laid() as network.addresses["bob"]:
            asking = asyncio.create_task(alice.ask("bob", Ask("model", {})))
            await line.has_begun.wait()
            await asyncio.sleep(0.2)
            assert serving.times == 0
            line.open.set()
            assert (await asking).body == BODY
            await serving.was_sent.wait()
            await alice.close()
            await bob.close()
        assert serving.times == 1

    play(scenario)


def test_who_leaves_once_its_reply_is_sent_leaves_nobody_with_half_of_it(network: Any, play: Play) -> None:
    async def scenario() -> None:
        serving = Serving()
        alice, bob = network.join("alice"), await network.serve("bob", serving)
        line = SlowLine(network.addresses["bob"])
        line.open.set()
        async with line.laid() as network.addresses["bob"]:
            asking = asyncio.create_task(alice.ask("bob", Ask("model", {})))
            await serving.was_sent.wait()
            await bob.close()
            assert (await asking).body == BODY
            await alice.close()

    play(scenario)


def test_a_reply_that_broke_off_is_sent_once_when_it_was_gone_on_with(network: Any, play: Play, proxy_to: Any) -> None:
    async def scenario() -> None:
        serving, limits = Serving(), Limits(backoff=0.01, farewell=0.1)
        alice, bob = network.join("alice", limits=limits), await network.serve("bob", serving, limits=limits)
        async with proxy_to(network.addresses["bob"], cuts=[900_000]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            assert (await alice.ask("bob", Ask("model", {}))).body == BODY
            await serving.was_sent.wait()
            await alice.close()
        await bob.close()
        assert (serving.times, proxy.connections) == (1, 2)

    play(scenario)
