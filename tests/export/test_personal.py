"""Personal models of every method, of complete and incomplete runs, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from torch import nn

from dispfl import Federation, Full
from dispfl.errors import ConfigError, RunError
from dispfl.export.personal import PersonalModel, personal_model
from dispfl.registry import METHODS
from dispfl.runs.directory import SPLIT, read_metrics, read_summary

MakeRun = Callable[..., Path]


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.mark.parametrize("method", METHODS)
def test_the_exported_weights_and_accuracy_are_those_of_the_summary(
    tmp_path: Path, make_run: MakeRun, method: str
) -> None:
    """Own models, a server's, a consensus, the server's under a mask, and fine-tuned ones: bit for
    bit, with an own head for each peer."""
    words = [f"method={method}", "workers=1"]
    if method != "scaffold":  # which refuses it
        words.append("method.private=head")
    path = make_run(tmp_path / "run", *words)
    summary = read_summary(path)
    assert summary is not None
    card = personal_model(path, "2").card
    assert card.weights_sha256 == summary["weights_sha256"][2]
    assert card.score == summary["scores"]["accuracy"]["per_peer"][2]
    assert (card.method, card.rounds, card.peer) == (method, 2, "002")


def test_the_card_describes_the_models_origin(personal: PersonalModel) -> None:
    card = personal.card
    assert (card.data, card.method, card.seed, card.rounds, card.peer) == (
        "fashion-sample",
        "dispfl",
        0,
        2,
        "001",
    )
    assert card.classes[9] == "Ankle boot"
    assert (card.shape, card.mean, card.std) == ((1, 28, 28), (0.286,), (0.353,))
    assert card.model is not None
    assert card.model.name == "cnn"


def test_an_index_and_a_name_give_the_same_peer(finished: Path, personal: PersonalModel) -> None:
    assert (
        personal_model(finished, "001").card == personal_model(finished, "1").card == personal.card
    )
    assert personal_model(finished, "0").card.weights_sha256 != personal.card.weights_sha256


@pytest.mark.parametrize("peer", ["4", "-1", "server", "", "²"])
def test_an_unknown_peer_is_refused(finished: Path, peer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        personal_model(finished, peer)
    assert (
        str(refused.value)
        == f"There is no peer {peer} in {finished}; there are 4, from 000 to 003."
    )


def test_an_incomplete_run_gives_its_newest_complete_checkpoint(copy: Path) -> None:
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints/round-000002")
    card = personal_model(copy, "0").card
    assert card.rounds == 1
    assert card.score == read_metrics(copy)[0]["scores"]["accuracy"]["per_peer"][0]


def test_a_round_without_evaluation_has_no_accuracy(copy: Path) -> None:
    records = [{**record, "scores": {}} for record in read_metrics(copy)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert personal_model(copy, "0").card.score is None


def test_a_run_trained_on_another_device_is_exported_on_this_one(
    copy: Path, personal: PersonalModel
) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert personal_model(copy, "1").card == personal.card


def test_a_run_without_a_complete_round_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with refused(RunError):
        personal_model(copy, "0")


def test_fine_tuning_needs_the_runs_split_and_does_not_change_threads_and_random_state(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path = make_run(tmp_path / "run", "method=fedavg-ft", "workers=6")
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    personal_model(path, "0")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    (path / SPLIT).unlink()
    with refused(RunError):
        personal_model(path, "0")


def test_a_checkpoint_of_another_network_is_refused(copy: Path) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('name = "cnn"', 'name = "resnet18"'))
    with refused(RunError):
        personal_model(copy, "0")


def test_a_federation_made_in_python_is_exported_there(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 4)
    data = [((x[k], x[k, :, :2].argmax(1)), (x[k], x[k, :, :2].argmax(1))) for k in range(2)]
    Federation(model=lambda: nn.Linear(4, 2), peers=data, topology=Full(), rounds=1).run(
        out=tmp_path / "own"
    )
    with refused(RunError):
        personal_model(tmp_path / "own", "1")


@pytest.fixture
def hundred_classes(tmp_path: Path) -> Path:
    """CIFAR-100's binary files with four training images and one test image of each class, and its
    names."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in (("train", 4), ("test", 1)):
        labels = np.tile(np.arange(100, dtype=np.uint8), count)
        pixels = np.zeros((len(labels), 3 * 32 * 32), np.uint8)
        (folder / f"{name}.bin").write_bytes(np.column_stack([labels, labels, pixels]).tobytes())
    (folder / "fine_label_names.txt").write_text(
        "".join(f"kind-{number}\n" for number in range(100))
    )
    return folder


def test_class_names_are_those_of_the_run_also_without_its_data(
    tmp_path: Path, make_run: MakeRun, hundred_classes: Path
) -> None:
    path = make_run(
        tmp_path / "run", "data=cifar100", f"data.dir='{hundred_classes}'", "partition=iid"
    )
    hundred_classes.rename(tmp_path / "moved")
    card = personal_model(path, "0").card
    assert (card.classes[0], card.classes[99], card.shape) == ("kind-0", "kind-99", (3, 32, 32))


def test_fine_tuning_on_other_data_than_the_runs_is_refused(
    tmp_path: Path, make_run: MakeRun, hundred_classes: Path
) -> None:
    words = [
        "data=cifar100",
        f"data.dir='{hundred_classes}'",
        "partition=iid",
        "method=fedavg-ft",
        "rounds=1",
    ]
    path = make_run(tmp_path / "run", *words)
    images = bytearray((hundred_classes / "train.bin").read_bytes())
    images[1 :: 2 + 3 * 32 * 32] = bytes(reversed(images[1 :: 2 + 3 * 32 * 32]))  # the fine labels
    (hundred_classes / "train.bin").write_bytes(images)
    with refused(RunError):
        personal_model(path, "0")
