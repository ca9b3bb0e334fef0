"""The commands and the code in the documentation run as they stand."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.data.datasets import Data, load_dataset
from dispfl.data.labelled import ImageDataset
from dispfl.export.formats import load_model

NEEDED = ("onnx", "onnxscript", "onnxruntime")
pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in NEEDED),  # they are slow to import
    reason="the extra dispfl[export] is not installed",
)
PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
DEPLOY, OWN = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = [line for line in re.findall(r"```sh\n(.*?)```", PAGE, re.S)[0].splitlines() if line]


def words(command: str) -> list[str]:
    """What follows `dispfl`, without the comment."""
    return shlex.split(command, comments=True)[1:]


@pytest.fixture
def workplace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run and the image that the page uses."""
    shutil.copytree(finished, tmp_path / "runs/mine")
    data = load_dataset(Data())
    assert isinstance(data, ImageDataset)
    boot = int((data.test_labels == data.classes.index("Ankle boot")).nonzero()[0])
    Image.fromarray(data.test_inputs[boot, 0].numpy()).save(tmp_path / "boot.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_dispfl_predict_and_the_ten_lines_with_onnxruntime_agree(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, of_a_site, predict = COMMANDS
    assert words(of_a_site)[:2] == ["export", "alice"]  # tried in test_site_model.py
    # In a separate process, because torch emits most of its warnings once per process, during
    # import.
    program = Path(sys.executable).with_name("dispfl")
    done = subprocess.run([program, *words(export)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")  # none of them reaches the user
    assert len(done.stdout.splitlines()) == 3

    shown = CliRunner().invoke(app, words(predict))
    assert len(shown.stdout.splitlines()) == 3
    best = json.loads(CliRunner().invoke(app, [*words(predict), "--json"]).stdout)[0]["top"][0]
    assert shown.stdout.startswith(best["class"])

    exec(compile(DEPLOY, "export.md", "exec"), {})  # our own text
    name, probability = capsys.readouterr().out.rsplit(maxsplit=1)
    assert name == best["class"]
    assert float(probability) == pytest.approx(best["probability"], abs=1e-6)
    assert (
        len(
            [
                line
                for line in DEPLOY.splitlines()
                if line and not line.startswith(("import", "from"))
            ]
        )
        <= 10
    )


def test_a_custom_network_is_exported_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(OWN, "export.md", "exec"), names)  # our own text
    model = load_model(Path("site-3.onnx"))
    assert model.card == names["card"]
    with torch.no_grad():
        expected = names["run"].model(3)(names["inputs"][3]).softmax(1)
    assert torch.allclose(model.outputs(names["images"][3]), expected, atol=1e-5)
