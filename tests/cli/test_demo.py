"""`dispfl demo`: both methods side by side, a table and figures; here with fewer peers and
rounds."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dispfl.config
import dispfl.runs.execute  # before `compose` is replaced, so that it keeps the real one
from dispfl.cli import app
from dispfl.cli.run import DEMO_METHODS
from dispfl.config import compose
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.runs.directory import read_config, read_metrics, read_summary

SMALLER = [
    "peers=3",
    "rounds=2",
    "topology.degree=2",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
]


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def smaller(config: Mapping[str, Any], overrides: Iterable[str] = ()) -> Experiment:
        return compose(config, [*SMALLER, *overrides])

    assert vars(dispfl.runs.execute)["compose"] is compose
    monkeypatch.setattr(dispfl.config, "compose", smaller)
    monkeypatch.chdir(tmp_path)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the image's header."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">2I", content[16:24])
    return width, height


def test_all_four_methods_run_and_are_in_one_table_with_their_curves(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.exception
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    rounds = [line[:3] for line in lines if "round" in line]
    assert rounds == [[method, "round", f"{t}/2"] for method in DEMO_METHODS for t in (1, 2)]
    labels = ("Dis-PFL", "Local", "FedAvg", "D-PSGD")
    assert [line[:2] for line in lines if line[0] in labels] == [[label, "2"] for label in labels]
    assert (
        " ".join(lines[-1])
        == "Learning curves: runs/demo/learning-curves.png. Everything on one page:"
        " runs/demo/report.html"
    )
    for method in DEMO_METHODS:
        run = tmp_path / "runs/demo" / method
        summary = read_summary(run)
        assert summary is not None
        assert summary["method"] == method
        assert len(read_metrics(run)) == 2
        assert png_size(run / "learning-curve.png") == (1050, 630)  # 7 x 4.2 inches at 150 dots
    assert png_size(tmp_path / "runs/demo/learning-curves.png") == (1050, 630)


def test_both_methods_have_the_same_peers_data_and_seed_and_local_sends_nothing(
    tmp_path: Path,
) -> None:
    assert CliRunner().invoke(app, ["demo", "--seed", "5", "--out", "mine"]).exit_code == 0
    one, other = (tmp_path / "mine" / method for method in ("dispfl", "local"))
    assert (one / "split.safetensors").read_bytes() == (other / "split.safetensors").read_bytes()
    assert read_config(one)["seed"] == read_config(other)["seed"] == 5
    traffic = [
        [record["busiest"]["paper_mb"] > 0 for record in read_metrics(run)] for run in (one, other)
    ]
    assert traffic == [[True, True], [False, False]]


def test_a_second_demo_uses_the_next_free_folder_and_a_given_one_is_not_overwritten(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs/demo").mkdir(parents=True)
    result = CliRunner().invoke(app, ["demo"])
    assert (
        result.stdout.splitlines()[-1]
        == "Learning curves: runs/demo-2/learning-curves.png. Everything on one page:"
        " runs/demo-2/report.html"
    )
    again = CliRunner().invoke(app, ["demo", "--out", "runs/demo-2"])
    assert isinstance(again.exception, RunError)
    assert str(again.exception).startswith("The run directory runs/demo-2/dispfl exists already.")


def test_a_negative_seed_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--seed", "-1"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "seed must be at least 0, got -1."
    assert list(tmp_path.iterdir()) == []
