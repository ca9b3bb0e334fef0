"""The models that others may still ask for: this round's and the last one's, and older ones that somebody waits for."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dispfl.core.packed import PackedModel


@dataclass
class _Published:
    model: PackedModel
    waiting: set[str]
    """Who hears it and has not fetched it yet."""


class Shelf:
    """A peer's published models by round. Those of rounds that everybody is through with are dropped."""

    ALWAYS = 2
    """So many rounds are kept in any case, for those who are slower or start again."""
    AT_MOST = 8
    """So many at most, whoever is waiting: memory stays bounded."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Published] = {}
        self._news = asyncio.Event()

    @property
    def oldest(self) -> int | None:
        """The first round that can be had; None before anything was published."""
        return min(self._rounds, default=None)

    def publish(self, t: int, model: PackedModel, listeners: Iterable[str], gone: Callable[[str], bool]) -> None:
        """Put out the model of round t; drop what nobody will hear any more. `gone` says who is not waited for."""
        self._rounds[t] = _Published(model, set(listeners))
        for old in sorted(self._rounds):
            wanted = old > t - self.AT_MOST and not all(map(gone, self._rounds[old].waiting))
            if old <= t - self.ALWAYS and not wanted:
                del self._rounds[old]
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for(self, t: int, seconds: float) -> PackedModel | None:
        """The model of round t, once it is published; None if it is not within so many seconds, or gone."""
        try:
            async with asyncio.timeout(seconds):
                while t not in self._rounds and not self.is_past(t):
                    await self._news.wait()
        except TimeoutError:
            return None
        found = self._rounds.get(t)
        return found.model if found else None

    def is_past(self, t: int) -> bool:
        """Whether round t was published and dropped, or skipped."""
        return bool(self._rounds) and t < max(self._rounds) and t not in self._rounds

    def fetched(self, t: int, listener: str) -> None:
        """Somebody has got the model of round t."""
        if t in self._rounds:
            self._rounds[t].waiting.discard(listener)

    def awaited(self) -> set[str]:
        """Who has not fetched a model that is still here."""
        return {name for published in self._rounds.values() for name in published.waiting}
