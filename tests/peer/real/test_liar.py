"""A real process that lies to the others, with the lies of simulated attacks: honest peers measure
it."""

from collections.abc import Callable

from real_peers import LIE, TINY, Peers

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines

ROUNDS = 4


def test_a_liar_that_claims_all_that_is_requested_is_the_farthest_of_all_in_report_log_and_status(
    federation: Callable[..., Peers],
) -> None:
    settings = [
        "peers=5",
        f"rounds={ROUNDS}",
        "topology=full",
        "method.robust=clip",
        "method.byzantine=1",
    ]
    peers = federation(compose({}, [*TINY, *settings]), Deadlines(min=60, startup=240))
    (peers.out / LIE).write_text("hold-all")
    honest, attacker = peers.names[:-1], peers.names[-1]
    peers.byzantine = [attacker]
    peers.start(*peers.names)
    peers.until(lambda: all(peers.newest(name) == ROUNDS - 1 for name in honest))
    for name in honest:
        for t, entry in peers.rounds(name).items():
            distances = entry["report"]["distances"]
            assert max(distances, key=distances.get) == attacker, (name, t)
        assert f"distances={attacker}=" in peers.log(name).replace('"', "")  # the farthest first
    # The status is written now and then, and may still be that of the start.
    peers.until(
        lambda: all(
            peers.status(name)["peers"].get(attacker, {}).get("distance") is not None
            for name in honest
        )
    )
