"""The decoder takes arbitrary bytes: every bad message is one named refusal, and never anything
else."""

import tracemalloc
import zlib
from collections.abc import Callable
from itertools import product

import fuzz
import hypothesis
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dispfl.channels.find_units import find_units
from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel, WeightMask
from dispfl.core.tensors import TensorSpec
from dispfl.errors import MessageError
from dispfl.wire.codec import ANSWER, HEADER, MAGIC, MODEL, REQUEST, VERSION, Codec, Wire
from dispfl.wire.refusals import Refusal

MUTATIONS = 150
"""How many mutated messages each kind of value and coding gets from one seed; `make fuzz` takes
more seeds."""
LAYOUT = Layout.from_shapes({"first": (9, 5), "bias": (9,), "second": (3, 9)})
KEPT = torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(1)) < 0.5
KEPT[45:54] = True
ASKED = torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(2)) < 0.5
ASKED[45:54] = True
SENT = PackedModel.pack(torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(3)), KEPT)
REQUESTED = WeightMask.pack(ASKED)
UNITS = find_units(
    nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 6), nn.Linear(6, 3)), torch.zeros(2, 5)
)
SENT_UNITS = UNITS.mask(np.arange(UNITS.units) % 2 == 0)
REQUESTED_UNITS = UNITS.mask(np.arange(UNITS.units) % 3 < 2)
BESIDE = Layout.from_shapes({"first": (9, 5), "bias": (9,), "private": (3, 9)})
"""Whose last layer is private, and whose models have tensors beside them."""
SHARED = WeightMask.pack(torch.arange(LAYOUT.size) < 54)
TENSORS = {"push_sum": TensorSpec(), "scores": TensorSpec((2, 3), "int16")}
SENT_BESIDE = SENT.restrict(SHARED).with_tensors(
    push_sum=0.5, scores=torch.arange(-3, 3, dtype=torch.int16).view(2, 3)
)
EXCHANGED: dict[str, tuple[Layout, PackedModel, Mask]] = {
    "weights": (LAYOUT, SENT, REQUESTED),
    "tensors": (BESIDE, SENT_BESIDE, REQUESTED & SHARED),
    "channels": (
        UNITS,
        PackedModel(torch.linspace(-1, 1, SENT_UNITS.kept), SENT_UNITS),
        REQUESTED_UNITS,
    ),
}
"""With masks of single weights, with tensors beside them, and with masks of channels: the layout, a
model that is sent, and a mask that is requested."""
CODINGS = ("plain", "zstd")
FORMATS = [
    *product(("float32", "float16", "bfloat16", "int8"), CODINGS, ("weights", "channels")),
    *product(("float32", "int8"), CODINGS, ("tensors",)),
]


def codec(values: str = "float32", coding: str = "plain", structure: str = "weights") -> Codec:
    layout = EXCHANGED[structure][0]
    dense = [name == "bias" for name in layout.names]
    wire = Wire(values=values, coding=coding)  # type: ignore[arg-type]
    private = [name == "private" for name in layout.names]
    return Codec(layout, dense, wire, private, TENSORS if structure == "tensors" else {})


def exchanged(talk: Codec) -> tuple[PackedModel, Mask]:
    return next(
        (model, mask) for layout, model, mask in EXCHANGED.values() if layout is talk.layout
    )


def frames(talk: Codec) -> dict[int, bytes]:
    model, mask = exchanged(talk)
    return {
        MODEL: talk.encode_model(model, rng=torch.Generator()),
        REQUEST: talk.encode_request(mask),
        ANSWER: talk.encode_answer(model, mask, rng=torch.Generator()),
    }


def decode(talk: Codec, kind: int, frame: bytes) -> PackedModel | Mask:
    if kind == MODEL:
        return talk.decode_model(frame)
    return (
        talk.decode_request(frame)
        if kind == REQUEST
        else talk.decode_answer(frame, exchanged(talk)[1])
    )


def outcome(talk: Codec, kind: int, frame: bytes) -> PackedModel | Mask | Refusal:
    """What was read, or the refusal; any other exception is a bug."""
    try:
        return decode(talk, kind, frame)
    except MessageError as refused:
        return Refusal(refused.refusal)


def sealed(frame: bytes) -> bytes:
    """With the right checksum, as a malicious peer would send it."""
    checksum = zlib.crc32(frame[12:], zlib.crc32(frame[:8]))
    return frame[:8] + checksum.to_bytes(4, "little") + frame[12:]


def refusal(frame: bytes, talk: Codec | None = None, kind: int = MODEL) -> str:
    with pytest.raises(MessageError) as problem:
        decode(talk or codec(), kind, frame)
    sentence = str(problem.value)
    assert sentence.endswith(".")
    assert len(sentence) < 200
    return problem.value.refusal


GOOD = frames(codec())[MODEL]
MASK_BYTES = 9
VALUES_BEGIN = HEADER.size + MASK_BYTES


def changed(at: int, *new: int) -> bytes:
    return sealed(GOOD[:at] + bytes(new) + GOOD[at + len(new) :])


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", Refusal.TOO_SHORT),
        (GOOD[:27], Refusal.TOO_SHORT),
        (sealed(b"HTTP" + GOOD[4:]), Refusal.NOT_OURS),
        (changed(4, VERSION + 1), Refusal.VERSION),
        (changed(5, REQUEST), Refusal.KIND),
        (changed(5, 77), Refusal.KIND),
        (changed(6, 2), Refusal.FORMAT),
        (changed(7, 1), Refusal.FORMAT),
        (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), Refusal.CHECKSUM),
        (sealed(GOOD[:-1]), Refusal.LENGTH),
        (sealed(GOOD + b"\0"), Refusal.LENGTH),
        (changed(12, MASK_BYTES - 1), Refusal.LENGTH),
        (changed(12, *[255] * 8), Refusal.LENGTH),
        (changed(20, GOOD[20] + 1), Refusal.COUNT),
        (changed(20, *[255] * 8), Refusal.COUNT),
        (changed(HEADER.size, GOOD[HEADER.size] ^ 1), Refusal.COUNT),
        (changed(VALUES_BEGIN, *np.array([np.nan], "<f4").tobytes()), Refusal.NOT_FINITE),
        (changed(VALUES_BEGIN, *np.array([-np.inf], "<f4").tobytes()), Refusal.NOT_FINITE),
    ],
)
def test_every_kind_of_damage_has_its_own_refusal(frame: bytes, reason: Refusal) -> None:
    assert refusal(frame) == reason


def test_bits_after_a_masks_end_must_be_zero() -> None:
    layout = Layout.from_shapes({"only": (3,)})
    talk = Codec(layout, [False], Wire())
    frame = talk.encode_request(WeightMask.pack(torch.tensor([True, False, True])))
    assert frame[-1] == 0b101
    assert refusal(sealed(frame[:-1] + bytes([0b1101])), talk, REQUEST) == Refusal.PADDING


def test_a_units_flag_that_does_not_fit_the_announced_weights_is_refused() -> None:
    """Units 0 and 1 of 15 are the first bits: the sender has unit 0 and not unit 1, and a request
    has both."""
    talk = codec(structure="channels")
    good = frames(talk)
    for kind in (MODEL, REQUEST):
        begin = HEADER.size
        other = good[kind][:begin] + bytes([good[kind][begin] ^ 2]) + good[kind][begin + 1 :]
        assert refusal(sealed(other), talk, kind) == Refusal.COUNT
        padded = (
            good[kind][: begin + 1] + bytes([good[kind][begin + 1] | 128]) + good[kind][begin + 2 :]
        )
        assert refusal(sealed(padded), talk, kind) == Refusal.PADDING


def test_a_scale_that_is_not_finite_or_makes_a_weight_infinite_is_refused() -> None:
    talk = codec("int8")
    good = frames(talk)[MODEL]
    for scale in (np.nan, np.inf, 3e38):
        bad = good[:VALUES_BEGIN] + np.array([scale], "<f4").tobytes() + good[VALUES_BEGIN + 4 :]
        assert refusal(sealed(bad), talk) == Refusal.NOT_FINITE


@pytest.mark.parametrize("coding", ["plain", "zstd"])
def test_a_malformed_tensor_is_refused_by_name(coding: str) -> None:
    """The last 16 bytes of a plain message are push_sum, a float32, and scores, six int16."""
    talk = codec("float32", coding, "tensors")
    good = frames(talk)[MODEL]
    assert outcome(talk, MODEL, good).tensors["scores"].tolist() == [[-3, -2, -1], [0, 1, 2]]  # type: ignore[union-attr]
    with pytest.raises(MessageError, match=r"^The tensor scores is malformed: ") as problem:
        talk.decode_model(sealed(good[:-1]))
    assert problem.value.refusal == Refusal.TENSOR
    with pytest.raises(MessageError, match=r"^2 bytes follow the end") as problem:
        talk.decode_model(sealed(good + b"12"))
    assert problem.value.refusal == Refusal.LENGTH
    if coding == "plain":
        infinite = good[:-16] + np.array([np.inf], "<f4").tobytes() + good[-12:]
        with pytest.raises(MessageError, match=r"^The tensor push_sum has a value that") as problem:
            talk.decode_model(sealed(infinite))
        assert problem.value.refusal == Refusal.TENSOR
        assert refusal(sealed(good[:-16]), talk) == Refusal.TENSOR


def test_a_message_without_tensors_and_one_with_them_do_not_fit() -> None:
    with_tensors = frames(codec("float32", "plain", "tensors"))[MODEL]
    private = [False, False, True]
    without = Codec(BESIDE, [False, True, False], Wire(), private)
    assert refusal(with_tensors, without) == Refusal.LENGTH
    message = without.encode_model(SENT_BESIDE, rng=torch.Generator())
    assert refusal(message, codec("float32", "plain", "tensors")) == Refusal.TENSOR


def bomb(inside: bytes, claimed: int) -> bytes:
    """A request whose mask is a compressed block."""
    block = zstandard.ZstdCompressor().compress(inside)
    header = HEADER.pack(MAGIC, VERSION, REQUEST, 0, 1, 0, len(block), claimed)
    return sealed(header + block)


def test_a_compressed_block_that_expands_beyond_the_layout_is_refused_without_the_memory() -> None:
    layout = Layout.from_shapes({"only": (800_000,)})
    talk = Codec(layout, [False], Wire(coding="zstd"))
    frame = bomb(bytes(100_000_000), 0)
    tracemalloc.start()
    try:
        assert refusal(frame, talk, REQUEST) == Refusal.COMPRESSION
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda block: block[:-1],
        lambda block: block + b"\0",
        lambda block: b"\0" * len(block),
        lambda block: zstandard.ZstdCompressor().compress(bytes(9_999)),
        lambda block: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10_000)),
        lambda block: b"",
    ],
)
def test_a_damaged_compressed_block_is_refused(damage: Callable[[bytes], bytes]) -> None:
    layout = Layout.from_shapes({"only": (80_000,)})
    talk = Codec(layout, [False], Wire(coding="zstd"))
    block = damage(zstandard.ZstdCompressor().compress(bytes(10_000)))
    frame = sealed(HEADER.pack(MAGIC, VERSION, REQUEST, 0, 1, 0, len(block), 0) + block)
    assert refusal(frame, talk, REQUEST) in (Refusal.COMPRESSION, Refusal.LENGTH)


@pytest.mark.parametrize("kind", [MODEL, REQUEST, ANSWER])
def test_every_prefix_of_a_message_is_refused(kind: int) -> None:
    for form in FORMATS:
        talk = codec(*form)
        frame = frames(talk)[kind]
        for end in range(len(frame)):
            cut = frame[:end]
            assert refusal(sealed(cut) if end >= HEADER.size else cut, talk, kind)


@pytest.mark.parametrize(("values", "coding", "structure"), FORMATS)
def test_every_single_flipped_bit_is_detected(values: str, coding: str, structure: str) -> None:
    talk = codec(values, coding, structure)
    for kind, frame in frames(talk).items():
        for bit in range(8 * len(frame)):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            assert refusal(bytes(flipped), talk, kind)


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """A message after a few changes, sealed again half of the time so that they reach beyond the
    checksum."""
    frame = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        change = draw(st.sampled_from(("set", "cut", "insert", "append", "number")))
        if change == "set" and frame:
            frame[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del frame[at : at + draw(st.integers(1, 16))]
        elif change == "insert":
            frame[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif change == "append":
            frame += draw(st.binary(min_size=1, max_size=16))
        elif len(frame) >= HEADER.size:  # a length or a count of any size
            where = draw(st.sampled_from((12, 20)))
            frame[where : where + 8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    return sealed(bytes(frame)) if len(frame) >= 12 and draw(st.booleans()) else bytes(frame)


@pytest.mark.parametrize(("values", "coding", "structure"), FORMATS)
def test_mutated_messages_are_either_refused_or_decoded(
    values: str, coding: str, structure: str
) -> None:
    talk = codec(values, coding, structure)
    good = frames(talk)

    @settings(
        max_examples=MUTATIONS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(sorted(good)).flatmap(
            lambda kind: st.tuples(st.just(kind), mutated(good[kind]))
        )
    )
    def try_it(kind_and_frame: tuple[int, bytes]) -> None:
        kind, frame = kind_and_frame
        read = outcome(talk, kind, frame)
        if isinstance(read, WeightMask):
            assert read.size == talk.layout.size
        elif isinstance(read, PackedModel):
            assert read.mask.size == talk.layout.size
            assert read.mask.kept == read.values.numel()
            assert torch.isfinite(read.values).all()
            assert read.tensors.keys() == talk.tensors.keys()
            for name, spec in talk.tensors.items():
                assert spec.difference(read.tensors[name]) is None
            if structure == "tensors":
                assert not (read.mask & ~SHARED).kept

    for number in fuzz.seeds(1, share=1 / len(FORMATS)):
        hypothesis.seed(number)(try_it)()


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=400), st.sampled_from([MODEL, REQUEST, ANSWER]), st.sampled_from(FORMATS))
def test_arbitrary_bytes_are_refused(noise: bytes, kind: int, form: tuple[str, str, str]) -> None:
    talk = codec(*form)
    assert refusal(noise, talk, kind)
    header = frames(talk)[kind][: HEADER.size]
    outcome(talk, kind, sealed(header + noise))
