"""The three formats: what is in the files, that they compute what torch computes, and what is
refused."""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from dispfl.core.layout import Layout
from dispfl.data.datasets import Data, load_dataset
from dispfl.data.labelled import ImageDataset
from dispfl.errors import ConfigError, DataError, DispflError
from dispfl.export import formats
from dispfl.export.card import Card
from dispfl.export.formats import load_model, save_model
from dispfl.export.personal import PersonalModel
from dispfl.export.predictor import DeployedModel
from dispfl.models.settings import Model
from dispfl.runs.directory import final_states, read_metrics, read_split

ENDINGS = [".safetensors", ".onnx", ".pt2"]
Exported = Callable[[str], Path]


def test_a_deployed_network_normalizes_and_gives_probabilities() -> None:
    """(0.75 - 0.5) / 0.25 = 1 and (0.5 - 0.5) / 0.25 = 0; softmax of (1, 0) is e / (e + 1) = 0.7311
    and 0.2689."""
    card = Card(classes=("a", "b"), shape=(1, 1, 2), mean=(0.5,), std=(0.25,))
    probabilities = DeployedModel(nn.Flatten(), card)(torch.tensor([[[[0.75, 0.5]]]]))
    assert probabilities.tolist() == [pytest.approx([0.7311, 0.2689], abs=1e-4)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_gives_the_card_and_torchs_probabilities_for_any_batch_size(
    exported: Exported, personal: PersonalModel, ending: str
) -> None:
    model = load_model(exported(ending), trust=True)
    assert model.card == personal.card
    for count in (1, 5):
        images = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected = DeployedModel(personal.network, personal.card)(images)
        assert torch.allclose(model.outputs(images), expected, atol=1e-6)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_accuracy_on_the_peers_test_images_is_the_runs(
    exported: Exported, finished: Path, ending: str
) -> None:
    data = load_dataset(Data())
    saved = read_split(finished)
    assert isinstance(data, ImageDataset)
    assert saved is not None
    rows = saved[0].test[1]
    guesses = (
        load_model(exported(ending), trust=True).outputs(data.test_inputs[rows] / 255).argmax(1)
    )
    right = int((guesses == data.test_labels[rows]).sum())
    assert right / len(rows) == read_metrics(finished)[-1]["scores"]["accuracy"]["per_peer"][1]


def test_safetensors_contains_the_parameters_by_name_with_zeros_for_pruned_weights(
    exported: Exported, finished: Path
) -> None:
    tensors = safetensors.torch.load_file(exported(".safetensors"))
    layout = Layout.of(Model().build(1, 10, 28))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(
        zip(layout.names, layout.shapes, strict=True)
    )
    values = torch.cat([tensors[name].flatten() for name in layout.names])
    weights, mask = final_states(finished)["001"].model.unpack()
    assert torch.equal(values, weights)
    assert not values[~mask].any()
    assert (~mask).sum() == pytest.approx(
        105_962 / 2, abs=12
    )  # each of 12 parameters keeps the integer part


def test_an_onnx_file_names_its_input_output_and_classes(exported: Exported) -> None:
    onnxruntime = pytest.importorskip(
        "onnxruntime", reason="the extra dispfl[export] is not installed"
    )
    session = onnxruntime.InferenceSession(exported(".onnx"), providers=["CPUExecutionProvider"])
    [takes], [gives] = session.get_inputs(), session.get_outputs()
    assert (takes.name, takes.type, takes.shape) == (
        "images",
        "tensor(float)",
        ["batch", 1, 28, 28],
    )
    assert (gives.name, gives.type, gives.shape) == (
        "probabilities",
        "tensor(float)",
        ["batch", 10],
    )
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"])[:2] == ["T-shirt/top", "Trouser"]
    assert (about["peer"], json.loads(about["mean"]), json.loads(about["std"])) == (
        "001",
        [0.286],
        [0.353],
    )


def test_a_pt2_file_contains_no_pickle(exported: Exported) -> None:
    with zipfile.ZipFile(exported(".pt2")) as archive:
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert contents["data/sample_inputs/model.pt"] == b""
    weights = json.loads(contents["data/weights/model_weights_config.json"])["config"]
    assert len(weights) == 12 + 2  # the network's, and mean and std
    assert not any(entry["use_pickle"] for entry in weights.values())
    assert json.loads(contents["data/constants/model_constants_config.json"])["config"] == {}


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_graph_contains_no_paths_of_this_machine(exported: Exported, ending: str) -> None:
    content = exported(ending).read_bytes()
    for trace in (b".py", b"site-packages", bytes(Path(formats.__file__).parent)):
        assert trace not in content


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_damaged_model_is_refused_with_one_sentence(
    tmp_path: Path, exported: Exported, ending: str
) -> None:
    whole = exported(ending).read_bytes()
    path = tmp_path / f"cut{ending}"
    for content in (whole[: len(whole) // 2], b"", b"no model at all"):
        path.write_bytes(content)
        with pytest.raises(DataError) as refused:
            load_model(path, trust=True)
        assert str(refused.value).startswith(f"{path} is not a model, or is damaged (")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ending", [".safetensors", ".pt2"])
def test_a_missing_model_is_refused_with_one_sentence(tmp_path: Path, ending: str) -> None:
    with pytest.raises(
        DataError, match=r"The model .*none\.\w+ does not exist; `dispfl export` writes one\."
    ):
        load_model(tmp_path / f"none{ending}", trust=True)


def test_an_untrusted_pt2_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"any\.pt2 was not opened: .* add --trust .*; \.safetensors and \.onnx do not need",
    ):
        load_model(tmp_path / "any.pt2")


def test_an_unknown_suffix_is_refused_with_the_three_known_ones(
    tmp_path: Path, personal: PersonalModel
) -> None:
    sentence = rf"{tmp_path / 'model.pth'} must end in \.safetensors, \.onnx or \.pt2\."
    with pytest.raises(ConfigError, match=sentence):
        save_model(personal.network, personal.card, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match=sentence):
        load_model(tmp_path / "model.pth")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_onnx_without_its_extra_is_refused_with_the_command_that_fixes_it(
    tmp_path: Path, personal: PersonalModel, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for other in ("onnx", "onnxscript", "onnxruntime"):
        if other != package:
            pytest.importorskip(other, reason="the extra dispfl[export] is not installed")
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(ConfigError) as refused:
        save_model(personal.network, personal.card, tmp_path / "model.onnx")
    assert (
        str(refused.value)
        == f"A .onnx file needs {package}, which is not installed: pip install 'dispfl[export]'."
    )
    assert not list(tmp_path.iterdir())


def test_weights_of_another_network_are_refused_without_building_it(
    tmp_path: Path, exported: Exported
) -> None:
    """The card declares images of 4096 x 4096, whose first linear layer would have two thousand
    million weights."""
    tensors = safetensors.torch.load_file(exported(".safetensors"))
    card = load_model(exported(".safetensors")).card.model_copy(update={"shape": (1, 4096, 4096)})
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file(tensors, path, card.to_strings())
    with pytest.raises(
        DataError, match="Its tensors are not those of the network that its card names"
    ):
        load_model(path)


def test_a_file_without_a_card_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(DataError) as refused:
        load_model(path)
    assert (
        str(refused.value)
        == f"{path} is not a model that dispfl can run. It has no card, so `dispfl export` did not"
        " write it."
    )


OWN = Card(classes=("a", "b"), shape=(1, 2, 3), mean=(0.0,), std=(1.0,))


def own_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 2))


def test_a_custom_network_with_buffers_can_be_saved_as_a_graph(tmp_path: Path) -> None:
    saved = save_model(own_network(), OWN, tmp_path / "own.pt2")
    assert saved.size == (tmp_path / "own.pt2").stat().st_size
    assert saved.difference == 0


def test_a_custom_network_cannot_be_saved_as_weights_only(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"safetensors contains weights only; export it as \.onnx or \.pt2"
    ):
        save_model(own_network(), OWN, tmp_path / "own.safetensors")


def test_a_model_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    network = own_network()
    nn.init.constant_(network[2].bias, torch.nan)  # type: ignore[index]
    with pytest.raises(DispflError, match="not finite"):
        save_model(network, OWN, tmp_path / "own.pt2")
    assert not (tmp_path / "own.pt2").exists()


def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that writes the weights of another network."""
    other = own_network()
    written = formats.FORMATS[".pt2"]

    def wrong(deployed: DeployedModel, card: Card) -> bytes:
        return written.encode(DeployedModel(other, card), card)

    monkeypatch.setitem(formats.FORMATS, ".pt2", written._replace(encode=wrong))
    with pytest.raises(
        DataError,
        match=r"own\.pt2 was not written: its probabilities would differ from torch's by 0\.",
    ):
        save_model(own_network(), OWN, tmp_path / "own.pt2")
    assert not (tmp_path / "own.pt2").exists()
