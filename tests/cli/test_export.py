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
from dispfl.runs.execute import ExperimentRun

TINY = [
    "peers=3",
    "rounds=1",
    "topology=full",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
    "train.epochs=1",
]


def dispfl(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    ExperimentRun.create(compose({}, TINY), path).run()
    return path


@pytest.fixture(scope="module")
def model(finished: Path) -> Path:
    path = finished.parent / "model.safetensors"
    assert dispfl("export", finished, "--peer", "2", "--to", path).exit_code == 0
    return path


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """One of the model's size, one that is not, one that is not an image."""
    Image.new("L", (28, 28), 200).save(tmp_path / "small.png")
    Image.new("RGB", (64, 32), "red").save(tmp_path / "large [b].jpg")
    (tmp_path / "broken.png").write_text("no image")
    return [tmp_path / name for name in ("small.png", "large [b].jpg", "broken.png")]


def test_export_prints_the_peer_the_input_and_the_difference_from_torch(
    finished: Path, tmp_path: Path
) -> None:
    to = tmp_path / "model.safetensors"
    result = dispfl("export", finished, "--peer", "002", "--to", to)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"{to}: peer 002 of {finished} after 1 round, accuracy ")
    assert first.endswith(" on its test data; 0.43 MB.")
    assert rest == [
        "Images (batch, 1, 28, 28) in [0, 1] to probabilities (batch, 10).",
        "Largest difference from torch: 0.0e+00.",
    ]
    with safetensors.safe_open(to, "pt") as file:
        assert (file.metadata()["peer"], file.metadata()["data"]) == ("002", "fashion-sample")


def test_an_unknown_suffix_is_refused_first(tmp_path: Path) -> None:
    result = dispfl("export", tmp_path / "no-run", "--peer", "0", "--to", "model.pickle")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "model.pickle must end in .safetensors, .onnx or .pt2."


def test_a_missing_extra_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    result = dispfl("export", tmp_path / "no-run", "--peer", "0", "--to", "model.onnx")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).endswith("which is not installed: pip install 'dispfl[export]'.")


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    result = dispfl("export", tmp_path, "--peer", "0", "--to", tmp_path / "model.pt2")
    assert isinstance(result.exception, RunError)
    assert str(result.exception) == f"{tmp_path} is not a run directory: it has no config.toml."


def test_an_unwritable_path_is_refused(finished: Path, tmp_path: Path) -> None:
    result = dispfl("export", finished, "--peer", "0", "--to", tmp_path / "none/model.safetensors")
    assert isinstance(result.exception, RunError)
    assert str(result.exception).startswith(
        f"{tmp_path / 'none/model.safetensors'} could not be written: "
    )


def test_one_image_is_shown_with_three_classes_and_their_probabilities(
    model: Path, images: list[Path]
) -> None:
    result = dispfl("predict", model, images[0])
    assert result.exit_code == 0
    evaluates_global = [
        float(line.rstrip("%").rsplit(maxsplit=1)[1]) for line in result.stdout.splitlines()
    ]
    assert len(evaluates_global) == 3
    assert evaluates_global == sorted(evaluates_global, reverse=True)


def test_several_images_are_shown_as_a_table_and_an_unreadable_one_gives_exit_code_1(
    model: Path, images: list[Path]
) -> None:
    small, large, broken = images
    result = dispfl("predict", model, *images)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["image", "class", "or"]
    assert [
        line.startswith(str(path)) for line, path in zip(lines[1:3], (small, large), strict=True)
    ] == [True, True]
    assert lines[3:] == [f"{large} was resized from 64x32 to 28x28."]
    assert (
        result.stderr
        == f"dispfl: The image {broken} cannot be read: not an image; use PNG or JPEG.\n"
    )


def test_json_is_a_list_with_guesses_or_a_problem_for_each_image(
    model: Path, images: list[Path]
) -> None:
    result = dispfl("predict", model, *images, "--json")
    assert result.exit_code == 1
    small, large, broken = json.loads(result.stdout)
    assert (small["image"], small["resized_from"], large["resized_from"]) == (
        str(images[0]),
        None,
        [64, 32],
    )
    for found in (small, large):
        assert len(found["top"]) == 3
        assert (
            found["top"][0]["probability"]
            >= found["top"][1]["probability"]
            >= found["top"][2]["probability"]
        )
        assert found["top"][0].keys() == {"class", "probability"}
    assert broken.keys() == {"image", "problem"}


def test_a_pt2_needs_trust(tmp_path: Path, images: list[Path]) -> None:
    result = dispfl("predict", tmp_path / "model.pt2", images[0])
    assert isinstance(result.exception, DataError)
    assert "add --trust" in str(result.exception)
