"""Where each parameter stands in the flat vector."""

import torch
from messages import refused
from torch import nn

from dispfl.core.layout import Layout
from dispfl.errors import ConfigError


def test_a_linear_layer_of_2_by_3_is_at_0_to_6_and_its_bias_at_6_to_8() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    assert layout.names == ("weight", "bias")
    assert layout.shapes == ((2, 3), (2,))
    assert layout.sizes == (6, 2)
    assert layout.slices == (slice(0, 6), slice(6, 8))
    assert layout.size == 8


def test_views_share_memory_with_the_flat_vector_and_read_it_row_by_row() -> None:
    flat = torch.arange(8.0)
    weight, bias = Layout.from_shapes({"weight": (2, 3), "bias": (2,)}).views(flat)
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bias.tolist() == [6, 7]
    weight[1, 0] = 30
    assert flat[3] == 30


def test_a_scalar_parameter_takes_one_element() -> None:
    layout = Layout.from_shapes({"scale": (), "bias": (2,)})
    assert layout.slices == (slice(0, 1), slice(1, 3))
    assert layout.views(torch.arange(3.0))[0].shape == ()


def test_tied_parameters_appear_once_and_frozen_ones_not_at_all() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    third.requires_grad_(False)
    layout = Layout.of(nn.Sequential(first, second, third))
    assert layout.names == ("0.weight", "0.bias", "1.bias")
    assert layout.size == 4 + 2 + 2


def test_layouts_with_the_same_names_and_shapes_are_equal() -> None:
    assert Layout.of(nn.Linear(3, 2)) == Layout.of(nn.Linear(3, 2))
    assert Layout.of(nn.Linear(3, 2)) != Layout.of(nn.Linear(2, 3))


def test_parameters_are_named_by_globs_or_as_the_head_or_the_normalization_layers() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    layout = Layout.of(network)
    assert layout.matching("head", "only") == [False, False, False, False, True, True]
    assert layout.matching("norm", "only") == [False, False, True, True, False, False]
    assert layout.matching(["0.*", "2.bias"], "only") == [True, True, False, False, False, True]
    flags = layout.flags(layout.matching("head", "only"))
    assert flags.tolist() == [False] * (18 + 2 + 2 + 2) + [True] * (4 + 2)


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_of_the_parameters() -> None:
    layout = Layout.of(nn.Linear(3, 2))
    with refused(ConfigError, key="method.private"):
        layout.matching("classifier", "method.private")
