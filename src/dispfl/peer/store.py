"""A peer's rounds on its disk: checkpoints as those of a simulation, and a line for each round."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dispfl.core.train import Report
from dispfl.costs.ledger import Carried
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.terms import difference
from dispfl.runs.directory import RunDirectory, read_config
from dispfl.runs.files import append_durably
from dispfl.work import Step

ROUNDS = "rounds.jsonl"


class PeerStore:
    """The run folder of one peer, which this process alone writes to."""

    def __init__(self, folder: Path, name: str, terms: Mapping[str, str]) -> None:
        """Begin a folder, or go on with one, which must be of this peer and of these terms."""
        self.name = name
        self.folder = folder
        if not (folder / "config.toml").exists():
            self._directory = RunDirectory.create(folder, {"peer": name, "terms": dict(terms)})
            return
        written = read_config(folder)
        if differs := difference(terms, written.get("terms", {}), "now", "then"):
            raise RunError(f"{folder} was begun with other terms: {differs} Delete the folder to begin anew.")
        self._directory = RunDirectory.open(folder)

    def last(self) -> tuple[int, PeerState] | None:
        """How many rounds are done and the state after them, from the newest checkpoint that is whole."""
        checkpoints = self._directory.checkpoints
        for rounds in reversed(checkpoints.finished_rounds()):
            try:
                return rounds, checkpoints.load(rounds)[self.name].state
            except (RunError, KeyError):
                checkpoints.discard(rounds)
        return None

    def go_back_to(self, rounds: int) -> None:
        """Forget what was done after so many rounds, if there is a checkpoint of them, or if only round 0 is lost."""
        finished = self._directory.checkpoints.finished_rounds()
        if rounds in finished or (rounds, finished) == (0, [1]):
            for later in finished:
                if later > rounds:
                    self._directory.checkpoints.discard(later)

    def save(self, t: int, step: Step, heard: Sequence[str], missed: Sequence[str]) -> None:
        """Write a round down; the line first, the checkpoint that makes the round count last."""
        line: dict[str, Any] = {"round": t, "at": time.time(), "heard": list(heard), "missed": list(missed)}
        line |= {"report": asdict(step.report), "carried": step.carried}
        append_durably(self.folder / ROUNDS, json.dumps(line, allow_nan=False).encode() + b"\n")
        self._directory.checkpoints.add(t, self.name, step)
        self._directory.checkpoints.complete(t)

    def close(self) -> None:
        """Let others have the folder."""
        self._directory.close()


def rounds_of(folder: Path) -> dict[int, dict[str, Any]]:
    """What a peer wrote down of each round: the last line of a round counts, for a crash may have come in between."""
    found: dict[int, dict[str, Any]] = {}
    try:
        content = (folder / ROUNDS).read_bytes()
    except FileNotFoundError:
        return {}
    for line in content.split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a crash
        if isinstance(entry, dict) and "round" in entry:
            found[entry["round"]] = entry
    return found


def report_of(entry: Mapping[str, Any]) -> tuple[Report, tuple[Carried, ...]]:
    """The report and the messages of a round that was written down."""
    return Report(**entry["report"]), tuple(Carried(*message) for message in entry["carried"])
