"""Byte counters match the bytes on the sockets."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.listener import wait_until

Play = Callable[[Any], None]


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender}, request.body * 10)


def test_both_ends_count_the_bytes_that_a_proxy_between_them_forwards(
    network: Any, play: Play, proxy_to: Any
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            for size in (0, 1000, 100_000, 1_000_000):
                await alice.request("bob", Request("model", {"round": 1}, os.urandom(size)))
            at_alice, at_bob = alice.counters.traffic["bob"], bob.counters.traffic["alice"]
            await wait_until(lambda: (at_bob.received, at_bob.sent) == (proxy.up, proxy.down), 5)
            assert (at_alice.sent, at_alice.received) == pytest.approx(
                (proxy.up, proxy.down), rel=0.001
            )
            assert (at_bob.received, at_bob.sent) == pytest.approx(
                (proxy.up, proxy.down), rel=0.001
            )
            assert (at_alice.body_sent, at_alice.body_received) == (1_101_000, 11_010_000)
            assert 0 < at_alice.sent / at_alice.body_sent - 1 < 0.03
            await alice.close()
            await bob.close()

    play(scenario)


def test_bytes_count_for_unknown_until_the_first_request_of_a_member(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        alice, carol = network.join("alice"), network.join("carol")
        bob = await network.serve("bob", echo)
        await alice.request("bob", Request("sync", {}))
        await carol.request("bob", Request("sync", {}, b"x" * 5000))
        traffic = bob.counters.traffic
        # Signatures in handshakes differ by a few bytes.
        assert traffic["carol"].received > traffic["alice"].received + 4990
        assert (traffic["unknown"].sent, traffic["unknown"].received) == (0, 0)
        del network.members[network.sites["alice"].der]
        fresh = network.join("alice")
        with pytest.raises(Exception, match="bob does not accept this certificate"):
            await fresh.request("bob", Request("sync", {}))
        assert traffic["unknown"].received > 500  # its handshake and its header
        for transport in (alice, carol, fresh, bob):
            await transport.close()

    play(scenario)
