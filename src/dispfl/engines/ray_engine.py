"""The Ray engine: the same rounds, with the peers spread over processes on this machine or on a cluster.

Peers' data and states stay with their worker; what travels is messages of the codec, and reports. A worker that is
lost (killed, or with its machine) is replaced: the new one takes its peers up from the last checkpoint and does their
parts of the round again, which gives the same bits.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dispfl.core.layout import Layout
from dispfl.engines.balance import rebalanced
from dispfl.engines.ray_connection import connect, disconnect
from dispfl.engines.ray_crew import Crew
from dispfl.engines.ray_round import RayRound
from dispfl.engines.ray_worker import Told
from dispfl.methods.base import PeerState
from dispfl.runs.checkpoint import Checkpoints
from dispfl.work import Outcome, Part, Setting


class RayEngine:
    """Keeps the peers in `threads` workers, each a process with one thread."""

    def __init__(
        self, setting: Setting, threads: int | None, checkpoints: Checkpoints, address: str | None = None
    ) -> None:
        self.setting = setting
        count = min(threads or os.cpu_count() or 1, len(setting.roster))
        connect(address, count)
        folder = checkpoints.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._codec = setting.codec(Layout.of(setting.module()))
        self._measured: dict[str, float] = {}
        self.crew = Crew(setting, count, folder)

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Everyone's state, fetched one by one when it is looked at."""
        return _Fetched(self.setting.roster, lambda peer: self._fetch(peer, judged=False))

    @property
    def judged(self) -> Mapping[str, PeerState]:
        """What each peer was judged on last, where that was a model that all share."""
        known = {peer for names in self.crew.ask_all("has_judged") for peer in names}
        roster = [peer for peer in self.setting.roster if peer in known]
        return _Fetched(roster, lambda peer: self._fetch(peer, judged=True))

    def recall(self, rounds: int) -> None:
        """Take up everyone's state after so many rounds."""
        self.crew.recall(rounds)

    def under_way(self, t: int) -> dict[str, Outcome]:
        """Take up the steps of round t that were finished before a stop."""
        return {peer: outcome for found in self.crew.ask_all("under_way", t) for peer, outcome in found.items()}

    def steps(self, parts: Iterable[Part]) -> Iterator[tuple[str, Outcome]]:
        """Each part's outcome, as it is done; when all are, the states are on the disk."""
        try:
            yield from RayRound(self.crew, list(parts), self.take).done()
        except BaseException:
            self.crew.call_all("stop")
            raise

    def turn(self) -> None:
        """The round is over; peers move where that makes the workers' load more even, by what their steps took."""
        self.crew.turn()
        if len(self._measured) == len(self.setting.roster):
            places = rebalanced(self._measured, self.crew.places, len(self.crew))
            if places != self.crew.places:
                self.crew.move(places)

    def flush(self, t: int) -> None:
        """Write down the finished steps of round t that are not on the disk yet."""
        self.crew.farewell(t)

    def close(self) -> None:
        """End the workers, and the connection to Ray if it was made here."""
        self.crew.end()
        disconnect()

    def take(self, peer: str, told: Told) -> Outcome:
        """What is told of a step, with the message to the server opened."""
        self._measured[peer] = told.seconds
        sent = None if told.message is None else self._codec.decode_model(told.message)
        return replace(told.outcome, sent=sent)

    def _fetch(self, peer: str, judged: bool) -> PeerState:
        state: PeerState = self.crew.ask(self.crew.places[peer], "fetch", peer, judged)
        return state


class _Fetched(Mapping[str, PeerState]):
    """Peers' states that are elsewhere."""

    def __init__(self, roster: Sequence[str], fetch: Callable[[str], PeerState]) -> None:
        self._roster, self._fetch = roster, fetch

    def __getitem__(self, peer: str) -> PeerState:
        return self._fetch(peer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._roster)

    def __len__(self) -> int:
        return len(self._roster)
