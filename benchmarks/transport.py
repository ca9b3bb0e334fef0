"""A ResNet-18 message at density 0.5 over loopback through the HTTPS transport, against raw TLS streams of asyncio.

Both sides live in one process, with the same certificates and the same cipher, and take turns. The limit says that the
transport takes at most twice the time: half of the raw throughput.
"""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cryptography.hazmat.primitives.serialization import Encoding

from dispfl.peer.https import HttpsTransport
from dispfl.peer.identity import Identity, client_context, server_context
from dispfl.peer.transport import Ask, Reply
from measure import report

BODY = os.urandom(22_400_000)
"""5.6 million of ResNet-18's 11.2 million weights."""
REQUEST = os.urandom(1_400_000)
"""A mask: one bit for each of them."""
CHUNK = 256 * 1024
REPEATS = 9
LOCAL = "127.0.0.1"

Fetch = Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def raw_streams(client: ssl.SSLContext, server: ssl.SSLContext) -> AsyncIterator[Fetch]:
    """A mask to the other side, a model back: on one connection, in chunks, and nothing else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _read(reader, len(REQUEST)):
            await _write(writer, BODY)
        writer.close()
        is_over.set()

    is_over = asyncio.Event()
    listening = await asyncio.start_server(answer, LOCAL, 0, ssl=server, limit=CHUNK)
    address = listening.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(*address, ssl=client, limit=CHUNK)

    async def fetch() -> bytes:
        await _write(writer, REQUEST)
        return await _read(reader, len(BODY))

    yield fetch
    writer.close()
    await is_over.wait()
    listening.close()
    await listening.wait_closed()


async def _write(writer: asyncio.StreamWriter, body: bytes) -> None:
    for place in range(0, len(body), CHUNK):
        writer.write(memoryview(body)[place : place + CHUNK])
        await writer.drain()


async def _read(reader: asyncio.StreamReader, length: int) -> bytes:
    parts = []
    while length and (part := await reader.read(CHUNK)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


@asynccontextmanager
async def https(
    client: ssl.SSLContext, server: ssl.SSLContext, names: dict[bytes, str]
) -> AsyncIterator[tuple[Fetch, HttpsTransport]]:
    """The same through the transport, on a connection that is kept."""

    async def answer(sender: str, ask: Ask) -> Reply:
        return Reply({"round": ask.head["round"]}, BODY)

    def transport(name: str) -> HttpsTransport:
        return HttpsTransport(
            name,
            (LOCAL, 0),
            client=client,
            server=server,
            who=lambda leaf, issuers: names.get(leaf),
            address=lambda peer: (LOCAL, bob.port),
            max_ask=lambda what: len(REQUEST),
            max_reply=lambda what: len(BODY),
        )

    alice, bob = transport("alice"), transport("bob")
    await bob.serve(answer)

    async def fetch() -> bytes:
        return (await alice.ask("bob", Ask("model", {"round": 1}, REQUEST))).body

    yield fetch, alice
    await alice.close()
    await bob.close()


async def best(*sides: Fetch) -> list[float]:
    """The best time of each side; taking turns lets a noisy machine disturb all alike."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for side, taken in zip(sides, times, strict=True):
            began = time.perf_counter()
            assert len(await side()) == len(BODY)
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


async def main() -> None:
    """Measure, and report the ratio of times."""
    alice, bob = Identity.make("alice"), Identity.make("bob")
    client, server = client_context(alice, [bob.certificate]), server_context(bob, [alice.certificate])
    names = {one.certificate.public_bytes(Encoding.DER): one.name for one in (alice, bob)}
    async with raw_streams(client, server) as raw, https(client, server, names) as (through, asker):
        raw_time, https_time = await best(raw, through)
        meter = asker.counters.carried["bob"]
        overhead = (meter.sent + meter.received) / (meter.body_sent + meter.body_received) - 1
    report(
        "transport",
        https_time / raw_time,
        2.0,
        what="a ResNet-18 model asked for with a mask",
        mb_a_second=round(len(BODY) / 1e6 / https_time),
        raw_mb_a_second=round(len(BODY) / 1e6 / raw_time),
        tls_and_http_overhead_percent=round(100 * overhead, 2),
    )


if __name__ == "__main__":
    asyncio.run(main())
