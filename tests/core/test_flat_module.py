"""The flat module: its parameters and gradients are views into two flat vectors."""

import torch
from messages import refused
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule
from dispfl.errors import ConfigError


def filled(module: nn.Module, value: float) -> nn.Module:
    """The module with every parameter at one value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def test_the_flat_vector_starts_with_the_modules_own_weights_in_order() -> None:
    layer = nn.Linear(2, 1)
    expected = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
    assert FlatModule(layer).weights.equal(expected)


def test_writing_the_flat_vector_moves_the_parameters_and_the_outputs() -> None:
    network = FlatModule(nn.Linear(2, 1))
    network.weights.copy_(torch.tensor([1.0, 2.0, 10.0]))
    assert network(torch.tensor([[3.0, 4.0]])).tolist() == [[3 + 8 + 10]]


def test_backward_writes_into_the_flat_gradient() -> None:
    network = FlatModule(nn.Linear(2, 1))
    network(torch.tensor([[3.0, 4.0]])).sum().backward()  # type: ignore[no-untyped-call]
    assert network.grad.tolist() == [3.0, 4.0, 1.0]


def test_load_copies_in_and_read_copies_out() -> None:
    network = FlatModule(nn.Linear(2, 1))
    given = torch.tensor([1.0, 2.0, 3.0])
    network.load(given, {})
    taken = network.read()
    network.weights.zero_()
    assert given.tolist() == taken.tolist() == [1.0, 2.0, 3.0]


def test_tied_parameters_appear_once_and_stay_tied() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    network = FlatModule(filled(nn.Sequential(first, second), 1.0))
    assert network.layout.size == 4
    network.weights.fill_(2.0)
    assert second.weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    # f(w) = sum of W W x with all entries w: 8 w^2 for x = (1, 1), so 16 w = 32 over four equal
    # entries.
    network(torch.ones(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
    assert network.grad.tolist() == [8.0] * 4


def test_frozen_parameters_are_left_out_and_unchanged() -> None:
    frozen = filled(nn.Linear(2, 2), 5.0).requires_grad_(False)
    network = FlatModule(nn.Sequential(frozen, nn.Linear(2, 1)))
    assert network.layout.names == ("1.weight", "1.bias")
    network.weights.zero_()
    assert all((parameter == 5.0).all() for parameter in frozen.parameters())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with refused(ConfigError):
            FlatModule(module)


def test_a_float64_model_is_refused_with_the_fix() -> None:
    with refused(ConfigError):
        FlatModule(nn.Linear(2, 2).double())


def test_buffers_are_loaded_and_read_as_copies() -> None:
    network = FlatModule(nn.BatchNorm1d(2))
    assert network.buffer_names == ["running_mean", "running_var", "num_batches_tracked"]
    mine = {
        "running_mean": torch.tensor([1.0, 2.0]),
        "running_var": torch.tensor([3.0, 4.0]),
        "num_batches_tracked": torch.tensor(7),
    }
    network.load(network.read(), mine)
    taken = network.read_buffers()
    network(torch.ones(2, 2))  # in training mode: the module's own buffers move
    assert {name: buffer.tolist() for name, buffer in taken.items()} == {
        "running_mean": [1.0, 2.0],
        "running_var": [3.0, 4.0],
        "num_batches_tracked": 7,
    }
    assert mine["running_mean"].tolist() == [1.0, 2.0]
    assert network.read_buffers()["num_batches_tracked"] == 8


def test_a_transposed_buffer_is_read_row_by_row() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(6.0).view(2, 3).t())
    table = FlatModule(module).read_buffers()["table"]
    assert table.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert table.is_contiguous()


class Viewing(nn.Module):
    """Flattens with `view`, which needs row-major activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        outputs: Tensor = self.linear(x.view(x.size(0), -1))
        return outputs


def test_a_network_that_flattens_with_view_works_on_row_major_images() -> None:
    assert FlatModule(Viewing())(torch.ones(2, 3, 4, 4)).shape == (2, 1)
