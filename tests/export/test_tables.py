"""Models for tables: the inputs of their files, the same results as at the site, and what is
refused."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from dispfl.cli import app
from dispfl.config import compose
from dispfl.export.formats import load_model, save_model
from dispfl.export.personal import personal_model, site_model
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.site_data import SiteData
from dispfl.peer.site import Site, SiteInfo
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.run import Run

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
COMMANDS = [line for line in re.findall(r"```sh\n(.*?)```", PAGE, re.S)[1].splitlines() if line]
ROWS = [
    (20 + 7 * k % 60, 1000 + 3 * k % 17, "ill" if 7 * k % 60 > 30 else "well") for k in range(60)
]
"""Two columns of very different size; the first determines the class."""


def write(path: Path, rows: list[tuple[int, int, str]]) -> Path:
    path.write_text(
        "age,pressure,diagnosis\n" + "".join(f"{age},{more},{label}\n" for age, more, label in rows)
    )
    return path


def dispfl(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site that has taken its two rounds, alone, on 40 rows; tested on 20 others."""
    folder = tmp_path_factory.mktemp("tables") / "clinic"
    data = {
        "path": "patients.csv",
        "test_path": "others.csv",
        "label": "diagnosis",
        "standardize": True,
    }
    train = {"epochs": 2, "batch_size": 8}
    config = SiteConfig.from_values({"data": data, "model": "mlp", "rounds": 2, "train": train})
    where = SiteInfo(name="clinic", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(folder, where, config.to_toml())
    write(folder / "patients.csv", ROWS[:40])
    write(folder / "others.csv", ROWS[40:])
    run_site(site)
    return site


@pytest.fixture(scope="module")
def model(clinic: Site) -> Path:
    path = clinic.folder.parent / "clinic.safetensors"
    assert dispfl("export", clinic.folder, "--to", path).exit_code == 0
    return path


def test_the_card_names_the_columns_in_order_and_how_each_is_scaled(clinic: Site) -> None:
    card = site_model(clinic.folder).card
    ages = torch.tensor([float(age) for age, _, _ in ROWS[:40]])
    assert (card.columns, card.label, card.shape) == (("age", "pressure"), "diagnosis", (2,))
    assert card.mean[0] == pytest.approx(float(ages.mean()), rel=1e-6)
    assert card.std[0] == pytest.approx(float(ages.std(correction=0)), rel=1e-6)
    assert card.classes == ("ill", "well")


@pytest.mark.parametrize("ending", [".safetensors", ".onnx", ".pt2"])
def test_raw_rows_get_the_probabilities_of_the_sites_own_model(
    clinic: Site, tmp_path: Path, ending: str
) -> None:
    if ending == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="the extra dispfl[export] is not installed")
    path = tmp_path / f"clinic{ending}"
    result = dispfl("export", clinic.folder, "--to", path)
    assert result.exit_code == 0, result.output
    assert "Rows (batch, 2) as in the table to probabilities (batch, 2)." in result.stdout
    scaled, labels = next(SiteData.read(clinic, clinic.config()).dataset.samples()[1].batches(20))
    personal = site_model(clinic.folder)
    with torch.no_grad():
        expected = personal.network.eval()(scaled).softmax(1)
    classifier = load_model(path, trust=True)
    assert classifier.card == personal.card
    raw = torch.tensor([[float(age), float(more)] for age, more, _ in ROWS[40:]])
    assert torch.allclose(classifier.outputs(raw), expected, atol=1e-5)
    predictions = classifier.predict([clinic.folder / "others.csv"])
    assert [one.guesses[0][0] for one in predictions] == [
        personal.card.classes[k] for k in expected.argmax(1)
    ]
    right = sum(
        one.guesses[0][0] == personal.card.classes[k]
        for one, k in zip(predictions, labels, strict=True)
    )
    assert right / 20 == personal.card.score


def test_a_table_that_changes_after_training_does_not_change_the_exported_model(
    clinic: Site, tmp_path: Path
) -> None:
    """100 children with another unit of pressure, another column, and then no table at all."""
    assert dispfl("export", clinic.folder, "--to", tmp_path / "before.safetensors").exit_code == 0
    table = clinic.folder / "patients.csv"
    content = table.read_text()
    try:
        with table.open("a") as file:
            file.writelines(f"{2 + k % 13},{14 + k / 100},well\n" for k in range(100))
        changed = dispfl("export", clinic.folder, "--to", tmp_path / "after.safetensors")
        assert changed.exit_code == 0, changed.output
        table.unlink()
        missing = dispfl("export", clinic.folder, "--to", tmp_path / "missing.safetensors")
        assert missing.exit_code == 0, missing.output
        assert Run.load(clinic.folder).model(0) is not None
    finally:
        table.write_text(content)
    before = load_model(tmp_path / "before.safetensors")
    patient = torch.tensor([[61.0, 1005.0]])
    for name in ("after", "missing"):
        after = load_model(tmp_path / f"{name}.safetensors")
        assert after.card == before.card
        assert torch.equal(after.outputs(patient), before.outputs(patient))


def test_the_models_of_a_simulation_keep_the_scaling_that_they_were_trained_with(
    tmp_path: Path,
) -> None:
    table = write(tmp_path / "patients.csv", ROWS)
    settings = ["data.label=diagnosis", "data.standardize=true", "model=mlp", "peers=2"]
    settings += ["rounds=1", "topology=full", "partition.samples_per_peer=20", "train.epochs=1"]
    experiment = compose({}, [f"data.path={table}", *settings])
    experiment.run(tmp_path / "run")
    card = personal_model(tmp_path / "run", "0").card
    model = Run.load(tmp_path / "run").model(0)
    write(table, [*ROWS, *[(2 + k % 13, 14 + k, "well") for k in range(100)]])
    assert personal_model(tmp_path / "run", "0").card == card
    table.unlink()
    assert personal_model(tmp_path / "run", "0").card == card
    rows = torch.rand(5, 2)
    assert torch.equal(Run.load(tmp_path / "run").model(0)(rows), model(rows))


def test_an_onnx_file_of_a_table_takes_rows(clinic: Site, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip(
        "onnxruntime", reason="the extra dispfl[export] is not installed"
    )
    assert dispfl("export", clinic.folder, "--to", tmp_path / "clinic.onnx").exit_code == 0
    session = onnxruntime.InferenceSession(
        tmp_path / "clinic.onnx", providers=["CPUExecutionProvider"]
    )
    [takes] = session.get_inputs()
    assert (takes.name, takes.shape) == ("rows", ["batch", 2])
    assert json.loads(session.get_modelmeta().custom_metadata_map["columns"]) == ["age", "pressure"]


def test_columns_are_found_by_name_and_the_label_is_ignored(model: Path, tmp_path: Path) -> None:
    """The same row three times: as in training, in another order without the label, and with a
    label left empty."""
    texts = [
        "age,pressure,diagnosis\n70,1005,well\n",
        "pressure;age\n1005;70\n",
        "diagnosis,age,pressure\n,70,1005\n",
    ]
    paths = [tmp_path / f"{k}.csv" for k in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    one, *others = load_model(model).predict(paths)
    assert one.guesses
    assert [other.guesses for other in others] == [one.guesses, one.guesses]


def test_rows_are_shown_by_file_and_line_and_as_json(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("age,pressure\n25,1001\n\n78,1001\n")
    shown = dispfl("predict", model, path)
    assert shown.exit_code == 0
    header, *lines = shown.stdout.splitlines()
    assert header.split() == ["row", "class", "or"]
    assert [line.split()[0] for line in lines] == [f"{path}:2", f"{path}:4"]
    printed = json.loads(dispfl("predict", model, path, "--json").stdout)
    assert [(one["table"], one["line"]) for one in printed] == [(str(path), 2), (str(path), 4)]
    assert all({guess["class"] for guess in one["top"]} == {"ill", "well"} for one in printed)


REFUSED_TABLES = {
    "incomplete": (
        "age,diagnosis\n50,ill\n",
        "FILE has no column 'pressure', which the model requires; add it.",
    ),
    "unknown": (
        "age,pressure,sex\n50,1,M\n",
        "FILE has a column 'sex', which the model does not know; remove it.",
    ),
    "empty": (
        "age,pressure\n50,\n",
        "FILE, line 2, column pressure: the value is missing; fill it in or remove the line",
    ),
    "absent": (None, "The table FILE does not exist."),
}
"""By name: the content of a table, and what is said of it."""


def test_tables_with_other_columns_are_refused_with_exit_code_1(
    model: Path, tmp_path: Path
) -> None:
    good = write(tmp_path / "good.csv", ROWS[:2])
    paths = {name: tmp_path / f"{name}.csv" for name in REFUSED_TABLES}
    for name, (text, _) in REFUSED_TABLES.items():
        if text is not None:
            paths[name].write_text(text)
    result = dispfl("predict", model, *paths.values(), good)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    for (_, sentence), path, line in zip(
        REFUSED_TABLES.values(), paths.values(), lines, strict=True
    ):
        assert line.replace(str(path), "FILE").startswith(f"dispfl: {sentence}")
    assert f"{good}:3" in result.stdout  # the other table is predicted all the same
    printed = json.loads(dispfl("predict", model, *paths.values(), good, "--json").stdout)
    for answer in printed[: len(paths)]:
        assert answer.keys() == {"table", "problem"}


def test_columns_that_were_not_standardized_are_not_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "patients.csv", ROWS)
    words = [
        "peers=2",
        "rounds=1",
        "topology=full",
        "partition.samples_per_peer=15",
        "partition.test_samples_per_peer=5",
        "model=mlp",
    ]
    data = {"data": {"path": "patients.csv", "label": "diagnosis"}}
    ExperimentRun.create(compose(data, words), tmp_path / "run").run()
    card = personal_model(tmp_path / "run", "1").card
    assert (card.columns, card.mean, card.std) == (("age", "pressure"), (0, 0), (1, 1))


def test_arrays_without_names_are_exported_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("signals.npz", x=np.random.default_rng(0).normal(size=(60, 5)), y=np.arange(60) % 2)
    words = [
        "peers=2",
        "rounds=1",
        "topology=full",
        "partition.samples_per_peer=15",
        "partition.test_samples_per_peer=5",
        "model=mlp",
    ]
    ExperimentRun.create(compose({"data": {"path": "signals.npz"}}, words), tmp_path / "run").run()
    personal = personal_model(tmp_path / "run", "1")
    save_model(personal.network, personal.card, tmp_path / "signals.safetensors")
    signals = torch.randn(3, 5)
    outputs = load_model(tmp_path / "signals.safetensors").outputs(signals)
    assert torch.equal(outputs, personal.network(signals).softmax(1))


def test_the_commands_on_the_page_export_and_try_a_model_for_tables(
    clinic: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra dispfl[export] is not installed")
    shutil.copytree(clinic.folder, tmp_path / "clinic")
    write(tmp_path / "patients.csv", ROWS[:3])
    monkeypatch.chdir(tmp_path)
    export, predict = (shlex.split(command, comments=True)[1:] for command in COMMANDS)
    assert dispfl(*export).exit_code == 0
    result = dispfl(*predict)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1 + 3
