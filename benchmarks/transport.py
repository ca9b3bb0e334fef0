"""A ResNet-18 message at density 0.5 over loopback through the HTTPS transport, compared with raw
TLS of asyncio.

Both run in one process, in turn, with the same certificates and cipher. Limit: twice the time, half
of the raw throughput.
"""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cryptography.hazmat.primitives.serialization import Encoding

from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.https import HttpsTransport
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
    """Send a mask and receive a model on one connection, in chunks, without a protocol."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _read(reader, len(REQUEST)):
            await _write(writer, BODY)
        writer.close()
        ended.set()

    ended = asyncio.Event()
    listening = await asyncio.start_server(answer, LOCAL, 0, ssl=server, limit=CHUNK)
    address = listening.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(*address, ssl=client, limit=CHUNK)

    async def fetch() -> bytes:
        await _write(writer, REQUEST)
        return await _read(reader, len(BODY))

    yield fetch
    writer.close()
    await ended.wait()
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
    """The same through the transport, on a persistent connection."""

    async def answer(sender: str, request: Request) -> Response:
        return Response({"round": request.header["round"]}, BODY)

    def transport(name: str) -> HttpsTransport:
        return HttpsTransport(
            name,
            (LOCAL, 0),
            client=client,
            server=server,
            identify=lambda leaf, issuers: names.get(leaf),
            address=lambda peer: (LOCAL, bob.port),
            max_request=lambda kind: len(REQUEST),
            max_response=lambda kind: len(BODY),
        )

    alice, bob = transport("alice"), transport("bob")
    await bob.serve(answer)

    async def fetch() -> bytes:
        return (await alice.request("bob", Request("model", {"round": 1}, REQUEST))).body

    yield fetch, alice
    await alice.close()
    await bob.close()


async def best(*sides: Fetch) -> list[float]:
    """The best time of each; in turn, so that other load affects all alike."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for side, taken in zip(sides, times, strict=True):
            began = time.perf_counter()
            assert len(await side()) == len(BODY)
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


async def main() -> None:
    """Measure and report the ratio of times."""
    alice, bob = Identity.make("alice"), Identity.make("bob")
    client, server = (
        client_context(alice, [bob.certificate]),
        server_context(bob, [alice.certificate]),
    )
    names = {one.certificate.public_bytes(Encoding.DER): one.name for one in (alice, bob)}
    async with (
        raw_streams(client, server) as raw,
        https(client, server, names) as (through, transport),
    ):
        raw_time, https_time = await best(raw, through)
        counter = transport.counters.traffic["bob"]
        overhead = (counter.sent + counter.received) / (
            counter.body_sent + counter.body_received
        ) - 1
    report(
        "transport",
        https_time / raw_time,
        2.0,
        what="a ResNet-18 model requested with a mask",
        mb_a_second=round(len(BODY) / 1e6 / https_time),
        raw_mb_a_second=round(len(BODY) / 1e6 / raw_time),
        tls_and_http_overhead_percent=round(100 * overhead, 2),
    )


if __name__ == "__main__":
    asyncio.run(main())
