"""Messages in memory: carried, lost, doubled, overtaken, parted, and the same for the same seed."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from dispfl.peer.memory import Fate, MemoryNetwork, MemoryTransport, Passage
from dispfl.peer.transport import Ask, Refused, Reply, Transport, Unreachable
from dispfl.peer.virtual_time import run

Scenario = Callable[[MemoryNetwork, MemoryTransport], Coroutine[Any, Any, None]]


async def echo(sender: str, ask: Ask) -> Reply:
    return Reply({"from": sender, **ask.head}, ask.body[::-1])


def now() -> float:
    return asyncio.get_running_loop().time()


def play(scenario: Scenario, fate: Fate | None = None, limit: float = 1000) -> None:
    """Alice and bob, who echoes, on a network of this fate."""

    async def both() -> None:
        network = MemoryNetwork(fate, seed=1) if fate else MemoryNetwork(seed=1)
        alice, bob = network.join("alice"), network.join("bob")
        await bob.serve(echo)
        await scenario(network, alice)
        await alice.close()
        await bob.close()

    run(both(), limit)


def test_an_ask_comes_back_with_the_sender_and_the_body() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        reply = await alice.ask("bob", Ask("model", {"round": 3}, b"abc"))
        assert reply == Reply({"from": "alice", "round": 3}, b"cba")

    play(scenario)


def test_heads_are_copies_as_if_they_had_been_sent() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        masks: list[Any] = [1, 2]
        reply = await alice.ask("bob", Ask("model", {"masks": masks}))
        masks.append(3)
        assert reply.head["masks"] == [1, 2]
        with pytest.raises(ValueError, match="Out of range float"):
            await alice.ask("bob", Ask("model", {"norm": float("nan")}))

    play(scenario)


def test_a_refusal_is_raised_again_at_the_asker() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def refuse(sender: str, ask: Ask) -> Reply:
            raise Refused("stale", f"Round {ask.head['round']} is over.")

        await network.join("carol").serve(refuse)
        with pytest.raises(Refused, match="Round 3 is over") as caught:
            await alice.ask("carol", Ask("model", {"round": 3}))
        assert caught.value.reason == "stale"

    play(scenario)


def test_a_mistake_in_a_handler_is_not_hidden() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def stumble(sender: str, ask: Ask) -> Reply:
            raise ZeroDivisionError

        await network.join("carol").serve(stumble)
        with pytest.raises(ZeroDivisionError):
            await alice.ask("carol", Ask("model", {}))

    play(scenario)


def test_nobody_at_home_is_unreachable_at_once_and_silence_after_the_stall() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        with pytest.raises(Unreachable, match="carol: cannot be reached"):
            await alice.ask("carol", Ask("hello", {}))
        assert now() == 0
        network.partition(["alice"], ["bob"])
        with pytest.raises(Unreachable, match="bob: no answer for 30 s"):
            await alice.ask("bob", Ask("hello", {}))
        assert now() == 30
        network.heal()
        assert (await alice.ask("bob", Ask("hello", {}))).head == {"from": "alice"}

    play(scenario)


def test_a_delay_counts_both_ways() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        await alice.ask("bob", Ask("hello", {}))
        assert now() == 0.75

    play(scenario, lambda passage, rng: (0.5 if passage.is_reply else 0.25,))


def test_a_reply_may_be_lost_too() -> None:
    asked: list[str] = []

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, ask: Ask) -> Reply:
            asked.append(sender)
            return Reply({})

        await network.join("carol").serve(note)
        with pytest.raises(Unreachable):
            await alice.ask("carol", Ask("hello", {}))

    play(scenario, lambda passage, rng: () if passage.is_reply else (0.0,))
    assert asked == ["alice"]


def test_a_reply_is_sent_when_it_arrives_and_never_if_it_is_lost() -> None:
    sent: list[str] = []

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, ask: Ask) -> Reply:
            return Reply({}, sent=lambda: sent.append(ask.what))

        await network.join("carol").serve(note)
        await alice.ask("carol", Ask("hello", {}))
        with pytest.raises(Unreachable):
            await alice.ask("carol", Ask("model", {}))

    play(scenario, lambda passage, rng: () if passage.is_reply and passage.what == "model" else (0.0,))
    assert sent == ["hello"]


def test_a_later_message_may_overtake_and_a_doubled_one_is_answered_once() -> None:
    arrived: list[Any] = []

    def fate(passage: Passage, rng: random.Random) -> Sequence[float]:
        if passage.is_reply:
            return (0.0,)
        return {"slow": (5.0,), "quick": (1.0,), "twice": (2.0, 3.0)}[passage.what]

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, ask: Ask) -> Reply:
            arrived.append((ask.what, now()))
            if arrived.count(("twice", 3.0)):
                raise Refused("replayed", "This came twice.")
            return Reply({"heard": len(arrived)})

        await network.join("carol").serve(note)
        asks = (alice.ask("carol", Ask(what, {})) for what in ("slow", "quick", "twice"))
        replies = asyncio.gather(*asks, return_exceptions=True)
        slow, quick, twice = await replies
        assert (quick, twice) == (Reply({"heard": 1}), Reply({"heard": 2}))  # the replay's refusal reaches nobody
        assert isinstance(slow, Refused)

    play(scenario, fate)
    assert arrived == [("quick", 1.0), ("twice", 2.0), ("twice", 3.0), ("slow", 5.0)]


def test_a_node_that_vanishes_breaks_its_connections_and_can_come_back() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        ended: list[float] = []

        async def hold(sender: str, ask: Ask) -> Reply:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append(now())
            return Reply({})

        carol = network.join("carol")
        await carol.serve(hold)
        asking = asyncio.create_task(alice.ask("carol", Ask("model", {})))
        await asyncio.sleep(4)
        await carol.close()
        with pytest.raises(Unreachable, match="carol: the connection broke"):
            await asking
        assert (now(), ended) == (4, [4])
        await network.join("carol").serve(echo)
        assert (await alice.ask("carol", Ask("model", {}))).head == {"from": "alice"}

    play(scenario)


def test_who_stops_waiting_hangs_up() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        ended: list[float] = []

        async def hold(sender: str, ask: Ask) -> Reply:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append(now())
            return Reply({})

        await network.join("carol").serve(hold)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await alice.ask("carol", Ask("model", {}))
        await asyncio.sleep(0)
        assert ended == [3]

    play(scenario)


def bad_weather(seed: int) -> list[tuple[float, str]]:
    """What happens in 20 asks of each of three nodes, with delays, losses and doubles."""
    trace: list[tuple[float, str]] = []

    def fate(passage: Passage, rng: random.Random) -> Sequence[float]:
        return tuple(rng.uniform(0, 2) for _ in range(rng.choice((0, 1, 1, 1, 2))))

    async def asks(node: MemoryTransport, peers: Sequence[str]) -> None:
        for number in range(20):
            peer = peers[number % len(peers)]
            try:
                await node.ask(peer, Ask("hello", {"number": number}))
                trace.append((now(), f"{node.name} heard {peer}"))
            except Unreachable as problem:
                trace.append((now(), str(problem)))

    async def everyone() -> None:
        network = MemoryNetwork(fate, seed=seed, stall=5)
        nodes = [network.join(name) for name in "abc"]
        for node in nodes:
            await node.serve(echo)
        await asyncio.gather(*(asks(node, [name for name in "abc" if name != node.name]) for node in nodes))

    run(everyone(), 1000)
    return trace


def test_the_same_seed_gives_the_same_trace() -> None:
    assert bad_weather(7) == bad_weather(7)
    assert bad_weather(7) != bad_weather(8)
    assert len(bad_weather(7)) == 60
