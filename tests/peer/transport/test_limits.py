"""What others may not do: send too much, too slowly, too often, or what is not the protocol."""

import asyncio
import contextlib
import gc
import os
import ssl
import zlib
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.peer import heads
from dispfl.peer.door import Door
from dispfl.peer.limits import Limits
from dispfl.peer.listener import until
from dispfl.peer.transport import Ask, Refused, Reply

Play = Callable[[Any], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(sender: str, ask: Ask) -> Reply:
    return Reply({"from": sender}, ask.body)


async def as_member(network: Any, name: str) -> Streams:
    """A connection to bob with a member's certificate, and no manners yet."""
    bob = [network.sites["bob"]]
    context = network.sites[name].context(ssl.PROTOCOL_TLS_CLIENT, bob)
    return await asyncio.open_connection(*network.addresses["bob"], ssl=context)


async def say(network: Any, request: bytes) -> bytes:
    """What bob answers to these bytes of alice."""
    reader, writer = await as_member(network, "alice")
    writer.write(request)
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    finally:
        writer.transport.abort()


def post(path: str = "/v1/model", head: str = '{"version":1,"head":{}}', more: str = "content-length: 0\r\n") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: bob\r\ndispfl-head: {head}\r\n{more}\r\n".encode()


NOT_THE_PROTOCOL = [
    (post("/v2/model"), "version"),
    (post("/v1/Model"), "malformed"),
    (post("/v1/"), "malformed"),
    (post("/v1/model?x=1"), "malformed"),
    (post("/"), "malformed"),
    (post().replace(b"POST", b"GET"), "malformed"),
    (post(head="not json"), "malformed"),
    (post(head="[1]"), "malformed"),
    (post(head='{"head":NaN}'), "malformed"),
    (post(head="[" * 60_000), "malformed"),
    (post(head="{}"), "malformed"),
    (post(head='{"head":{},"offset":-1}'), "malformed"),
    (post(head='{"head":{},"offset":true}'), "malformed"),
    (post(head='{"head":{},"offset":1,"digest":7}'), "malformed"),
    (post(more=""), "too-long"),
    (post(more="transfer-encoding: chunked\r\n") + b"1\r\nx\r\n0\r\n\r\n", "too-long"),
    (post(more="content-length: 1001\r\n"), "too-long"),
    (post(more=f"content-length: {10**15}\r\n"), "too-long"),
]
NOT_HTTP = [
    b"\x16\x03\x01 nonsense\r\n\r\n",
    b"POST /v1/" + b"m" * 1000 + b" HTTP/1.1\r\n\r\n",
    post(head='{"head":{"x":"' + "x" * 2 * heads.LIMIT + '"}}'),
    post(more="x: y\r\n" * 200),
    post(more="content-length: -1\r\n"),
    post(more="content-length: 1\r\ncontent-length: 2\r\n"),
]


def test_what_is_not_the_protocol_is_refused_by_name(network: Any, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "STRIKES", 1000)

    async def scenario() -> None:
        bob = await network.serve("bob", echo, max_ask=lambda what: 1000)
        for number, (request, reason) in enumerate(NOT_THE_PROTOCOL, 1):
            answer = await say(network, request)
            assert answer.startswith(b"HTTP/1.1 403 "), request[:200]
            assert f'"refused":"{reason}"'.encode() in answer, request[:200]
            assert bob.counters.refused.total() == number
        assert set(bob.counters.refused) == {(reason, "alice") for _, reason in NOT_THE_PROTOCOL}
        await bob.close()

    play(scenario)


def test_who_keeps_sending_what_is_not_the_protocol_is_cut_off_and_nobody_else_is(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        for _ in range(Door.STRIKES):
            assert b'"refused":"malformed"' in await say(network, post(head="not json"))
        alice, carol = network.join("alice"), network.join("carol")
        with pytest.raises(Refused, match="alice was refused too often; it may come back in") as caught:
            await alice.ask("bob", Ask("hello", {}))
        assert caught.value.reason == "cut-off"
        assert (await carol.ask("bob", Ask("hello", {}))).head == {"from": "carol"}
        assert bob.counters.refused == {("malformed", "alice"): Door.STRIKES, ("cut-off", "alice"): 1}
        for transport in (alice, carol, bob):
            await transport.close()

    play(scenario)


def test_whom_the_handler_refuses_is_not_cut_off_by_the_transport(network: Any, play: Play) -> None:
    async def refuse(sender: str, ask: Ask) -> Reply:
        raise Refused("joining", "not yet")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", refuse)
        for _ in range(2 * Door.STRIKES):
            with pytest.raises(Refused, match="not yet"):
                await alice.ask("bob", Ask("hello", {}))
        await alice.close()
        await bob.close()

    play(scenario)


def test_what_is_not_http_is_answered_shortly_and_counted(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        for request in NOT_HTTP:
            assert b" 400 " in (await say(network, request))[:13], request[:200]
        assert bob.counters.refused == {("malformed", "unknown"): len(NOT_HTTP)}
        await bob.close()

    play(scenario)


def test_a_compressed_body_stays_compressed(network: Any, play: Play) -> None:
    bomb = zlib.compress(bytes(10_000_000))
    sizes: list[int] = []

    async def note(sender: str, ask: Ask) -> Reply:
        sizes.append(len(ask.body))
        return Reply({})

    async def scenario() -> None:
        bob = await network.serve("bob", note)
        more = f"content-encoding: deflate\r\ncontent-length: {len(bomb)}\r\n"
        assert (await say(network, post(more=more) + bomb)).startswith(b"HTTP/1.1 200 ")
        await bob.close()

    play(scenario)
    assert sizes == [len(bomb)]


def test_an_ask_that_is_too_long_is_refused_before_it_is_sent(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve("bob", echo, max_ask=lambda what: 1_000_000 if what == "model" else 0)
        await alice.ask("bob", Ask("model", {}, bytes(1_000_000)))
        sent = alice.counters.carried["bob"].sent
        with pytest.raises(Refused, match="A question 'model' has at most 1000000 bytes, not 1000001") as caught:
            await alice.ask("bob", Ask("model", {}, bytes(1_000_001)))
        assert caught.value.reason == "too-long"
        assert alice.counters.carried["bob"].sent - sent < 10_000
        with pytest.raises(Refused, match="A question 'hello' has at most 0 bytes, not 1"):
            await alice.ask("bob", Ask("hello", {}, b"x"))
        await alice.close()
        await bob.close()

    play(scenario)


def test_an_answer_that_is_too_long_is_refused_before_it_is_read(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice", max_reply=lambda what: 2_000_000), await network.serve("bob", echo)
        await alice.ask("bob", Ask("model", {}, bytes(2_000_000)))
        received = alice.counters.carried["bob"].body_received
        with pytest.raises(Refused, match="bob's answer to 'model' has 2000001 bytes; at most 2000000 are allowed"):
            await alice.ask("bob", Ask("model", {}, bytes(2_000_001)))
        assert alice.counters.carried["bob"].body_received == received
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_head_that_is_too_long_is_not_sent_either_way(network: Any, play: Play) -> None:
    async def swell(sender: str, ask: Ask) -> Reply:
        return Reply({"x": "x" * heads.LIMIT} if ask.what == "model" else ask.head)

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", swell)
        longest = {"x": "x" * (heads.LIMIT - 100)}
        assert (await alice.ask("bob", Ask("hello", longest))).head == longest
        for ask in (Ask("hello", {"x": "x" * heads.LIMIT}), Ask("model", {})):
            with pytest.raises(Refused, match="A head has at most 65536 bytes as JSON") as caught:
                await alice.ask("bob", ask)
            assert caught.value.reason == "too-long"
        assert bob.counters.refused == {("too-long", "alice"): 1}
        await alice.close()
        await bob.close()

    play(scenario)


async def drip(streams: Streams, request: bytes) -> None:
    """Send a request one byte at a time, far too slowly, until the other side has had enough."""
    with contextlib.suppress(OSError):
        for byte in request:
            streams[1].write(bytes([byte]))
            await streams[1].drain()
            await asyncio.sleep(0.05)
    streams[1].transport.abort()


@pytest.mark.parametrize("begun", [b"", post(more="content-length: 999\r\n")], ids=["head", "body"])
def test_who_sends_a_byte_at_a_time_is_cut_and_counted(begun: bytes, network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(head=0.5, stall=0.5))
        reader, writer = streams = await as_member(network, "alice")
        writer.write(begun)
        dripping = asyncio.create_task(drip(streams, b"POST /v1/model HTTP/1.1\r\n" * 20))
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        await dripping
        assert bob.counters.refused == {("slow", "alice" if begun else "unknown"): 1}
        await bob.close()

    play(scenario)


def test_who_does_not_fetch_its_answer_is_cut_and_counted(network: Any, play: Play) -> None:
    async def much(sender: str, ask: Ask) -> Reply:
        return Reply({}, bytes(30_000_000))

    async def scenario() -> None:
        bob = await network.serve("bob", much, limits=Limits(stall=0.3))
        _, writer = await as_member(network, "alice")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post())
        await until(lambda: bool(bob.counters.refused), 20)
        assert bob.counters.refused == {("slow", "alice"): 1}
        writer.transport.abort()
        await bob.close()

    play(scenario)


def test_200_slow_connections_neither_fill_the_place_nor_keep_an_honest_peer_out(network: Any, play: Play) -> None:
    body = os.urandom(500_000)

    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve("bob", echo, limits=Limits(head=1.0, connect=1.0, strangers=16))
        await alice.ask("bob", Ask("hello", {}))
        slow = [await asyncio.open_connection(*network.addresses["bob"]) for _ in range(180)]
        slow += [await as_member(network, "carol") for _ in range(20)]
        dripping = [asyncio.create_task(drip(streams, b"\x16\x03\x01\x02" * 10)) for streams in slow]
        newcomer = network.join("carol")
        for _ in range(3):
            assert (await alice.ask("bob", Ask("model", {}, body))).body == body
            assert (await newcomer.ask("bob", Ask("model", {}, body))).body == body
            assert len(bob._listener.lines) <= 16 + 2
        await asyncio.gather(*dripping)
        await until(lambda: len(bob._listener.lines) <= 2, 20)
        assert len(bob._listener.lines) == 2  # alice's and the newcomer's
        assert bob.counters.refused["slow", "unknown"] >= 180
        for transport in (alice, newcomer, bob):
            await transport.close()

    play(scenario)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"], ids=["no TLS", "slow"])
def test_a_failed_handshake_gives_its_buffers_back_at_once(content: bytes, network: Any, play: Play) -> None:
    """They are 256 kB each: a crowd must not fill the memory until Python next looks for circles."""

    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(strangers=1))
        for _ in range(10):
            _, writer = await asyncio.open_connection(*network.addresses["bob"])
            writer.write(content)
            await asyncio.sleep(0.01)
            writer.transport.abort()
        await until(lambda: not bob._listener.lines and bob.counters.refused.total() == 10, 20)
        assert bob.counters.refused.total() == 10
        assert [kept for kept in gc.get_objects() if isinstance(kept, SSLProtocol)] == []
        await bob.close()

    gc.collect()
    gc.disable()
    try:
        play(scenario)
    finally:
        gc.enable()


def test_when_the_place_is_full_a_member_s_connections_stay(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        bob = await network.serve("bob", echo, limits=Limits(connections=3))
        await alice.ask("bob", Ask("hello", {}))
        strangers = [await asyncio.open_connection(*network.addresses["bob"]) for _ in range(6)]
        await until(lambda: bob.counters.refused["slow", "unknown"] == 4, 20)
        assert bob.counters.refused == {("slow", "unknown"): 4}  # of six strangers, two are left
        assert (await alice.ask("bob", Ask("hello", {}))).head == {"from": "alice"}
        await alice.close()
        await bob.close()
        for _, writer in strangers:
            writer.transport.abort()

    play(scenario)


def test_a_member_has_only_so_many_connections_and_the_longest_idle_goes(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo, limits=Limits(from_one=2))
        lives = [network.join("alice") for _ in range(4)]  # a peer that was killed and started again
        for alice in lives:
            await alice.ask("bob", Ask("hello", {}))
        await until(lambda: len(bob._listener.lines) == 2, 20)
        assert len(bob._listener.lines) == 2
        assert not bob.counters.refused
        for transport in (*lives, bob):
            await transport.close()

    play(scenario)


def test_a_member_with_too_many_asks_under_way_is_told_so(network: Any, play: Play) -> None:
    began, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def hold(sender: str, ask: Ask) -> Reply:
        began.release()
        await go_on.wait()
        return Reply({})

    async def scenario() -> None:
        bob = await network.serve("bob", hold, limits=Limits(from_one=2))
        alice, other = network.join("alice"), network.join("alice")
        asking = [asyncio.create_task(alice.ask("bob", Ask("hello", {}))) for _ in range(2)]
        for _ in range(2):
            await began.acquire()
        with pytest.raises(Refused, match="alice has 2 requests under way already") as caught:
            await other.ask("bob", Ask("hello", {}))
        assert caught.value.reason == "crowded"
        go_on.set()
        await asyncio.gather(*asking)
        for transport in (alice, other, bob):
            await transport.close()

    play(scenario)


def test_a_redirect_is_not_followed_and_cookies_and_proxies_are_ignored(
    network: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    heard: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 307 Elsewhere\r\nlocation: /v1/other\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
            )
        await reader.read()
        writer.close()

    async def scenario() -> None:
        bob = network.sites["bob"].context(ssl.PROTOCOL_TLS_SERVER, [network.sites["alice"]])
        listening = await asyncio.start_server(redirect, "127.0.0.1", 0, ssl=bob)
        network.addresses["bob"] = listening.sockets[0].getsockname()[:2]
        alice = network.join("alice")
        for _ in range(2):
            with pytest.raises(Refused, match="head cannot be read"):
                await alice.ask("bob", Ask("hello", {}))
        await alice.close()
        listening.close()
        await asyncio.sleep(0.05)

    play(scenario)
    assert len(heard) == 2
    assert all(request.startswith(b"POST /v1/hello HTTP/1.1") for request in heard)
    assert not any(b"cookie" in request.lower() for request in heard)
