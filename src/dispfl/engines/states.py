"""Peers' states in one process: what they began the round with, and what they have become."""

from collections.abc import Collection
from dataclasses import replace

from dispfl.errors import DamagedError
from dispfl.methods.base import SERVER, PeerState
from dispfl.round import start
from dispfl.runs.checkpoint import Checkpoints
from dispfl.work import Outcome, Part, Setting, Step


class States:
    """Some peers' states. Finished steps go to the disk, if there is one, and are found there again."""

    def __init__(self, setting: Setting, checkpoints: Checkpoints | None = None) -> None:
        self.setting = setting
        self.checkpoints = checkpoints
        self.now: dict[str, PeerState] = {}
        """What the peers began the round with, and what others hear of them."""
        self.next: dict[str, PeerState] = {}
        """What those have become who have finished it."""
        self.judged: dict[str, PeerState] = {}
        """What each was judged on last, where that was a model that all share."""

    def recall(self, rounds: int, peers: Collection[str]) -> None:
        """Add these peers' states after so many rounds: from the seed, or from the checkpoint."""
        if rounds == 0:
            found = start(self.setting, peers)
        else:
            found = {peer: step.state for peer, step in self._on_disk().load(rounds, peers).items()}
            if missing := sorted(set(peers) - set(found)):
                raise DamagedError(f"The checkpoint after {rounds} rounds lacks peer {missing[0]}; it is damaged.")
        self.now |= {peer: _settled(state) for peer, state in found.items() if peer != SERVER}

    def under_way(self, t: int, peers: Collection[str]) -> dict[str, Outcome]:
        """Add what became of these peers in round t before a stop."""
        if self.checkpoints is None:
            return {}
        steps = self.checkpoints.load(t + 1, peers)
        self.next |= {peer: step.state for peer, step in steps.items()}
        return {peer: Outcome.of(step) for peer, step in steps.items()}

    def finish(self, part: Part, step: Step) -> Outcome:
        """Take in what a peer has become."""
        if part.shared is not None:
            self.judged[part.peer] = step.state
        else:
            self.next[part.peer] = step.state
            if self.checkpoints is not None:
                self.checkpoints.add(part.t, part.peer, step)
        return Outcome.of(step)

    def flush(self, t: int) -> None:
        """Write down what is not on the disk yet."""
        if self.checkpoints is not None:
            self.checkpoints.flush(t)

    def turn(self) -> None:
        """The round is over."""
        self.now = {peer: _settled(state) for peer, state in sorted(self.next.items())}
        self.next = {}

    def forget(self, peers: Collection[str]) -> None:
        """These peers are kept elsewhere from now on."""
        for peer in peers:
            self.now.pop(peer, None)
            self.judged.pop(peer, None)

    def _on_disk(self) -> Checkpoints:
        assert self.checkpoints is not None, "only a run with a directory can be gone on with"
        return self.checkpoints


def _settled(state: PeerState) -> PeerState:
    """A state without what was sent to the server in its round; a checkpoint still has that."""
    return state if state.sent is None else replace(state, sent=None)
