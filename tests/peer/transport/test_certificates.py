"""Clients and servers with a wrong certificate are refused, and the refusals are counted by
reason."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from messages import refused

from dispfl.peer.transport.base import Refused, Request, Response, Unreachable
from dispfl.peer.transport.listener import wait_until

Play = Callable[[Any], None]


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender, **request.header}, request.body)


async def never(sender: str, request: Request) -> Response:
    raise AssertionError(f"the handler was called by {sender}")


async def raw_request(address: tuple[str, int], context: ssl.SSLContext) -> bytes:
    """Send a request over TLS and read until the server closes the connection."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        try:
            writer.write(b"POST /v1/sync HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
            return await reader.read()
        finally:
            writer.transport.abort()
    return b""


def test_a_client_without_a_certificate_is_refused_and_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert await raw_request(network.addresses["bob"], context) == b""
        await wait_until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {"unknown": {"no-certificate": 1}}
        await bob.close()

    play(scenario)


def test_a_client_without_tls_is_refused_and_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        reader, writer = await asyncio.open_connection(*network.addresses["bob"])
        writer.write(b"POST /v1/sync HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await wait_until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {"unknown": {"handshake": 1}}
        await bob.close()

    play(scenario)


def test_a_client_with_an_unknown_certificate_is_refused(
    network: Any, play: Play, make_site: Callable[[str], Any]
) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", never)
        network.sites["mallory"] = make_site("mallory")  # accepts the others, but is not accepted
        mallory = network.join("mallory")
        with refused(Unreachable):
            await mallory.request("bob", Request("sync", {}))
        assert bob.counters.refused == {"unknown": {"unknown-certificate": 1}}
        await mallory.close()
        await bob.close()

    play(scenario)


def test_a_revoked_member_is_refused_on_an_open_connection(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        await alice.request("bob", Request("sync", {}))
        del network.members[network.sites["alice"].der]
        for _ in range(2):
            with refused(Refused) as caught:
                await alice.request("bob", Request("sync", {}))
        assert caught.value.reason == "not-a-member"
        assert (
            bob.counters.refused["alice"]["not-a-member"]
            + bob.counters.refused["unknown"]["not-a-member"]
            == 2
        )
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_long_body_of_a_non_member_is_refused_before_it_is_sent(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", never)
        del network.members[network.sites["alice"].der]
        with refused(Refused):
            await alice.request("bob", Request("model", {}, b"x" * 30_000_000))
        assert alice.counters.traffic["bob"].sent < 10_000
        await alice.close()
        await bob.close()

    play(scenario)


def test_identify_may_refuse_with_its_own_reason(network: Any, play: Play) -> None:
    def refuse_alice(leaf: bytes, issuers: Any) -> str | None:
        raise Refused("revoked", "alice was revoked on Monday.")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", never, identify=refuse_alice)
        with refused(Refused) as caught:
            await alice.request("bob", Request("sync", {}))
        assert caught.value.reason == "revoked"
        await alice.close()
        await bob.close()

    play(scenario)


def test_no_request_is_sent_to_the_wrong_member(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, carol = network.join("alice"), await network.serve("carol", never)
        network.addresses["bob"] = network.addresses["carol"]
        with refused(Refused) as caught:
            await alice.request("bob", Request("model", {}, b"for bob only"))
        assert caught.value.reason == "wrong-certificate"
        assert alice.counters.traffic["bob"].body_sent == 0
        await alice.close()
        await carol.close()

    play(scenario)


def test_no_request_is_sent_to_a_server_with_an_unaccepted_certificate(
    network: Any, play: Play, make_site: Callable[[str], Any]
) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        network.sites["bob"] = make_site("bob")  # a new key that alice has not accepted
        bob = await network.serve("bob", never)
        with refused(Refused):
            await alice.request("bob", Request("sync", {}))
        await wait_until(lambda: bool(bob.counters.refused), 10)
        assert bob.counters.refused == {"unknown": {"handshake": 1}}
        await alice.close()
        await bob.close()

    play(scenario)


def test_the_certificate_of_a_reused_connection_is_checked_again(
    network: Any, play: Play, make_site: Callable[[str], Any], proxy_to: Any
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            await alice.request("bob", Request("sync", {}))
            old = network.sites["bob"].der
            network.members[old] = "carol"  # the certificate now belongs to another member
            with refused(Refused):
                await alice.request("bob", Request("sync", {}))
            assert (
                proxy.connections == 2
            )  # the reused one was closed, and a new one has the same certificate
            network.members[old] = "bob"
            assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
            await alice.close()
            await bob.close()

    play(scenario)


def test_the_issuers_of_a_certificate_are_passed_to_identify(
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
        chain.write_bytes(
            network.sites["alice"].files.read_bytes()
            + extra.files.read_bytes().split(b"-----\n", 2)[2]
        )
        alice._client.load_cert_chain(chain)
        bob = await network.serve("bob", echo, identify=count_issuers)
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
        await alice.close()
        await bob.close()

    play(scenario)
    assert seen == [1]
