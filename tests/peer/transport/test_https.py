"""Requests and responses over real TLS on loopback."""

import asyncio
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.peer.transport.base import Refused, Request, Response, Unreachable

Play = Callable[[Any], None]


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender, **request.header}, request.body[::-1])


def test_a_request_is_answered_with_the_authenticated_sender_and_the_body(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        response = await alice.request("bob", Request("model", {"round": 3, "note": "ö\n"}, b"abc"))
        assert response == Response({"from": "alice", "round": 3, "note": "ö\n"}, b"cba")
        await alice.close()
        await bob.close()

    play(scenario)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_all_addresses_are_those_of_both_families(host: str, network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), network.join("bob")
        bob._listen = ("::", 0)
        await bob.serve(echo)
        network.addresses["bob"] = (host, bob.port)
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
        await alice.close()
        await bob.close()

    play(scenario)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 262_144, 262_145, 5_000_000])
def test_bodies_of_any_size_arrive_complete_in_both_directions(
    size: int, network: Any, play: Play
) -> None:
    body = os.urandom(size)

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        assert (await alice.request("bob", Request("model", {}, body))).body == body[::-1]
        assert (
            alice.counters.traffic["bob"].body_sent
            == bob.counters.traffic["alice"].body_received
            == size
        )
        assert (
            alice.counters.traffic["bob"].body_received
            == bob.counters.traffic["alice"].body_sent
            == size
        )
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_refusal_of_the_handler_reaches_the_client_and_is_not_counted_twice(
    network: Any, play: Play
) -> None:
    async def refuse(sender: str, request: Request) -> Response:
        raise Refused("stale", f"Round {request.header['round']} is over; “come back”.")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", refuse)
        with refused(Refused) as caught:
            await alice.request("bob", Request("model", {"round": 3}, b"x" * 100_000))
        assert caught.value.reason == "stale"
        assert not bob.counters.refused
        await alice.close()
        await bob.close()

    play(scenario)


def test_an_error_in_the_handler_is_refused_without_details(
    network: Any, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(sender: str, request: Request) -> Response:
        raise ZeroDivisionError("a secret")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", fail)
        with refused(Refused) as caught:
            await alice.request("bob", Request("model", {}))
        assert caught.value.reason == "internal-error"
        assert "secret" not in str(caught.value)
        await alice.close()
        await bob.close()

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert "The 'model' request of alice failed" in caplog.text


def test_concurrent_requests_share_two_connections_and_get_their_own_responses(
    network: Any, play: Play, proxy_to: Any
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            bodies = [bytes([number]) * 100_000 for number in range(20)]
            responses = await asyncio.gather(
                *(alice.request("bob", Request("model", {}, body)) for body in bodies)
            )
            assert [response.body for response in responses] == bodies
            assert proxy.connections == 2
            await alice.close()
            await bob.close()

    play(scenario)


def test_all_sites_send_requests_to_each_other_concurrently(network: Any, play: Play) -> None:
    async def scenario() -> None:
        nodes = [await network.serve(name, echo) for name in network.sites]
        pairs = [(node, name) for node in nodes for name in network.sites if name != node.name]
        requests = (
            node.request(name, Request("model", {"to": name}, os.urandom(300_000)))
            for node, name in pairs * 2
        )
        responses = await asyncio.gather(*requests)
        assert [response.header for response in responses] == [
            {"from": node.name, "to": name} for node, name in pairs * 2
        ]
        for node in nodes:
            await node.close()

    play(scenario)


def test_a_connection_is_reused_for_the_next_request(
    network: Any, play: Play, proxy_to: Any
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            for number in range(5):
                await alice.request("bob", Request("model", {"round": number}, b"x" * 70_000))
            assert proxy.connections == 1
            await alice.close()
            await bob.close()

    play(scenario)


def test_a_site_that_restarts_between_two_requests_is_reachable_again(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        await alice.request("bob", Request("sync", {}))
        await bob.close()
        with refused(Unreachable):
            await alice.request("bob", Request("sync", {}))
        bob = await network.serve("bob", echo)
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
        await alice.close()
        await bob.close()

    play(scenario)


def test_cancelling_a_request_cancels_its_handler_and_no_other_request(
    network: Any, play: Play
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def hold(sender: str, request: Request) -> Response:
        if request.kind == "sync":
            return Response({})
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Response({})

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", hold)
        pending = asyncio.create_task(alice.request("bob", Request("model", {}, b"x" * 100_000)))
        await began.wait()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        assert pending.cancelled()
        await ended.wait()
        await alice.request("bob", Request("sync", {}))
        await alice.close()
        await bob.close()

    play(scenario)


def test_closing_ends_requests_and_responses_in_progress(network: Any, play: Play) -> None:
    began = asyncio.Event()

    async def hold(sender: str, request: Request) -> Response:
        began.set()
        await asyncio.sleep(60)
        return Response({})

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", hold)
        pending = asyncio.create_task(alice.request("bob", Request("model", {})))
        await began.wait()
        await bob.close()
        with refused(Unreachable):
            await pending
        await alice.close()
        with refused(Unreachable):
            await alice.request("bob", Request("model", {}))

    play(scenario)


def test_an_address_in_use_is_named_in_the_error(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        carol = network.join("carol")
        carol._listen = ("127.0.0.1", bob.port)
        with pytest.raises(
            ConfigError, match=f"Cannot listen on 127.0.0.1:{bob.port} .*choose another address"
        ):
            await carol.serve(echo)
        await carol.close()
        await bob.close()

    play(scenario)


def ipv6_addresses() -> list[str]:
    """This machine's loopback address of IPv6 and one of a link, with its interface as zone, as far
    as it has them."""
    file = Path("/proc/net/if_inet6")
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    loopback = ["::1" for line in lines if line[5] == "lo"]
    links = [
        f"{ipaddress.IPv6Address(int(line[0], 16))}%{line[5]}" for line in lines if line[3] == "20"
    ]
    return loopback[:1] + links[:1]


@pytest.mark.parametrize("host", ipv6_addresses())
def test_sites_reach_each_other_over_ipv6_and_messages_have_brackets(
    host: str, network: Any, play: Play
) -> None:
    async def scenario() -> None:
        alice, bob, carol = (network.join(name) for name in ("alice", "bob", "carol"))
        bob._listen = (host, 0)
        await bob.serve(echo)
        network.addresses["bob"] = carol._listen = (host, bob.port)
        where = re.escape(f"[{host}]:{bob.port}")
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}
        with pytest.raises(ConfigError, match=f"Cannot listen on {where} "):
            await carol.serve(echo)
        await bob.close()
        with pytest.raises(Unreachable, match=f"bob: cannot be reached at {where}: "):
            await alice.request("bob", Request("sync", {}))
        for transport in (alice, carol):
            await transport.close()

    play(scenario)


@pytest.mark.parametrize("kind", ["", "Model", "../model", "model?x", "m" * 33])
def test_the_kind_of_a_request_must_be_a_short_lower_case_word(
    kind: str, network: Any, play: Play
) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        with refused(Refused):
            await alice.request("bob", Request(kind, {}))
        await alice.close()

    play(scenario)
