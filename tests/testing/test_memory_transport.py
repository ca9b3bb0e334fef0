"""The in-memory network: messages are delivered, lost, duplicated, reordered or partitioned, as the
seed determines."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from messages import refused

from dispfl.peer.transport.base import Refused, Request, Response, Transport, Unreachable
from dispfl.testing.memory_transport import Delivery, DeliveryModel, MemoryNetwork, MemoryTransport
from dispfl.testing.virtual_time import run

Scenario = Callable[[MemoryNetwork, MemoryTransport], Coroutine[Any, Any, None]]


async def echo(sender: str, request: Request) -> Response:
    return Response({"from": sender, **request.header}, request.body[::-1])


def now() -> float:
    return asyncio.get_running_loop().time()


def play(
    scenario: Scenario, delivery_model: DeliveryModel | None = None, limit: float = 1000
) -> None:
    """Run alice and bob, who echoes, on a network with this delivery model."""

    async def both() -> None:
        network = MemoryNetwork(delivery_model, seed=1) if delivery_model else MemoryNetwork(seed=1)
        alice, bob = network.join("alice"), network.join("bob")
        await bob.serve(echo)
        await scenario(network, alice)
        await alice.close()
        await bob.close()

    run(both(), limit)


def test_a_request_is_answered_with_the_sender_and_the_body() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        response = await alice.request("bob", Request("model", {"round": 3}, b"abc"))
        assert response == Response({"from": "alice", "round": 3}, b"cba")

    play(scenario)


def test_headers_are_copied() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        masks: list[Any] = [1, 2]
        response = await alice.request("bob", Request("model", {"masks": masks}))
        masks.append(3)
        assert response.header["masks"] == [1, 2]
        with pytest.raises(ValueError, match="Out of range float"):
            await alice.request("bob", Request("model", {"norm": float("nan")}))

    play(scenario)


def test_a_refusal_is_raised_at_the_client() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def refuse(sender: str, request: Request) -> Response:
            raise Refused("stale", f"Round {request.header['round']} is over.")

        await network.join("carol").serve(refuse)
        with refused(Refused) as caught:
            await alice.request("carol", Request("model", {"round": 3}))
        assert caught.value.reason == "stale"

    play(scenario)


def test_an_error_in_a_handler_is_not_hidden() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def fail(sender: str, request: Request) -> Response:
            raise ZeroDivisionError

        await network.join("carol").serve(fail)
        with refused(Refused):
            await alice.request("carol", Request("model", {}))

    with pytest.raises(ZeroDivisionError):
        play(scenario)


def test_a_missing_node_is_unreachable_immediately_and_a_silent_one_after_the_timeout() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        with refused(Unreachable):
            await alice.request("carol", Request("sync", {}))
        assert now() == 0
        network.partition(["alice"], ["bob"])
        with refused(Unreachable):
            await alice.request("bob", Request("sync", {}))
        assert now() == 30
        network.heal()
        assert (await alice.request("bob", Request("sync", {}))).header == {"from": "alice"}

    play(scenario)


def test_requests_and_responses_are_delayed() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        await alice.request("bob", Request("sync", {}))
        assert now() == 0.75

    play(scenario, lambda delivery, rng: (0.5 if delivery.is_response else 0.25,))


def test_a_response_may_be_lost() -> None:
    senders: list[str] = []

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, request: Request) -> Response:
            senders.append(sender)
            return Response({})

        await network.join("carol").serve(note)
        with pytest.raises(Unreachable):
            await alice.request("carol", Request("sync", {}))

    play(scenario, lambda delivery, rng: () if delivery.is_response else (0.0,))
    assert senders == ["alice"]


def test_a_response_counts_as_sent_only_if_it_arrives() -> None:
    sent_kinds: list[str] = []

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, request: Request) -> Response:
            return Response({}, on_sent=lambda: sent_kinds.append(request.kind))

        await network.join("carol").serve(note)
        await alice.request("carol", Request("sync", {}))
        with pytest.raises(Unreachable):
            await alice.request("carol", Request("model", {}))

    play(
        scenario,
        lambda delivery, rng: () if delivery.is_response and delivery.kind == "model" else (0.0,),
    )
    assert sent_kinds == ["sync"]


def test_messages_may_be_reordered_and_a_duplicate_is_answered_once() -> None:
    arrived: list[Any] = []

    def delivery_model(delivery: Delivery, rng: random.Random) -> Sequence[float]:
        if delivery.is_response:
            return (0.0,)
        return {"slow": (5.0,), "quick": (1.0,), "twice": (2.0, 3.0)}[delivery.kind]

    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        async def note(sender: str, request: Request) -> Response:
            arrived.append((request.kind, now()))
            if arrived.count(("twice", 3.0)):
                raise Refused("replayed", "This is a duplicate.")
            return Response({"count": len(arrived)})

        await network.join("carol").serve(note)
        requests = (
            alice.request("carol", Request(kind, {})) for kind in ("slow", "quick", "twice")
        )
        slow, quick, twice = await asyncio.gather(*requests, return_exceptions=True)
        # The refusal of the duplicate is dropped.
        assert (quick, twice) == (Response({"count": 1}), Response({"count": 2}))
        assert isinstance(slow, Refused)

    play(scenario, delivery_model)
    assert arrived == [("quick", 1.0), ("twice", 2.0), ("twice", 3.0), ("slow", 5.0)]


def test_closing_a_node_breaks_its_connections_and_it_can_rejoin() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        ended: list[float] = []

        async def hold(sender: str, request: Request) -> Response:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append(now())
            return Response({})

        carol = network.join("carol")
        await carol.serve(hold)
        pending = asyncio.create_task(alice.request("carol", Request("model", {})))
        await asyncio.sleep(4)
        await carol.close()
        with refused(Unreachable):
            await pending
        assert (now(), ended) == (4, [4])
        await network.join("carol").serve(echo)
        assert (await alice.request("carol", Request("model", {}))).header == {"from": "alice"}

    play(scenario)


def test_a_client_that_stops_waiting_cancels_the_handler() -> None:
    async def scenario(network: MemoryNetwork, alice: Transport) -> None:
        ended: list[float] = []

        async def hold(sender: str, request: Request) -> Response:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append(now())
            return Response({})

        await network.join("carol").serve(hold)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await alice.request("carol", Request("model", {}))
        await asyncio.sleep(0)
        assert ended == [3]

    play(scenario)


def unreliable_trace(seed: int) -> list[tuple[float, str]]:
    """The events of 20 requests by each of three nodes, with delays, losses and duplicates."""
    trace: list[tuple[float, str]] = []

    def delivery_model(delivery: Delivery, rng: random.Random) -> Sequence[float]:
        return tuple(rng.uniform(0, 2) for _ in range(rng.choice((0, 1, 1, 1, 2))))

    async def client(node: MemoryTransport, peers: Sequence[str]) -> None:
        for number in range(20):
            peer = peers[number % len(peers)]
            try:
                await node.request(peer, Request("sync", {"number": number}))
                trace.append((now(), f"{node.name} received {peer}"))
            except Unreachable as problem:
                trace.append((now(), str(problem)))

    async def all_nodes() -> None:
        network = MemoryNetwork(delivery_model, seed=seed, timeout=5)
        nodes = [network.join(name) for name in "abc"]
        for node in nodes:
            await node.serve(echo)
        await asyncio.gather(
            *(client(node, [name for name in "abc" if name != node.name]) for node in nodes)
        )

    run(all_nodes(), 1000)
    return trace


def test_the_same_seed_gives_the_same_trace() -> None:
    assert unreliable_trace(7) == unreliable_trace(7)
    assert unreliable_trace(7) != unreliable_trace(8)
    assert len(unreliable_trace(7)) == 60
