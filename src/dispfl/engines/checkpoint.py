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
import math
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask, channel_layout
from dispfl.core.optimizers import Moments
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.errors import DamagedError, RunError
from dispfl.files import (
    open_regular,
    plain_disk_errors,
    read_regular,
    sync_folder,
    write_atomically,
)
from dispfl.methods.base import PeerState
from dispfl.round.context import StepResult
from dispfl.round.ledger import MessageCost

SECONDS_BETWEEN_PARTS = 60.0
BYTES_IN_A_PART = 64_000_000
KEPT_CHECKPOINTS = 2
VERSION = 2
"""The version of the format, raised with every change that makes older checkpoints unreadable."""
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
            raise _unreadable(self.folder, problem) from problem
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
            write_atomically(self._next_part(folder), _encode(self._waiting))
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
            steps |= _decode(file, peers)
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
            raise _unreadable(manifest, problem) from problem
        try:
            fields = json.loads(content)
            parts = [_part_name(name) for name in fields["parts"]]
            version = int(fields.get("version", 1))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as problem:
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


def _part_name(name: object) -> str:
    """Return the name of a part; refuse one that is no file in the round's own folder."""
    if not isinstance(name, str) or not _PART.fullmatch(name):
        raise ValueError(f"it names the part {name!r}")
    return name


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
    """Return the tensors of a state by their names in the file."""
    tensors = {"values": state.model.values, "mask": state.model.mask.bits}
    if state.next_mask is not state.model.mask:
        tensors["next_mask"] = state.next_mask.bits
    # Clones: a file may not hold one tensor twice, and SubFedAvg uploads its own model.
    for kept_as, packed in (("upload", state.upload), ("private", state.private)):
        if packed is not None:
            tensors[f"{kept_as}/values"] = packed.values.clone()
            tensors[f"{kept_as}/mask"] = packed.mask.bits.clone()
            tensors |= _cloned(f"{kept_as}/tensors", packed.tensors)
    tensors |= _cloned("tensors", state.model.tensors)
    tensors |= _prefixed("buffers", state.buffers)
    tensors |= _prefixed("memory", state.memory)
    for model, moments in state.moments.items():
        tensors[f"moments/{model}/mask"] = moments.mask.bits.clone()
        tensors |= _prefixed(f"moments/{model}/values", moments.values)
    return _prefixed(peer, tensors)


def _cloned(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    clones = {name: tensor.clone() for name, tensor in tensors.items()}
    return _prefixed(prefix, clones)


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


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
        OverflowError,
        RecursionError,
    ) as problem:
        raise DamagedError(f"The checkpoint {part} is damaged ({problem}).") from problem
    try:
        layout = channel_layout(metadata["units"]) if "units" in metadata else None
        steps = {}
        for peer, entry in header.items():
            steps[peer] = _step(peer, entry, tensors[peer], layout)
        return steps
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
    with open_regular(part) as file:
        start = 8 + int.from_bytes(_read_range(file, 0, 8), "little")
        index = json.loads(_read_range(file, 8, start))
        metadata = index.pop("__metadata__")
        _check_version(part, int(metadata.get("version", 1)))
        header = json.loads(metadata["peers"])
        if header.keys() != set(map(_peer_of, index)):
            raise ValueError("its header names other peers than its tensors")
        if peers is not None:
            header = {peer: entry for peer, entry in header.items() if peer in peers}
        requested = {name: index[name] for name in index if _peer_of(name) in header}
        loaded = _read_tensors(file, start, requested)
    tensors: dict[str, dict[str, Tensor]] = {peer: {} for peer in header}
    for name, tensor in loaded.items():
        tensors[_peer_of(name)][name] = tensor
    return metadata, header, tensors


def _read_tensors(file: BinaryIO, start: int, index: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of an index, whose data begin at `start`, as if they were the whole file."""
    moved = {}
    content = bytearray()
    for name, where in sorted(index.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = where["data_offsets"]
        moved[name] = where | {"data_offsets": [len(content), len(content) + end - begin]}
        content += _read_range(file, start + begin, start + end)
    header = json.dumps(moved).encode()
    return safetensors.torch.load(len(header).to_bytes(8, "little") + header + content)


def _read_range(file: BinaryIO, begin: int, end: int) -> bytes:
    if not 0 <= begin <= end <= os.fstat(file.fileno()).st_size:
        raise ValueError("it is truncated")
    file.seek(begin)
    return file.read(end - begin)


def _peer_of(tensor_name: str) -> str:
    return tensor_name.split("/")[0]


def _digest(entry: Mapping[str, object], tensors: Mapping[str, Tensor], units: str | None) -> str:
    """Return the digest of a peer's entry, its tensors, and the units of its masks.

    Of a tensor it covers name, type, shape and bytes.
    """
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
        " fix the cause and start again."
    )


def _step(
    peer: str,
    entry: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layout: ChannelLayout | None,
) -> StepResult:
    size = int(entry["size"])
    model = _model(tensors, peer, size, layout)
    next_bits = tensors.get(f"{peer}/next_mask")
    next_mask = model.mask if next_bits is None else _mask(peer, next_bits, size, layout)
    state = PeerState(
        model,
        next_mask,
        _without_prefix(f"{peer}/buffers/", tensors),
        _without_prefix(f"{peer}/memory/", tensors),
        _moments(tensors, peer, size, layout),
        _optional_model(tensors, f"{peer}/upload", size, layout),
        _optional_model(tensors, f"{peer}/private", size, layout),
    )
    messages = tuple(MessageCost(*message) for message in entry["messages"])
    return StepResult(Report(**entry["report"]), messages, state=state)


def _mask(peer: str, bits: Tensor, size: int, layout: ChannelLayout | None) -> Mask:
    """Return a mask of these bits: of units, where there is a layout of units."""
    flags = layout.units if layout else size
    if bits.numel() != math.ceil(flags / 8):
        raise ValueError(f"peer {peer}'s mask and values do not fit")
    return ChannelMask(bits, size, layout) if layout else WeightMask(bits, size)


def _model(
    tensors: Mapping[str, Tensor], whose: str, size: int, layout: ChannelLayout | None
) -> PackedModel:
    values = tensors[f"{whose}/values"]
    mask = _mask(whose, tensors[f"{whose}/mask"], size, layout)
    if mask.kept != values.numel() or values.dtype != torch.float32:
        raise ValueError(f"peer {whose}'s mask and values do not fit")
    return PackedModel(values, mask, _without_prefix(f"{whose}/tensors/", tensors))


def _optional_model(
    tensors: Mapping[str, Tensor], whose: str, size: int, layout: ChannelLayout | None
) -> PackedModel | None:
    if f"{whose}/values" not in tensors:
        return None
    return _model(tensors, whose, size, layout)


def _moments(
    tensors: Mapping[str, Tensor], peer: str, size: int, layout: ChannelLayout | None
) -> dict[str, Moments]:
    """Return the moments of each of a peer's models."""
    names = _without_prefix(f"{peer}/moments/", tensors)
    models = {name.split("/")[0] for name in names}
    moments = {}
    for model in sorted(models):
        bits = tensors[f"{peer}/moments/{model}/mask"]
        of_weights = bits.numel() == math.ceil(size / 8)  # as those of a dense global model
        mask = _mask(peer, bits, size, None if of_weights else layout)
        values = _without_prefix(f"{peer}/moments/{model}/values/", tensors)
        if any(value.dim() and value.numel() != mask.kept for value in values.values()):
            raise ValueError(f"peer {peer}'s moments and their mask do not fit")
        moments[model] = Moments(mask, values)
    return moments


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the remainder of their names."""
    selected = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            selected[name.removeprefix(prefix)] = tensor
    return selected
