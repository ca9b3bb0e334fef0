"""Averages, scores and evolution of models under masks of units, beside those of single weights."""

import numpy as np
import pytest
import torch
from tests.channels.test_units import IMAGES, NETWORKS, half_of, units_of
from torch import nn

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask
from dispfl.channels.kept_units import replace_units, unit_strengths
from dispfl.channels.units import UnitGroup
from dispfl.core.averaging import gossip_average
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.wire.codec import Codec, Wire

TINY = ChannelLayout(
    ("hidden.weight", "hidden.bias", "linear.weight", "linear.bias"),
    ((3, 2), (3,), (2, 3), (2,)),
    (UnitGroup("hidden", 3, 1),),
    ((0, 1, 2),),
    ((0, None), (0,), (None, 0), (None,)),
    (0, 0, 0, 0),
)
"""Two inputs, three hidden units, two outputs."""


def tiny(units: list[bool], *values: float) -> PackedModel:
    return PackedModel(torch.tensor(values, dtype=torch.float32), TINY.mask(np.array(units)))


def random_model(name: str, seed: int) -> PackedModel:
    mask = half_of(units_of(name), seed)
    return PackedModel(torch.randn(mask.kept, generator=torch.Generator().manual_seed(seed)), mask)


def test_an_average_by_hand() -> None:
    """We hold units 0 and 2. Of unit 0, both hold all; unit 2 is ours alone; the output's bias has
    two holders."""
    #            incoming of each unit    biases    outgoing, by output   bias
    ours = tiny([True, False, True], 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    theirs = tiny([True, True, False], 3, 4, 9, 9, 7, 9, 9, 9, 11, 9, 13, 14)
    mixed = ours.mask.average([ours, theirs], lambda: torch.zeros(TINY.size))
    assert mixed.tolist() == [2, 3, 3, 4, 6, 6, 8, 8, 10, 10, 12, 13]


def test_a_unit_that_nobody_holds_starts_with_the_first_weights_and_without_outputs() -> None:
    ours = tiny([True, False, False], 1, 2, 5, 7, 9, 11, 12)
    first = torch.arange(1.0, TINY.size + 1) / 100
    mixed = TINY.mask(np.array([True, False, True])).average([ours], lambda: first)
    #                                    new: incoming, bias      new: outgoing
    assert mixed.tolist() == pytest.approx([1, 2, 0.05, 0.06, 5, 0.09, 7, 0, 9, 0, 11, 12])


def test_without_any_model_a_peer_starts_from_the_first_weights() -> None:
    nothing = PackedModel(torch.zeros(0), WeightMask.pack(torch.zeros(TINY.size, dtype=torch.bool)))
    mask, first = (
        TINY.mask(np.array([False, True, False])),
        torch.arange(1.0, TINY.size + 1),
    )
    assert mask.average([nothing], lambda: first).tolist() == [3, 4, 8, 11, 14, 16, 17]


@pytest.mark.parametrize(
    "name", ["cnn", "mlp", "convolutions", "normalized", "attention", "resnet18"]
)
def test_the_average_is_that_of_single_weights_to_the_bit(name: str) -> None:
    models = [random_model(name, seed) for seed in range(5)]
    mask = half_of(units_of(name), 9)
    everybody = np.logical_or.reduce([model.mask.units for model in models])  # type: ignore[attr-defined]
    mask = mask.layout.mask(mask.units & everybody)
    weights, masks = zip(*(model.unpack() for model in models), strict=True)
    expected = gossip_average(weights, masks, mask.unpack())
    found = mask.average(models, lambda: torch.full((mask.layout.size,), torch.nan))
    assert found.equal(expected[mask.unpack()])


def test_a_new_unit_changes_nothing_at_first_and_learns() -> None:
    build, _ = NETWORKS["convolutions"]
    layout, first = units_of("convolutions"), FlatModule(build()).read()
    before = random_model("convolutions", 0)
    assert isinstance(before.mask, ChannelMask)
    unit = (
        int(np.flatnonzero(~before.mask.units[layout.group_slices[1]])[0])
        + layout.group_slices[1].start
    )
    flags = before.mask.units.copy()
    flags[unit] = True
    mask = layout.mask(flags)
    mixed = mask.average([before], lambda: first)
    outputs = []
    for values, under in ((before.values, before.mask), (mixed, mask)):
        small = under.small_network(build()).eval()
        for name in layout.buffer_axes:
            small.get_buffer(name).fill_(1.0 if "var" in name else 0.0)
        nn.utils.vector_to_parameters(values, small.parameters())
        outputs.append(small(IMAGES))
    torch.testing.assert_close(outputs[1], outputs[0])
    outputs[1].square().sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in small.parameters() if p.grad is not None])
    new = mask.unpack() & ~torch.from_numpy(before.mask.flags())
    assert gradient[new[mask.unpack()]].abs().sum() > 0


@pytest.mark.parametrize("values", ["float32", "float16", "int8"])
@pytest.mark.parametrize("coding", ["plain", "zstd"])
def test_messages_have_a_bit_for_each_unit_and_the_common_block(values: str, coding: str) -> None:
    layout = units_of("cnn")
    codec = Codec(layout, [False] * len(layout.names), Wire(values=values, coding=coding))  # type: ignore[arg-type]
    model, request = random_model("cnn", 0), half_of(layout, 1)
    rng = torch.Generator()
    whole = codec.decode_model(codec.encode_model(model, rng=rng))
    assert isinstance(whole.mask, ChannelMask)
    assert whole.mask.units.tolist() == model.mask.units.tolist()  # type: ignore[attr-defined]
    asked = codec.decode_request(codec.encode_request(request))
    assert isinstance(asked, ChannelMask)
    assert asked.units.tolist() == request.units.tolist()
    frame = codec.encode_answer(model, request, rng=rng)
    answer = codec.decode_answer(frame, request)
    both = model.mask.unpack() & request.unpack()
    assert answer.mask.unpack().equal(both)
    expected = model.unpack()[0][both]
    torch.testing.assert_close(
        answer.values, expected, rtol=0, atol={"float32": 0, "float16": 1e-2, "int8": 0.1}[values]
    )
    if coding == "plain":
        assert len(frame) == codec.answer_size(model, request)
        assert len(codec.encode_request(request)) == codec.request_size() == 28 + layout.units // 8
        assert len(codec.encode_model(model, rng=rng)) == codec.model_size(model)


def test_strengths_by_hand() -> None:
    """Unit 0: incoming 1 and 2, outgoing 7 and 9; unit 2: incoming 3 and 4, outgoing 8 and 10; unit
    1 is not held."""
    model = tiny([True, False, True], 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert isinstance(model.mask, ChannelMask)
    expected = [(1 + 4) / 2 * (49 + 81) / 2, 0, (9 + 16) / 2 * (64 + 100) / 2]
    assert unit_strengths(model.values, model.mask).tolist() == pytest.approx(expected)


def test_the_weakest_unit_is_replaced_by_the_one_with_the_largest_growth_score() -> None:
    layout = units_of("normalized")  # 32 and 48 units
    mask = half_of(layout)
    rng = torch.Generator().manual_seed(0)
    strength, growth = (
        np.random.default_rng(0).random(layout.units),
        np.random.default_rng(1).random(layout.units),
    )
    found = replace_units(mask, strength, growth, 0.25, rng=rng)
    for group, where in zip(layout.groups, layout.group_slices, strict=True):
        before, after = mask.units[where], found.units[where]
        pruned, grown = np.flatnonzero(before & ~after), np.flatnonzero(after & ~before)
        assert len(pruned) == len(grown) == group.units // 2 // 4
        assert strength[where][pruned].max() < strength[where][before & after].min()
        assert growth[where][grown].min() > growth[where][~before & ~after].max()


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet18"])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.5, 1.0])
def test_counts_of_every_norm_group_never_change(name: str, rate: float) -> None:
    layout = units_of(name)
    mask, rng = half_of(layout), torch.Generator().manual_seed(1)
    changed = 0
    for _ in range(40):
        random = np.random.default_rng(changed).random((2, layout.units))
        found = replace_units(mask, random[0], random[1], rate, rng=rng)
        changed += int((found.units & ~mask.units).sum())
        for group, where in zip(layout.groups, layout.group_slices, strict=True):
            per_stratum = [
                flags[where].reshape(group.strata, -1).sum(1).tolist()
                for flags in (mask.units, found.units)
            ]
            assert per_stratum[0] == per_stratum[1]
        mask = found
    assert changed == pytest.approx(
        40 * rate * mask.units.sum(), rel=0.2
    )  # rounded at random, right on average


def test_a_dense_model_never_changes_its_mask() -> None:
    layout = units_of("cnn")
    mask = layout.mask(np.ones(layout.units, bool))
    scores = np.ones(layout.units)
    assert replace_units(mask, scores, scores, 0.5, rng=torch.Generator()).units.all()
