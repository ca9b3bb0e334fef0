"""The pages about tasks: their scripts and their commands run as they stand."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from program import Dispfl, dispfl  # noqa: F401 (a fixture)

from dispfl.runs.directory import read_summary

DOCS = Path(__file__).parent.parent / "docs"


def run_page(name: str, folder: Path, program: Dispfl) -> list[str]:
    """Write and run the scripts of a page, then its commands; return their outputs."""
    page = (DOCS / name).read_text()
    for script in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S):
        file, code = script
        (folder / file).write_text(code)
        runpy.run_path(str(folder / file))
    outputs = []
    for commands in re.findall(r"```sh\n(.*?)```", page, re.S):
        for command in commands.splitlines():
            result = program(*shlex.split(command)[1:])
            assert result.code == 0, f"{command}\n{result.out}\n{result.err}"
            outputs.append(result.out)
    return outputs


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scores_of(run: str) -> dict[str, float]:
    summary = read_summary(Path(run))
    assert summary is not None
    return {name: values["mean"] for name, values in summary["scores"].items()}


def test_the_page_about_regression(tmp_path: Path, dispfl: Dispfl) -> None:  # noqa: F811
    page = (DOCS / "regression.md").read_text()
    [rows] = re.findall(r"```csv\n(.*?)```", page, re.S)
    (tmp_path / "new-houses.csv").write_text(rows)
    outputs = run_page("regression.md", tmp_path, dispfl)
    scores = scores_of("runs/houses")
    assert scores["r2"] > 0.7  # 0: always the mean
    assert 15_000 < scores["rmse"] < 70_000  # the noise alone has 20,000
    [heading, first, second] = outputs[-1].split("\n")[:3]
    assert heading.split() == ["row", "price"]
    for line, expected in ((first, 191_000), (second, 314_000)):
        assert float(line.split()[1]) == pytest.approx(expected, abs=60_000)


def test_the_page_about_several_labels(tmp_path: Path, dispfl: Dispfl) -> None:  # noqa: F811
    outputs = run_page("multilabel.md", tmp_path, dispfl)
    assert scores_of("runs/toys/dispfl/seed-0")["multilabel_f1"] > 0.75  # all labels: 0.6
    assert outputs[-1].split("\n")[0].split() == ["row", "red", "round", "heavy"]


def test_the_page_about_segmentation(tmp_path: Path, dispfl: Dispfl) -> None:  # noqa: F811
    outputs = run_page("segmentation.md", tmp_path, dispfl)
    assert scores_of("runs/shapes")["mean_iou"] > 0.6  # all ground: 0.4
    assert [line.split()[0] for line in outputs[-1].splitlines()] == ["ground", "disc"]
    assert (tmp_path / "predicted" / "1.png").exists()
    config = (tmp_path / "runs/shapes/config.toml").read_text()
    assert 'task = "segmentation"' in config
    assert json.loads((tmp_path / "runs/shapes/summary.json").read_text())["failures"] == 0


def test_the_page_about_texts(tmp_path: Path, dispfl: Dispfl) -> None:  # noqa: F811
    [rows] = re.findall(r"```csv\n(.*?)```", (DOCS / "text.md").read_text(), re.S)
    (tmp_path / "new-reviews.csv").write_text(rows)
    outputs = run_page("text.md", tmp_path, dispfl)
    assert scores_of("runs/reviews")["accuracy"] > 0.9
    assert [line.split()[1] for line in outputs[-1].splitlines()[1:3]] == ["keep", "return"]
