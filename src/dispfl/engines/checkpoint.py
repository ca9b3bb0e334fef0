"""Checkpoints: all peers' states after a round, and the finished steps of a round in progress.

    checkpoints/round-000012/
        part-000.safetensors   some peers' states and, in the header, their reports
        part-001.safetensors   (part-w1-000... where several processes write)
        complete.json          written last: which parts make up the 12 finished rounds

A folder without `complete.json` is a round in progress. A short round of small models has one part.
Where a round is long, a part is written every minute with the peers that finished since the last,
so that little is lost; where models are large, every 64 MB, so that little memory is needed.

`checkpoint_part.py` has the format of a part. What cannot be read is never
deleted: an error of the system and another version stop the run with a sentence, and a damaged
checkpoint is renamed to `round-000012.damaged`.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dispfl.engines.checkpoint_part import (
    VERSION,
    check_version,
    part_bytes,
    read_part,
    unreadable,
    write_part,
)
from dispfl.errors import DamagedError
from dispfl.files import plain_disk_errors, read_regular, sync_folder, write_atomically
from dispfl.round.context import StepResult

SECONDS_BETWEEN_PARTS = 60.0
BYTES_IN_A_PART = 64_000_000
KEPT_CHECKPOINTS = 2
_FOLDER = re.compile(r"round-([0-9]{6,18})")
_PART = re.compile(r"part-[A-Za-z0-9-]+\.safetensors")
log = logging.getLogger("dispfl")


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        self.folder = folder
        self._name = f"part-{writer}-" if writer else "part-"
        self._waiting: dict[str, StepResult] = {}
        self._last_write = time.monotonic()

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

    def add(self, t: int, peer: str, step: StepResult) -> None:
        """Add a finished step of round t; write a file if enough steps or time have accumulated."""
        self._waiting[peer] = step
        models = [waiting.next_state.model for waiting in self._waiting.values()]
        size = sum(model.values.nbytes for model in models)
        seconds = time.monotonic() - self._last_write
        if size >= BYTES_IN_A_PART or seconds >= SECONDS_BETWEEN_PARTS:
            self.flush(t)

    def flush(self, t: int) -> None:
        """Write the steps of round t that are not on the disk yet."""
        if self._waiting:
            folder = self._round(t + 1)
            with plain_disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder)
            write_part(self._next_part(folder), self._waiting)
            self._waiting = {}
        self._last_write = time.monotonic()

    def _next_part(self, folder: Path) -> Path:
        """Return the first number that this writer has not used in a round's folder."""
        number = 0
        for file in folder.glob(f"{self._name}*.safetensors"):
            number = max(number, int(file.stem.split("-")[-1]) + 1)
        return folder / f"{self._name}{number:03d}.safetensors"

    def complete(self, t: int, *, last: bool = False) -> None:
        """Complete the checkpoint of round t, and delete all older ones except one.

        `last` says that it is the run's last round.
        """
        self.flush(t)
        folder = self._round(t + 1)
        parts = sorted(file.name for file in folder.glob("part-*.safetensors"))
        manifest = {"version": VERSION, "rounds": t + 1, "parts": parts}
        if last:
            manifest["last"] = True
        write_atomically(folder / "complete.json", json.dumps(manifest).encode())
        self.delete_old()

    def delete_old(self) -> None:
        """Delete all but the newest complete checkpoints, and remains of interrupted deletions."""
        newest = self.finished_rounds()[-KEPT_CHECKPOINTS:]
        for rounds, folder in self._rounds().items():
            if newest and rounds < newest[0]:
                shutil.rmtree(folder)

    def load(self, rounds: int, peers: Collection[str] | None = None) -> dict[str, StepResult]:
        """Return the saved steps, of all or some peers, of the round that completes this many.

        The round may be unfinished.
        """
        steps: dict[str, StepResult] = {}
        for file in self._parts(rounds):
            steps |= read_part(file, peers)
        return steps

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
                    try:
                        os.link(file, target / file.name)
                    except OSError:  # a file system without hard links
                        write_atomically(target / file.name, file.read_bytes())
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
        return sorted(folder.glob("part-*.safetensors"))

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


def _part_name(name: object) -> str:
    """Return the name of a part; refuse one that is no file in the round's own folder."""
    if not isinstance(name, str) or not _PART.fullmatch(name):
        raise ValueError(f"it names the part {name!r}")
    return name


def checkpoint_bytes(peer: str, step: StepResult) -> int:
    """The size of a checkpoint with one peer."""
    return part_bytes({peer: step})
