"""`dispfl export` and `dispfl predict`, as a user types them."""

import json
import sys
from pathlib import Path

import pytest
import safetensors
from PIL import Image
from typer.testing import CliRunner, Result

from dispfl.cli import app
from dispfl.config import compose
from dispfl.errors import ConfigError, DataError, RunError
from dispfl.launch import Launch
from dispfl.runs.loop import Progress

TINY = ["peers=3", "rounds=1", "topology=full", "partition.samples=20", "partition.test_samples=10", "train.epochs=1"]


def dispfl(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    Launch.begin(compose({}, TINY), path).run(Progress())
    return path


@pytest.fixture(scope="module")
def model(finished: Path) -> Path:
    path = finished.parent / "model.safetensors"
    assert dispfl("export", finished, "--peer", "2", "--to", path).exit_code == 0
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """One of the model's size, one that is not, one that is no picture."""
    Image.new("L", (28, 28), 200).save(tmp_path / "small.png")
    Image.new("RGB", (64, 32), "red").save(tmp_path / "large [b].jpg")
    (tmp_path / "broken.png").write_text("no picture")
    return [tmp_path / name for name in ("small.png", "large [b].jpg", "broken.png")]


def test_export_says_whose_model_it_wrote_what_it_takes_and_how_near_it_is(finished: Path, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    result = dispfl("export", finished, "--peer", "002", "--to", to)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"{to}: peer 002 of {finished} after 1 round, accuracy ")
    assert first.endswith(" on its own test data; 0.43 MB.")
    assert rest == [
        "Pictures (batch, 1, 28, 28) in [0, 1] to probabilities (batch, 10).",
        "Largest difference from torch: 0.0e+00.",
    ]
    with safetensors.safe_open(to, "pt") as file:
        assert (file.metadata()["peer"], file.metadata()["data"]) == ("002", "fashion-sample")


def test_a_wrong_ending_is_noticed_before_anything_else(tmp_path: Path) -> None:
    result = dispfl("export", tmp_path / "no-run", "--peer", "0", "--to", "model.pickle")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "model.pickle must end in .safetensors, .onnx or .pt2."


def test_a_missing_extra_is_noticed_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported
    result = dispfl("export", tmp_path / "no-run", "--peer", "0", "--to", "model.onnx")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith("which is not installed: pip install 'dispfl[onnx]'.")


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path: Path) -> None:
    result = dispfl("export", tmp_path, "--peer", "0", "--to", tmp_path / "model.pt2")
    assert isinstance(result.exception, RunError)
    assert str(result.exception) == f"{tmp_path} is not a run directory: it has no config.toml."


def test_a_place_that_cannot_be_written_is_a_sentence(finished: Path, tmp_path: Path) -> None:
    result = dispfl("export", finished, "--peer", "0", "--to", tmp_path / "none/model.safetensors")
    assert isinstance(result.exception, RunError)
    assert str(result.exception).startswith(f"{tmp_path / 'none/model.safetensors'} could not be written: ")


def test_one_picture_gets_three_classes_with_their_probabilities(model: Path, pictures: list[Path]) -> None:
    result = dispfl("predict", model, pictures[0])
    assert result.exit_code == 0
    shares = [float(line.rstrip("%").rsplit(maxsplit=1)[1]) for line in result.stdout.splitlines()]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)


def test_several_pictures_are_a_table_and_a_bad_one_a_sentence_and_exit_code_1(
    model: Path, pictures: list[Path]
) -> None:
    small, large, broken = pictures
    result = dispfl("predict", model, *pictures)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["picture", "class", "or"]
    assert [line.startswith(str(path)) for line, path in zip(lines[1:3], (small, large), strict=True)] == [True, True]
    assert lines[3:] == [f"{large} was resized from 64x32 to 28x28."]
    assert result.stderr == f"dispfl: The picture {broken} cannot be read: not a picture; PNG and JPEG are.\n"


def test_json_is_a_list_with_guesses_or_a_problem_for_each_picture(model: Path, pictures: list[Path]) -> None:
    result = dispfl("predict", model, *pictures, "--json")
    assert result.exit_code == 1
    small, large, broken = json.loads(result.stdout)
    assert (small["picture"], small["resized_from"], large["resized_from"]) == (str(pictures[0]), None, [64, 32])
    for found in (small, large):
        assert len(found["top"]) == 3
        assert found["top"][0]["probability"] >= found["top"][1]["probability"] >= found["top"][2]["probability"]
        assert found["top"][0].keys() == {"class", "probability"}
    assert broken.keys() == {"picture", "problem"}


def test_a_pt2_needs_trust(tmp_path: Path, pictures: list[Path]) -> None:
    result = dispfl("predict", tmp_path / "model.pt2", pictures[0])
    assert isinstance(result.exception, DataError)
    assert "add --trust" in str(result.exception)
