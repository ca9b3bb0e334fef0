"""The bytes that are counted are those that crossed the sockets."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.peer.listener import until
from dispfl.peer.transport import Ask, Reply

Play = Callable[[Any], None]


async def echo(sender: str, ask: Ask) -> Reply:
    return Reply({"from": sender}, ask.body * 10)


def test_both_ends_count_what_a_proxy_between_them_saw(network: Any, play: Play, proxy_to: Any) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            for size in (0, 1000, 100_000, 1_000_000):
                await alice.ask("bob", Ask("model", {"round": 1}, os.urandom(size)))
            there, here = alice.counters.carried["bob"], bob.counters.carried["alice"]
            await until(lambda: (here.received, here.sent) == (proxy.up, proxy.down), 5)
            assert (there.sent, there.received) == pytest.approx((proxy.up, proxy.down), rel=0.001)
            assert (here.received, here.sent) == pytest.approx((proxy.up, proxy.down), rel=0.001)
            assert (there.body_sent, there.body_received) == (1_101_000, 11_010_000)
            assert 0 < there.sent / there.body_sent - 1 < 0.03
            await alice.close()
            await bob.close()

    play(scenario)


def test_bytes_are_unknown_s_until_a_member_has_asked(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, carol = network.join("alice"), network.join("carol")
        bob = await network.serve("bob", echo)
        await alice.ask("bob", Ask("hello", {}))
        await carol.ask("bob", Ask("hello", {}, b"x" * 5000))
        carried = bob.counters.carried
        assert carried["carol"].received > carried["alice"].received + 5000
        assert (carried["unknown"].sent, carried["unknown"].received) == (0, 0)
        del network.members[network.sites["alice"].der]
        fresh = network.join("alice")
        with pytest.raises(Exception, match="bob does not accept this certificate"):
            await fresh.ask("bob", Ask("hello", {}))
        assert carried["unknown"].received > 500  # its handshake and its head
        for transport in (alice, carol, fresh, bob):
            await transport.close()

    play(scenario)
