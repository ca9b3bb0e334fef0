"""The codec: messages between peers as bytes. It is stateless.

Both ends know the layout, so a message has no names, types or shapes: a header, a mask as packed
bits (one for each weight, or for each unit where whole units are left out), and the kept values.
There are two ways to exchange models:

    push    a model: the sender's mask and its values
    pull    a request: the receiver's next mask; an answer: the sender's mask at the requested
            positions, and the values there. Dis-PFL uses nothing else, so the average is the same
            to the bit.

Either way, the tensors that a method sends beside a model follow its values.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import or_
from typing import ClassVar, Literal

import numpy as np
import torch

from dispfl.core.chunks import select, spread
from dispfl.core.layout import Layout
from dispfl.core.packed import Flags, Mask, PackedModel
from dispfl.core.tensors import TensorSpec, total_bytes
from dispfl.errors import ConfigError
from dispfl.settings import Settings
from dispfl.wire.refusals import Refusal, refuse
from dispfl.wire.tensors import restore_tensors, store_tensors
from dispfl.wire.values import (
    CODES,
    ITEMSIZE,
    Bytes,
    from_bytes,
    restore,
    restore_planes,
    scales_size,
    store,
    store_planes,
    to_bytes,
)

MAGIC = b"DPFL"
VERSION = 1
MODEL = 1
REQUEST = 2
ANSWER = 3
KINDS = {MODEL: "a model", REQUEST: "a request", ANSWER: "an answer"}
HEADER = struct.Struct("<4sBBBBIQQ")
"""Magic, version, kind, values, coding, checksum, bytes of the stored mask, and kept weights."""
NO_VALUES = 0
"""In the header of a request, instead of the type of values."""
_CHECKSUM = slice(8, 12)

NOT_DENSE = (
    "A model or a mask omits weights of a layer that its method declares dense: override"
    " `always_dense` (or `kept_counts`) in the method."
)


class Wire(Settings):
    """How models are sent."""

    table: ClassVar[str] = "wire"
    exchange: Literal["pull", "push"] = "pull"
    """Request only weights under our mask, where the method allows it, or send whole models."""
    values: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """The type of weights in messages; float32 is lossless."""
    coding: Literal["plain", "zstd"] = "plain"
    """Send masks and values as they are, or losslessly compressed: about a sixth smaller."""


class Codec:
    """Encodes and decodes models of one layout.

    `dense` says which layers all peers keep whole, `private` which ones are never sent. `tensors`
    are those that the method sends beside each model.
    """

    def __init__(
        self,
        layout: Layout,
        dense: Sequence[bool],
        wire: Wire,
        private: Sequence[bool] = (),
        tensors: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.layout = layout
        self.wire = wire
        self.tensors = tensors or {}
        private = private or [False] * len(layout.names)
        self._sent_layers = [layer for layer, hidden in enumerate(private) if not hidden]
        self._private = list(compress(layout.slices, private))
        """The entries that no message mentions, and no sent model holds."""
        self._sparse = layout.sparse_slices(list(map(or_, dense, private)))
        self._flag_count = _length_of(self._sparse)
        """Flags that a whole mask takes."""
        self._dense_count = layout.entries - self._flag_count - _length_of(self._private)
        """Entries that all peers keep, and no mask mentions."""
        self._compress = wire.coding == "zstd"

    # push

    def encode_model(self, model: PackedModel, *, rng: torch.Generator) -> bytes:
        """Encode a whole model; `rng` is for stochastic rounding."""
        return self._encode(MODEL, self._flags(model.mask), model, rng)

    def decode_model(self, frame: bytes) -> PackedModel:
        """Decode a whole model."""
        flags, payload, count = self._decode(MODEL, frame, self._flag_count)
        return self._model(self._mask(flags), payload, count)

    # pull

    def encode_request(self, mask: Mask) -> bytes:
        """Encode a request for the weights under the receiver's next mask."""
        bits = store(np.packbits(self._flags(mask), bitorder="little"), self._compress)
        return _frame(REQUEST, NO_VALUES, self.wire.coding, mask.kept, bits, [])

    def decode_request(self, frame: bytes) -> Mask:
        """Decode the mask of a request."""
        flags, payload, count = self._decode(REQUEST, frame, self._flag_count)
        mask = self._mask(flags)
        if len(payload):
            refuse(Refusal.LENGTH, f"{len(payload)} bytes follow the end of the request.")
        if mask.kept != count:
            refuse(
                Refusal.COUNT,
                f"The request announces {count} weights, but its mask keeps {mask.kept}.",
            )
        return mask

    def encode_answer(self, model: PackedModel, request: Mask, *, rng: torch.Generator) -> bytes:
        """Encode the part of a model that was requested."""
        flags = select(self._flags(model.mask), self._flags(request))
        answered = model.restrict(request)
        return self._encode(ANSWER, flags, answered, rng)

    def decode_answer(self, frame: bytes, request: Mask) -> PackedModel:
        """Decode the answer to this request."""
        requested = self._flags(request)
        flags, payload, count = self._decode(ANSWER, frame, int(np.count_nonzero(requested)))
        return self._model(self._mask(spread(flags, requested)), payload, count)

    # lengths of plain messages, without encoding them

    def model_size(self, model: PackedModel) -> int:
        """Return the length of `encode_model` with plain coding."""
        self._check_dense(model.mask)
        return self.whole_size(model.mask.kept)

    def whole_size(self, kept: int) -> int:
        """Return the length of `encode_model` with plain coding, of a model with so many values."""
        return self._size(self._flag_count, kept)

    def request_size(self) -> int:
        """Return the length of `encode_request` with plain coding."""
        return HEADER.size + _bytes_for(self._flag_count)

    def answer_size(self, model: PackedModel, request: Mask) -> int:
        """Return the length of `encode_answer` with plain coding."""
        self._check_dense(request)
        flags = request.kept_entries - self._dense_count
        return self._size(flags, model.mask.overlap(request))

    def _check_dense(self, mask: Mask) -> None:
        if mask.kept_entries < self._dense_count:
            raise ConfigError(NOT_DENSE)

    def _size(self, bits: int, count: int) -> int:
        scales = scales_size(self.wire.values, len(self._sent_layers))
        values = count * ITEMSIZE[self.wire.values]
        return HEADER.size + _bytes_for(bits) + scales + values + total_bytes(self.tensors)

    # shared by push and pull

    def _encode(self, kind: int, flags: Flags, model: PackedModel, rng: torch.Generator) -> bytes:
        value_type = self.wire.values
        per_layer = []
        if value_type == "int8":
            per_layer = self._kept_per_layer(model.mask)
        scales, raw = to_bytes(model.values, value_type, per_layer, rng=rng)
        bits = store(np.packbits(flags, bitorder="little"), self._compress)
        parts = [scales, *store_planes(raw, ITEMSIZE[value_type], self._compress)]
        parts += store_tensors(model.tensors, self.tensors, self._compress)
        count = len(model.values)
        return _frame(kind, CODES[value_type], self.wire.coding, count, bits, parts)

    def _decode(self, kind: int, frame: bytes, bits: int) -> tuple[Flags, Bytes, int]:
        """Return a message's mask, the bytes after it, and the number of weights it announces."""
        length, count = self._check_header(kind, frame)
        payload = np.frombuffer(frame, np.uint8)[HEADER.size :]
        if length > len(payload):
            refuse(
                Refusal.LENGTH,
                f"A mask of {length} bytes is announced, but {len(payload)} are left.",
            )
        packed = restore(payload[:length], _bytes_for(bits), self._compress)
        mask = np.unpackbits(packed, bitorder="little").view(np.bool_)
        if mask[bits:].any():
            refuse(Refusal.PADDING, "The unused bits of the mask's last byte are not zero.")
        return mask[:bits], payload[length:], count

    def _check_header(self, kind: int, frame: bytes) -> tuple[int, int]:
        if len(frame) < HEADER.size:
            refuse(
                Refusal.TOO_SHORT,
                f"The message has {len(frame)} bytes; a header alone has {HEADER.size}.",
            )
        header = HEADER.unpack_from(frame)
        magic, version, message_kind, values, coding, checksum, length, count = header
        if magic != MAGIC:
            refuse(
                Refusal.NOT_OURS, f"The message begins with {magic.hex()}, not with {MAGIC.hex()}."
            )
        if version != VERSION:
            refuse(
                Refusal.VERSION,
                f"The message has version {version}; this program uses version {VERSION}.",
            )
        if checksum != _checksum([memoryview(frame)]):
            refuse(Refusal.CHECKSUM, "The message was changed in transit: its checksum is wrong.")
        if message_kind != kind:
            message = KINDS.get(message_kind, f"a message of kind {message_kind}")
            refuse(Refusal.KIND, f"Expected {KINDS[kind]}, got {message}.")
        value_code = NO_VALUES if kind == REQUEST else CODES[self.wire.values]
        expected = (value_code, int(self._compress))
        if (values, coding) != expected:
            refuse(
                Refusal.FORMAT,
                f"The message has values {values} and coding {coding}; expected are {expected}.",
            )
        return length, count

    def _model(self, mask: Mask, payload: Bytes, count: int) -> PackedModel:
        per_layer = self._kept_per_layer(mask)
        if sum(per_layer) != count:
            refuse(
                Refusal.COUNT,
                f"The message announces {count} values, but its mask keeps {sum(per_layer)}.",
            )
        scales = scales_size(self.wire.values, len(per_layer))
        if len(payload) < scales:
            refuse(Refusal.LENGTH, f"The message ends {scales - len(payload)} bytes too early.")
        itemsize = ITEMSIZE[self.wire.values]
        raw, stored = restore_planes(payload[scales:], count, itemsize, self._compress)
        tensors = restore_tensors(stored, self.tensors, self._compress)
        values = from_bytes(payload[:scales], raw, self.wire.values, per_layer)
        return PackedModel(values, mask, tensors)

    def _kept_per_layer(self, mask: Mask) -> list[int]:
        """Return the number of kept weights of each layer that is sent."""
        counts = mask.kept_per_layer(self.layout)
        return [counts[layer] for layer in self._sent_layers]

    def _flags(self, mask: Mask) -> Flags:
        """Return a mask's flags as sent: those of the entries that are not dense for all peers."""
        entries = mask.entries()
        sparse = [entries[where] for where in self._sparse]
        flags = np.concatenate(sparse) if sparse else entries[:0]
        if np.count_nonzero(entries) != np.count_nonzero(flags) + self._dense_count:
            raise ConfigError(NOT_DENSE)
        return flags

    def _mask(self, flags: Flags) -> Mask:
        """Return the mask with these flags: the inverse of `_flags`."""
        entries = np.ones(self.layout.entries, np.bool_)
        begin = 0
        for where in self._sparse:
            end = begin + where.stop - where.start
            entries[where] = flags[begin:end]
            begin = end
        for where in self._private:
            entries[where] = False
        return self.layout.mask(entries)


def _frame(
    kind: int, values: int, coding: str, count: int, bits: Bytes, parts: Sequence[Bytes]
) -> bytes:
    header = bytearray(
        HEADER.pack(MAGIC, VERSION, kind, values, int(coding == "zstd"), 0, len(bits), count)
    )
    pieces = [memoryview(header), bits.data]
    for part in parts:
        pieces.append(part.data)
    header[_CHECKSUM] = _checksum(pieces).to_bytes(4, "little")
    return b"".join(pieces)


def _checksum(pieces: Sequence[memoryview]) -> int:
    """Return the CRC-32 of a message without the four bytes that hold it."""
    first = pieces[0]
    checksum = zlib.crc32(first[_CHECKSUM.stop :], zlib.crc32(first[: _CHECKSUM.start]))
    for piece in pieces[1:]:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _length_of(slices: Sequence[slice]) -> int:
    return sum(where.stop - where.start for where in slices)


def _bytes_for(bits: int) -> int:
    return -(-bits // 8)
