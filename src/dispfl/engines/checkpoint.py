"""Checkpoints: all peers' states after a round, and the finished steps of a round in progress.

    checkpoints/round-000012/
        part-000.safetensors   some peers' states and, in the header, their reports
        part-001.safetensors   (part-w1-000... where several processes write)
        complete.json          written last: which parts make up the 12 finished rounds

A folder without `complete.json` is a round in progress. A short round of small models has one part.
Where a round is long, a part is written every minute with the peers that finished since the last,
so that little is lost; where models are large, every 64 MB, so that little memory is needed.

A part has the format's version and a digest of each peer's state. What cannot be read is never
deleted: an error of the system and another version stop the run with a sentence, and a damaged
checkpoint is renamed to `round-000012.damaged`.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask, channel_layout
from dispfl.core.optimizers import Moments
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.errors import DamagedError, RunError
from dispfl.files import plain_disk_errors, sync_folder, write_atomically
from dispfl.methods.base import PeerState
from dispfl.round.context import StepResult
from dispfl.round.ledger import MessageCost

SECONDS_BETWEEN_PARTS = 60.0
BYTES_IN_A_PART = 64_000_000
KEPT_CHECKPOINTS = 2
VERSION = 2
"""The version of the format, to be raised with every change after which older checkpoints cannot be
read."""
_FOLDER = re.compile(r"round-([0-9]{6,})")
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
        try:
            return sorted(
                rounds
                for rounds, folder in self._rounds().items()
                if (folder / "complete.json").exists()
            )
        except OSError as problem:
            raise _unreadable(self.folder, problem) from problem

    def add(self, t: int, peer: str, step: StepResult) -> None:
        """Add a finished step of round t; write a file if enough steps or time have accumulated."""
        self._waiting[peer] = step
        size = sum(
            4 * waiting.next_state.model.values.numel() for waiting in self._waiting.values()
        )
        if size >= BYTES_IN_A_PART or time.monotonic() - self._last_write >= SECONDS_BETWEEN_PARTS:
            self.flush(t)

    def flush(self, t: int) -> None:
        """Write the steps of round t that are not on the disk yet."""
        if self._waiting:
            folder = self._round(t + 1)
            with plain_disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder)
            numbers = [
                int(file.stem.split("-")[-1]) for file in folder.glob(f"{self._name}*.safetensors")
            ]
            number = max(numbers, default=-1) + 1
            file = folder / f"{self._name}{number:03d}.safetensors"
            write_atomically(file, _encode(self._waiting))
            self._waiting = {}
        self._last_write = time.monotonic()

    def complete(self, t: int, *, last: bool = False) -> None:
        """Complete the checkpoint of round t, and delete all older ones except one; `last`: of the
        run's last round."""
        self.flush(t)
        folder = self._round(t + 1)
        parts = sorted(file.name for file in folder.glob("part-*.safetensors"))
        manifest = {"version": VERSION, "rounds": t + 1, "parts": parts}
        if last:
            manifest["last"] = True
        write_atomically(folder / "complete.json", json.dumps(manifest).encode())
        self.delete_old()

    def delete_old(self) -> None:
        """Delete all but the newest complete checkpoints, and remains of an interrupted
        deletion."""
        newest = self.finished_rounds()[-KEPT_CHECKPOINTS:]
        for rounds, folder in self._rounds().items():
            if newest and rounds < newest[0]:
                shutil.rmtree(folder)

    def load(self, rounds: int, peers: Collection[str] | None = None) -> dict[str, StepResult]:
        """Return the saved steps of the round that completes this many rounds, finished or not; all
        or some peers'."""
        steps: dict[str, StepResult] = {}
        for file in self._parts(rounds):
            steps |= _decode(file, peers)
        return steps

    def was_last(self, rounds: int) -> bool:
        """Whether these rounds were all of the run when they were finished; it may have been
        extended since."""
        return bool(self._manifest(rounds).get("last"))

    def copy_from(self, leader: "Checkpoints") -> None:
        """Take over the complete checkpoints of a run with the same states; their files are shared,
        not copied."""
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
        """Rename a damaged checkpoint, log the damage and what happens instead, and return the new
        name."""
        folder = self._round(rounds)
        renamed = folder.with_name(f"{folder.name}.damaged")
        number = 2
        while renamed.exists():
            renamed = folder.with_name(f"{folder.name}.{number}.damaged")
            number += 1
        with plain_disk_errors(renamed):
            folder.rename(renamed)
        log.warning("%s It is kept as %s. %s", damage, renamed, instead)
        return renamed

    def _parts(self, rounds: int) -> list[Path]:
        """Return a round's files; `complete.json` names those of a complete round, so that a
        missing one is noticed."""
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
            content = manifest.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as problem:
            raise _unreadable(manifest, problem) from problem
        try:
            fields = json.loads(content)
            parts = [str(part) for part in fields["parts"]]
            version = int(fields.get("version", 1))
        except (KeyError, TypeError, ValueError) as problem:
            raise DamagedError(f"The checkpoint {folder} is damaged ({problem}).") from problem
        _check_version(manifest, version)
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


def checkpoint_bytes(peer: str, step: StepResult) -> int:
    """The size of a checkpoint with one peer."""
    return len(_encode({peer: step}))


def _encode(steps: Mapping[str, StepResult]) -> bytes:
    tensors: dict[str, Tensor] = {}
    header = {}
    masks = [step.next_state.next_mask for step in steps.values()]
    units = next((mask.layout_spec for mask in masks if mask.layout_spec), None)
    for peer, step in steps.items():
        peer_tensors = _tensors(peer, step.next_state)
        entry = {
            "size": step.next_state.model.mask.size,
            "report": asdict(step.report),
            "messages": step.messages,
        }
        header[peer] = entry | {"digest": _digest(entry, peer_tensors, units)}
        tensors |= peer_tensors
    metadata = {"version": str(VERSION), "peers": json.dumps(header)}
    if units is not None:
        metadata["units"] = units
    return safetensors.torch.save(tensors, metadata)


def _tensors(peer: str, state: PeerState) -> dict[str, Tensor]:
    tensors = {f"{peer}/values": state.model.values, f"{peer}/mask": state.model.mask.bits}
    if state.next_mask is not state.model.mask:
        tensors[f"{peer}/next_mask"] = state.next_mask.bits
    # Clones: a file may not hold one tensor twice, and SubFedAvg uploads its own model.
    if state.upload is not None:
        tensors[f"{peer}/upload/values"] = state.upload.values.clone()
        tensors[f"{peer}/upload/mask"] = state.upload.mask.bits.clone()
    tensors |= {f"{peer}/buffers/{name}": tensor for name, tensor in state.buffers.items()}
    tensors |= {f"{peer}/memory/{name}": tensor for name, tensor in state.memory.items()}
    for model, moments in state.moments.items():
        tensors[f"{peer}/moments/{model}/mask"] = moments.mask.bits.clone()
        tensors |= {
            f"{peer}/moments/{model}/values/{name}": tensor
            for name, tensor in moments.values.items()
        }
    return tensors


def _decode(part: Path, peers: Collection[str] | None) -> dict[str, StepResult]:
    """Return the steps of all or some peers in a part, if they are what was written."""
    try:
        metadata, header, tensors = _read(part, peers)
        for peer, entry in header.items():
            if entry.pop("digest") != _digest(entry, tensors[peer], metadata.get("units")):
                raise ValueError(f"the digest of peer {peer} does not match")
    except FileNotFoundError as problem:
        raise DamagedError(f"The checkpoint {part} is damaged (it is missing).") from problem
    except OSError as problem:
        raise _unreadable(part, problem) from problem
    except (
        safetensors.SafetensorError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as problem:
        raise DamagedError(f"The checkpoint {part} is damaged ({problem}).") from problem
    try:
        layout = channel_layout(metadata["units"]) if "units" in metadata else None
        return {peer: _step(peer, entry, tensors[peer], layout) for peer, entry in header.items()}
    except (KeyError, TypeError, ValueError) as problem:
        raise RunError(
            f"The checkpoint {part} is intact, but another dispfl wrote it ({problem}). Resume with"
            " that one, or choose another folder to start again."
        ) from problem


def _read(
    part: Path, peers: Collection[str] | None
) -> tuple[Any, dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the metadata, and the entries and the tensors of the requested peers; no more is read.

    The file is read, not mapped into memory: there, a disk error would end the process with a
    signal.
    """
    with part.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def take(begin: int, end: int) -> bytes:
            if not 0 <= begin <= end <= size:
                raise ValueError("it is truncated")
            file.seek(begin)
            return file.read(end - begin)

        start = 8 + int.from_bytes(take(0, 8), "little")
        index = json.loads(take(8, start))
        metadata = index.pop("__metadata__")
        _check_version(part, int(metadata.get("version", 1)))
        header = json.loads(metadata["peers"])
        if header.keys() != {name.split("/")[0] for name in index}:
            raise ValueError("its header names other peers than its tensors")
        requested = header
        if peers is not None:
            requested = {peer: entry for peer, entry in header.items() if peer in peers}
        chosen = {}
        content = bytearray()
        for name, where in sorted(index.items(), key=lambda item: item[1]["data_offsets"]):
            if name.split("/")[0] in requested:
                begin, end = where["data_offsets"]
                chosen[name] = where | {"data_offsets": [len(content), len(content) + end - begin]}
                content += take(start + begin, start + end)
    chosen_index = json.dumps(chosen).encode()
    tensors: dict[str, dict[str, Tensor]] = {peer: {} for peer in requested}
    loaded = safetensors.torch.load(
        len(chosen_index).to_bytes(8, "little") + chosen_index + content
    )
    for name, tensor in loaded.items():
        tensors[name.split("/")[0]][name] = tensor
    return metadata, requested, tensors


def _digest(entry: Mapping[str, object], tensors: Mapping[str, Tensor], units: str | None) -> str:
    """The digest of a peer's entry and tensors (names, types, shapes and bytes), and of the units
    of its masks."""
    digest = hashlib.blake2b(json.dumps([entry, units]).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_version(file: Path, version: int) -> None:
    if version == VERSION:
        return
    fix = "Resume with the dispfl that wrote it" if version < VERSION else "Upgrade dispfl"
    raise RunError(
        f"The checkpoint {file} has version {version} of the format; this dispfl reads version"
        f" {VERSION}. {fix}, or choose another folder to start again. Nothing was changed."
    )


def _unreadable(path: Path, problem: OSError) -> RunError:
    return RunError(
        f"The checkpoint {path} cannot be read: {problem.strerror or problem}. Nothing was changed;"
        " mend the cause and start again."
    )


def _step(
    peer: str,
    entry: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    layout: ChannelLayout | None,
) -> StepResult:
    size = int(str(entry["size"]))
    model = _model(tensors, peer, size, layout)
    next_bits = tensors.get(f"{peer}/next_mask")
    next_mask = model.mask if next_bits is None else _mask(peer, next_bits, size, layout)
    upload = (
        _model(tensors, f"{peer}/upload", size, layout)
        if f"{peer}/upload/values" in tensors
        else None
    )
    state = PeerState(
        model,
        next_mask,
        _named(tensors, f"{peer}/buffers/"),
        _named(tensors, f"{peer}/memory/"),
        _moments(tensors, peer, size, layout),
        upload,
    )
    messages = tuple(MessageCost(*message) for message in entry.get("messages", ()))  # type: ignore[attr-defined]
    return StepResult(Report(**entry["report"]), messages, state=state)  # type: ignore[arg-type]


def _mask(peer: str, bits: Tensor, size: int, layout: ChannelLayout | None) -> Mask:
    """Return a mask of these bits: of units, where there is a layout of units."""
    if bits.numel() != -(-(layout.units if layout else size) // 8):
        raise ValueError(f"peer {peer}'s mask and values do not fit")
    return ChannelMask(bits, size, layout) if layout else WeightMask(bits, size)


def _model(
    tensors: Mapping[str, Tensor], whose: str, size: int, layout: ChannelLayout | None
) -> PackedModel:
    values = tensors[f"{whose}/values"]
    mask = _mask(whose, tensors[f"{whose}/mask"], size, layout)
    if mask.kept != values.numel() or values.dtype != torch.float32:
        raise ValueError(f"peer {whose}'s mask and values do not fit")
    return PackedModel(values, mask)


def _moments(
    tensors: Mapping[str, Tensor], peer: str, size: int, layout: ChannelLayout | None
) -> dict[str, Moments]:
    """Return the moments of each of a peer's models."""
    models = {name.split("/")[0] for name in _named(tensors, f"{peer}/moments/")}
    moments = {}
    for model in sorted(models):
        bits = tensors[f"{peer}/moments/{model}/mask"]
        of_weights = layout is None or bits.numel() == -(-size // 8)  # a global model may be dense
        mask = _mask(peer, bits, size, None if of_weights else layout)
        values = _named(tensors, f"{peer}/moments/{model}/values/")
        if any(value.dim() and value.numel() != mask.kept for value in values.values()):
            raise ValueError(f"peer {peer}'s moments and their mask do not fit")
        moments[model] = Moments(mask, values)
    return moments


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
