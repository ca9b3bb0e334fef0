"""Asks and replies over real TLS on loopback."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from dispfl.errors import ConfigError
from dispfl.peer.transport import Ask, Refused, Reply, Unreachable

Play = Callable[[Any], None]


async def echo(sender: str, ask: Ask) -> Reply:
    return Reply({"from": sender, **ask.head}, ask.body[::-1])


def test_an_ask_comes_back_with_the_authenticated_sender_and_the_body(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        reply = await alice.ask("bob", Ask("model", {"round": 3, "note": "ö\n"}, b"abc"))
        assert reply == Reply({"from": "alice", "round": 3, "note": "ö\n"}, b"cba")
        await alice.close()
        await bob.close()

    play(scenario)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 262_144, 262_145, 5_000_000])
def test_bodies_of_any_size_arrive_whole_both_ways(size: int, network: Any, play: Play) -> None:
    body = os.urandom(size)

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        assert (await alice.ask("bob", Ask("model", {}, body))).body == body[::-1]
        assert alice.counters.carried["bob"].body_sent == bob.counters.carried["alice"].body_received == size
        assert alice.counters.carried["bob"].body_received == bob.counters.carried["alice"].body_sent == size
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_handlers_refusal_travels_by_name_and_in_a_sentence_and_is_not_counted_a_second_time(
    network: Any, play: Play
) -> None:
    async def refuse(sender: str, ask: Ask) -> Reply:
        raise Refused("stale", f"Round {ask.head['round']} is over; “come back”.")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", refuse)
        with pytest.raises(Refused, match=r"Round 3 is over; “come back”\.") as caught:
            await alice.ask("bob", Ask("model", {"round": 3}, b"x" * 100_000))
        assert caught.value.reason == "stale"
        assert not bob.counters.refused
        await alice.close()
        await bob.close()

    play(scenario)


def test_a_mistake_in_the_handler_is_a_refusal_that_says_no_more_than_that(
    network: Any, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble(sender: str, ask: Ask) -> Reply:
        raise ZeroDivisionError("a secret")

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", stumble)
        with pytest.raises(Refused, match="bob could not answer, for a mistake of its own") as caught:
            await alice.ask("bob", Ask("model", {}))
        assert caught.value.reason == "failed"
        assert "secret" not in str(caught.value)
        await alice.close()
        await bob.close()

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert "alice's question 'model' could not be answered" in caplog.text


def test_many_asks_at_once_share_two_connections_and_do_not_mix(network: Any, play: Play, proxy_to: Any) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            bodies = [bytes([number]) * 100_000 for number in range(20)]
            replies = await asyncio.gather(*(alice.ask("bob", Ask("model", {}, body)) for body in bodies))
            assert [reply.body for reply in replies] == bodies
            assert proxy.connections == 2
            await alice.close()
            await bob.close()

    play(scenario)


def test_everyone_asks_everyone_at_once(network: Any, play: Play) -> None:
    async def scenario() -> None:
        nodes = [await network.serve(name, echo) for name in network.sites]
        pairs = [(node, name) for node in nodes for name in network.sites if name != node.name]
        asks = (node.ask(name, Ask("model", {"to": name}, os.urandom(300_000))) for node, name in pairs * 2)
        replies = await asyncio.gather(*asks)
        assert [reply.head for reply in replies] == [{"from": node.name, "to": name} for node, name in pairs * 2]
        for node in nodes:
            await node.close()

    play(scenario)


def test_a_connection_is_kept_from_one_ask_to_the_next(network: Any, play: Play, proxy_to: Any) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        async with proxy_to(network.addresses["bob"]) as proxy:
            network.addresses["bob"] = ("127.0.0.1", proxy.port)
            for number in range(5):
                await alice.ask("bob", Ask("model", {"round": number}, b"x" * 70_000))
            assert proxy.connections == 1
            await alice.close()
            await bob.close()

    play(scenario)


def test_a_site_that_restarts_between_two_asks_is_heard_again(network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", echo)
        await alice.ask("bob", Ask("hello", {}))
        await bob.close()
        with pytest.raises(Unreachable, match=r"bob: cannot be reached at 127\.0\.0\.1:\d+: connection refused\.$"):
            await alice.ask("bob", Ask("hello", {}))
        bob = await network.serve("bob", echo)
        assert (await alice.ask("bob", Ask("hello", {}))).head == {"from": "alice"}
        await alice.close()
        await bob.close()

    play(scenario)


def test_an_ask_that_is_cancelled_cancels_its_handler_and_harms_no_other(network: Any, play: Play) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def hold(sender: str, ask: Ask) -> Reply:
        if ask.what == "hello":
            return Reply({})
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Reply({})

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", hold)
        asking = asyncio.create_task(alice.ask("bob", Ask("model", {}, b"x" * 100_000)))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        await ended.wait()
        await alice.ask("bob", Ask("hello", {}))
        await alice.close()
        await bob.close()

    play(scenario)


def test_closing_ends_asks_and_answers_that_are_under_way(network: Any, play: Play) -> None:
    began = asyncio.Event()

    async def hold(sender: str, ask: Ask) -> Reply:
        began.set()
        await asyncio.sleep(60)
        return Reply({})

    async def scenario() -> None:
        alice, bob = network.join("alice"), await network.serve("bob", hold)
        asking = asyncio.create_task(alice.ask("bob", Ask("model", {})))
        await began.wait()
        await bob.close()
        with pytest.raises(Unreachable, match="the connection broke"):
            await asking
        await alice.close()
        with pytest.raises(Unreachable, match="this site is shutting down"):
            await alice.ask("bob", Ask("model", {}))

    play(scenario)


def test_an_address_that_is_taken_is_named(network: Any, play: Play) -> None:
    async def scenario() -> None:
        bob = await network.serve("bob", echo)
        carol = network.join("carol")
        carol._listen = ("127.0.0.1", bob.port)
        with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{bob.port} .*choose another address"):
            await carol.serve(echo)
        await carol.close()
        await bob.close()

    play(scenario)


@pytest.mark.parametrize("what", ["", "Model", "../model", "model?x", "m" * 33])
def test_a_question_is_named_by_a_short_lower_case_word(what: str, network: Any, play: Play) -> None:
    async def scenario() -> None:
        alice = network.join("alice")
        with pytest.raises(Refused, match="short lower-case word"):
            await alice.ask("bob", Ask(what, {}))
        await alice.close()

    play(scenario)
