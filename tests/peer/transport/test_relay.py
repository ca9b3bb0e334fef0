"""Sites without an open port reach each other by relays, which see ciphertext."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from relay_world import LOCAL, QUICK, HostileRelay, Lie, RelayWorld

from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity
from dispfl.peer.transport.base import Refused, Request, Response, Unreachable
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from dispfl.peer.transport.relay_client import RelayClient, RelayError
from dispfl.peer.transport.relay_protocol import RELAY_PATH, Proof, Role
from dispfl.peer.transport.relay_server import RelayLimits
from dispfl.wire.refusals import Refusal

Play = Callable[[Any], None]
BODY = os.urandom(3_000_000)
MASK = os.urandom(200_000)
REQUEST = Request("model", {"nonce": "n1"}, MASK)
IMPATIENT = Limits(
    backoff=0.01,
    stall_timeout=0.5,
    min_rate=10_000.0,
    shutdown_grace=0.1,
    connect_timeout=2.0,
    relay_timeout=2.0,
)


async def answer(sender: str, request: Request) -> Response:
    assert request.body == MASK
    return Response({"sender": sender}, BODY)


class Pausing:
    """A handler that notes the offsets of requests."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    async def __call__(self, sender: str, request: Request) -> Response:
        self.offsets.append(request.offset)
        return Response({}, BODY)


def test_a_site_that_listens_nowhere_answers_by_its_relay_which_sees_ciphertext(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with (
            world.relay(HostileRelay) as relay,
            world.site("bob", answer) as bob,
            world.site("alice", own=()) as alice,
        ):
            response = await alice.request("bob", REQUEST)
            assert response.body == BODY
            assert response.header == {"sender": "alice"}
            assert alice.route("bob") == f"wss://127.0.0.1:{relay.port}"
            assert bob.port == 0
            for secret in (BODY, MASK):
                pieces = [secret[start : start + 16] for start in range(0, len(secret), 4096)]
                assert not any(piece in relay.seen for piece in pieces)
            assert len(relay.seen) > len(BODY) + len(MASK)
            assert relay.counters.calls == 1

    play(scenario)


def test_a_member_with_an_address_is_reached_directly_and_by_its_relay_if_that_fails(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with (
            world.relay() as relay,
            world.site("bob", answer, listen=(LOCAL, 0)) as bob,
            world.site("alice", own=()) as alice,
        ):
            world.addresses["bob"] = (LOCAL, bob.port)
            assert (await alice.request("bob", REQUEST)).body == BODY
            assert alice.route("bob") == "direct"
            assert relay.counters.calls == 0

            [dead_port] = free_ports(1)
            world.addresses["bob"] = (LOCAL, dead_port)
            await alice.disconnect("bob")
            assert (await alice.request("bob", REQUEST)).body == BODY
            assert alice.route("bob") == f"wss://127.0.0.1:{relay.port}"

    play(scenario)


def test_a_site_of_which_no_relay_knows_anything_is_unreachable_by_name(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with world.relay() as relay, world.site("alice", own=()) as alice:
            with pytest.raises(Unreachable) as caught:
                await alice.request("bob", REQUEST)
            where = f"wss://127.0.0.1:{relay.port}"
            expected = f"cannot be reached by {where}: the member is not connected to it"
            assert caught.value.detail == expected
            assert relay.counters.missed_calls == 1
        with pytest.raises(Unreachable, match="connection refused"):
            async with world.site("alice", own=()) as alice:
                await alice.request("bob", REQUEST)

    play(scenario)


def test_a_transfer_resumes_after_the_restart_of_its_relay(tmp_path: Path, play: Play) -> None:
    pausing = Pausing()

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with contextlib.AsyncExitStack() as sites:
            async with world.relay(HostileRelay) as relay:
                await sites.enter_async_context(world.site("bob", pausing))
                alice = await sites.enter_async_context(world.site("alice", own=()))
                relay.lie = Lie.STALL
                relay.lie_after = 2_000_000
                request = asyncio.create_task(alice.request("bob", REQUEST))
                while not relay.lies:
                    await asyncio.sleep(0.01)
            async with world.relay(port=relay.port):
                response = await request
            assert response.body == BODY
            assert pausing.offsets[0] == 0
            assert 1_000_000 < pausing.offsets[-1] < len(BODY)

    play(scenario)


def test_a_transfer_resumes_by_another_relay_if_one_is_lost(tmp_path: Path, play: Play) -> None:
    pausing = Pausing()

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with contextlib.AsyncExitStack() as rest:
            async with world.relay(HostileRelay) as lost:
                other = await rest.enter_async_context(world.relay())
                await rest.enter_async_context(world.site("bob", pausing))
                alice = await rest.enter_async_context(world.site("alice", own=()))
                lost.lie = Lie.STALL
                lost.lie_after = 2_000_000
                request = asyncio.create_task(alice.request("bob", REQUEST))
                while not lost.lies:
                    await asyncio.sleep(0.01)
            assert (await request).body == BODY
            assert alice.route("bob") == f"wss://127.0.0.1:{other.port}"
            assert pausing.offsets[0] == 0
            assert 1_000_000 < pausing.offsets[-1] < len(BODY)

    play(scenario)


@pytest.mark.parametrize("lie", Lie)
@pytest.mark.parametrize("after", [0, 1_000_000], ids=["at once", "after 1 MB"])
def test_a_relay_that_lies_is_a_named_failure_and_never_another_model(
    tmp_path: Path, play: Play, lie: Lie, after: int
) -> None:
    """With an honest relay beside it, the model arrives all the same."""

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob", "carol")
        async with (
            world.relay(HostileRelay) as hostile,
            world.site("bob", answer, limits=IMPATIENT),
            world.site("carol", answer, limits=IMPATIENT),
            world.site("alice", limits=IMPATIENT, own=()) as alice,
        ):
            hostile.lie = lie
            hostile.lie_after = after
            hostile.instead = world.identities["carol"].fingerprint
            with pytest.raises((Refused, Unreachable)) as caught:
                await alice.request("bob", REQUEST)
            assert hostile.lies
            if lie == Lie.SWAP:
                assert isinstance(caught.value, Refused)
                assert caught.value.reason == Refusal.WRONG_CERTIFICATE
                where = f"by wss://127.0.0.1:{hostile.port}"
                assert f"bob's certificate is not the accepted one {where}" in str(caught.value)
            else:
                assert isinstance(caught.value, Unreachable)
                assert str(caught.value).startswith("bob: ")

    play(scenario)


@pytest.mark.parametrize("lie", Lie)
def test_beside_a_relay_that_lies_an_honest_one_carries_the_model(
    tmp_path: Path, play: Play, lie: Lie
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob", "carol")
        async with (
            world.relay(HostileRelay) as hostile,
            world.relay() as honest,
            world.site("bob", answer, limits=IMPATIENT),
            world.site("carol", answer, limits=IMPATIENT),
            world.site("alice", limits=IMPATIENT, own=()) as alice,
        ):
            hostile.lie = lie
            hostile.instead = world.identities["carol"].fingerprint
            assert (await alice.request("bob", REQUEST)).body == BODY
            assert alice.route("bob") == f"wss://127.0.0.1:{honest.port}"
            assert hostile.lies

    play(scenario)


# who may use a relay


async def introduce(world: RelayWorld, relay: Any, proof: Callable[[str], str]) -> Any:
    """What a relay says to a proof, which is made from its challenge."""
    url = f"https://127.0.0.1:{relay.port}{RELAY_PATH}"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, ssl=False) as websocket,
    ):
        challenge = (await websocket.receive_json())["challenge"]
        await websocket.send_str(proof(challenge))
        return await websocket.receive_json()


def test_outsiders_and_signatures_for_another_relay_or_challenge_get_nothing(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        alice = world.identities["alice"]
        async with world.relay() as relay:
            name = relay.name

            def refusal(proof: Callable[[str], str]) -> Any:
                return introduce(world, relay, proof)

            def park(challenge: str) -> str:
                return Proof.sign(alice, name, challenge, Role.PARK).to_text()

            assert await refusal(park) == {"status": "parked"}
            outsider = Identity.make("alice")
            refused = await refusal(
                lambda challenge: Proof.sign(outsider, name, challenge, Role.PARK).to_text()
            )
            assert refused["refused"] == "not-a-member"
            elsewhere = Address("relay.example.org", 443)
            refused = await refusal(
                lambda challenge: Proof.sign(alice, elsewhere, challenge, Role.PARK).to_text()
            )
            assert refused["refused"] == "signature"
            earlier = park("0" * 64)
            assert (await refusal(lambda challenge: earlier))["refused"] == "signature"

            def as_a_call(challenge: str) -> str:
                return park(challenge).replace('"role":"park"', '"role":"call"')

            assert (await refusal(as_a_call))["refused"] == "signature"
            for text in ("", "[]", "{}", '{"chain":[],"to":""}', "[" * 100_000):
                assert (await refusal(lambda challenge, text=text: text))["refused"] == "malformed"  # type: ignore[misc]
            assert relay.traffic.refused["unknown"]["signature"] == 3
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"https://127.0.0.1:{relay.port}/", ssl=False) as response,
            ):
                assert response.status == 404

    play(scenario)


def test_a_site_that_has_replaced_its_key_is_admitted_by_its_earlier_certificate(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        admitted = world.admitted()
        world.identities["bob"] = world.identities["bob"].rotate()
        async with (
            world.relay(admitted=admitted),
            world.site("bob", answer),
            world.site("alice", own=()) as alice,
        ):
            assert (await alice.request("bob", REQUEST)).body == BODY
        forged = Identity("bob", world.identities["alice"].key, Identity.make("bob").certificate)
        async with world.relay(admitted=admitted) as relay:
            refused = await introduce(
                world,
                relay,
                lambda challenge: Proof.sign(forged, relay.name, challenge, Role.PARK).to_text(),
            )
            assert refused["refused"] == "signature"

    play(scenario)


def test_a_member_that_is_no_longer_admitted_is_disconnected(tmp_path: Path, play: Play) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with (
            world.relay() as relay,
            world.site("bob", answer) as bob,
            world.site("alice", own=()) as alice,
        ):
            assert (await alice.request("bob", REQUEST)).body == BODY
            fingerprint = world.identities["bob"].fingerprint
            admitted = world.admitted()
            del admitted[fingerprint]
            relay.admit(admitted)
            assert bob.relays is not None
            [state] = bob.relays.states.values()
            while state.is_connected:
                await asyncio.sleep(0.01)
            assert state.problem is not None
            assert state.problem.startswith("it refuses us: This relay does not admit")
            with pytest.raises(Unreachable):
                await alice.request("bob", REQUEST)

    play(scenario)


def test_a_relay_limits_the_connections_and_the_bytes_of_each_member(
    tmp_path: Path, play: Play
) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        alice = world.identities["alice"]
        async with world.relay(limits=RelayLimits(connections=3)) as relay:
            client = RelayClient(alice, QUICK)
            parked = [await client.open(world.relays[0], Role.PARK) for _ in range(3)]
            with pytest.raises(RelayError, match="has 3 requests in progress already"):
                await client.open(world.relays[0], Role.PARK)
            assert relay.counters.parked == len(parked)
            await client.close()
        world.relays.clear()
        async with (
            world.relay(limits=RelayLimits(hourly_bytes=1_000_000)) as relay,
            world.site("bob", answer),
            world.site("alice", own=(), limits=IMPATIENT) as caller,
        ):
            with pytest.raises(Unreachable):
                await caller.request("bob", REQUEST)
            [label] = [name for name in relay.traffic.refused if name.startswith("bob")]
            assert relay.traffic.refused[label]["too-many-requests"] > 0
            assert relay.counters.passed_on < len(BODY)

    play(scenario)


def test_one_member_cannot_take_all_connections_on_which_another_waits(
    tmp_path: Path, play: Play
) -> None:
    """Mallory calls bob 100 times at once and holds each call; alice is served nevertheless."""

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob", "mallory")
        async with (
            world.relay() as relay,
            world.site("bob", answer),
            world.site("mallory", own=()) as mallory,
            world.site("alice", own=()) as alice,
        ):
            assert mallory.relays is not None
            [address] = world.relays
            bob = world.identities["bob"].fingerprint

            async def call() -> object:
                assert mallory.relays is not None
                try:
                    return await mallory.relays.open(address, Role.CALL, bob)
                except RelayError as problem:
                    return problem

            calls = [asyncio.create_task(call()) for _ in range(100)]
            results = await asyncio.gather(*calls)
            held = [result for result in results if not isinstance(result, RelayError)]
            assert 0 < len(held) <= RelayLimits().calls_to_one
            [refused] = relay.traffic.refused.values()
            assert refused[Refusal.TOO_MANY_CONNECTIONS] >= 100 - RelayLimits().calls_to_one
            assert (await alice.request("bob", REQUEST)).body == BODY
            await asyncio.gather(*(websocket.close() for websocket in held))  # type: ignore[attr-defined]

    play(scenario)


def test_a_relay_ends_connections_that_are_idle_or_too_old(tmp_path: Path, play: Play) -> None:
    async def answered(alice: HttpsTransport) -> None:
        """On a busy machine a connection may end before its first request is answered."""
        while True:
            with contextlib.suppress(Unreachable):
                assert (await alice.request("bob", REQUEST)).body == BODY
                return

    async def scenario(limits: RelayLimits) -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with (
            world.relay(limits=limits) as relay,
            world.site("bob", answer),
            world.site("alice", own=()) as alice,
        ):
            for _ in range(2):
                await answered(alice)
                while relay.counters.connected:
                    await asyncio.sleep(0.01)
            assert relay.counters.calls >= 2

    play(lambda: scenario(RelayLimits(idle_seconds=0.3)))
    play(lambda: scenario(RelayLimits(max_seconds=2.0)))
