"""Sites without an open port reach each other by relays, which see ciphertext."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relay_world import HostileRelay, RelayWorld

from dispfl.peer.transport.base import Request, Response

Play = Callable[[Any], None]
BODY = os.urandom(3_000_000)
MASK = os.urandom(200_000)


async def answer(sender: str, request: Request) -> Response:
    return Response({"sender": sender, "size": len(request.body)}, BODY)


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
            response = await alice.request("bob", Request("model", {}, MASK))
            assert response.body == BODY
            assert response.header == {"sender": "alice", "size": len(MASK)}
            assert alice.route("bob") == f"wss://127.0.0.1:{relay.port}"
            assert bob.port == 0
            for secret in (BODY, MASK):
                pieces = [secret[start : start + 16] for start in range(0, len(secret), 4096)]
                assert not any(piece in relay.seen for piece in pieces)
            assert len(relay.seen) > len(BODY) + len(MASK)
            assert relay.counters.calls == 1

    play(scenario)
