"""The states of peers: in memory, or in the parts of checkpoints and read when they are needed."""

from collections.abc import Iterator, MutableMapping
from dataclasses import replace

from dispfl.engines.checkpoint_part import OpenPart, state_bytes
from dispfl.methods.base import PeerState


class StoredStates(MutableMapping[str, PeerState]):
    """States by peer, without their uploads, which the server has.

    Threads may read states while one thread changes them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """The size of the states in memory."""
        self._states: dict[str, PeerState | OpenPart] = {}
        self._movable: dict[str, OpenPart] = {}
        """The parts with states that are in memory too."""

    def __getitem__(self, peer: str) -> PeerState:
        state = self._states[peer]
        if isinstance(state, OpenPart):
            return without_upload(state.state(peer))
        return state

    def __setitem__(self, peer: str, state: PeerState) -> None:
        before = self._states.get(peer)
        self._movable.pop(peer, None)
        self._put(peer, without_upload(state))  # a thread that reads sees the one or the other
        if isinstance(before, PeerState):
            self.bytes -= state_bytes(before)

    def __delitem__(self, peer: str) -> None:
        state = self._states.pop(peer)
        self._movable.pop(peer, None)
        if not isinstance(state, OpenPart):
            self.bytes -= state_bytes(state)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def drop(self, peer: str) -> None:
        """Drop a state, if there is one, without reading it."""
        if peer in self._states:
            del self[peer]

    def share(self, peer: str, states: "StoredStates") -> None:
        """Take over a peer's state, which has not changed, from others."""
        self.drop(peer)
        self._put(peer, states._states[peer])
        if peer in states._movable:
            self._movable[peer] = states._movable[peer]

    def sort(self) -> None:
        """Put the states into the order of the roster."""
        self._states = dict(sorted(self._states.items()))

    def saved(self, peer: str, part: OpenPart) -> None:
        """Note that a state is on the disk, so that it can be moved there."""
        if peer in self._states:
            self._movable[peer] = part

    def move_one(self) -> bool:
        """Drop a state from memory that is on the disk; return whether there was any."""
        while self._movable:
            peer = next(iter(self._movable))
            part = self._movable.pop(peer)
            state = self._states[peer]
            if not isinstance(state, OpenPart):
                self._states[peer] = part
                self.bytes -= state_bytes(state)
                return True
        return False

    def _put(self, peer: str, state: PeerState | OpenPart) -> None:
        self._states[peer] = state
        if not isinstance(state, OpenPart):
            self.bytes += state_bytes(state)


def without_upload(state: PeerState) -> PeerState:
    """Return a state without its upload, which the server has; a checkpoint still has it."""
    if state.upload is None:
        return state
    return replace(state, upload=None)
