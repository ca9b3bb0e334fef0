"""Whose model is exported: of every method, of runs that are finished or cut, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dispfl import Federation, Full
from dispfl.errors import ConfigError, DataError, RunError
from dispfl.export.personal import Personal, personal_model
from dispfl.methods.registry import METHODS
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.split import FILE as SPLIT

MakeRun = Callable[..., Path]


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.mark.parametrize("method", METHODS)
def test_the_exported_weights_and_accuracy_are_those_of_the_summary(
    tmp_path: Path, make_run: MakeRun, method: str
) -> None:
    """Own models, a server's, a consensus, the server's under a mask, and fine-tuned ones: bit for bit."""
    path = make_run(tmp_path / "run", f"method={method}", "threads=1")
    summary = read_summary(path)
    assert summary is not None
    card = personal_model(path, "2").card
    assert card.weights_sha256 == summary["weights_sha256"][2]
    assert card.accuracy == summary["accuracy"]["per_peer"][2]
    assert (card.method, card.rounds, card.peer) == (method, 2, "002")


def test_the_card_says_where_the_model_comes_from(personal: Personal) -> None:
    card = personal.card
    assert (card.data, card.method, card.seed, card.rounds, card.peer) == ("fashion-sample", "dispfl", 0, 2, "001")
    assert card.classes[9] == "Ankle boot"
    assert (card.shape, card.mean, card.std) == ((1, 28, 28), (0.286,), (0.353,))
    assert card.model is not None
    assert card.model.name == "cnn"


def test_a_place_and_a_name_are_the_same_peer(finished: Path, personal: Personal) -> None:
    assert personal_model(finished, "001").card == personal_model(finished, "1").card == personal.card
    assert personal_model(finished, "0").card.weights_sha256 != personal.card.weights_sha256


@pytest.mark.parametrize("peer", ["4", "-1", "server", "", "²"])
def test_a_peer_that_does_not_exist_is_a_sentence(finished: Path, peer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        personal_model(finished, peer)
    assert str(refused.value) == f"There is no peer {peer} in {finished}; there are 4, from 000 to 003."


def test_a_cut_run_gives_its_newest_complete_checkpoint(copy: Path) -> None:
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints/round-000002")
    card = personal_model(copy, "0").card
    assert card.rounds == 1
    assert card.accuracy == read_metrics(copy)[0]["accuracy"]["per_peer"][0]


def test_a_round_that_was_not_scored_has_no_accuracy(copy: Path) -> None:
    records = [{**record, "accuracy": None} for record in read_metrics(copy)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert personal_model(copy, "0").card.accuracy is None


def test_a_run_trained_on_another_device_is_exported_on_this_one(copy: Path, personal: Personal) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert personal_model(copy, "1").card == personal.card


def test_a_run_without_a_finished_round_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RunError, match="has no complete checkpoint"):
        personal_model(copy, "0")


def test_tuning_needs_the_runs_split_and_leaves_the_callers_threads_and_random_numbers_alone(
    tmp_path: Path, make_run: MakeRun
) -> None:
    path = make_run(tmp_path / "run", "method=fedavg-ft", "threads=6")
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    personal_model(path, "0")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    (path / SPLIT).unlink()
    with pytest.raises(RunError, match=r"run has no split.safetensors, which says whose data are whose"):
        personal_model(path, "0")


def test_a_checkpoint_of_another_network_is_refused(copy: Path) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('name = "cnn"', 'name = "resnet18"'))
    with pytest.raises(RunError, match=r"The checkpoint has 105,962 weights; the run's network has 11,172,810"):
        personal_model(copy, "0")


def test_a_federation_made_in_python_is_exported_there(tmp_path: Path) -> None:
    x = torch.randn(2, 8, 4)
    data = [((x[k], x[k, :, :2].argmax(1)), (x[k], x[k, :, :2].argmax(1))) for k in range(2)]
    Federation(model=lambda: nn.Linear(4, 2), peers=data, topology=Full()).run(1, out=tmp_path / "own")
    with pytest.raises(
        RunError, match=r"own was made in Python, .*formats\.save\(run\.model\(1\), Card\(\.\.\.\), PATH\)"
    ):
        personal_model(tmp_path / "own", "1")


@pytest.fixture
def hundred_classes(tmp_path: Path) -> Path:
    """CIFAR-100's binary files with four training pictures and one test picture of each class, and its names."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, each in (("train", 4), ("test", 1)):
        labels = np.tile(np.arange(100, dtype=np.uint8), each)
        pixels = np.zeros((len(labels), 3 * 32 * 32), np.uint8)
        (folder / f"{name}.bin").write_bytes(np.column_stack([labels, labels, pixels]).tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"kind-{number}\n" for number in range(100)))
    return folder


def test_class_names_that_only_the_data_know_are_read_from_them_wherever_they_are_now(
    tmp_path: Path, make_run: MakeRun, hundred_classes: Path
) -> None:
    path = make_run(tmp_path / "run", "data=cifar100", f"data.dir='{hundred_classes}'", "partition=iid")
    moved = hundred_classes.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="The files of cifar100 were not found"):
        personal_model(path, "0")
    card = personal_model(path, "0", data_dir=moved).card
    assert (card.classes[0], card.classes[99], card.shape) == ("kind-0", "kind-99", (3, 32, 32))


def test_a_model_is_not_tuned_on_other_data_than_the_runs(
    tmp_path: Path, make_run: MakeRun, hundred_classes: Path
) -> None:
    words = ["data=cifar100", f"data.dir='{hundred_classes}'", "partition=iid", "method=fedavg-ft", "rounds=1"]
    path = make_run(tmp_path / "run", *words)
    pictures = bytearray((hundred_classes / "train.bin").read_bytes())
    pictures[1 :: 2 + 3 * 32 * 32] = bytes(reversed(pictures[1 :: 2 + 3 * 32 * 32]))  # the fine labels
    (hundred_classes / "train.bin").write_bytes(pictures)
    with pytest.raises(RunError, match=r"cifar100 is not the one that .*run was run with: its labels differ\."):
        personal_model(path, "0")
