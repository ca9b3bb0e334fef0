"""How exactly `limits.bandwidth` is kept on real sockets: bytes a second against the setting.

Over loopback, with one of the two sites limited; a model alone, and two at the same time, which
have the same share. Limits: the bytes on the socket, with TLS and HTTP, are at most 5% above the
setting, and transfers take at most a quarter longer than it allows. On a busy machine they lose
turns, which are not made up for.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cryptography.hazmat.primitives.serialization import Encoding

from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from measure import report

MAX_RATE = 1.05
MAX_TIME = 1.25
MODELS = {"1 Mbit/s": 250_000, "40 Mbit/s": 10_000_000, "400 Mbit/s": 100_000_000}
"""Bytes of a model for each bandwidth: two seconds."""
LOCALHOST = "127.0.0.1"
UNLIMITED = Limits()


@asynccontextmanager
async def sites(receiver: Limits, sender: Limits, size: int) -> AsyncIterator[HttpsTransport]:
    """Alice, who receives, and bob, who sends models of this size."""
    alice = Identity.make("alice")
    bob = Identity.make("bob")
    names = {}
    for identity in (alice, bob):
        names[identity.certificate.public_bytes(Encoding.DER)] = identity.name
    model = os.urandom(size)

    async def answer(sender: str, request: Request) -> Response:
        return Response({}, model)

    def transport(identity: Identity, other: Identity, limits: Limits) -> HttpsTransport:
        return HttpsTransport(
            identity.name,
            (LOCALHOST, 0),
            client=client_context(identity, [other.certificate]),
            server=server_context(identity, [other.certificate]),
            identify=lambda leaf, issuers: names.get(leaf),
            address=lambda peer: (LOCALHOST, called.port),
            max_request=lambda kind: 0,
            max_response=lambda kind: size,
            limits=limits,
        )

    caller = transport(alice, bob, receiver)
    called = transport(bob, alice, sender)
    await called.serve(answer)
    try:
        yield caller
    finally:
        await caller.close()
        await called.close()


async def measure(caller: HttpsTransport, transfers: int) -> tuple[float, list[float]]:
    """Return the bytes a second on the socket, and the seconds of each of several transfers."""
    counter = caller.counters.counter("bob")
    bytes_before = counter.received
    began = time.perf_counter()

    async def fetch() -> float:
        await caller.request("bob", Request("model", {}))
        return time.perf_counter() - began

    seconds = await asyncio.gather(*[fetch() for _ in range(transfers)])
    return (counter.received - bytes_before) / max(seconds), seconds


async def check(bandwidth: str, limited_site: str, transfers: int) -> None:
    """Measure one case, and report the ratios of rate and time."""
    limited = Limits(bandwidth=bandwidth)
    rate = limited.bytes_per_second
    assert rate is not None
    receiver = limited if limited_site == "receiver" else UNLIMITED
    sender = limited if limited_site == "sender" else UNLIMITED
    size = MODELS[bandwidth]
    async with sites(receiver, sender, size // transfers) as caller:
        measured, seconds = await measure(caller, transfers)
    what = f"{transfers} of the {limited_site}'s transfers at {bandwidth}"
    report("bandwidth_rate", measured / rate, MAX_RATE, what=what)
    each = [round(one, 2) for one in seconds]
    report("bandwidth_time", max(seconds) / (size / rate), MAX_TIME, what=what, seconds=each)


async def main() -> None:
    """Measure all cases."""
    for bandwidth in MODELS:
        for limited_site in ("sender", "receiver"):
            for transfers in (1, 2):
                await check(bandwidth, limited_site, transfers)


if __name__ == "__main__":
    asyncio.run(main())
