"""Messages: what they look like, what they weigh, and that they arrive."""

import zlib
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refused
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.errors import ConfigError
from dispfl.wire.codec import HEADER, Codec, Wire

Values = Literal["float32", "float16", "bfloat16", "int8"]
Coding = Literal["plain", "zstd"]

LAYOUT = Layout.from_shapes({"first": (4, 3), "bias": (4,), "second": (5, 4)})
"""12, 4 and 20 weights; the bias is dense for everyone, so masks have 32 bits."""
DENSE = [False, True, False]
VALUES: tuple[Values, ...] = ("float32", "float16", "bfloat16", "int8")
CODINGS: tuple[Coding, ...] = ("plain", "zstd")


def codec(**changes: Any) -> Codec:
    return Codec(LAYOUT, DENSE, Wire(**changes))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask(density: float, seed: int, layout: Layout = LAYOUT) -> Tensor:
    flags = torch.rand(layout.size, generator=rng(seed)) < density
    flags[12:16] = True
    return flags


def model(density: float = 0.5, seed: int = 1) -> PackedModel:
    return PackedModel.pack(
        torch.randn(LAYOUT.size, generator=rng(seed + 100)), mask(density, seed)
    )


def same(one: PackedModel, other: PackedModel) -> bool:
    return one.values.equal(other.values) and one.mask.bits.equal(other.mask.bits)


def under(sent: PackedModel, asked: WeightMask) -> PackedModel:
    weights, kept = sent.unpack()
    return PackedModel.pack(weights, kept & asked.unpack())


def test_a_model_is_a_header_a_mask_and_its_values_byte_by_byte() -> None:
    kept = torch.zeros(36, dtype=torch.bool)
    kept[[0, 12, 13, 14, 15, 16, 35]] = (
        True  # one of the first layer, the whole bias, first and last of the second
    )
    frame = codec().encode_model(PackedModel.pack(torch.arange(36.0), kept), rng=rng())
    body = bytes([0b1, 0b1_0000, 0, 0b1000_0000])  # bits 0, 12 and 31: the bias has none
    body += np.array([0, 12, 13, 14, 15, 16, 35], "<f4").tobytes()
    start = b"DPFL" + bytes([1, 1, 1, 0])
    lengths = (4).to_bytes(8, "little") + (7).to_bytes(8, "little")
    checksum = zlib.crc32(start + lengths + body).to_bytes(4, "little")
    assert frame == start + checksum + lengths + body


def test_an_answer_has_mask_bits_only_for_requested_weights() -> None:
    asked = torch.zeros(36, dtype=torch.bool)
    asked[[3, 5, 12, 13, 14, 15, 20]] = True
    kept = torch.zeros(36, dtype=torch.bool)
    kept[[5, 12, 13, 14, 15, 20, 30]] = True
    frame = codec().encode_answer(
        PackedModel.pack(torch.arange(36.0), kept), WeightMask.pack(asked), rng=rng()
    )
    assert (
        frame[HEADER.size :] == bytes([0b110]) + np.array([5, 12, 13, 14, 15, 20], "<f4").tobytes()
    )


@pytest.mark.parametrize("coding", CODINGS)
def test_a_model_in_float32_arrives_unchanged(coding: str) -> None:
    talk, sent = codec(coding=coding), model()
    assert same(talk.decode_model(talk.encode_model(sent, rng=rng())), sent)


@pytest.mark.parametrize("coding", CODINGS)
def test_an_answer_is_the_model_under_both_masks(coding: str) -> None:
    talk, sent, asked = codec(coding=coding), model(0.6, 1), WeightMask.pack(mask(0.4, 2))
    request = talk.decode_request(talk.encode_request(asked))
    assert request.bits.equal(asked.bits)
    answer = talk.decode_answer(talk.encode_answer(sent, request, rng=rng()), asked)
    assert same(answer, under(sent, asked))


@pytest.mark.parametrize(("values", "coding"), list(product(VALUES, CODINGS)))
@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=5),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_any_model_round_trips_and_plain_lengths_are_known_in_advance(
    values: Values, coding: Coding, shapes: list[list[int]], density: float, seed: int
) -> None:
    layout = Layout.from_shapes({str(k): shape for k, shape in enumerate(shapes)})
    draws = torch.rand(2, layout.size, generator=rng(seed))
    kept, asked = draws < density
    dense = [bool(kept[where].all() and asked[where].all()) for where in layout.slices]
    talk = Codec(layout, dense, Wire(values=values, coding=coding))
    sent = PackedModel.pack(torch.randn(layout.size, generator=rng(seed)), kept)
    request = WeightMask.pack(asked)
    whole = talk.encode_model(sent, rng=rng())
    question = talk.encode_request(request)
    answer = talk.encode_answer(sent, request, rng=rng())
    if coding == "plain":
        assert len(whole) == talk.model_size(sent)
        assert len(question) == talk.request_size()
        assert len(answer) == talk.answer_size(sent, request)
    arrived = talk.decode_model(whole)
    assert arrived.mask.bits.equal(sent.mask.bits)
    assert talk.decode_request(question).bits.equal(request.bits)
    assert talk.decode_answer(answer, request).mask.bits.equal(under(sent, request).mask.bits)
    # a float16 has 11 significant bits, a bfloat16 8; int8 has 127 steps up to the layer's largest
    # weight
    relative = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.0}[values]
    absolute = (
        float(sent.values.abs().max()) / 126.9 if values == "int8" and len(sent.values) else 1e-6
    )
    assert torch.allclose(
        arrived.values, sent.values, rtol=relative, atol=absolute if values != "float32" else 0
    )


def test_int8_is_right_on_average_and_its_largest_weight_is_exact() -> None:
    layout = Layout.from_shapes({"only": (20_000,)})
    talk = Codec(layout, [True], Wire(values="int8"))
    weights = torch.full((20_000,), 0.3)
    weights[0] = -127.0  # so that a step is 1, and 0.3 becomes 0 or 1
    arrived = talk.decode_model(
        talk.encode_model(
            PackedModel.pack(weights, torch.ones(20_000, dtype=torch.bool)), rng=rng()
        )
    ).values
    assert arrived[0] == -127
    assert set(arrived[1:].tolist()) == {0.0, 1.0}
    assert float(arrived[1:].mean()) == pytest.approx(
        0.3, abs=0.015
    )  # 20,000 draws: 0.0032 is one standard deviation


def test_the_same_stream_rounds_the_same_way_and_another_does_not() -> None:
    talk, sent = codec(values="int8"), model(1.0)
    assert talk.encode_model(sent, rng=rng(7)) == talk.encode_model(sent, rng=rng(7))
    assert talk.encode_model(sent, rng=rng(7)) != talk.encode_model(sent, rng=rng(8))


@pytest.mark.parametrize(
    ("values", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)]
)
def test_a_weight_that_a_float_type_cannot_hold_becomes_its_largest(
    values: str, largest: float
) -> None:
    talk = codec(values=values)
    weights = torch.full((36,), 3.4e38)
    arrived = talk.decode_model(
        talk.encode_model(PackedModel.pack(weights, mask(1.0, 0)), rng=rng())
    )
    assert set(arrived.values.tolist()) == {largest}


@pytest.mark.parametrize("values", VALUES)
def test_no_weight_arrives_as_minus_zero(values: str) -> None:
    talk = codec(values=values)
    weights = torch.full((36,), -1e-30)
    weights[0] = 1.0
    arrived = talk.decode_model(
        talk.encode_model(PackedModel.pack(weights, mask(1.0, 0)), rng=rng(3))
    ).values
    assert not torch.signbit(arrived[arrived == 0]).any()


@pytest.mark.parametrize("values", VALUES)
def test_a_model_that_keeps_only_the_dense_layers_can_be_sent(values: str) -> None:
    for coding in CODINGS:
        talk = codec(values=values, coding=coding)
        sent = PackedModel.pack(torch.zeros(36), mask(0.0, 0))
        assert talk.decode_model(talk.encode_model(sent, rng=rng())).mask.kept == 4


def test_trained_looking_weights_shrink_by_a_seventh_without_loss() -> None:
    layout = Layout.from_shapes({"only": (50_000,)})
    weights = 0.05 * torch.randn(50_000, generator=rng())
    sent = PackedModel.pack(weights, torch.ones(50_000, dtype=torch.bool))
    plain, coded = (Codec(layout, [True], Wire(coding=coding)) for coding in CODINGS)
    frame = coded.encode_model(sent, rng=rng())
    assert len(frame) < 0.87 * plain.model_size(sent)
    assert same(coded.decode_model(frame), sent)


def test_a_method_that_wrongly_declares_a_layer_dense_is_refused() -> None:
    holes = mask(1.0, 0)
    holes[13] = False
    with refused(ConfigError):
        codec().encode_model(PackedModel.pack(torch.ones(36), holes), rng=rng())
