"""Peers are killed in every phase of a round, and one stands still for a while: the others go on, and they rejoin."""

from collections.abc import Callable, Iterable

from real_peers import TINY, Peers

from dispfl.config import compose
from dispfl.peer.pace import Pace
from dispfl.topology import RandomRegular

ROUNDS, DEGREE = 36, 6


class Story:
    """Eight peers, each of which hears all others but one in a round."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.unharmed = set(peers.names)
        peers.start(*peers.names)
        peers.until(lambda: all(peers.newest(name) >= 1 for name in peers.names))

    def heard(self, t: int) -> dict[str, list[str]]:
        return RandomRegular(degree=DEGREE).heard(0, t, self.peers.names)

    def federation_round(self) -> int:
        return min(self.peers.newest(name) for name in self.unharmed)

    def the_others_go_on(self, rounds: int) -> None:
        reached = max(map(self.peers.newest, self.unharmed)) + rounds
        self.peers.until(lambda: self.federation_round() >= reached)

    def freeze_one(self, is_there: Callable[[str], bool], among: Iterable[str] | None = None) -> str:
        """Freeze a peer that is found in a phase, and still is when it stands still."""
        frozen = []

        def found() -> bool:
            for name in sorted(self.unharmed if among is None else among):
                if is_there(name):
                    self.peers.freeze(name)
                    if is_there(name):
                        frozen.append(name)
                        return True
                    self.peers.thaw(name)
            return False

        self.peers.until(found, pause=0.001)
        self.unharmed.discard(frozen[0])
        return frozen[0]

    def kill_one(self, is_there: Callable[[str], bool], among: Iterable[str] | None = None) -> str:
        victim = self.freeze_one(is_there, among)
        self.peers.kill(victim)
        return victim

    def rejoins(self, name: str) -> None:
        """Several others hear it again, and it hears others."""
        since = self.federation_round()

        def is_back() -> bool:
            hearing = [
                other
                for other in self.unharmed
                if any(t > since and name in entry["heard"] for t, entry in self.peers.rounds(other).items())
            ]
            return len(hearing) >= 3 and any(
                t > since and entry["heard"] for t, entry in self.peers.rounds(name).items()
            )

        self.peers.until(is_back)

    # The phases of a round; a status is up to half a second old, so the files of rounds must agree with it.

    def is_asking_in_vain(self, name: str, absent: str) -> bool:
        """It waits for one who cannot have published this round, and has not given it up."""
        status, t = self.peers.status(name), self.peers.newest(absent) + 2
        waits = status["state"] == "asking" and status["round"] == t and absent in self.heard(t)[name]
        return waits and f"late         round={t}  peer={absent}" not in self.peers.log(name)

    def is_learning(self, name: str) -> bool:
        status = self.peers.status(name)
        return bool(status["state"] == "learning" and status["round"] > self.peers.newest(name))

    def is_writing_down(self, name: str) -> bool:
        """The line of a round is there, its checkpoint is not."""
        return self.peers.newest(name) > self.peers.checkpoint(name)

    def is_serving_others(self, name: str) -> bool:
        return bool(self.peers.status(name)["state"] == "serving others")


def test_the_others_finish_every_round_whichever_phase_a_peer_is_killed_in(federation: Callable[..., Peers]) -> None:
    settings = [*TINY, "topology=random", f"topology.degree={DEGREE}", "peers=8", f"rounds={ROUNDS}", "train.epochs=15"]
    peers = federation(compose({}, settings), Pace(floor=2.5, first=120.0))
    story = Story(peers)

    # One stands still while it learns. Whoever hears it asks in vain until the deadline, and is killed meanwhile.
    frozen = story.freeze_one(story.is_learning)
    killed = [story.kill_one(lambda name: story.is_asking_in_vain(name, frozen))]
    story.the_others_go_on(2)
    peers.thaw(frozen)
    peers.start(killed[0])
    story.rejoins(frozen)
    story.rejoins(killed[0])

    for phase in (story.is_learning, story.is_writing_down):
        killed.append(story.kill_one(phase))
        story.the_others_go_on(2)
        peers.start(killed[-1])
        story.rejoins(killed[-1])

    # Near the end a slow one has yet to fetch the last model of one that is done, does not hear it and so waits for it.
    heard = story.heard(ROUNDS - 1)
    serves = {name: other for name in heard for other in heard if name in heard[other] and other not in heard[name]}
    slow = story.freeze_one(
        lambda name: any(
            serves[one] == name and peers.newest(one) == ROUNDS - 2 and peers.newest(name) == ROUNDS - 3
            for one in serves
        ),
        peers.names,
    )
    killed.append(story.kill_one(story.is_serving_others, peers.names))
    peers.thaw(slow)
    peers.start(killed[-1])

    peers.until(lambda: len(peers.ended()) == len(peers.names))
    assert set(peers.ended().values()) == {0}
    for name in peers.names:
        assert peers.newest(name) == ROUNDS - 1
        assert peers.status(name)["state"] == "finished"
    for name in story.unharmed:
        assert sorted(peers.rounds(name)) == list(range(ROUNDS))
    for harmed in (frozen, *killed[:3]):
        assert any(peers.status(name)["peers"][harmed]["missed"] for name in story.unharmed)
