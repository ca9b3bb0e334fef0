"""A ResNet-18 message at density 0.5 by a relay and a proxy, against the direct connection.

Over loopback. The sites are in one process, the relay and an HTTP proxy in one each. Both ways are
measured in turn. Limit: three times the time, a third of the direct throughput.
"""

import asyncio
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.run_relay import RelaySettings
from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from dispfl.peer.transport.relay_client import RelayClient
from dispfl.peer.transport.relay_server import Relay
from measure import report

LIMIT = 3.0
BODY = os.urandom(22_400_000)
"""5.6 million of ResNet-18's 11.2 million weights."""
REQUEST = os.urandom(1_400_000)
"""A mask: one bit for each of them."""
REPEATS = 60
"""Many, because only in some of them do all three processes get a core when they need one."""
LOCALHOST = "127.0.0.1"
CHUNK = 256 * 1024
START_SECONDS = 60.0


def run_relay(folder: Path, port: int, admitted: dict[str, str]) -> None:
    """Run a relay in this process."""

    async def serve() -> None:
        settings = RelaySettings(f"{LOCALHOST}:{port}", [], identity=folder)
        relay = Relay(Address(LOCALHOST, port), settings.certificate(), admitted)
        await relay.open(Address(LOCALHOST, port))
        await asyncio.Event().wait()

    asyncio.run(serve())


def run_proxy(port: int) -> None:
    """Run an HTTP proxy that knows CONNECT alone in this process."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(CHUNK):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # `wait_for` says nothing
            writer.close()
            return
        host, _, target_port = head.split()[1].decode().rpartition(":")
        target_reader, target_writer = await asyncio.open_connection(host, int(target_port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(forward(reader, target_writer), forward(target_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connect, LOCALHOST, port, limit=CHUNK)
        await server.serve_forever()

    asyncio.run(serve())


async def answer(sender: str, request: Request) -> Response:
    """Answer with a model."""
    return Response({"round": request.header["round"]}, BODY)


@asynccontextmanager
async def sites(
    alice: Identity, bob: Identity, relays: tuple[RelayAddress, ...]
) -> AsyncIterator[HttpsTransport]:
    """Alice, and bob who listens, or is reached by relays if there are any."""
    names = {}
    for identity in (alice, bob):
        names[identity.certificate.public_bytes(Encoding.DER)] = identity.name

    def transport(identity: Identity, other: Identity) -> HttpsTransport:
        own_relays = relays if identity is bob else ()
        return HttpsTransport(
            identity.name,
            None if relays else (LOCALHOST, 0),
            client=client_context(identity, [other.certificate]),
            server=server_context(identity, [other.certificate]),
            identify=lambda leaf, issuers: names.get(leaf),
            address=lambda peer: None if relays else (LOCALHOST, called.port),
            max_request=lambda kind: len(REQUEST),
            max_response=lambda kind: len(BODY),
            relays=RelayClient(
                identity,
                Limits(),
                relays_of=lambda peer: relays,
                fingerprint_of=lambda peer: bob.fingerprint,
                own=own_relays,
            ),
        )

    caller = transport(alice, bob)
    called = transport(bob, alice)
    await called.serve(answer)
    try:
        yield caller
    finally:
        await caller.close()
        await called.close()


async def fetch(caller: HttpsTransport) -> float:
    """Return the seconds that a model takes."""
    began = time.perf_counter()
    response = await caller.request("bob", Request("model", {"round": 1}, REQUEST))
    assert len(response.body) == len(BODY)
    return time.perf_counter() - began


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as bound:
        bound.bind((LOCALHOST, 0))
        port: int = bound.getsockname()[1]
    return port


def wait_for(port: int) -> None:
    """Wait until somebody listens on a port."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError):
            socket.create_connection((LOCALHOST, port)).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def measure(relay: RelayAddress, alice: Identity, bob: Identity) -> tuple[float, float]:
    """Return the best times of both ways; in turn, so that other load affects both alike."""
    best_direct = best_relayed = math.inf
    async with sites(alice, bob, ()) as direct, sites(alice, bob, (relay,)) as relayed:
        for _ in range(REPEATS):
            best_direct = min(best_direct, await fetch(direct))
            best_relayed = min(best_relayed, await fetch(relayed))
        assert relayed.route("bob") == f"wss://{relay.address}"
    return best_direct, best_relayed


def main() -> None:
    """Measure and report the ratio of times."""
    alice = Identity.make("alice")
    bob = Identity.make("bob")
    admitted = {identity.fingerprint: identity.name for identity in (alice, bob)}
    relay_port = free_port()
    proxy_port = free_port()
    os.environ["HTTPS_PROXY"] = f"http://{LOCALHOST}:{proxy_port}"
    os.environ["NO_PROXY"] = ""
    with tempfile.TemporaryDirectory() as folder:
        settings = RelaySettings(f"{LOCALHOST}:{relay_port}", [], identity=Path(folder))
        address = settings.address()
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=run_relay, args=(Path(folder), relay_port, admitted)),
            context.Process(target=run_proxy, args=(proxy_port,)),
        ]
        for process in processes:
            process.start()
        try:
            wait_for(relay_port)
            wait_for(proxy_port)
            direct_time, relayed_time = asyncio.run(measure(address, alice, bob))
        finally:
            for process in processes:
                process.kill()
                process.join()
    report(
        "relay",
        relayed_time / direct_time,
        LIMIT,
        what="a ResNet-18 model by a relay and a proxy, against the direct connection",
        mb_a_second=round(len(BODY) / 1e6 / relayed_time),
        direct_mb_a_second=round(len(BODY) / 1e6 / direct_time),
    )


if __name__ == "__main__":
    main()
