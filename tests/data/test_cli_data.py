"""`dispfl data`, through its command line."""

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import dispfl
from dispfl.cli.data import app
from dispfl.data import datasets
from dispfl.errors import ConfigError, DataError
from dispfl.runs.directory import layout_of


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPFL_DATA", raising=False)
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, images in (("train", 50_000), ("test", 10_000)):
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(images * (2 + 3 * 32 * 32))  # sparse
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def test_list_shows_where_each_data_set_is_or_how_to_download_it(cifar100: Path) -> None:
    result = run("list", "--data-dir", str(cifar100.parent))
    assert result.exit_code == 0
    rows = {line.split()[0]: " ".join(line.split()) for line in result.stdout.splitlines()}
    assert rows["fashion-sample"] == "fashion-sample 4,000 + 2,000 10 1x28x28 bundled"
    assert rows["cifar100"] == f"cifar100 50,000 + 10,000 100 3x32x32 {cifar100}"
    assert rows["cifar10"].endswith("3x32x32 not found: dispfl data get cifar10 (170 MB)")
    assert len(rows) == 1 + len(datasets.DATASETS)


def test_list_as_json_is_one_record_per_data_set(
    cifar100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPFL_DATA", str(cifar100.parent))
    records = {record["name"]: record for record in json.loads(run("list", "--json").stdout)}
    assert list(records) == list(datasets.DATASETS)
    assert records["cifar100"]["path"] == str(cifar100)
    assert records["mnist"]["path"] is None
    assert records["tiny-imagenet"]["shape"] == [3, 64, 64]
    assert records["cifar10"]["download_bytes"] == 170_052_171


def test_path_prints_the_folder_alone(cifar100: Path) -> None:
    result = run("path", "cifar100", "--data-dir", str(cifar100))
    assert result.stdout == f"{cifar100}\n"
    as_json = run("path", "cifar100", "--data-dir", str(cifar100), "--json")
    assert json.loads(as_json.stdout) == {"name": "cifar100", "path": str(cifar100)}


def test_path_of_a_missing_data_set_is_a_data_error_with_the_fix() -> None:
    error = run("path", "mnist").exception
    assert isinstance(error, DataError)
    assert "dispfl data get mnist" in str(error)


def test_get_prints_an_existing_folder_without_a_download(cifar100: Path) -> None:
    result = run("get", "fashion-sample", "cifar100", "--data-dir", str(cifar100.parent))
    assert result.exit_code == 0
    assert [Path(line).name for line in result.stdout.splitlines()] == [
        "bundled",
        "cifar-100-binary",
    ]


def test_get_refuses_a_mistyped_name_before_it_downloads_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "DISPFL_MIRROR", "http://127.0.0.1:9"
    )  # a download would fail there with a DataError
    error = run("get", "mnist", "cifar1").exception
    assert isinstance(error, ConfigError)
    assert "Did you mean cifar10?" in str(error)


@pytest.mark.parametrize("command", ["list", "path", "get"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: dispfl data {command}" in run(command, "--help").stdout


def test_list_does_not_import_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from dispfl.cli.data import app; "
        "assert CliRunner().invoke(app, ['list']).exit_code == 0; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    """Two classes of Tiny-ImageNet, with three training images and one test image each."""
    folder = tmp_path / "data" / "tiny-imagenet-200"
    lines = []
    for label, wnid in enumerate(("n01", "n02")):
        for number in range(4):
            is_test = number == 3
            place = "val/images" if is_test else f"train/{wnid}/images"
            image = folder / place / f"{wnid}_{number}.JPEG"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (100 * label, 9 * number, 0)).save(image, "JPEG")
        lines.append(f"{wnid}_3.JPEG\t{wnid}\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


MISSING = "2 of 200 classes, 6 of 100,000 training images, 2 of 10,000 test images"


def test_list_counts_what_an_incomplete_data_set_has(two_classes: Path) -> None:
    words = ("list", "--data-dir", str(two_classes.parent))
    rows = {line.split()[0]: " ".join(line.split()) for line in run(*words).stdout.splitlines()}
    assert rows["tiny-imagenet"].startswith("tiny-imagenet 6 + 2 2 3x64x64")
    assert rows["tiny-imagenet"].endswith(f"(not complete: {MISSING})")
    records = {record["name"]: record for record in json.loads(run(*words, "--json").stdout)}
    incomplete = records["tiny-imagenet"]
    assert [incomplete[key] for key in ("classes", "train", "test")] == [2, 6, 2]
    assert not incomplete["complete"]
    assert records["fashion-sample"]["complete"]


def test_a_run_with_an_incomplete_data_set_says_so_and_its_models_can_be_loaded(
    two_classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "data": {"name": "tiny-imagenet", "dir": str(two_classes)},
        "partition": {"name": "iid", "test_samples_per_peer": 2},
        "topology": "full",
        "peers": 2,
        "rounds": 1,
    }
    made = dispfl.run(settings, out=tmp_path / "run", progress=False)
    assert f"tiny-imagenet in {two_classes} is not complete: it has {MISSING}." in caplog.messages
    loaded = dispfl.Run.load(tmp_path / "run")
    assert loaded.model(0).state_dict().keys() == made.model(0).state_dict().keys()
    assert layout_of(tmp_path / "run").size == loaded.states["000"].model.mask.size


@pytest.mark.parametrize("packed", [False, True])
def test_the_headers_of_idx_files_tell_the_number_of_images(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for prefix, count in (("train", 60_000), ("t10k", 12)):
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            header = struct.pack(">II", 0x801, count)
            suffix = ".gz" if packed else ""
            content = gzip.compress(header) if packed else header
            (folder / f"{prefix}-{name}{suffix}").write_bytes(content)
    rows = run("list", "--data-dir", str(tmp_path / "data")).stdout
    assert "(not complete: 12 of 10,000 test images)" in " ".join(rows.split())
