"""Attacks by non-members and malicious members on a running federation are refused and counted, and
rounds complete."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.config import compose
from dispfl.errors import DispflError
from dispfl.peer.local_federation import collect_results
from dispfl.peer.membership.identity import Identity
from dispfl.peer.transport.base import Refused, Request, Unreachable
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import Limits
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun

SYNC = (
    b"POST /v1/sync HTTP/1.1\r\nhost: x\r\ndispfl-header:"
    b' {"version":1,"header":{}}\r\ncontent-length: 0\r\n\r\n'
)
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(600)
"""The beginning of a TLS handshake: a record of 512 bytes."""
FLOOD = 200
MAX_GROWTH = 20.0
"""MB of memory that a flood may take. Accepting all 200 would take 50 MB: TLS uses 256 kB for
each."""


def no_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def refusal(request: Any) -> str:
    """The reason for the refusal of a request."""
    with pytest.raises(Refused) as caught:
        await request
    return caught.value.reason


def test_a_client_without_a_certificate_gets_no_response(attacked: Any, until: Any) -> None:
    assert asyncio.run(attacked.send_raw("000", SYNC, no_certificate())) == b""
    until(lambda: attacked.refusals("000", "no-certificate") == 1)


def test_a_client_without_tls_gets_no_response(attacked: Any, until: Any) -> None:
    assert b"HTTP" not in asyncio.run(attacked.send_raw("000", SYNC))
    until(lambda: attacked.refusals("000", "handshake") == 1)


def test_a_forged_certificate_of_a_member_and_an_unknown_one_get_no_response(
    attacked: Any, until: Any
) -> None:
    for number, name in enumerate(["001", "mallory"], 1):
        context = attacked.context(Identity.make(name))
        assert asyncio.run(attacked.send_raw("000", SYNC, context)) == b""
        until(lambda number=number: attacked.refusals("000", "unknown-certificate") == number)


def test_a_member_gets_a_response(attacked: Any) -> None:
    """Shows that the other clients are refused for the expected reasons."""

    async def scenario() -> None:
        async with attacked.guest("curious") as guest:
            response = await guest.request("000", attacked.model())
        assert response.header["status"] == "model"
        assert attacked.setup.codec().decode_answer(
            response.body, attacked.setup.initial_state().next_mask
        )

    asyncio.run(scenario())
    assert not attacked.refused("000", "curious")


def test_a_member_revoked_at_run_time_is_refused_on_its_open_connection_and_then_by_tls(
    attacked: Any,
) -> None:
    async def refused_while_connected(guest: Any) -> None:
        while True:  # at most until the node has read the list, twice a second
            assert await refusal(guest.request("000", attacked.model())) == "revoked"
            await asyncio.sleep(0.1)

    async def scenario() -> None:
        async with attacked.guest("revoked") as guest:
            assert (await guest.request("000", attacked.model())).header["status"] == "model"
            attacked.sites["000"].members.revoke("revoked")
            with pytest.raises(Unreachable, match="000 may not have accepted our certificate"):
                await refused_while_connected(guest)
            assert (await guest.request("001", attacked.model())).header[
                "status"
            ] == "model"  # 001 has not revoked it
        async with attacked.guest("revoked") as again:
            with pytest.raises(Unreachable, match="000 may not have accepted our certificate"):
                await again.request("000", attacked.model())

    asyncio.run(scenario())


def test_a_member_with_another_spec_is_refused_with_the_difference(
    attacked: Any, until: Any
) -> None:
    spec = dict(attacked.setup.spec) | {"seed": "7"}

    async def scenario() -> None:
        async with attacked.guest("foreign") as guest:
            with pytest.raises(Refused, match="seed is 0 at 000 and 7 at foreign") as caught:
                await guest.request("000", Request("sync", {"spec": spec, "current_round": 0}))
            assert caught.value.reason == "spec-mismatch"
            assert (
                await refusal(guest.request("000", attacked.model(spec="0" * 32)))
                == "spec-mismatch"
            )

    asyncio.run(scenario())
    until(
        lambda: attacked.refused("000", "foreign") == {"spec-mismatch": 2}
    )  # each is counted once


def test_a_request_that_is_sent_twice_is_answered_once(attacked: Any, until: Any) -> None:
    async def scenario() -> None:
        request = attacked.model()
        async with attacked.guest("replaying") as guest:
            assert (await guest.request("000", request)).header["status"] == "model"
            assert await refusal(guest.request("000", request)) == "replayed"
        async with attacked.guest("replaying") as again:
            assert await refusal(again.request("000", request)) == "replayed"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "replaying") == {"replayed": 2})


def test_an_invalid_round_is_refused_and_a_future_round_must_wait(
    attacked: Any, until: Any
) -> None:
    async def scenario() -> None:
        async with attacked.guest("mistimed") as guest:
            early = asyncio.create_task(guest.request("000", attacked.model(attacked.rounds - 1)))
            for wrong in (-1, attacked.rounds, 10**30):
                assert await refusal(guest.request("000", attacked.model(wrong))) == "no-such-round"
            for malformed in ("0", True, None, 0.0):
                assert await refusal(guest.request("000", attacked.model(malformed))) == "malformed"
            assert (await early).header["status"] == "wait"

    asyncio.run(scenario())
    until(lambda: attacked.refused("000", "mistimed") == {"no-such-round": 3, "malformed": 4})


def test_a_malformed_body_is_refused_with_the_reason(attacked: Any, until: Any) -> None:
    valid = attacked.model().body
    bodies = {
        b"": "too-short",
        bytes(100): "not-ours",
        valid[:-1]: "checksum",
        valid[:-1] + bytes([valid[-1] ^ 1]): "checksum",
    }

    async def scenario() -> None:
        async with attacked.guest("garbling") as guest:
            for body, reason in bodies.items():
                assert await refusal(guest.request("000", attacked.model(0, body))) == reason
            assert (
                await refusal(guest.request("000", attacked.model(0, bytes(1_000_000))))
                == "too-long"
            )

    asyncio.run(scenario())
    until(lambda: sum(attacked.refused("000", "garbling").values()) == len(bodies) + 1)
    assert attacked.refused("000", "garbling") == {
        "too-short": 1,
        "not-ours": 1,
        "checksum": 2,
        "too-long": 1,
    }


def test_a_member_that_repeats_bad_messages_is_banned_and_others_are_not(
    attacked: Any, until: Any, log: Callable[[str], str]
) -> None:
    async def scenario() -> None:
        async with attacked.guest("nuisance") as guest, attacked.guest("curious") as other:
            for _ in range(RequestGuard.STRIKES):
                assert (
                    await refusal(guest.request("000", attacked.model(0, bytes(100)))) == "not-ours"
                )
            for _ in range(100):
                with pytest.raises(
                    Refused, match="nuisance was refused too often; it is banned for"
                ) as caught:
                    await guest.request("000", attacked.model())
                assert caught.value.reason == "banned"
            assert (await other.request("000", attacked.model())).header["status"] == "model"
            assert (await guest.request("001", attacked.model())).header["status"] == "model"

    asyncio.run(scenario())
    until(
        lambda: (
            attacked.refused("000", "nuisance") == {"not-ours": RequestGuard.STRIKES, "banned": 100}
        )
    )
    assert (
        log("000").count("peer=nuisance") == RequestGuard.STRIKES
    )  # a banned member does not fill the disk with log lines


async def drip(connecting: Any, content: bytes) -> None:
    """Send one byte per second until the server closes the connection."""
    with contextlib.suppress(OSError):
        _, writer = await connecting
        try:
            for byte in content:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
        finally:
            writer.transport.abort()


def test_200_slow_connections_are_closed_and_memory_and_open_files_do_not_grow(
    attacked: Any, until: Any
) -> None:
    memory, files = attacked.memory("000"), attacked.open_files("000")
    tls = attacked.context(attacked.guests["slow"].identity)
    highest, most = memory, files
    sync = Request("sync", {"spec": dict(attacked.setup.spec), "current_round": 0})

    async def scenario() -> None:
        nonlocal highest, most
        async with attacked.guest("curious") as regular, attacked.guest("late") as newcomer:
            await regular.request("000", sync)
            slow = [
                asyncio.create_task(drip(attacked.connect("000"), CLIENT_HELLO))
                for _ in range(FLOOD // 2)
            ]
            slow += [
                asyncio.create_task(drip(attacked.connect("000", tls), SYNC))
                for _ in range(FLOOD // 2)
            ]
            while not all(each.done() for each in slow):
                await asyncio.sleep(0.2)
                highest, most = (
                    max(highest, attacked.memory("000")),
                    max(most, attacked.open_files("000")),
                )
                assert "current_round" in (await regular.request("000", sync)).header
            await newcomer.request("000", sync)

    asyncio.run(scenario())
    until(lambda: attacked.refusals("000", "slow") >= FLOOD)
    until(lambda: attacked.open_files("000") <= files)
    assert most < files + FLOOD // 2
    assert highest - memory < MAX_GROWTH
    assert attacked.memory("000") - memory < MAX_GROWTH


def test_a_member_that_sends_bodies_slowly_is_limited_to_four_connections(
    attacked: Any, until: Any
) -> None:
    tls = attacked.context(attacked.guests["slow"].identity)
    header = SYNC.replace(b"sync", b"model").replace(b"length: 0", b"length: 1000")

    async def scenario() -> None:
        held = [
            await attacked.connect("000", tls) for _ in range(Limits().max_connections_from_peer)
        ]
        for _, writer in held:
            writer.write(header)
        await asyncio.sleep(0.5)
        more = await asyncio.gather(*(attacked.send_raw("000", header, tls) for _ in range(10)))
        assert all(b'"refused":"too-many-connections"' in response for response in more)
        for _, writer in held:
            writer.transport.abort()

    asyncio.run(scenario())
    until(lambda: attacked.refusals("000", "too-many-connections", "slow") == 10)


async def attack_once(attacked: Any, peer: str, request: Request) -> None:
    """Run one attack of each kind."""
    non_member = attacked.context(Identity.make("000"))
    await attacked.send_raw(peer, SYNC, no_certificate())
    await attacked.send_raw(peer, SYNC, non_member)
    await attacked.send_raw(peer, SYNC)
    async with attacked.guest("tireless") as guest:
        for bad in (
            request,
            attacked.model(10**9),
            attacked.model(-1),
            attacked.model(spec="none"),
            Request("key", {}),
        ):
            with contextlib.suppress(DispflError):  # refused, or the peer is not running
                await guest.request(peer, bad)


async def request_an_old_round(attacked: Any) -> None:
    while attacked.status("000")["round"] < 12:
        await asyncio.sleep(0.05)
    async with attacked.guest("mistimed") as guest:
        assert (await guest.request("000", attacked.model(0))).header["status"] == "stale"


def test_models_under_attack_equal_those_of_the_simulation_bit_for_bit(
    attacked: Any, until: Any, tmp_path: Path
) -> None:
    ExperimentRun.create(compose({}, attacked.settings), tmp_path / "simulated").run()
    processes, request = attacked.processes, attacked.model()
    tls = attacked.context(attacked.guests["slow"].identity)

    async def scenario() -> None:
        slow: set[asyncio.Task[None]] = set()
        past = asyncio.create_task(request_an_old_round(attacked))
        while len(processes.ended()) < len(processes.names):
            for peer in processes.names:
                await attack_once(attacked, peer, request)
                slow.add(asyncio.create_task(drip(attacked.connect(peer), CLIENT_HELLO)))
                slow.add(asyncio.create_task(drip(attacked.connect(peer, tls), SYNC)))
            await asyncio.sleep(0.1)
        await past
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    processes.start(processes.names[-1])
    asyncio.run(scenario())
    assert set(processes.ended().values()) == {0}
    for name in processes.names:
        status = attacked.status(name)
        assert status["state"] == "finished"
        assert {
            peer: found["missed"]
            for peer, found in status["peers"].items()
            if peer in processes.names
        } == {peer: 0 for peer in processes.names if peer != name}
        assert {"no-such-round", "spec-mismatch", "unknown-request", "banned"} <= attacked.refused(
            name, "tireless"
        ).keys()
        for reason in ("no-certificate", "unknown-certificate", "handshake"):
            assert attacked.refusals(name, reason) >= 1
    assert attacked.refused("000", "mistimed")["stale"] == 1
    collect_results(attacked.out)
    real, simulated = read_summary(attacked.out), read_summary(tmp_path / "simulated")
    assert real
    assert simulated
    assert real["weights_sha256"] == simulated["weights_sha256"]
    for one, other in zip(
        read_metrics(attacked.out), read_metrics(tmp_path / "simulated"), strict=True
    ):
        assert one["traffic"] == other["traffic"]
