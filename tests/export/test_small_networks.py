"""Models whose masks leave out channels: every format contains the small network and computes what
the run did."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from messages import refused
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from dispfl import DisPFL, Federation, Full
from dispfl.channels.channel_mask import ChannelMask
from dispfl.channels.find_units import masked
from dispfl.cli import app
from dispfl.config import compose
from dispfl.core.flat_module import FlatModule
from dispfl.core.rng import global_stream
from dispfl.data.datasets import Data, load_dataset
from dispfl.data.labelled import ImageDataset
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import DataError, RunError
from dispfl.export.card import Card
from dispfl.export.formats import NORM_GROUPS, load_model, save_model
from dispfl.export.personal import PersonalModel, personal_model, site_model
from dispfl.export.predictor import DeployedModel
from dispfl.models.settings import Model
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.runs.directory import final_states, read_config, read_split, read_summary

pytestmark = pytest.mark.filterwarnings("ignore:The model has buffers")

MakeRun = Callable[..., Path]
CHANNELS = ["method.structure=channels", "method.density=0.3", "workers=1"]
OWN_CODE = '''
from dispfl.methods.base import FineTuning
from dispfl.methods.dispfl import DisPFL
from torch import nn


class BatchNormNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 3, stride=2)
        self.norm1 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 48, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(48)
        self.frozen = nn.Linear(classes, classes).requires_grad_(False)
        self.linear = nn.Linear(48 * 36, classes)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        return self.frozen(self.linear(self.norm2(self.conv2(x)).relu().flatten(1)))


def net(classes):
    return BatchNormNet(classes)


class Tuned(DisPFL):
    """Evaluates every peer's own model after another epoch."""

    evaluates_global = True

    @property
    def fine_tuning(self):
        return FineTuning(epochs=1, rate="initial", every=1)

    def global_model(self, states):
        return next(iter(states.values())).model

    def evaluated_model(self, state, global_model):
        return state.model
'''


@dataclass(frozen=True)
class Small:
    """A run of small networks, and the model of its second peer."""

    path: Path
    personal: PersonalModel

    @property
    def mask(self) -> ChannelMask:
        mask = final_states(self.path)["001"].model.mask
        assert isinstance(mask, ChannelMask)
        return mask

    def whole(self) -> nn.Module:
        """The whole network, with zeros for the weights that the peer does not keep."""
        with global_stream(0, "model"):
            network = FlatModule(compose(read_config(self.path), []).model.network((1, 28, 28), 10))
        state = final_states(self.path)["001"]
        network.load(state.model.unpack()[0], state.buffers)
        return network.module.eval()


@pytest.fixture(scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with a network and a method of a user."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_small_net.py").write_text(OWN_CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module", params=["cnn", "own"])
def small(request: pytest.FixtureRequest, own_code: Path, make_run: MakeRun) -> Small:
    """The small CNN with its group norms, or a user's network with batch norms."""
    words = {"cnn": [], "own": ["model.factory=own_small_net:net"]}[request.param]
    path = make_run(own_code / request.param, *CHANNELS, *words)
    return Small(path, personal_model(path, "1"))


@pytest.fixture(scope="module")
def cnn(own_code: Path, make_run: MakeRun) -> PersonalModel:
    return personal_model(make_run(own_code / "only-cnn", *CHANNELS), "1")


def needed(ending: str, personal: PersonalModel) -> None:
    if ending == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="the extra dispfl[export] is not installed")
    if ending == ".safetensors" and personal.card.model is None:
        pytest.skip("weights alone are for built-in networks")


def test_the_card_says_what_is_left_out_and_how_much_is_kept(small: Small) -> None:
    card, summary = small.personal.card, read_summary(small.path)
    whole = sum(
        parameter.numel() for parameter in small.whole().parameters() if parameter.requires_grad
    )
    kept = sum(
        parameter.numel()
        for parameter in small.personal.network.parameters()
        if parameter.requires_grad
    )
    assert (card.structure, card.parameters, card.whole_parameters) == ("channels", kept, whole)
    assert card.density == kept / whole == pytest.approx(0.3, abs=0.02)
    assert summary is not None
    assert card.weights_sha256 == summary["weights_sha256"][1]
    assert card.score == summary["scores"]["accuracy"]["per_peer"][1]


@pytest.mark.parametrize("ending", [".safetensors", ".onnx", ".pt2"])
def test_a_file_computes_what_the_masked_whole_network_does_and_has_the_runs_accuracy(
    tmp_path: Path, small: Small, ending: str
) -> None:
    needed(ending, small.personal)
    save_model(small.personal.network, small.personal.card, tmp_path / f"small{ending}")
    model = load_model(tmp_path / f"small{ending}", trust=True)
    assert model.card == small.personal.card

    data = load_dataset(Data())
    saved = read_split(small.path)
    assert isinstance(data, ImageDataset)
    assert saved is not None
    rows = saved[0].test[1]
    images = data.test_inputs[rows] / 255
    with masked(small.whole(), small.mask) as whole, torch.no_grad():
        expected = DeployedModel(whole, model.card)(images)
    probabilities = model.outputs(images)
    assert torch.allclose(probabilities, expected, atol=1e-5)
    right = int((probabilities.argmax(1) == data.test_labels[rows]).sum())
    assert right / len(rows) == model.card.score


@pytest.mark.parametrize("ending", [".safetensors", ".onnx", ".pt2"])
def test_a_file_is_smaller_by_four_bytes_for_each_weight_that_is_left_out(
    tmp_path: Path, small: Small, ending: str
) -> None:
    needed(ending, small.personal)
    card = small.personal.card
    sizes = [
        save_model(network, card, tmp_path / f"{name}{ending}").size
        for name, network in (("small", small.personal.network), ("whole", small.whole()))
    ]
    assert card.whole_parameters is not None
    assert card.parameters is not None
    assert sizes[1] - sizes[0] == pytest.approx(
        4 * (card.whole_parameters - card.parameters), abs=4_000
    )


def test_a_fine_tuned_small_network_is_exported_as_the_run_evaluated_it(
    own_code: Path, make_run: MakeRun
) -> None:
    path = make_run(own_code / "tuned", *CHANNELS, "method=own_small_net:Tuned")
    summary, card = read_summary(path), personal_model(path, "1").card
    assert summary is not None
    assert card.weights_sha256 == summary["weights_sha256"][1]
    assert card.score == summary["scores"]["accuracy"]["per_peer"][1]
    assert card.density == pytest.approx(0.3, abs=0.02)


def test_a_network_that_has_changed_since_the_run_is_refused(
    own_code: Path, make_run: MakeRun
) -> None:
    path = make_run(own_code / "changed", *CHANNELS, "model.factory=own_small_net:net")
    (own_code / "renamed_net.py").write_text(OWN_CODE.replace("conv1", "first"))
    config = path / "config.toml"
    config.write_text(config.read_text().replace("own_small_net:net", "renamed_net:net"))
    with pytest.raises(RunError) as refused:
        personal_model(path, "1", trust=True)
    assert (
        str(refused.value)
        == "The channels of the checkpoint are not those of the run's network: its layers have"
        " changed."
    )


def test_a_federation_made_in_python_gives_the_small_network_and_saves_it(tmp_path: Path) -> None:
    images = torch.rand(2, 40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = (images[:, :, 0, :9].mean((2, 3)) > 0.5).long()
    data = [((images[k], labels[k]), (images[k], labels[k])) for k in range(2)]
    method = DisPFL(structure="channels", density=0.3)
    run = Federation(lambda: Model().build(1, 2, 28), data, method, Full(), rounds=2).run()
    network = run.model(1)
    with torch.no_grad():
        right = (network(images[1]).argmax(1) == labels[1]).float().mean()
    assert float(right) == pytest.approx(run.accuracy[1])
    assert (
        sum(parameter.numel() for parameter in network.parameters())
        == run.personal["001"].model.mask.kept
    )
    card = Card(classes=("a", "b"), shape=(1, 28, 28), mean=(0.0,), std=(1.0,), model=Model())
    save_model(network, card, tmp_path / "small.safetensors")
    with torch.no_grad():
        expected = network(images[1]).softmax(1)
    assert torch.allclose(
        load_model(tmp_path / "small.safetensors").outputs(images[1]), expected, atol=1e-6
    )


def test_a_site_exports_its_small_network_and_predicts_with_it(tmp_path: Path) -> None:
    method = {"structure": "channels", "density": 0.3}
    data = {"path": "scans", "size": 28, "colour": False}
    config = SiteConfig.from_values(
        {"data": data, "rounds": 2, "train": {"epochs": 1, "batch_size": 8}, "method": method}
    )
    where = SiteInfo(name="alice", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(tmp_path / "alice", where, config.to_toml())
    for name, shade in (("dark", 20), ("light", 220)):
        (site.folder / "scans" / name).mkdir(parents=True)
        for k in range(10):
            Image.new("L", (28, 28), shade + k).save(site.folder / "scans" / name / f"{k}.png")
    run_site(site)
    card, mask = (
        site_model(site.folder).card,
        Checkpoints(site.run_folder / "checkpoints").load(2)["alice"].next_state,
    )
    assert (card.structure, card.parameters) == ("channels", mask.model.mask.kept)

    to = tmp_path / "alice.safetensors"
    exported = CliRunner().invoke(app, ["export", str(site.folder), "--to", str(to)])
    assert exported.exit_code == 0, exported.output
    assert (
        exported.stdout.splitlines()[1]
        == f"Small network: {card.parameters:,} of the {card.whole_parameters:,} parameters of the"
        " whole one."
    )
    image = str(site.folder / "scans/light/3.png")
    predicted = CliRunner().invoke(app, ["predict", str(to), image, "--json"])
    assert predicted.exit_code == 0, predicted.output
    assert {guess["class"] for guess in json.loads(predicted.stdout)[0]["top"]} == {"dark", "light"}


Tensors = dict[str, Tensor]


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).clone())


NOT_THOSE = "Its tensors are not those of the network that its card names."
GOOD = '{"norm1": 4, "norm2": 4}'


@pytest.mark.parametrize(
    ("change", "norm_groups", "sentence"),
    [
        (with_tensor("conv2.weight", lambda x: x[:, :1]), GOOD, "Its layers do not fit together: "),
        (
            with_tensor("hidden.weight", lambda x: x[:, :-1]),
            GOOD,
            "Its layers do not fit together: ",
        ),
        (with_tensor("linear.weight", lambda x: x[:2]), GOOD, "Its layers do not fit together: "),
        (with_tensor("linear.weight", lambda x: x.repeat(1, 9)), GOOD, NOT_THOSE),
        (with_tensor("conv1.weight", lambda x: x[:0]), GOOD, NOT_THOSE),
        (with_tensor("conv1.weight", lambda x: x[0]), GOOD, NOT_THOSE),
        (lambda tensors: tensors.pop("conv1.bias"), GOOD, NOT_THOSE),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), GOOD, NOT_THOSE),
        (dict, '{"norm1": 3, "norm2": 4}', "Its layers do not fit together: "),
        (dict, '{"norm1": 4}', "Its norm_groups are not those of the network that its card names."),
        (
            dict,
            '{"norm1": 4, "conv2": 4}',
            "Its norm_groups are not those of the network that its card names.",
        ),
        (
            dict,
            f'{{"norm1": {10**30}, "norm2": 4}}',
            "Its norm_groups are not those of the network",
        ),
        (
            dict,
            '{"norm1": 0, "norm2": 4}',
            "norm_groups must be JSON with a positive number for each layer, got '{",
        ),
        (
            dict,
            '{"norm1": "\x1b[2J", "norm2": 4}',
            "norm_groups must be JSON with a positive number for each",
        ),
        (
            dict,
            "[4, 4]",
            "norm_groups must be JSON with a positive number for each layer, got '[4, 4]'.",
        ),
        (
            dict,
            "[" * 100_000,
            "norm_groups must be JSON with a positive number for each layer, got '[[[",
        ),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_with_one_sentence(
    tmp_path: Path,
    cnn: PersonalModel,
    change: Callable[[Tensors], Any],
    norm_groups: str,
    sentence: str,
) -> None:
    path = tmp_path / "small.safetensors"
    save_model(cnn.network, cnn.card, path)
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, cnn.card.to_strings() | {NORM_GROUPS: norm_groups})
    with pytest.raises(DataError) as refused:
        load_model(path)
    assert str(refused.value).startswith(f"{path} is not a model that dispfl can run. {sentence}")
    assert str(refused.value).isprintable()


def test_a_card_that_declares_huge_images_needs_no_memory(
    tmp_path: Path, cnn: PersonalModel
) -> None:
    """The first linear layer of the whole network would have two thousand million weights."""
    path = tmp_path / "small.safetensors"
    save_model(cnn.network, cnn.card, path)
    card = cnn.card.model_copy(update={"shape": (1, 4096, 4096)})
    safetensors.torch.save_file(
        safetensors.torch.load_file(path), path, card.to_strings() | {NORM_GROUPS: GOOD}
    )
    with refused(DataError):
        load_model(path)
