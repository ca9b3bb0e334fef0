"""FLOPs by hand for single layers, and the paper's figures for ResNet-18."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_count
from dispfl.core.sparsity import erk_densities
from dispfl.costs import flops
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
    assert cost_of(nn.Sequential(nn.GroupNorm(1, 4), nn.ReLU(), nn.Linear(4, 1)), 4).per_weight == (
        0,
        0,
        2,
        1,
    )


def test_a_layer_that_is_used_twice_costs_twice_and_tied_weights_add_up() -> None:
    layer, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    assert cost_of(nn.Sequential(layer, layer), 2).per_weight == (4, 2)
    twin.weight = layer.weight
    assert cost_of(nn.Sequential(layer, twin), 2).per_weight == (4, 1, 1)


def test_a_frozen_layer_is_not_in_the_layout_and_costs_the_same_under_every_mask() -> None:
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1, bias=False))
    cost = cost_of(module, 2)
    assert cost.per_weight == (2,)
    assert cost.fixed == 2 * 4 + 2
    assert cost.sparse([1]) == 2 + 10


def test_training_counts_the_gradients_that_a_network_with_frozen_layers_has() -> None:
    """A step of one sample: the frozen first layer has no gradient at all; the trained ones have
    both; the frozen last one has that of its inputs."""
    module = nn.Sequential(
        nn.Linear(3, 5).requires_grad_(False),
        nn.Linear(5, 4, bias=False),
        nn.Linear(4, 2).requires_grad_(False),
    )
    cost = cost_of(module, 3)
    first, middle, last = 2 * 15 + 5, 2 * 20, 2 * 8
    assert cost.fixed == first + last + 2
    assert cost.fixed_backward == last
    assert cost.training(cost.sizes, 7) == 7 * (first + 3 * middle + 2 * last + 2)


def test_fine_tuning_with_low_rank_adapters_costs_what_torch_counts() -> None:
    """Torch does not count elementwise operations, nor the gradient of a network's inputs."""

    class Adapted(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
            self.down = nn.Linear(inputs, 2, bias=False)
            self.up = nn.Linear(2, outputs, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base(x) + self.up(self.down(x))
            return result

    module = nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 16), nn.ReLU(), Adapted(16, 4))
    with FlopCounterMode(display=False) as counter:
        module(torch.ones(1, 8)).sum().backward()
    cost = cost_of(module, 8)
    gradient_of_inputs = 2 * 8 * 2
    assert cost.training(cost.sizes, 1) - gradient_of_inputs == counter.get_total_flops()


def test_attention_is_trained_in_three_passes_like_everything_in_the_paper() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)

    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.attention(x, x, x)[0]
            return result

    cost = cost_of(Itself(), 3, 4)
    assert cost.fixed > 0
    assert cost.training(cost.sizes, 1) == 3 * cost.dense()


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


class Steps(nn.Module):
    """Runs a cell over a sequence, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        outputs: Tensor = state[0] if isinstance(state, tuple) else state
        return outputs


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_uses_each_weight_at_each_of_five_steps(
    kind: Callable[..., nn.Module], device: str
) -> None:
    """Weights of the input, weights of the state, and their biases: 2, 2, 1 and 1 operations a
    step."""
    with torch.device(device):
        module, sample = kind(3, 2, batch_first=True), torch.zeros(1, 5, 3)
    cost = forward_cost(module, Layout.of(module), sample)
    assert cost.per_weight == (10, 10, 5, 5)
    gates = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}[type(module)]
    assert cost.dense() == gates * 5 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2)
    assert cost.fixed == 0
    assert cost.uncounted == ()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_two_layers_in_two_directions_without_biases_are_four_recurrent_layers(
    kind: Callable[..., nn.Module],
) -> None:
    module = kind(3, 2, num_layers=2, bidirectional=True, bias=False, batch_first=True)
    assert cost_of(module, 5, 3).per_weight == (10,) * 8


@pytest.mark.parametrize("cell", [nn.RNNCell(3, 2), nn.GRUCell(3, 2), nn.LSTMCell(3, 2)])
def test_a_recurrent_cell_costs_as_much_as_its_layer(cell: nn.Module) -> None:
    assert cost_of(Steps(cell), 5, 3).per_weight == (10, 10, 5, 5)


class Attention(nn.Module):
    """Attention over the input; a second input, if there is one, gives keys and values."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.attention(x, x, x, **self.options)[0]
        return outputs


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_over_three_tokens_costs_its_four_projections_and_two_products(
    need_weights: bool,
) -> None:
    """Projections: 4 x 4 x 4 weights at 3 positions. Products: 2 heads x 3 x 3 pairs x 2
    dimensions, twice."""
    cost = cost_of(Attention(need_weights=need_weights), 3, 4)
    assert cost.per_weight == (6, 3, 6, 3)
    assert cost.fixed == 2 * (2 * 3 * 3 * 2) * 2
    assert cost.uncounted == ()


class CrossAttention(Attention):
    """The first two of seven tokens ask the other five."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.attention(x[:, :2], x[:, 2:], x[:, 2:])[0]
        return outputs


def test_in_cross_attention_queries_keys_and_values_are_projected_at_their_own_positions() -> None:
    """Queries at 2 positions, keys and values at 5: (4 + 10 + 10) / 3 a weight. 2 x 5 pairs, 4
    dimensions."""
    cost = cost_of(CrossAttention(), 7, 4)
    assert cost.per_weight == (8, 4, 4, 2)
    assert cost.fixed == 2 * (2 * 5 * 4) * 2


class OwnAttention(nn.Module):
    """Attention as transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scaled_dot_product_attention_costs_two_products(device: str) -> None:
    with torch.device(device):
        module, sample = OwnAttention(), torch.zeros(1, 3, 4)
    cost = forward_cost(module, Layout.of(module), sample)
    assert cost.per_weight == (6,)
    assert cost.fixed == 2 * (3 * 3 * 4) * 2
    assert cost.sparse([24]) == 6 * 24 + 144  # half of the weights, but all pairs of tokens


def test_a_transformer_layer_is_counted_although_torch_has_a_fused_kernel_for_it() -> None:
    """In eval mode torch runs one kernel, in which no layer is called. Norms are free, and
    everything else is used."""
    module = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
    cost = cost_of(module, 3, 4)
    by_name = dict(zip(Layout.of(module).names, cost.per_weight, strict=True))
    assert (
        by_name["linear1.weight"],
        by_name["linear2.bias"],
        by_name["self_attn.in_proj_weight"],
    ) == (6, 3, 6)
    assert (by_name["norm1.weight"], by_name["norm2.bias"]) == (0, 0)
    assert cost.fixed == 144
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_embedding_costs_1_for_each_value_that_is_looked_up() -> None:
    """5 tokens x 4 values, of a table with 10 x 4: half an operation a weight."""
    for module in (nn.Embedding(10, 4), nn.EmbeddingBag(10, 4)):
        cost = forward_cost(module, Layout.of(module), torch.tensor([[1, 1, 2, 3, 9]]))
        assert cost.per_weight == (0.5,)
        assert cost.dense() == 20


class BareParameters(nn.Module):
    """Uses its parameters without layers: a product with a vector, a scale, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))
        self.scale, self.token = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), 1, 4), x * self.scale], 1)
        return (tokens @ self.matrix) @ self.vector


def test_parameters_without_a_layer_count_too() -> None:
    """3 tokens are scaled, a fourth is added; then 4 x 4 x 2 and 4 x 2 multiplications."""
    cost = cost_of(BareParameters(), 3, 4)
    assert cost.per_weight == (8, 8, 3, 1)
    assert cost.fixed == 0
    assert cost.uncounted == ()


class OneRow(ByName):
    """Passes a vector to its layer, not a batch."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x[0])
        return outputs[None]


def test_a_layer_of_a_vector_costs_as_much_as_of_a_batch_of_one() -> None:
    assert cost_of(OneRow(), 3).per_weight == (2, 1)


class Odd(nn.Module):
    """Operations without a formula, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.norm, self.spare = nn.Bilinear(4, 4, 2), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(x), dim=1).real
        outputs: Tensor = self.pair(x, x) + spectrum.sum()
        return outputs


def test_what_is_not_counted_is_named_and_norms_are_free() -> None:
    cost = cost_of(Odd(), 4)
    assert cost.uncounted == (
        "pair (Bilinear)",
        "spare (Linear)",
        "fft_r2c (an operation)",
        "trilinear (an operation)",
    )
    assert (
        cost.omission
        == "FLOPs do not include pair (Bilinear), spare (Linear), fft_r2c (an operation), trilinear"
        " (an operation): there is no formula for these operations."
    )
    assert (
        cost_of(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)), 4).omission
        is None
    )


class Uncountable(nn.Module):
    """Fails where its operations are observed, as compiled code may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("observed")
        outputs: Tensor = self.linear(x)
        return outputs


def test_a_network_that_cannot_be_counted_trains_all_the_same_and_says_so() -> None:
    cost = cost_of(Uncountable(), 3)
    assert cost.per_weight == (0, 0)
    assert cost.uncounted == ("anything of Uncountable, which torch cannot count",)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cost_of(nn.Linear(3, 2), 4)


def test_a_sparse_layer_costs_in_proportion_to_what_it_keeps() -> None:
    assert cost_of(nn.Linear(3, 2), 3).sparse([4, 1]) == 2 * 4 + 1


def test_a_local_training_is_three_passes_over_every_sample() -> None:
    cost = cost_of(nn.Linear(3, 2), 3)  # dense 14, with 4 and 1 kept 9
    assert cost.training([4, 1], samples=500) == 3 * 5 * 100 * 9


def test_resnet18_on_cifar10_costs_the_papers_8_3e12_dense_and_7_0e12_at_half_density() -> None:
    with torch.device("meta"):
        module = ResNet18(3, 10)
        sample = torch.empty(1, 3, 32, 32)
    layout = Layout.of(module)
    cost = forward_cost(module, layout, sample)
    densities = erk_densities(dict(zip(layout.names, layout.shapes, strict=True)), 0.5)
    kept = [
        kept_count(size, densities[name])
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
    assert cost.training(layout.sizes, samples=2500) == pytest.approx(8.33e12, rel=1e-3)
    search = cost.training(layout.sizes, samples=128)
    assert cost.training(kept, samples=2500) + search == pytest.approx(7.06e12, rel=1e-3)


def test_counting_does_not_load_torchs_compiler() -> None:
    """Torch wraps a dispatch mode for it by default, and loads it at the first operation."""
    assert flops._OperationCounter.__torch_dispatch__.__code__.co_filename == flops.__file__
