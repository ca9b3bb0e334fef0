"""Peers are killed in every phase of a round, or suspended: the others continue, and the peers
rejoin."""

import os
from collections.abc import Callable, Iterable

from real_peers import TINY, Peers
from slow_network import SLOW

from dispfl.config import compose
from dispfl.peer.deadlines import Deadlines
from dispfl.topology import RandomRegular

PEERS, ROUNDS, DEGREE = 8, 36, 6


class Scenario:
    """Eight peers, each of which receives from six others in a round."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.healthy = set(peers.names)
        peers.start(*peers.names)
        peers.until(lambda: all(peers.newest(name) >= 1 for name in peers.names))

    def online_neighbours(self, t: int) -> dict[str, list[str]]:
        return RandomRegular(degree=DEGREE).online_neighbours(0, t, self.peers.names)

    def federation_round(self) -> int:
        return min(self.peers.newest(name) for name in self.healthy)

    def wait_for_the_others(self, rounds: int) -> None:
        reached = max(map(self.peers.newest, self.healthy)) + rounds
        self.peers.until(lambda: self.federation_round() >= reached)

    def freeze_one(
        self, in_phase: Callable[[str], bool], among: Iterable[str] | None = None
    ) -> str:
        """Suspend a peer in a phase, and make sure that it is still in this phase when it is
        suspended."""
        frozen = []

        def found() -> bool:
            for name in sorted(self.healthy if among is None else among):
                if in_phase(name):
                    self.peers.freeze(name)
                    if in_phase(name):
                        frozen.append(name)
                        return True
                    self.peers.thaw(name)
            return False

        self.peers.until(found, pause=0.001)
        self.healthy.discard(frozen[0])
        return frozen[0]

    def kill_one(self, in_phase: Callable[[str], bool], among: Iterable[str] | None = None) -> str:
        target = self.freeze_one(in_phase, among)
        self.peers.kill(target)
        return target

    def kill_one_while_it_saves(self) -> str:
        """Kill a peer that has saved the line of a round, but not its checkpoint.

        Saving takes a few milliseconds. It lasts until the kill where a named pipe that nobody
        reads is in the place of the last temporary file (`write_or_block`).
        """
        target = min(self.healthy)
        self.healthy.discard(target)
        rounds = self.peers.newest(target) + 5
        pipe = self.peers.checkpoints(target) / f"round-{rounds:06d}" / ".complete.json.partial"
        pipe.parent.mkdir()
        os.mkfifo(pipe)
        self.peers.until(lambda: self.peers.newest(target) == rounds - 1)
        self.wait_for_the_others(2)
        assert (self.peers.newest(target), self.peers.checkpoint(target)) == (
            rounds - 1,
            rounds - 2,
        )
        self.peers.kill(target)
        pipe.unlink()
        return target

    def wait_for_rejoin(self, name: str) -> None:
        """Wait until several others receive from a peer again, and it receives from others."""
        since = self.federation_round()

        def is_back() -> bool:
            hearing = [
                other
                for other in self.healthy
                if any(
                    t > since and name in entry["received"]
                    for t, entry in self.peers.rounds(other).items()
                )
            ]
            return len(hearing) >= 3 and any(
                t > since and entry["received"] for t, entry in self.peers.rounds(name).items()
            )

        self.peers.until(is_back)

    # The phases of a round. A status is up to half a second old, so the saved rounds are checked,
    # too.

    def is_waiting_for(self, name: str, absent: str) -> bool:
        """Whether it waits for a peer that has not published this round."""
        status, t = self.peers.status(name), self.peers.newest(absent) + 2
        waits = (
            status["state"] == "fetching"
            and status["round"] == t
            and absent in self.online_neighbours(t)[name]
        )
        return waits and f"late         round={t}  peer={absent}" not in self.peers.log(name)

    def is_training(self, name: str) -> bool:
        status = self.peers.status(name)
        return bool(status["state"] == "training" and status["round"] > self.peers.newest(name))

    def is_serving(self, name: str) -> bool:
        return bool(self.peers.status(name)["state"] == "serving")


def test_the_others_finish_every_round_whenever_a_peer_is_killed(
    federation: Callable[..., Peers],
) -> None:
    settings = [
        *TINY,
        *SLOW,
        "topology=random",
        f"topology.degree={DEGREE}",
        f"peers={PEERS}",
        f"rounds={ROUNDS}",
    ]
    peers = federation(compose({}, settings), Deadlines(min=2.5, startup=30.0))
    scenario = Scenario(peers)

    # One peer is suspended while it trains. A peer that waits for it is killed before the deadline.
    frozen = scenario.freeze_one(scenario.is_training)
    killed = [scenario.kill_one(lambda name: scenario.is_waiting_for(name, frozen))]
    scenario.wait_for_the_others(2)
    peers.thaw(frozen)
    peers.start(killed[0])
    scenario.wait_for_rejoin(frozen)
    scenario.wait_for_rejoin(killed[0])

    for kill in (lambda: scenario.kill_one(scenario.is_training), scenario.kill_one_while_it_saves):
        killed.append(kill())
        scenario.wait_for_the_others(2)
        peers.start(killed[-1])
        scenario.wait_for_rejoin(killed[-1])

    # Near the end, kill a finished peer that still serves its last model to a slow one.
    received = scenario.online_neighbours(ROUNDS - 1)
    serves = {
        name: other
        for name in received
        for other in received
        if name in received[other] and other not in received[name]
    }
    slow = scenario.freeze_one(
        lambda name: any(
            serves[one] == name
            and peers.newest(one) == ROUNDS - 2
            and peers.newest(name) == ROUNDS - 3
            for one in serves
        ),
        peers.names,
    )
    killed.append(scenario.kill_one(scenario.is_serving, peers.names))
    peers.thaw(slow)
    peers.start(killed[-1])

    peers.until(lambda: len(peers.ended()) == len(peers.names))
    assert set(peers.ended().values()) == {0}
    for name in peers.names:
        assert peers.newest(name) == ROUNDS - 1
        assert peers.status(name)["state"] == "finished"
    for name in scenario.healthy:
        assert sorted(peers.rounds(name)) == list(range(ROUNDS))
    for affected in (frozen, *killed[:3]):
        assert any(peers.status(name)["peers"][affected]["missed"] for name in scenario.healthy)


def test_a_site_that_starts_late_joins_with_masks_of_channels(
    federation: Callable[..., Peers],
) -> None:
    """Its first model is its neighbours' average: it has none of its own to add."""
    settings = [
        "peers=3",
        "rounds=60",
        "topology=full",
        "method.structure=channels",
        "method.density=[0.3,0.5,0.8]",
    ]
    peers = federation(compose({}, [*TINY, *settings]), Deadlines(min=2, startup=2))
    peers.start("000", "001")
    peers.until(lambda: peers.newest("000") >= 4)
    peers.start("002")
    peers.until(lambda: len(peers.ended()) == 3)
    assert "joining" in peers.log("002")
    own = peers.rounds("002")
    assert min(own) > 1
    assert own[min(own)]["received"] == ["000", "001"]
    assert max(own) == 59
    assert any("002" in entry["received"] for entry in peers.rounds("000").values())
    state = peers.state("002")
    assert 0.7 < state.model.mask.kept / state.model.mask.size <= 0.8
