"""Checkpoints: all peers' states after a round, and the finished steps of a round in progress.

    checkpoints/round-000012/
        part-000.safetensors   some peers' states and, in the header, their reports
        part-001.safetensors   (part-w1-000... where several processes write)
        part-kept-000...       states that this round has not changed: files of earlier rounds
        complete.json          written last: which parts make up the 12 finished rounds

A folder without `complete.json` is a round in progress. A short round of small models has one part.
Where a round is long, a part is written every minute with the peers that finished since the last,
so that little is lost; where models are large, every 64 MB, so that little memory is needed.

`checkpoint_part.py` has the format of a part. What cannot be read is never
deleted: an error of the system and another version stop the run with a sentence, and a damaged
checkpoint is renamed to `round-000012.damaged`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dispfl.engines.checkpoint_part import (
    VERSION,
    OpenPart,
    check_version,
    open_part,
    part_bytes,
    read_part,
    unreadable,
    write_part,
)
from dispfl.errors import DamagedError
from dispfl.files import plain_disk_errors, read_regular, sync_folder, write_atomically
from dispfl.round.context import LazyStates, StepResult

SECONDS_BETWEEN_PARTS = 60.0
BYTES_IN_A_PART = 64_000_000
KEPT_CHECKPOINTS = 2
MAX_WRITES = 2
"""Parts that wait for the writing thread, in memory; then the round waits for it."""
KEPT = "part-kept-"
"""How the names of parts begin that a checkpoint shares with earlier ones."""
_FOLDER = re.compile(r"round-([0-9]{6,18})")
_PART = re.compile(r"part-[A-Za-z0-9-]+\.safetensors")
log = logging.getLogger("dispfl")


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        self.folder = folder
        self.saves_round = True
        """Whether the steps of this round are written; false between two checkpoints."""
        self.on_written: Callable[[int, Path], None] = _nothing
        """Called with each part that is written and the rounds that its states follow, on the
        writing thread if there is one."""
        self._name = f"part-{writer}-" if writer else "part-"
        self._waiting: dict[str, StepResult] = {}
        self._waiting_bytes = 0
        self._round_bytes = 0
        self._last_write = time.monotonic()
        self._saved: set[str] = set()
        """The peers whose present states have been added, so that a part has or will have them."""
        self._kept: set[str] = set()
        """Those of them whose states are the same after this round."""
        self._newest: dict[str, SavedPart] = {}
        """The part with each peer's newest state."""
        self._thread: ThreadPoolExecutor | None = None
        self._writes: deque[Future[None]] = deque()
        self._failed = False

    def finished_rounds(self) -> list[int]:
        """Return the numbers of rounds after which there is a complete checkpoint, ascending."""
        finished = []
        try:
            for rounds, folder in self._rounds().items():
                if (folder / "complete.json").exists():
                    finished.append(rounds)
        except OSError as problem:
            raise unreadable(self.folder, problem) from problem
        return sorted(finished)

    # Writing

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Write on a thread of its own until the block ends, and wait for it at the end.

        After an error nothing more is written; the next call raises it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoints") as thread:
            self._thread = thread
            try:
                yield
                self.wait()
            finally:
                self._thread = None

    def wait(self) -> None:
        """Wait until everything is on the disk that was to be written."""
        while self._writes:
            self._writes.popleft().result()

    def _write(self, write: Callable[[], None]) -> None:
        if self._thread is None:
            write()
            return
        while self._writes and (self._writes[0].done() or len(self._writes) >= MAX_WRITES):
            self._writes.popleft().result()
        self._writes.append(self._thread.submit(self._write_unless_failed, write))

    def _write_unless_failed(self, write: Callable[[], None]) -> None:
        if self._failed:
            return  # a checkpoint without a part that was not written must not become complete
        try:
            write()
        except BaseException:
            self._failed = True
            raise

    def add(self, t: int, peer: str, step: StepResult) -> None:
        """Add a finished step of round t; write a file if enough steps or time have accumulated."""
        if not self.saves_round:
            self._saved.discard(peer)
            return
        self._saved.add(peer)
        self._waiting[peer] = step
        size = step.next_state.model.values.nbytes
        self._waiting_bytes += size
        self._round_bytes += size
        seconds = time.monotonic() - self._last_write
        if self._waiting_bytes >= BYTES_IN_A_PART or seconds >= SECONDS_BETWEEN_PARTS:
            self.flush(t)

    def keep(self, peer: str) -> bool:
        """Let this round's checkpoint share the part with a peer's state, which has not changed.

        Return whether there is one; otherwise the state is to be added.
        """
        if not self.saves_round:
            return True
        if peer not in self._saved:
            return False
        self._kept.add(peer)
        return True

    def flush(self, t: int) -> None:
        """Write the steps of round t that are not on the disk yet."""
        if self._waiting:
            self._write(partial(self._write_part, t, self._waiting))
            self._waiting = {}
            self._waiting_bytes = 0
        self._last_write = time.monotonic()

    def _write_part(self, t: int, steps: Mapping[str, StepResult]) -> None:
        folder = self._make_folder(t + 1)
        path = self._next_part(folder)
        write_part(path, steps)
        self._note(path, steps)
        self.on_written(t + 1, path)

    def _make_folder(self, rounds: int) -> Path:
        """Make the folder of the checkpoint after this many rounds, if there is none; return it."""
        folder = self._round(rounds)
        with plain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder)
        return folder

    def _note(self, path: Path, peers: Collection[str]) -> None:
        """Note that a part has the newest states of these peers."""
        part = SavedPart(path, len(peers))
        self._newest |= dict.fromkeys(peers, part)

    def _next_part(self, folder: Path) -> Path:
        """Return the first number that this writer has not used in a round's folder."""
        number = 0
        for file in folder.glob(f"{self._name}*.safetensors"):
            number = max(number, int(file.stem.split("-")[-1]) + 1)
        return folder / f"{self._name}{number:03d}.safetensors"

    def complete(self, t: int, *, last: bool = False) -> None:
        """Complete the checkpoint of round t, and delete all older ones except one.

        `last` says that it is the run's last round. A small checkpoint is on the disk
        afterwards. A large one is written while the next round begins; if the process is killed
        meanwhile, its round is repeated.
        """
        self.flush(t)
        self._write(partial(self._complete, t, self._kept, last))
        self._kept = set()
        if self._round_bytes < BYTES_IN_A_PART:
            self.wait()
        self._round_bytes = 0

    def _complete(self, t: int, kept: Collection[str], last: bool) -> None:
        folder = self._round(t + 1)
        if not folder.exists():  # a round without any step has written no part
            self._make_folder(t + 1)
        parts = self._keep_parts(folder, kept)
        parts += sorted(file.name for file in _own_parts(folder))
        manifest = {"version": VERSION, "rounds": t + 1, "parts": parts}
        if last:
            manifest["last"] = True
        write_atomically(folder / "complete.json", json.dumps(manifest).encode())
        self.delete_old()

    def _keep_parts(self, folder: Path, kept: Collection[str]) -> list[str]:
        """Add the parts with unchanged states to a checkpoint, the oldest first.

        Files are shared, not copied. Of a part whose states are mostly outdated, the others are
        written anew, so that no checkpoint takes more than twice its space.
        """
        peers_of: dict[SavedPart, list[str]] = {}
        for peer in sorted(kept):
            peers_of.setdefault(self._newest[peer], []).append(peer)
        names: list[str] = []
        for part in sorted(peers_of, key=lambda part: part.number):
            peers = peers_of[part]
            path = folder / f"{KEPT}{len(names):03d}.safetensors"
            if 2 * len(peers) < part.peers:
                write_part(path, read_part(part.path, peers))
                part = replace(part, peers=len(peers))
            else:
                _share(part.path, path)
            moved = replace(part, path=path)
            for peer in peers:
                self._newest[peer] = moved
            names.append(path.name)
        if names:
            sync_folder(folder)
        return names

    def delete_old(self) -> None:
        """Delete all but the newest complete checkpoints, and remains of interrupted deletions."""
        newest = self.finished_rounds()[-KEPT_CHECKPOINTS:]
        for rounds, folder in self._rounds().items():
            if newest and rounds < newest[0]:
                shutil.rmtree(folder)

    # Reading

    def load(self, rounds: int, peers: Collection[str] | None = None) -> dict[str, StepResult]:
        """Return the saved steps, of all or some peers, of the round that completes this many.

        The round may be unfinished.
        """
        steps: dict[str, StepResult] = {}
        for _, steps_of_part in self.load_parts(rounds, peers):
            steps |= steps_of_part
        return steps

    def load_parts(
        self, rounds: int, peers: Collection[str] | None = None
    ) -> Iterator[tuple[Path, dict[str, StepResult]]]:
        """Yield each part with its steps; a later part has the newer states."""
        for file in self._parts(rounds):
            steps = read_part(file, peers)
            self._note(file, steps)
            self._saved.update(steps)
            yield file, steps

    def states(self, rounds: int, peers: Iterable[str]) -> LazyStates:
        """Return the states of these peers after this many rounds, read on access."""
        parts: dict[str, OpenPart] = {}
        for file in self._parts(rounds):
            part = open_part(file)
            parts |= dict.fromkeys(part.entries, part)
        return LazyStates(peers, lambda peer: parts[peer].checked_state(peer))

    def was_last(self, rounds: int) -> bool:
        """Whether the run had no more rounds when these were finished.

        It may have been extended since.
        """
        return bool(self._manifest(rounds).get("last"))

    def copy_from(self, leader: "Checkpoints") -> None:
        """Take over the complete checkpoints of a run with the same states.

        Files are shared, not copied, where the file system allows it.
        """
        for rounds in leader.finished_rounds():
            manifest = leader._round(rounds) / "complete.json"
            target = self._round(rounds)
            with plain_disk_errors(target):
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
                for file in (*leader._parts(rounds), manifest):  # the last makes it count
                    _share(file, target / file.name)
                sync_folder(target)

    def discard(self, rounds: int) -> None:
        """Delete the checkpoint after this many rounds, complete or partial."""
        shutil.rmtree(self._round(rounds))

    def set_aside(self, rounds: int, damage: DamagedError, instead: str) -> Path:
        """Rename a damaged checkpoint and return its new name.

        The damage and what happens instead are logged.
        """
        renamed = self.rename(rounds, "damaged")
        log.warning("%s It is kept as %s. %s", damage, renamed, instead)
        return renamed

    def rename(self, rounds: int, suffix: str) -> Path:
        """Rename a checkpoint, so that it no longer counts, and return its new name."""
        folder = self._round(rounds)
        renamed = folder.with_name(f"{folder.name}.{suffix}")
        number = 2
        while renamed.exists():
            renamed = folder.with_name(f"{folder.name}.{number}.{suffix}")
            number += 1
        with plain_disk_errors(renamed):
            folder.rename(renamed)
        return renamed

    def _parts(self, rounds: int) -> list[Path]:
        """Return a round's files.

        `complete.json` names those of a complete round, so that a missing one is noticed.
        """
        folder = self._round(rounds)
        manifest = self._manifest(rounds)
        if manifest:
            return [folder / name for name in manifest["parts"]]
        return _own_parts(folder)

    def _manifest(self, rounds: int) -> dict[str, Any]:
        """Return the content of `complete.json`; nothing for a round in progress."""
        folder = self._round(rounds)
        manifest = folder / "complete.json"
        try:
            content = read_regular(manifest)
        except FileNotFoundError:
            return {}
        except OSError as problem:
            raise unreadable(manifest, problem) from problem
        try:
            fields = json.loads(content)
            parts = [_part_name(name) for name in fields["parts"]]
            version = int(fields.get("version", 1))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
            raise DamagedError(f"The checkpoint {folder} is damaged ({problem}).") from problem
        check_version(manifest, version)
        return {"parts": parts, "last": fields.get("last")}

    def _rounds(self) -> dict[int, Path]:
        """Return the folders, of complete and of partial rounds."""
        try:
            folders = list(self.folder.iterdir())
        except FileNotFoundError:
            return {}
        rounds = {}
        for folder in folders:
            match = _FOLDER.fullmatch(folder.name)
            if match:
                rounds[int(match[1])] = folder
        return rounds

    def _round(self, rounds: int) -> Path:
        return self.folder / f"round-{rounds:06d}"


@dataclass(frozen=True)
class SavedPart:
    """A part on the disk."""

    path: Path
    peers: int
    """The peers in it; the newest states of some may be in later parts."""
    number: int = field(default_factory=count().__next__)
    """Orders the parts of this process: a later one has the newer states."""


def _own_parts(folder: Path) -> list[Path]:
    """Return the parts with the steps of a round, without those that it shares with earlier ones.

    Only `complete.json` names these, so that a round in progress does not count them as its steps.
    """
    parts = sorted(folder.glob("part-*.safetensors"))
    return [part for part in parts if not part.name.startswith(KEPT)]


def _share(file: Path, link: Path) -> None:
    """Give a file a second name, where the file system allows it; else copy it."""
    with plain_disk_errors(link):
        link.unlink(missing_ok=True)  # of a killed process
        try:
            os.link(file, link)
        except OSError:  # a file system without hard links
            write_atomically(link, file.read_bytes())


def _nothing(*_: object) -> None:
    pass


def _part_name(name: object) -> str:
    """Return the name of a part; refuse one that is no file in the round's own folder."""
    if not isinstance(name, str) or not _PART.fullmatch(name):
        raise ValueError(f"it names the part {name!r}")
    return name


def checkpoint_bytes(peer: str, step: StepResult) -> int:
    """The size of a checkpoint with one peer."""
    return part_bytes({peer: step})
