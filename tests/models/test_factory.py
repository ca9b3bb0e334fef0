"""`model.factory`: a user's own network in a config, and what is said of one that does not fit."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dispfl.config import compose
from dispfl.data.datasets import load
from dispfl.errors import ConfigError
from dispfl.federation import execute
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model
from dispfl.runs.loop import Progress

Code = Callable[[str], OwnModel]

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
    """Write `networks.py` into the working directory, and forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def write(text: str) -> OwnModel:
        (tmp_path / "networks.py").write_text(text)
        return OwnModel(factory="networks:Net")

    yield write
    sys.path[:] = path
    sys.modules.pop("networks", None)


def refusal(model: OwnModel, classes: int = 3) -> str:
    with pytest.raises(ConfigError) as caught:
        model.try_on(torch.zeros(2, 1, 4, 4), classes)
    return str(caught.value)


def test_shape_and_classes_are_given_to_a_function_that_takes_them(code: Code) -> None:
    network = code(VIEWING).network((3, 4, 4), 5)
    assert network.linear.weight.shape == (5, 48)


def test_a_function_that_takes_nothing_or_has_defaults_is_called_as_it_is(code: Code) -> None:
    text = "from torch import nn\nNet = lambda hidden=7, **rest: nn.Linear(hidden, 2 + len(rest))\n"
    assert code(text).network((3,), 5).weight.shape == (2, 7)  # type: ignore[union-attr]


def test_view_works_on_pictures_that_lie_channels_last_in_memory(code: Code) -> None:
    network = code(VIEWING).network((3, 4, 4), 5)
    pictures = torch.rand(2, 3, 4, 4)
    channels_last = pictures.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        channels_last.view(2, -1)
    assert network(channels_last).equal(network(pictures))


def test_every_call_gives_a_new_network_from_torchs_generator(code: Code) -> None:
    model = code(VIEWING)
    torch.manual_seed(0)
    one, other = model.network((4,), 2), model.network((4,), 2)
    torch.manual_seed(0)
    again = model.network((4,), 2)
    assert one is not other
    assert one.linear.weight.equal(again.linear.weight)
    assert not one.linear.weight.equal(other.linear.weight)


def test_trying_a_network_on_leaves_the_callers_generator_alone(code: Code) -> None:
    before = torch.get_rng_state()
    code(VIEWING).try_on(torch.zeros(2, 1, 4, 4), 3)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Net = lambda: 3",
            "model.factory networks:Net must return an nn.Module, got int; return the network itself.",
        ),
        (
            "from torch import nn\nNet = lambda: nn.ReLU",
            "model.factory networks:Net must return an nn.Module, got the class ReLU; write ReLU().",
        ),
        (
            "def Net(hidden): pass",
            "model.factory networks:Net wants hidden, but it is given classes and shape if it takes them. "
            "Give hidden a default.",
        ),
        (
            "from torch import nn\nNet = lambda: nn.Flatten()",
            None,
        ),
        (
            "from torch import nn\nNet = lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(16, classes - 1))",
            "model.factory networks:Net must give 3 numbers for each input, one a class; its output has shape [2].",
        ),
        (
            VIEWING.replace("return self.linear", "return x, self.linear"),
            "model.factory networks:Net must give 3 numbers for each input, one a class; its output has type tuple.",
        ),
        (
            VIEWING.replace("math.prod(shape)", "15"),
            "model.factory networks:Net fails on inputs of shape [1, 4, 4]: RuntimeError: "
            "mat1 and mat2 shapes cannot be multiplied (2x16 and 15x3) (networks.py, line 11).",
        ),
        (
            "def Net():\n    raise OSError('no disk')",
            "model.factory networks:Net raised OSError: no disk (networks.py, line 2).",
        ),
    ],
)
def test_a_network_that_cannot_be_is_one_sentence(code: Code, text: str, sentence: str | None) -> None:
    model = code(text)
    if sentence is None:  # more outputs than classes do no harm
        model.try_on(torch.zeros(2, 1, 4, 4), 3)
    else:
        assert refusal(model) == sentence


def test_simulated_peers_train_a_users_own_network_on_built_in_pictures(code: Code) -> None:
    code(VIEWING)
    words = ["peers=2", "rounds=2", "topology=full", "partition.samples=60", "threads=1", "model.factory=networks:Net"]
    experiment = compose({}, words)
    data = load(experiment.data)
    run = execute(experiment.setting(data, experiment.split(data)), None, 1, Progress())
    assert run.states["000"].model.mask.size == 28 * 28 * 10 + 10
    assert min(run.accuracy) > 0.3  # ten classes


def test_the_mlp_takes_inputs_of_any_shape_and_has_6530_parameters_for_30_columns_and_2_classes() -> None:
    """30*64+64 and 64*64+64 of hidden layers, 2*(64+64) of norms, 64*2+2 of outputs."""
    network = Model(name="mlp").network((30,), 2)
    assert sum(parameter.numel() for parameter in network.parameters()) == 6_530
    assert Model(name="mlp").network((2, 3, 5), 4)(torch.zeros(7, 2, 3, 5)).shape == (7, 4)


@pytest.mark.parametrize("shape", [(30,), (3, 8, 9)])
def test_networks_for_pictures_refuse_what_is_no_square_picture(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Model(name="resnet18").network(shape, 2)
    assert str(caught.value) == (
        f"model.name resnet18 needs square pictures, got inputs of shape {list(shape)}. "
        "Use mlp, or a network of your own with model.factory."
    )


def test_a_networks_module_is_looked_for_in_the_sites_folder_if_there_is_one(
    tmp_path: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = code(VIEWING)
    monkeypatch.chdir("/")
    assert isinstance(model.network((4,), 2, folder=tmp_path), nn.Module)
