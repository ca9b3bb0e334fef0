"""FLOPs by hand for single layers, and the paper's figures for ResNet-18."""

import pytest
import torch
from torch import Tensor, nn

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_count
from dispfl.core.sparsity import erk_densities
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.models.networks import ResNet18


def cost_of(module: nn.Module, *shape: int) -> ForwardCost:
    return forward_cost(module, Layout.of(module), torch.zeros(1, *shape))


def test_a_linear_layer_costs_2_a_weight_and_1_a_bias() -> None:
    cost = cost_of(nn.Linear(3, 2), 3)
    assert cost.per_weight == (2, 1)
    assert cost.dense() == 2 * 6 + 2


def test_a_linear_layer_over_a_sequence_of_five_costs_five_times_as_much() -> None:
    assert cost_of(nn.Linear(3, 2), 5, 3).per_weight == (10, 5)


def test_a_convolution_costs_2_a_weight_and_1_a_bias_at_each_of_16_places() -> None:
    assert cost_of(nn.Conv2d(1, 2, 3, padding=1), 1, 4, 4).per_weight == (32, 16)


def test_a_stride_of_2_leaves_4_places() -> None:
    assert cost_of(nn.Conv2d(1, 2, 3, stride=2, padding=1), 1, 4, 4).per_weight == (8, 4)


def test_in_a_grouped_convolution_each_weight_is_used_at_each_place() -> None:
    cost = cost_of(nn.Conv1d(4, 4, 3, groups=4, padding=1, bias=False), 4, 10)
    assert cost.dense() == 2 * 10 * (4 * 1 * 3)


def test_a_transposed_convolution_uses_its_weight_at_each_place_of_its_input() -> None:
    # 3 x 3 in, 6 x 6 out: the weights are used 9 times, the bias 36 times.
    assert cost_of(nn.ConvTranspose2d(1, 1, 2, stride=2), 1, 3, 3).per_weight == (18, 36)


def test_norms_and_activations_are_free() -> None:
    assert cost_of(nn.Sequential(nn.GroupNorm(1, 4), nn.ReLU(), nn.Linear(4, 1)), 4).per_weight == (0, 0, 2, 1)


def test_a_layer_that_is_used_twice_costs_twice_and_tied_weights_add_up() -> None:
    layer, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    assert cost_of(nn.Sequential(layer, layer), 2).per_weight == (4, 2)
    twin.weight = layer.weight
    assert cost_of(nn.Sequential(layer, twin), 2).per_weight == (4, 1, 1)


def test_frozen_layers_are_not_in_the_layout_and_not_counted() -> None:
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1, bias=False))
    assert cost_of(module, 2).per_weight == (2,)


class ByName(nn.Module):
    """Calls its layer with the input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(input=x)
        return outputs


def test_a_layer_called_with_its_input_by_name_counts_too() -> None:
    assert cost_of(ByName(), 3).per_weight == (2, 1)


def test_counting_changes_neither_the_modules_mode_nor_its_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for training in (True, False):
        module.train(training)
        cost_of(module, 3)
        assert module.training == training
    assert module.state_dict()["1.num_batches_tracked"] == 0
    assert not module[0]._forward_hooks


def test_a_sparse_layer_costs_in_proportion_to_what_it_keeps() -> None:
    assert cost_of(nn.Linear(3, 2), 3).sparse([4, 1]) == 2 * 4 + 1


def test_a_local_training_is_three_passes_over_every_sample_and_a_dense_batch_for_the_search() -> None:
    cost = cost_of(nn.Linear(3, 2), 3)  # dense 14, with 4 and 1 kept 9
    assert cost.local_training([4, 1], samples=500) == 3 * 5 * 100 * 9
    assert cost.local_training([4, 1], samples=500, search_batch=32) == 3 * (5 * 100 * 9 + 32 * 14)


def test_resnet18_on_cifar10_costs_the_papers_8_3e12_dense_and_7_0e12_at_half_density() -> None:
    with torch.device("meta"):
        module = ResNet18(3, 10)
        sample = torch.empty(1, 3, 32, 32)
    layout = Layout.of(module)
    cost = forward_cost(module, layout, sample)
    densities = erk_densities(dict(zip(layout.names, layout.shapes, strict=True)), 0.5)
    kept = [kept_count(size, densities[name]) for name, size in zip(layout.names, layout.sizes, strict=True)]
    assert cost.local_training(layout.sizes, samples=2500) == pytest.approx(8.33e12, rel=1e-3)
    assert cost.local_training(kept, samples=2500, search_batch=128) == pytest.approx(7.06e12, rel=1e-3)
