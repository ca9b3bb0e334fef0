"""A ResNet-18 message at density 0.5 through the HTTPS transport, against raw TLS of asyncio.

Over loopback. Both run in one process, in turn, with the same certificates and cipher. Limit: twice
the time, half of the raw throughput.
"""

import asyncio
import math
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

LIMIT = 2.0
BODY = os.urandom(22_400_000)
"""5.6 million of ResNet-18's 11.2 million weights."""
REQUEST = os.urandom(1_400_000)
"""A mask: one bit for each of them."""
CHUNK = 256 * 1024
REPEATS = 9
LOCALHOST = "127.0.0.1"

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
    listening = await asyncio.start_server(answer, LOCALHOST, 0, ssl=server, limit=CHUNK)
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
    chunks = []
    while length:
        chunk = await reader.read(CHUNK)
        if not chunk:
            break
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


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
            (LOCALHOST, 0),
            client=client,
            server=server,
            identify=lambda leaf, issuers: names.get(leaf),
            address=lambda peer: (LOCALHOST, bob.port),
            max_request=lambda kind: len(REQUEST),
            max_response=lambda kind: len(BODY),
        )

    alice = transport("alice")
    bob = transport("bob")
    await bob.serve(answer)

    async def fetch() -> bytes:
        response = await alice.request("bob", Request("model", {"round": 1}, REQUEST))
        return response.body

    yield fetch, alice
    await alice.close()
    await bob.close()


async def best_times(*sides: Fetch) -> list[float]:
    """Return the best time of each; in turn, so that other load affects all alike."""
    best = [math.inf] * len(sides)
    for _ in range(REPEATS):
        for index, fetch in enumerate(sides):
            began = time.perf_counter()
            assert len(await fetch()) == len(BODY)
            best[index] = min(best[index], time.perf_counter() - began)
    return best


async def main() -> None:
    """Measure and report the ratio of times."""
    alice = Identity.make("alice")
    bob = Identity.make("bob")
    client = client_context(alice, [bob.certificate])
    server = server_context(bob, [alice.certificate])
    names = {}
    for identity in (alice, bob):
        names[identity.certificate.public_bytes(Encoding.DER)] = identity.name

    async with (
        raw_streams(client, server) as raw,
        https(client, server, names) as (through_https, transport),
    ):
        raw_time, https_time = await best_times(raw, through_https)
        traffic = transport.counters.traffic["bob"]
    bodies = traffic.body_sent + traffic.body_received
    overhead = (traffic.sent + traffic.received) / bodies - 1
    report(
        "transport",
        https_time / raw_time,
        LIMIT,
        what="a ResNet-18 model requested with a mask",
        mb_a_second=round(len(BODY) / 1e6 / https_time),
        raw_mb_a_second=round(len(BODY) / 1e6 / raw_time),
        tls_and_http_overhead_percent=round(100 * overhead, 2),
    )


if __name__ == "__main__":
    asyncio.run(main())
