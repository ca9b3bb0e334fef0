"""Requests that violate the protocol or its size limits are refused with a reason."""

import asyncio
import ssl
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from messages import refused

from dispfl.peer.transport import http
from dispfl.peer.transport.base import Refused, Request, Response
from dispfl.peer.transport.guard import RequestGuard

Play = Callable[[Any], None]


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender}, request.body)


async def send_raw(network: Any, raw: bytes) -> bytes:
    """Bob's response header to these bytes from alice."""
    reader, writer = await network.connect_as("alice")
    writer.write(raw)
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    finally:
        writer.transport.abort()


def post(
    path: str = "/v1/model",
    header: str = '{"version":1,"header":{}}',
    more: str = "content-length: 0\r\n",
) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: bob\r\ndispfl-header: {header}\r\n{more}\r\n".encode()


PROTOCOL_VIOLATIONS = [
    (post("/v2/model"), "version"),
    (post("/v1/Model"), "malformed"),
    (post("/v1/"), "malformed"),
    (post("/v1/model?x=1"), "malformed"),
    (post("/"), "malformed"),
    (post().replace(b"POST", b"GET"), "malformed"),
    (post(header="not json"), "malformed"),
    (post(header="[1]"), "malformed"),
    (post(header='{"header":NaN}'), "malformed"),
    (post(header="[" * 60_000), "malformed"),
    (post(header="{}"), "malformed"),
    (post(header='{"header":{},"offset":-1}'), "malformed"),
    (post(header='{"header":{},"offset":true}'), "malformed"),
    (post(header='{"header":{},"offset":1,"digest":7}'), "malformed"),
    (post(more=""), "too-long"),
    (post(more="transfer-encoding: chunked\r\n") + b"1\r\nx\r\n0\r\n\r\n", "too-long"),
    (post(more="content-length: 1001\r\n"), "too-long"),
    (post(more=f"content-length: {10**15}\r\n"), "too-long"),
]
NOT_HTTP = [
    b"\x16\x03\x01 nonsense\r\n\r\n",
    b"POST /v1/" + b"m" * 1000 + b" HTTP/1.1\r\n\r\n",
    post(header='{"header":{"x":"' + "x" * 2 * http.MAX_HEADER_BYTES + '"}}'),
    post(more="x: y\r\n" * 200),
    post(more="content-length: -1\r\n"),
    post(more="content-length: 1\r\ncontent-length: 2\r\n"),
]


def test_protocol_violations_are_refused_with_a_reason(
    network: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestGuard, "STRIKES", 1000)

    async def scenario() -> None:
        bob = await network.serve("bob", echo, max_request=lambda kind: 1000)
        for number, (raw, reason) in enumerate(PROTOCOL_VIOLATIONS, 1):
            response = await send_raw(network, raw)
            assert response.startswith(b"HTTP/1.1 403 "), raw[:200]
            assert f'"refused":"{reason}"'.encode() in response, raw[:200]
            assert bob.counters.refused.total() == number
        assert bob.counters.refused.keys() == {"alice"}
        assert bob.counters.refused["alice"].keys() == {reason for _, reason in PROTOCOL_VIOLATIONS}
        await bob.close()

    play(scenario)


def test_a_member_that_repeats_protocol_violations_is_banned_and_others_are_not(
    network: Any, play: Play
) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        for _ in range(RequestGuard.STRIKES):
            assert b'"refused":"malformed"' in await send_raw(network, post(header="not json"))
        alice, carol = network.join("alice"), network.join("carol")
        with refused(Refused) as caught:
            await alice.request("bob", Request("sync", {}))
        assert caught.value.reason == "banned"
        assert (await carol.request("bob", Request("sync", {}))).header == {"from": "carol"}
        assert bob.counters.refused == {"alice": {"malformed": RequestGuard.STRIKES, "banned": 1}}
        for transport in (alice, carol, bob):
            await transport.close()

    play(scenario)


def test_refusals_of_the_handler_do_not_lead_to_a_ban_by_the_transport(
    network: Any, play: Play
) -> None:
    async def refuse(sender: str, request: Request) -> Response:
        raise Refused("joining", "not yet")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", refuse)
        for _ in range(2 * RequestGuard.STRIKES):
            with refused(Refused):
                await alice.request("bob", Request("sync", {}))
        await alice.close()
        await bob.close()

    play(scenario)


def test_invalid_http_gets_status_400_and_is_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        for raw in NOT_HTTP:
            assert b" 400 " in (await send_raw(network, raw))[:13], raw[:200]
        assert bob.counters.refused == {"unknown": {"malformed": len(NOT_HTTP)}}
        await bob.close()

    play(scenario)


def test_a_compressed_body_is_not_decompressed(network: Any, play: Play) -> None:
    bomb = zlib.compress(bytes(10_000_000))
    sizes: list[int] = []

    async def note(sender: str, request: Request) -> Response:
        sizes.append(len(request.body))
        return Response({})

    async def scenario() -> None:
        bob = await network.serve("bob", note)
        more = f"content-encoding: deflate\r\ncontent-length: {len(bomb)}\r\n"
        assert (await send_raw(network, post(more=more) + bomb)).startswith(b"HTTP/1.1 200 ")
        await bob.close()

    play(scenario)
    assert sizes == [len(bomb)]


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve(
            "bob", echo, max_request=lambda kind: 1_000_000 if kind == "model" else 0
        )
        await alice.request("bob", Request("model", {}, bytes(1_000_000)))
        sent = alice.counters.traffic["bob"].sent
        with refused(Refused) as caught:
            await alice.request("bob", Request("model", {}, bytes(1_000_001)))
        assert caught.value.reason == "too-long"
        assert alice.counters.traffic["bob"].sent - sent < 10_000
        with refused(Refused):
            await alice.request("bob", Request("sync", {}, b"x"))
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_response_that_is_too_long_is_refused_before_it_is_read(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = (
            network.join("alice", max_response=lambda kind: 2_000_000),
            await network.serve("bob", echo),
        )
        await alice.request("bob", Request("model", {}, bytes(2_000_000)))
        received = alice.counters.traffic["bob"].body_received
        with refused(Refused):
            await alice.request("bob", Request("model", {}, bytes(2_000_001)))
        assert alice.counters.traffic["bob"].body_received == received
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_header_that_is_too_long_is_not_sent_in_either_direction(
    network: Any, play: Play
) -> None:
    async def long_header(sender: str, request: Request) -> Response:
        return Response(
            {"x": "x" * http.MAX_HEADER_BYTES} if request.kind == "model" else request.header
        )

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", long_header)
        longest = {"x": "x" * (http.MAX_HEADER_BYTES - 100)}
        assert (await alice.request("bob", Request("sync", longest))).header == longest
        for request in (Request("sync", {"x": "x" * http.MAX_HEADER_BYTES}), Request("model", {})):
            with refused(Refused) as caught:
                await alice.request("bob", request)
            assert caught.value.reason == "too-long"
        assert bob.counters.refused == {"alice": {"too-long": 1}}
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_redirect_is_not_followed_and_cookies_and_proxies_are_ignored(
    network: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    received: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 307 Elsewhere\r\nlocation: /v1/other\r\nset-cookie:"
                b" a=b\r\ncontent-length: 0\r\n\r\n"
            )
        await reader.read()
        writer.close()

    async def scenario() -> None:
        bob = network.sites["bob"].context(ssl.PROTOCOL_TLS_SERVER, [network.sites["alice"]])
        listening = await asyncio.start_server(redirect, "127.0.0.1", 0, ssl=bob)
        network.addresses["bob"] = listening.sockets[0].getsockname()[:2]
        alice = network.join("alice")
        for _ in range(2):
            with refused(Refused):
                await alice.request("bob", Request("sync", {}))
        await alice.close()
        listening.close()
        await asyncio.sleep(0.05)

    play(scenario)
    assert len(received) == 2
    assert all(raw.startswith(b"POST /v1/sync HTTP/1.1") for raw in received)
    assert not any(b"cookie" in raw.lower() for raw in received)
