"""A part of a checkpoint: some peers' states as a safetensors file, with their reports beside.

The header has the format's version, and of each peer its report and a digest of its state. A part
is written without a copy of its tensors, and read peer by peer.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask, channel_layout
from dispfl.core.chunks import allocate
from dispfl.core.optimizers import Moments
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.errors import DamagedError, RunError
from dispfl.files import open_regular, write_atomically
from dispfl.methods.base import PeerState
from dispfl.round.context import StepResult
from dispfl.round.ledger import MessageCost

VERSION = 2
"""The version of the format, raised with every change that makes older checkpoints unreadable."""

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The names of types in safetensors files."""
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def part_bytes(steps: Mapping[str, StepResult]) -> int:
    """Return the size of a part with these steps."""
    return sum(len(piece) for piece in _pieces(steps))


def write_part(path: Path, steps: Mapping[str, StepResult]) -> None:
    """Write a part with these steps."""
    write_atomically(path, _pieces(steps))


def _pieces(steps: Mapping[str, StepResult]) -> list[bytes | memoryview]:
    """Return the content of a part in pieces: its header, and the memory of each tensor.

    `safetensors.torch.save` would copy all tensors, twice.
    """
    tensors: dict[str, Tensor] = {}
    entries = {}
    masks = [step.next_state.next_mask for step in steps.values()]
    units = next((mask.layout_spec for mask in masks if mask.layout_spec), None)
    for peer, step in steps.items():
        peer_tensors = _tensors(peer, step.next_state)
        entry = {
            "size": step.next_state.model.mask.size,
            "report": asdict(step.report),
            "messages": step.messages,
        }
        entries[peer] = entry | {"digest": digest_of(entry, peer_tensors, units)}
        tensors |= peer_tensors
    metadata = {"version": str(VERSION), "peers": json.dumps(entries)}
    if units is not None:
        metadata["units"] = units

    # Wide types first, so that every tensor is aligned.
    index: dict[str, Any] = {"__metadata__": metadata}
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        begin = end
        end += tensor.nbytes
        index[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        if tensor.nbytes:
            pieces.append(_memory(tensor))
    header = json.dumps(index).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, *pieces]


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, which is not copied if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensors(peer: str, state: PeerState) -> dict[str, Tensor]:
    """Return the tensors of a state by their names in the file."""
    tensors = {"values": state.model.values, "mask": state.model.mask.bits}
    if state.next_mask is not state.model.mask:
        tensors["next_mask"] = state.next_mask.bits
    for kept_as, packed in (("upload", state.upload), ("private", state.private)):
        if packed is not None:
            tensors[f"{kept_as}/values"] = packed.values
            tensors[f"{kept_as}/mask"] = packed.mask.bits
            tensors |= _prefixed(f"{kept_as}/tensors", packed.tensors)
    for number, sent in state.sent.items():
        tensors[f"sent/{number}/values"] = sent.values
        tensors[f"sent/{number}/mask"] = sent.mask.bits
        tensors |= _prefixed(f"sent/{number}/tensors", sent.tensors)
    for sender, late in state.late.items():
        tensors[f"late/{sender}/values"] = late.values
        tensors[f"late/{sender}/mask"] = late.mask.bits
        tensors |= _prefixed(f"late/{sender}/tensors", late.tensors)
    tensors |= _prefixed("tensors", state.model.tensors)
    tensors |= _prefixed("buffers", state.buffers)
    tensors |= _prefixed("memory", state.memory)
    for model, moments in state.moments.items():
        tensors[f"moments/{model}/mask"] = moments.mask.bits
        tensors |= _prefixed(f"moments/{model}/values", moments.values)
    return _prefixed(peer, tensors)


def state_bytes(state: PeerState) -> int:
    """Return the size of a state's tensors."""
    return sum(tensor.nbytes for tensor in _tensors("", state).values())


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def read_part(part: Path, peers: Collection[str] | None = None) -> dict[str, StepResult]:
    """Return the steps of all or some peers in a part, if they are what was written."""
    opened = open_part(part)
    requested = [peer for peer in opened.entries if peers is None or peer in peers]
    return {peer: opened.checked_step(peer) for peer in requested}


def open_part(part: Path) -> "OpenPart":
    """Open a part, if its header is what was written."""
    with _damage_named(part):
        return OpenPart(part)


@contextlib.contextmanager
def _damage_named(part: Path) -> Iterator[None]:
    """Turn what a damaged part leads to into a sentence; one that cannot be read is not damaged."""
    try:
        yield
    except FileNotFoundError as problem:
        raise DamagedError(f"The checkpoint {part} is damaged (it is missing).") from problem
    except OSError as problem:
        raise unreadable(part, problem) from problem
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
        RuntimeError,
    ) as problem:
        raise DamagedError(f"The checkpoint {part} is damaged ({problem}).") from problem


class OpenPart:
    """A part that stays open, also when its file is deleted: states are read one by one.

    It is read, not mapped into memory: there, a disk error would end the process with a signal, and
    all that was ever read would count as memory of the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        self._start = 8 + int.from_bytes(self._read_range(0, 8), "little")
        index = json.loads(self._read_range(8, self._start))
        self.metadata = index.pop("__metadata__")
        check_version(path, int(self.metadata.get("version", 1)))
        self.entries: dict[str, Any] = json.loads(self.metadata.pop("peers"))
        """By peer: the size of its model, its report and messages, and the digest of all."""
        self._index: dict[str, dict[str, Any]] = {peer: {} for peer in self.entries}
        named = set()
        for name, where in index.items():
            named.add(_peer_of(name))
            self._index.setdefault(_peer_of(name), {})[name] = where
        if self.entries.keys() != named:
            raise ValueError("its header names other peers than its tensors")

    def tensors(self, peer: str) -> dict[str, Tensor]:
        """Return the tensors of a peer by their names in the file."""
        return {name: self._tensor(where) for name, where in self._index[peer].items()}

    def state(self, peer: str) -> PeerState:
        """Return the state of a peer that this process has written or checked."""
        try:
            tensors = self.tensors(peer)
        except OSError as problem:
            raise unreadable(self.path, problem) from problem
        return self._step(peer, tensors).next_state

    def checked_step(self, peer: str) -> StepResult:
        """Return the step of a peer, if it is what was written."""
        units = self.metadata.get("units")
        with _damage_named(self.path):
            tensors = self.tensors(peer)
            entry = dict(self.entries[peer])
            if entry.pop("digest") != digest_of(entry, tensors, units):
                raise ValueError(f"the digest of peer {peer} does not match")
        try:
            return self._step(peer, tensors)
        except (KeyError, TypeError, ValueError) as problem:
            raise RunError(
                f"The checkpoint {self.path} is intact, but another dispfl wrote it ({problem})."
                " Resume with that one, or choose another folder to start again."
            ) from problem

    def checked_state(self, peer: str) -> PeerState:
        """Return the state of a peer, if it is what was written."""
        return self.checked_step(peer).next_state

    def _step(self, peer: str, tensors: Mapping[str, Tensor]) -> StepResult:
        return _step(peer, self.entries[peer], tensors, self._layout)

    def __del__(self) -> None:
        """Close the file when no state is read from it any more."""
        if hasattr(self, "_file"):
            self._file.close()

    @cached_property
    def _layout(self) -> ChannelLayout | None:
        units = self.metadata.get("units")
        return None if units is None else channel_layout(units)

    def _tensor(self, where: Mapping[str, Any]) -> Tensor:
        begin, end = where["data_offsets"]
        dtype = TYPES[where["dtype"]]
        if end == begin:  # a peer of FedAvg keeps no weights between rounds
            return torch.empty(where["shape"], dtype=dtype)
        memory = allocate(end - begin, np.dtype(np.uint8))
        self._read_into(memory, self._start + begin)
        return torch.from_numpy(memory).view(dtype).reshape(where["shape"])

    def _read_range(self, begin: int, end: int) -> bytes:
        self._check_range(begin, end)
        return os.pread(self._file.fileno(), end - begin, begin)

    def _read_into(self, memory: NDArray[np.uint8], begin: int) -> None:
        """Fill memory from this position of the file; threads may do so at the same time."""
        self._check_range(begin, begin + len(memory))
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:].data], begin + done)
            if not count:
                raise ValueError("it is truncated")
            done += count

    def _check_range(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= os.fstat(self._file.fileno()).st_size:
            raise ValueError("it is truncated")


def _peer_of(tensor_name: str) -> str:
    return tensor_name.split("/")[0]


def digest_of(entry: Mapping[str, object], tensors: Mapping[str, Tensor], units: str | None) -> str:
    """Return the digest of a peer's entry, its tensors, and the units of its masks.

    Of a tensor it covers name, type, shape and bytes.
    """
    digest = hashlib.blake2b(json.dumps([entry, units]).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(_memory(tensor))
    return digest.hexdigest()


def check_version(file: Path, version: int) -> None:
    if version == VERSION:
        return
    fix = "Resume with the dispfl that wrote it" if version < VERSION else "Upgrade dispfl"
    raise RunError(
        f"The checkpoint {file} has version {version} of the format; this dispfl reads version"
        f" {VERSION}. {fix}, or choose another folder to start again. Nothing was changed."
    )


def unreadable(path: Path, problem: OSError) -> RunError:
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
        _sent_models(tensors, f"{peer}/sent", size, layout),
        _named_models(tensors, f"{peer}/late", size, layout),
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


def _sent_models(
    tensors: Mapping[str, Tensor], whose: str, size: int, layout: ChannelLayout | None
) -> dict[int, PackedModel]:
    """Return the models that others may still average, by number."""
    named = _named_models(tensors, whose, size, layout)
    return {number: named[str(number)] for number in sorted(map(int, named))}


def _named_models(
    tensors: Mapping[str, Tensor], whose: str, size: int, layout: ChannelLayout | None
) -> dict[str, PackedModel]:
    """Return the models of a state by their names."""
    names = {name.split("/")[0] for name in _without_prefix(f"{whose}/", tensors)}
    models = {}
    for name in sorted(names):
        models[name] = _model(tensors, f"{whose}/{name}", size, layout)
    return models


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
