"""Who still has to hear whom in a round, so that a state can be forgotten as soon as nobody needs it."""

import heapq
from collections.abc import Mapping, Sequence

from dispfl.methods.base import PeerState
from dispfl.round import senders_of
from dispfl.work import Part, Setting


class Listening:
    """The parts of a round, and whose states each of them needs: the peer's own, and those of its senders."""

    def __init__(self, setting: Setting, parts: Sequence[Part], states: Mapping[str, PeerState]) -> None:
        self._parts = {part.peer: part for part in parts}
        self._needs = {part.peer: {part.peer, *senders_of(setting, part, states[part.peer])} for part in parts}
        self._needed_by: dict[str, set[str]] = {}
        for peer, needs in self._needs.items():
            for name in needs:
                self._needed_by.setdefault(name, set()).add(peer)

    def in_order(self) -> list[Part]:
        """All parts in an order that soon leaves states unheard: always those next that still need what fewest need."""
        left = {name: len(by) for name, by in self._needed_by.items()}
        queue = sorted((count, name) for name, count in left.items())
        order: dict[str, Part] = {}
        while queue:
            count, name = heapq.heappop(queue)
            if count != left[name]:  # there is a newer entry
                continue
            for peer in sorted(self._needed_by[name] - order.keys()):
                order[peer] = self._parts[peer]
                for other in self._needs[peer]:
                    left[other] -= 1
                    heapq.heappush(queue, (left[other], other))
        return list(order.values())

    def unheard_after(self, part: Part) -> list[str]:
        """Whose states nobody needs any more now that this part is done; none where only judging is left."""
        if part.shared is not None:
            return []
        unheard = []
        for name in self._needs[part.peer]:
            self._needed_by[name].discard(part.peer)
            if not self._needed_by[name]:
                unheard.append(name)
        return unheard
