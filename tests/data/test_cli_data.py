"""`dispfl data`, through its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dispfl.cli.data import app
from dispfl.data import datasets
from dispfl.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPFL_DATA", raising=False)
    monkeypatch.setenv("DISPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    (folder / "train.bin").touch()
    (folder / "test.bin").touch()
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
