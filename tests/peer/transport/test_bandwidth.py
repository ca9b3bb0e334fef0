"""Models are sent and received no faster than a site's bandwidth, and such transfers are not taken
for stalled ones."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from messages import refused
from simulated_world import World, reliable

from dispfl.errors import ConfigError
from dispfl.peer.transport.bandwidth import Bandwidth, RateLimit, Throttle, parse_bandwidth
from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.listener import wait_until
from dispfl.testing.memory_transport import MemoryTransport
from dispfl.testing.virtual_time import run

Play = Callable[[Any], None]
IMPATIENT = Limits(
    bandwidth="4 MB/s", stall_timeout=0.5, min_rate=8e6, backoff=0.01, shutdown_grace=0.1
)
"""Four million bytes a second, where anything slower than eight million counts as stalled."""
MODEL = bytes(range(250)) * 24_000


def test_concurrent_transfers_get_equal_shares_and_a_single_one_all() -> None:
    limit = RateLimit(1e6)
    ends: dict[str, float] = {}

    async def transfer(name: str, size: int, start: float) -> None:
        await asyncio.sleep(start)
        throttle = Throttle(limit)
        for _ in range(size // limit.turn):
            await throttle.take(limit.turn)
        ends[name] = asyncio.get_running_loop().time()

    async def story() -> None:
        await asyncio.gather(
            transfer("one", 1_000_000, 0.0),
            transfer("two", 1_000_000, 0.0),
            transfer("short", 100_000, 0.0),
            transfer("late", 1_000_000, 10.0),
        )

    run(story(), 100.0)
    assert limit.turn == 50_000
    assert ends["short"] == pytest.approx(0.3, abs=0.1)  # a third of the rate
    assert ends["one"] == pytest.approx(2.1, abs=0.2)
    assert ends["two"] == pytest.approx(2.1, abs=0.2)
    assert ends["late"] == pytest.approx(11.0, abs=0.1)  # nothing is saved up while nobody sends


@pytest.mark.parametrize("limited", ["sender", "receiver"])
def test_a_transfer_that_our_own_bandwidth_slows_down_is_not_stalled(
    limited: str, network: Any, play: Play
) -> None:
    async def answer(sender: str, request: Request) -> Response:
        return Response({}, MODEL)

    async def scenario() -> None:
        changes = {"limits": IMPATIENT}
        bob = await network.serve("bob", answer, **(changes if limited == "sender" else {}))
        alice = network.join("alice", **(changes if limited == "receiver" else {}))
        response = await alice.request("bob", Request("model", {}, b"mask"))
        assert response.body == MODEL
        assert not bob.counters.refused
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_client_that_reads_nothing_is_closed_by_a_limited_site_too(
    network: Any, play: Play
) -> None:
    async def long_model(sender: str, request: Request) -> Response:
        return Response({}, bytes(30_000_000))

    async def scenario() -> None:
        limits = Limits(bandwidth="1 Gbit/s", stall_timeout=0.3)
        bob = await network.serve("bob", long_model, limits=limits)
        _, writer = await network.connect_as("alice")
        writer.transport.pause_reading()
        header = b'dispfl-header: {"version":1,"header":{}}\r\n'
        writer.write(
            b"POST /v1/model HTTP/1.1\r\nhost: bob\r\n" + header + b"content-length: 0\r\n\r\n"
        )
        await wait_until(lambda: bool(bob.counters.refused), 30.0)
        assert bob.counters.refused == {"alice": {"slow": 1}}
        writer.transport.abort()
        await bob.close()

    play(scenario)


class LimitedSender(MemoryTransport):
    """The models of 000 arrive for 30 seconds, which is longer than the deadline of 20."""

    async def request(self, peer: str, request: Request) -> Response:
        response = await super().request(peer, request)
        if peer == "000" and response.body:
            request.on_alive()
            request.on_transfer()
            await asyncio.sleep(30.0)
        return response


def test_a_model_that_still_arrives_at_the_deadline_is_used_in_a_later_round() -> None:
    world = World(1, reliable, peers=4, rounds=40)
    world.network.join = lambda name: LimitedSender(world.network, name)  # type: ignore[method-assign]

    async def story() -> None:
        await asyncio.gather(*(world.live(name) for name in world.names))

    # An arriving model may be of an earlier round, as that of a slow member.
    world.is_slow = lambda peer, sender: sender == "000"  # type: ignore[method-assign]
    run(story(), 24 * 3600.0)
    for name in world.names[1:]:
        received = [t for t, senders in world.stores[name].received.items() if "000" in senders]
        assert len(received) > 3
        assert len(world.stores[name].rounds) > 30
    assert not any(event == "unreachable" for _, _, event, _ in world.trace)


def test_bandwidths_are_written_with_their_unit() -> None:
    assert parse_bandwidth("20 Mbit/s") == 2.5e6
    assert parse_bandwidth("2.5MB/s") == 2.5e6
    assert parse_bandwidth("500 kbit/s") == 62_500
    assert Limits(bandwidth="1 Gbit/s").bytes_per_second == 125e6
    assert Limits().bytes_per_second is None
    for text in ("20", "20 Mb", "-1 Mbit/s", "0.01 Mbit/s"):
        with refused(ConfigError, key="limits.bandwidth"):
            Limits(bandwidth=text)
    bandwidth = Bandwidth(1e6)
    assert bandwidth.sending("model").limit is not bandwidth.receiving("model").limit
    assert bandwidth.sending("sync").limit.rate is None
