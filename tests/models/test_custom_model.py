"""`model.factory`: a user's network in a config, and the errors for one that does not fit."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dispfl.config import compose
from dispfl.data.datasets import load_dataset
from dispfl.errors import ConfigError
from dispfl.models.settings import CustomModel, Model
from dispfl.runs.execute import execute
from dispfl.runs.prepare import experiment_context, split_dataset

Code = Callable[[str], CustomModel]

VIEWING = """
import math
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(math.prod(shape), classes)

    def forward(self, x):
        return self.linear(x.view(len(x), -1))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Code]:
    """Write `networks.py` into the working directory, and unload it afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def write(text: str) -> CustomModel:
        (tmp_path / "networks.py").write_text(text)
        return CustomModel(factory="networks:Net")

    yield write
    sys.path[:] = path
    sys.modules.pop("networks", None)


def refusal(model: CustomModel, classes: int = 3) -> str:
    with pytest.raises(ConfigError) as caught:
        model.check_network(torch.zeros(2, 1, 4, 4), classes)
    return str(caught.value)


def test_shape_and_classes_are_passed_to_a_function_with_these_parameters(code: Code) -> None:
    network = code(VIEWING).network((3, 4, 4), 5)
    assert network.linear.weight.shape == (5, 48)


def test_a_function_without_parameters_or_with_defaults_is_called_without_arguments(
    code: Code,
) -> None:
    text = "from torch import nn\nNet = lambda hidden=7, **rest: nn.Linear(hidden, 2 + len(rest))\n"
    assert code(text).network((3,), 5).weight.shape == (2, 7)  # type: ignore[union-attr]


def test_every_call_gives_a_new_network_from_torchs_generator(code: Code) -> None:
    model = code(VIEWING)
    torch.manual_seed(0)
    first, second = model.network((4,), 2), model.network((4,), 2)
    torch.manual_seed(0)
    again = model.network((4,), 2)
    assert first is not second
    assert first.get_parameter("linear.weight").equal(again.get_parameter("linear.weight"))
    assert not first.get_parameter("linear.weight").equal(second.get_parameter("linear.weight"))


def test_checking_a_network_does_not_touch_the_callers_generator(code: Code) -> None:
    before = torch.get_rng_state()
    code(VIEWING).check_network(torch.zeros(2, 1, 4, 4), 3)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Net = lambda: 3",
            (
                "model.factory networks:Net must return an nn.Module, got int; return the network"
                " itself."
            ),
        ),
        (
            "from torch import nn\nNet = lambda: nn.ReLU",
            (
                "model.factory networks:Net must return an nn.Module, got the class ReLU; write"
                " ReLU()."
            ),
        ),
        (
            "def Net(hidden): pass",
            (
                "model.factory networks:Net requires hidden, but only classes and shape can be"
                " passed. Give hidden a default."
            ),
        ),
        (
            "from torch import nn\nNet = lambda: nn.Flatten()",
            None,
        ),
        (
            (
                "from torch import nn\nNet = lambda classes: nn.Sequential(nn.Flatten(),"
                " nn.Linear(16, classes - 1))"
            ),
            (
                "model.factory networks:Net must return 3 numbers for each input, one per class;"
                " its output has shape [2]."
            ),
        ),
        (
            VIEWING.replace("return self.linear", "return x, self.linear"),
            (
                "The model Net returns a tuple of (Tensor, Tensor), but a tensor of outputs is"
                " needed: return one of them, such as outputs[0]."
            ),
        ),
        (
            VIEWING.replace("math.prod(shape)", "15"),
            (
                "model.factory networks:Net fails on inputs of shape [1, 4, 4]: RuntimeError: "
                "mat1 and mat2 shapes cannot be multiplied (2x16 and 15x3) (networks.py, line 11)."
            ),
        ),
        (
            "def Net():\n    raise OSError('no disk')",
            "model.factory networks:Net raised OSError: no disk (networks.py, line 2).",
        ),
    ],
)
def test_an_invalid_network_is_refused_with_one_sentence(
    code: Code, text: str, sentence: str | None
) -> None:
    model = code(text)
    if sentence is None:  # more outputs than classes are accepted
        model.check_network(torch.zeros(2, 1, 4, 4), 3)
    else:
        assert refusal(model) == sentence


def test_simulated_peers_train_a_custom_network_on_built_in_images(code: Code) -> None:
    code(VIEWING)
    words = [
        "peers=2",
        "rounds=2",
        "topology=full",
        "partition.samples_per_peer=60",
        "workers=1",
        "model.factory=networks:Net",
    ]
    experiment = compose({}, words)
    data = load_dataset(experiment.data)
    run = execute(experiment_context(experiment, data, split_dataset(experiment, data)))
    assert run.states["000"].model.mask.size == 28 * 28 * 10 + 10
    assert min(run.accuracy) > 0.3  # ten classes


def test_the_mlp_takes_any_shape_and_has_6530_parameters_for_30_columns_and_2_classes() -> None:
    """30*64+64 and 64*64+64 of hidden layers, 2*(64+64) of norms, 64*2+2 of outputs."""
    network = Model(name="mlp").network((30,), 2)
    assert sum(parameter.numel() for parameter in network.parameters()) == 6_530
    assert Model(name="mlp").network((2, 3, 5), 4)(torch.zeros(7, 2, 3, 5)).shape == (7, 4)


@pytest.mark.parametrize("shape", [(30,), (3, 8, 9)])
def test_networks_for_images_refuse_inputs_that_are_not_square_images(
    shape: tuple[int, ...],
) -> None:
    with pytest.raises(ConfigError) as caught:
        Model(name="resnet18").network(shape, 2)
    assert (
        str(caught.value)
        == f"model.name resnet18 needs square images, got inputs of shape {list(shape)}. "
        "Use mlp, or your own network with model.factory."
    )


def test_a_networks_module_is_looked_up_in_the_sites_folder_first(
    tmp_path: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = code(VIEWING)
    monkeypatch.chdir("/")
    assert isinstance(model.network((4,), 2, folder=tmp_path), nn.Module)
