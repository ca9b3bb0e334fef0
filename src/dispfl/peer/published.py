"""The models that other peers may request: those of the current and the last round, and older ones
still needed."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dispfl.core.packed import PackedModel


@dataclass
class _Published:
    model: PackedModel
    waiting: set[str]
    """Peers that receive it and have not fetched it yet."""


class PublishedModels:
    """A peer's published models, by round."""

    MIN_ROUNDS = 2
    """Rounds that are always kept, for slower and restarted peers."""
    MAX_ROUNDS = 8
    """Rounds that are kept at most, which bounds the memory."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Published] = {}
        self._changed = asyncio.Event()

    @property
    def oldest(self) -> int | None:
        """The oldest round that is kept; None before the first `publish`."""
        return min(self._rounds, default=None)

    def publish(
        self, t: int, model: PackedModel, listeners: Iterable[str], gone: Callable[[str], bool]
    ) -> None:
        """Publish the model of round t, and drop older ones that no peer needs; a peer that is
        `gone` needs none."""
        self._rounds[t] = _Published(model, set(listeners))
        for old in sorted(self._rounds):
            wanted = old > t - self.MAX_ROUNDS and not all(map(gone, self._rounds[old].waiting))
            if old <= t - self.MIN_ROUNDS and not wanted:
                del self._rounds[old]
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, t: int, seconds: float) -> PackedModel | None:
        """Return the model of round t once it is published; None if that takes longer, or the model
        was dropped."""
        try:
            async with asyncio.timeout(seconds):
                while t not in self._rounds and not self.is_past(t):
                    await self._changed.wait()
        except TimeoutError:
            return None
        found = self._rounds.get(t)
        return found.model if found else None

    def is_past(self, t: int) -> bool:
        """Whether round t was dropped or skipped."""
        return bool(self._rounds) and t < max(self._rounds) and t not in self._rounds

    def mark_fetched(self, t: int, listener: str) -> None:
        """Note that a peer has received the model of round t completely."""
        if t in self._rounds:
            self._rounds[t].waiting.discard(listener)

    def pending(self) -> set[str]:
        """Peers that have not fetched a model that is still kept."""
        return {name for published in self._rounds.values() for name in published.waiting}
