"""Who is not whom they should be is refused, on every side, in every way, and counted by name."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.peer.listener import until
from dispfl.peer.transport import Ask, Refused, Reply, Unreachable

Play = Callable[[Any], None]


async def echo(sender: str, ask: Ask) -> Reply:
    return Reply({"from": sender, **ask.head}, ask.body)


async def never(sender: str, ask: Ask) -> Reply:
    raise AssertionError(f"the handler was asked by {sender}")


async def tls_without_asking(address: tuple[str, int], context: ssl.SSLContext) -> bytes:
    """Shake hands, say a little, and listen until the other side has had enough."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        try:
            writer.write(b"POST /v1/hello HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            return await reader.read()
        finally:
            writer.transport.abort()
    return b""


def test_who_has_no_certificate_is_turned_away_and_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert await tls_without_asking(network.addresses["bob"], context) == b""
        await until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {("no-certificate", "unknown"): 1}
        await bob.close()

    play(scenario)


def test_who_speaks_no_tls_is_turned_away_and_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        reader, writer = await asyncio.open_connection(*network.addresses["bob"])
        writer.write(b"POST /v1/hello HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {("handshake", "unknown"): 1}
        await bob.close()

    play(scenario)


def test_who_has_a_certificate_that_nobody_accepted_is_turned_away(
    network: Any, play: Play, make_site: Callable[[str], Any]
) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        network.sites["mallory"] = make_site("mallory")  # knows everyone, but nobody knows her
        mallory = network.join("mallory")
        with pytest.raises(Unreachable, match="bob may not have accepted our certificate"):
            await mallory.ask("bob", Ask("hello", {}))
        assert bob.counters.refused == {("unknown-certificate", "unknown"): 1}
        await mallory.close()
        await bob.close()

    play(scenario)


def test_who_was_revoked_is_refused_on_a_connection_that_is_open(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        await alice.ask("bob", Ask("hello", {}))
        del network.members[network.sites["alice"].der]
        for _ in range(2):
            with pytest.raises(Refused, match="bob does not accept this certificate") as caught:
                await alice.ask("bob", Ask("hello", {}))
        assert caught.value.reason == "not-a-member"
        assert bob.counters.refused["not-a-member", "alice"] + bob.counters.refused["not-a-member", "unknown"] == 2
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_stranger_s_long_body_is_refused_before_it_is_sent(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", never)
        del network.members[network.sites["alice"].der]
        with pytest.raises(Refused, match="bob does not accept this certificate"):
            await alice.ask("bob", Ask("model", {}, b"x" * 30_000_000))
        assert alice.counters.carried["bob"].sent < 10_000
        await alice.close()
        await bob.close()

    play(scenario)


def test_whoever_decides_who_is_who_may_say_why_not(network: Any, play: Play) -> None:
    def nobody(leaf: bytes, issuers: Any) -> str | None:
        raise Refused("revoked", "alice was revoked on Monday.")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", never, who=nobody)
        with pytest.raises(Refused, match="revoked on Monday") as caught:
            await alice.ask("bob", Ask("hello", {}))
        assert caught.value.reason == "revoked"
        await alice.close()
        await bob.close()

    play(scenario)


def test_the_right_certificate_of_the_wrong_member_is_not_asked(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, carol = network.join("alice"), await network.serve("carol", never)
        network.addresses["bob"] = network.addresses["carol"]
        with pytest.raises(Refused, match="bob's certificate is not the one that was accepted; compare") as caught:
            await alice.ask("bob", Ask("model", {}, b"for bob only"))
        assert caught.value.reason == "wrong-certificate"
        assert alice.counters.carried["bob"].body_sent == 0
        await alice.close()
        await carol.close()

    play(scenario)


def test_a_certificate_that_was_never_accepted_is_not_asked(
    network: Any, play: Play, make_site: Callable[[str], Any]
) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        network.sites["bob"] = make_site("bob")  # a new key, which alice has not seen
        bob = await network.serve("bob", never)
        with pytest.raises(Refused, match=r"bob's certificate is not the one that was accepted .*self-signed"):
            await alice.ask("bob", Ask("hello", {}))
        await until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {("handshake", "unknown"): 1}
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_kept_connection_is_looked_at_again_before_it_is_used(
    network: Any, play: Play, make_site: Callable[[str], Any], proxy_to: Any
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            await alice.ask("bob", Ask("hello", {}))
            old = network.sites["bob"].der
            network.members[old] = "carol"  # the certificate has become somebody else's
            with pytest.raises(Refused, match="bob's certificate is not the one that was accepted"):
                await alice.ask("bob", Ask("hello", {}))
            assert proxy.connections == 2  # the kept one was given up, and a new one shows the same
            network.members[old] = "bob"
            assert (await alice.ask("bob", Ask("hello", {}))).head == {"from": "alice"}
            await alice.close()
            await bob.close()

    play(scenario)


def test_the_issuers_of_a_certificate_are_shown_too(
    network: Any, play: Play, tmp_path: Any, make_site: Callable[[str], Any]
) -> None:
    seen: list[int] = []

    def count_issuers(leaf: bytes, issuers: Any) -> str | None:
        seen.append(len(issuers))
        name: str | None = network.members.get(leaf)
        return name

    async def scenario() -> None:
        alice, extra = network.join("alice"), make_site("an earlier alice")
        chain = tmp_path / "chain.pem"
        chain.write_bytes(network.sites["alice"].files.read_bytes() + extra.files.read_bytes().split(b"-----\n", 2)[2])
        alice._client.load_cert_chain(chain)
        bob = await network.serve("bob", echo, who=count_issuers)
        assert (await alice.ask("bob", Ask("hello", {}))).head == {"from": "alice"}
        await alice.close()
        await bob.close()

    play(scenario)
    assert seen == [1]
