"""The examples in the documentation run as they stand: every config, after the commands and the
code beside it."""

import re
import shlex
import tomllib
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.config import compose, read_toml
from dispfl.data.datasets import load_dataset
from dispfl.runs.execute import execute
from dispfl.runs.prepare import experiment_context, split_dataset

PAGE = (Path(__file__).parents[2] / "docs" / "custom-data.md").read_text()
COMMAND, BY_COLUMN, SHIFT, UNSEEN = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
[TABLE] = re.findall(r"```csv\n(.*?)```", PAGE, re.S)
ARRAYS, MODULE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
CONFIGS = re.findall(r"```toml\n(.*?)```", PAGE, re.S)


def write_what_the_page_speaks_of(folder: Path) -> None:
    """Its table with more lines, its arrays, its folder of scans, its module."""
    rng = np.random.default_rng(0)
    header, *shown = TABLE.splitlines()
    more = [
        f"{age:.1f},{bmi:.1f},120,{'ill' if age > 50 else 'well'}"
        for age, bmi in rng.normal([50, 25], 9, (400, 2))
    ]
    (folder / "patients.csv").write_text("\n".join([header, *shown, *more]))
    lines = [f"{line},{name}" for line, name in zip(more, "ABCDE" * 80, strict=True)]
    (folder / "hospitals.csv").write_text("\n".join([f"{header},hospital", *lines]))
    exec(compile(ARRAYS, "custom-data.md", "exec"), {})  # our own text
    for name, brightness in (("clear", 60), ("shadow", 160)):
        (folder / "scans" / name).mkdir(parents=True)
        for k in range(150):
            pixels = rng.integers(brightness, brightness + 60, (20, 30), np.uint8)
            Image.fromarray(pixels).save(folder / "scans" / name / f"{k}.png")
    (folder / "mine.py").write_text(MODULE)


@pytest.fixture
def workplace(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(site)
    write_what_the_page_speaks_of(site)
    return site


WORDS = [*shlex.split(COMMAND)[3:], "workers=1"]


@pytest.mark.parametrize("config", CONFIGS, ids=["table", "arrays", "folder", "hub", "function"])
def test_every_config_on_the_page_trains_with_the_settings_on_the_page(
    config: str, workplace: Path
) -> None:
    if "hub" in tomllib.loads(config)["data"]:
        datasets = pytest.importorskip("datasets")
        columns = zip(
            *(line.split(",") for line in (workplace / "patients.csv").read_text().splitlines()),
            strict=True,
        )
        table = {
            name: [v if name == "diagnosis" else float(v) for v in values]
            for name, *values in columns
        }
        datasets.Dataset.from_dict(table).save_to_disk("patients")
    (workplace / "my.toml").write_text(config)
    experiment = compose(read_toml(workplace / "my.toml"), WORDS)
    data = load_dataset(experiment.data)
    run = execute(experiment_context(experiment, data, split_dataset(experiment, data)))
    assert fmean(run.accuracy) > 0.6  # two classes: guessing gives a half


def test_the_command_on_the_page_writes_a_run_directory_with_its_data_settings(
    workplace: Path,
) -> None:
    (workplace / "my.toml").write_text(CONFIGS[-1])
    done = CliRunner().invoke(
        app, [*shlex.split(COMMAND)[1:], "rounds=1", "workers=1", "--out", "run"]
    )
    assert done.exception is None, done.output
    written = tomllib.loads((workplace / "run" / "config.toml").read_text())
    assert written["data"]["factory"] == "mine:load"
    assert written["model"] == {"name": "custom", "factory": "mine:Net"}


@pytest.mark.parametrize(
    ("command", "summary"),
    [
        (BY_COLUMN, "summary.json"),
        (f"{SHIFT.strip()} peers=3", "dispfl/seed-0/summary.json"),
        (f"{UNSEEN.strip()} peers=4", "summary.json"),
    ],
    ids=["by column", "shift", "unseen peers"],
)
def test_the_other_commands_on_the_page_run(command: str, summary: str, workplace: Path) -> None:
    arguments = [
        *shlex.split(command)[1:],
        "rounds=1",
        "workers=1",
        "train.epochs=1",
        "--out",
        "run",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None, done.output
    assert (workplace / "run" / summary).exists()
