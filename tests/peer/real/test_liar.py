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


def test_a_liar_gains_nothing_when_two_of_five_sites_stop(
    federation: Callable[..., Peers],
) -> None:
    """With masks that never change, the model after mixing is that of the last round."""
    settings = ["peers=5", "rounds=200", "topology=full", "method.robust=clip", "method.alpha_0=0"]
    peers = federation(compose({}, [*TINY, *settings]), Deadlines(min=60, startup=240))
    (peers.out / LIE).write_text("sign-flip")
    *honest, attacker = peers.names
    peers.byzantine = [attacker]
    peers.start(*peers.names)
    peers.until(lambda: all(peers.newest(name) >= 2 for name in honest))
    for name in honest[2:]:
        peers.kill(name)

    def few(name: str) -> list[int]:
        """The rounds with two models, the liar's and one other."""
        return [t for t, entry in peers.rounds(name).items() if len(entry["received"]) == 2]

    staying = honest[:2]
    peers.until(lambda: all(len(few(name)) >= 4 for name in staying))
    for name in staying:
        rounds = peers.rounds(name)
        for t in few(name):
            assert attacker in rounds[t]["received"]
            assert rounds[t]["mixed"]["mean"] == rounds[t - 1]["scores"]["accuracy"]["mean"]
            assert rounds[t]["discarded"]["mean"] == 2
        assert "own weights kept: 2 of 4 models arrived" in peers.log(name)
