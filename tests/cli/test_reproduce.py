"""`dispfl reproduce` on the command line, with experiments that take a second."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from dispfl.cli.reproduce import reproduce
from dispfl.errors import ConfigError, DataError

APP = typer.Typer()
APP.command()(reproduce)
TINY = [
    "peers=4",
    "rounds=2",
    "topology.degree=2",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]
CUSTOM = """
peers = 3
rounds = 2
workers = 1

[partition]
name = "dirichlet"
samples_per_peer = 8
test_samples_per_peer = 4

[topology]
name = "random"
degree = 2

[train]
epochs = 1

[reproduce]
shows = "Table 1"
title = "Two methods."
label = "centralized-main-table"
beside = { data = "cifar10", model = "resnet18" }
parts = [
    { partition = { name = "dirichlet", alpha = 0.3 } },
    { partition = { name = "pathological", classes = 2, samples_per_peer = 8, \
test_samples_per_peer = 4 } },
]
rows = [{ method = "local" }, { method = { name = "dispfl", density = 0.5 } }]
"""


@dataclass(frozen=True)
class CommandResult:
    code: int
    output: str
    """Both streams, as on a terminal."""
    stdout: str
    exception: BaseException | None


def dispfl_reproduce(*arguments: str | Path) -> CommandResult:
    result = CliRunner().invoke(APP, [*map(str, arguments)], env={"COLUMNS": "80"})
    return CommandResult(result.exit_code, result.output, result.stdout, result.exception)


def refusal(kind: type[Exception], *arguments: str | Path) -> str:
    """Return the message of an expected error."""
    result = dispfl_reproduce(*arguments)
    assert isinstance(result.exception, kind)
    return str(result.exception)


def rounds_run(result: CommandResult) -> int:
    return sum(line.startswith("run ") for line in result.output.splitlines())


def test_an_experiment_prints_both_numbers_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    (tmp_path / "main.toml").write_text(CUSTOM)
    arguments: list[str | Path] = [tmp_path / "main.toml", "--out", tmp_path / "out"]
    first = dispfl_reproduce(*arguments, "--only", "local")
    assert first.code == 0, first.output
    assert first.output.splitlines()[0] == "Table 1: Two methods. 2 runs, 0 done."
    assert rounds_run(first) == 4
    assert [line.split()[:2] for line in first.output.splitlines() if line.startswith("local")] == [
        ["local", "61.55"]
    ]

    again = dispfl_reproduce(*arguments)
    assert again.output.splitlines()[0] == "Table 1: Two methods. 4 runs, 2 done."
    assert rounds_run(again) == 4  # those of Dis-PFL only
    assert "Not the paper's experiment: fashion-sample instead of cifar10" in again.output
    assert "Table 1, the paper's resnet18 on cifar10" in again.output
    [dispfl] = [line.split() for line in again.output.splitlines() if line.startswith("dispfl")]
    found = json.loads((tmp_path / "out/main/results.json").read_text())
    ours = [row["ours"] for row in found["rows"] if row["place"]["method"] == "dispfl"]
    accuracies = [f"{100 * row['accuracy']:.1f}" for row in ours]
    assert dispfl[:6] == ["dispfl", "85.70", accuracies[0], "91.05", accuracies[1], "223.4"]
    assert found["files"] == [
        "beside-paper.md",
        *(f"comparison.{ending}" for ending in ("md", "tex", "csv", "json")),
    ]
    assert all((tmp_path / "out/main" / file).exists() for file in found["files"])
    assert (
        (tmp_path / "out/main/beside-paper.md")
        .read_text()
        .startswith("## Table 1: Two methods.\n\nNot the paper's")
    )

    done = dispfl_reproduce(*arguments, "--json")
    assert json.loads(done.stdout) == {"name": "main", "scale": "laptop", **found}
    assert rounds_run(done) == 0


def test_a_variant_is_a_row_of_its_own_without_the_papers_numbers(tmp_path: Path) -> None:
    channels = (
        '{ variant = "channels", method = { name = "dispfl", density = 0.5, structure ='
        ' "channels" } }'
    )
    custom = CUSTOM.replace("label =", 'figure = "curves"\nlabel =').replace(
        "density = 0.5 } }]", f"density = 0.5 }} }}, {channels}]"
    )
    (tmp_path / "custom.toml").write_text(custom)
    result = dispfl_reproduce(
        tmp_path / "custom.toml", "--only", "dispfl,dirichlet", "--out", tmp_path, "rounds=1"
    )
    rows = [line.split()[:3] for line in result.output.splitlines() if line.startswith("dispfl ")]
    assert rows == [["dispfl", "–", "85.70"], ["dispfl", "channels", "–"]]
    found = json.loads((tmp_path / "custom/results.json").read_text())["rows"]
    assert [row["place"]["variant"] for row in found] == ["–", "channels"]
    assert [row["paper"] is None for row in found] == [False, True]
    assert (tmp_path / "custom/curves.png").stat().st_size > 1000


def test_targets_are_columns_and_costs_a_figure_without_a_table_of_the_paper(
    tmp_path: Path,
) -> None:
    custom = CUSTOM.replace('label = "centralized-main-table"', 'figure = "costs"').replace(
        "alpha = 0.3 } }", "alpha = 0.3 }, targets = [0.01, 0.99] }"
    )
    (tmp_path / "custom.toml").write_text(custom)
    result = dispfl_reproduce(tmp_path / "custom.toml", "--only", "dirichlet", "--out", tmp_path)
    rows = csv.DictReader((tmp_path / "custom/comparison.csv").read_text().splitlines())
    assert [[row["rounds_to_0.01"], row["rounds_to_0.99"]] for row in rows] == [
        ["1.0", ""],
        ["1.0", ""],
    ]
    assert "the first evaluated round that reaches it" in result.output
    with Image.open(tmp_path / "custom/costs.png") as image:
        assert image.width > 2.5 * image.height


def test_rows_are_compared_at_equal_bytes_with_the_row_that_the_file_names(tmp_path: Path) -> None:
    """D-PSGD sends more than three times as much as Dis-PFL, not four: it has one round where that
    has four."""
    custom = (
        CUSTOM.replace("peers = 3", "peers = 8")
        .replace("rounds = 2", "rounds = 4")
        .replace('shows = "Table 1"', 'shows = "Table 1"\nagainst = { method = "dpsgd" }')
    )
    (tmp_path / "custom.toml").write_text(custom.replace('"local"', '"dpsgd"'))
    result = dispfl_reproduce(
        tmp_path / "custom.toml", "--only", "dirichlet", "--budget", "bytes", "--out", tmp_path
    )
    output = result.output.splitlines()
    [verdict] = [
        line
        for line in output
        if line.startswith("Against dpsgd on dirichlet, in accuracy: dispfl ")
    ]
    assert "[" in verdict
    assert "Compared at equal bytes: " in result.output
    for name, dense in (("comparison", "4.0"), ("comparison-bytes", "1.0")):
        rows = csv.DictReader((tmp_path / f"custom/{name}.csv").read_text().splitlines())
        assert {row["method"]: row["round"] for row in rows} == {"dpsgd": dense, "dispfl": "4.0"}
    found = json.loads((tmp_path / "custom/results.json").read_text())
    assert found["at_equal"]["budget"]["of"] == "bytes"
    last = [
        row["ours"]["accuracy"] for row in found["rows"]
    ]  # beside the paper's are those of the last round
    assert [row["score"]["mean"] for row in found["at_equal"]["rows"]][1] == last[1]


def test_rows_are_compared_at_equal_hours_of_a_fleet(tmp_path: Path) -> None:
    """Dis-PFL's messages are smaller than D-PSGD's: in the hours of its rounds, that has fewer."""
    custom = CUSTOM.replace("peers = 3", "peers = 8").replace("rounds = 2", "rounds = 4")
    (tmp_path / "custom.toml").write_text(custom.replace('"local"', '"dpsgd"'))
    result = dispfl_reproduce(
        tmp_path / "custom.toml", "fleet=phones", "--only", "dirichlet", "--budget", "hours",
        "--out", tmp_path,
    )  # fmt: skip
    assert "Compared at equal simulated time: " in result.output
    rows = csv.DictReader((tmp_path / "custom/comparison-hours.csv").read_text().splitlines())
    rounds = {row["method"]: float(row["round"]) for row in rows}
    assert rounds["dpsgd"] < rounds["dispfl"] == 4


def test_a_file_cannot_compare_with_a_row_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "custom.toml").write_text(
        CUSTOM.replace("label =", 'against = { method = "ditto" }\nlabel =')
    )
    assert (
        refusal(ConfigError, tmp_path / "custom.toml")
        == "reproduce.against must name a row by partition, method, density; no row has {'method':"
        " 'ditto'}."
    )
    (tmp_path / "custom.toml").write_text(
        CUSTOM.replace("label =", 'against = { data = "cifar10" }\nlabel =')
    )
    assert "no row has {'data': 'cifar10'}" in refusal(
        ConfigError, tmp_path / "custom.toml"
    )  # all rows have it


def test_another_seed_is_another_run_of_the_same_row(tmp_path: Path) -> None:
    (tmp_path / "custom.toml").write_text(CUSTOM)
    result = dispfl_reproduce(
        tmp_path / "custom.toml", "--only", "local,dirichlet", "--seeds", "2", "--out", tmp_path
    )
    assert result.output.splitlines()[0] == "Table 1: Two methods. 2 runs, 0 done."
    assert "Not one of the paper's experiments." in result.output
    [row] = json.loads((tmp_path / "custom/results.json").read_text())["rows"]
    assert [Path(run).name for run in row["ours"]["runs"]] == ["seed-0", "seed-1"]


def test_runs_with_other_settings_have_other_directories(tmp_path: Path) -> None:
    (tmp_path / "custom.toml").write_text(CUSTOM)
    arguments: list[str | Path] = [
        tmp_path / "custom.toml",
        "--only",
        "local,dirichlet",
        "--out",
        tmp_path,
    ]
    dispfl_reproduce(*arguments, "rounds=1")
    assert (
        dispfl_reproduce(*arguments).output.splitlines()[0]
        == "Table 1: Two methods. 1 run, 0 done."
    )
    assert len(list(tmp_path.glob("runs/fashion-sample-dirichlet/local-random-*/seed-0"))) == 2


@pytest.mark.parametrize(
    ("name", "more", "figure"),
    [
        (
            "masks",
            ["partition.groups=2", "partition.samples_per_peer=8", "rounds=1"],
            "masks-seed-0.png",
        ),
        (
            "drop",
            ["partition.samples_per_peer=8", "rounds=1", "--only", "dispfl,0,0.8"],
            "drop.png",
        ),
        (
            "sparsity",
            ["partition.samples_per_peer=8", "rounds=1", "--only", "0.2,0.8"],
            "sparsity.png",
        ),
    ],
)
def test_a_figure_is_drawn_where_the_paper_has_one(
    tmp_path: Path, name: str, more: list[str], figure: str
) -> None:
    result = dispfl_reproduce(name, *TINY, *more, "--out", tmp_path)
    assert result.code == 0, result.output
    with Image.open(tmp_path / name / figure) as image:
        assert image.format == "PNG"
    assert f"Written to {tmp_path / name}: {figure}" in result.output


def test_groups_and_curves_are_drawn_from_the_same_runs(tmp_path: Path) -> None:
    grouped = CUSTOM.replace("density = 0.5", "density = [0.2, 0.4, 0.6]").replace(
        '{ method = "local" },', ""
    )
    config = grouped.replace('label = "centralized-main-table"', 'figure = "groups"')
    (tmp_path / "groups.toml").write_text(config)
    (tmp_path / "curves.toml").write_text(config.replace('"groups"', '"curves"'))
    result = dispfl_reproduce(tmp_path / "groups.toml", "--out", tmp_path)
    assert [line.split()[0] for line in result.output.splitlines() if line.startswith("0.")] == [
        "0.2",
        "0.4",
        "0.6",
    ]
    again = dispfl_reproduce(tmp_path / "curves.toml", "--out", tmp_path)
    assert rounds_run(again) == 0  # the same runs
    assert (tmp_path / "groups/groups.png").exists()
    assert (tmp_path / "curves/curves.png").exists()


def test_without_a_name_the_experiments_are_listed(tmp_path: Path) -> None:
    result = dispfl_reproduce()
    lines = result.output.splitlines()
    assert lines[0].split()[:3] == ["main", "Table", "1"]
    assert (
        "laptop 54 runs, 12 min · desktop 54 runs, 6e15 FLOPs · paper 108 runs, 5e19 FLOPs"
        in lines[0]
    )
    assert lines[1] == "    All nine methods on three data sets, two partitions each."
    listed = json.loads(dispfl_reproduce("--list", "--json").stdout)
    assert [one["shows"] for one in listed] == [
        *(f"Table {number}" for number in range(1, 10)),
        *(f"Figure {number}" for number in range(3, 7)),
        *[None] * 7,
    ]
    assert [one["name"] for one in listed if not one["shows"]][:4] == [
        "cifar10",
        "cifar100",
        "generalization",
        "little-data",
    ]
    assert listed[-4].keys() == {"name", "shows", "title", "desktop"}
    assert listed[3]["paper"] == {"runs": 10, "minutes": None, "flops": 4.5e18}


SMALL_AT_PAPER_SCALE = [
    "sparsity",
    "--scale",
    "paper",
    "model=cnn",
    "train.batch_size=4",
    "peers=12",
    "rounds=3",
    "workers=1",
]


def test_the_papers_scale_prints_the_hours_and_requires_yes(tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        *SMALL_AT_PAPER_SCALE,
        "--data-dir",
        tmp_path,
        "--out",
        tmp_path / "out",
    ]
    sentence = "Nothing was started. To start anyway, repeat the command with --yes."
    assert refusal(ConfigError, *arguments) == sentence
    output = dispfl_reproduce(*arguments).output
    [line] = [line.split() for line in output.splitlines() if line.startswith("dispfl")]
    assert line[1] == "10"  # five densities, two seeds
    assert "hours, or" in output
    assert "Run `dispfl data get cifar10`" in output  # known before anything runs
    found = json.loads(dispfl_reproduce(*arguments, "--json").stdout)
    assert [(method["method"], method["runs"]) for method in found["methods"]] == [("dispfl", 10)]
    assert found["hours"] > 0
    assert not (tmp_path / "out").exists()


def test_the_desktop_scale_prints_the_hours_and_starts(tmp_path: Path) -> None:
    """CIFAR-10 of 60 black images; two rounds of two runs, of which one is evaluated only."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([k]) + bytes(3072) for k in range(10)))
    settings = [
        "peers=2",
        "rounds=2",
        "train.batch_size=4",
        "partition.samples_per_peer=4",
        "partition.classes=2",
    ]
    tiny = [*settings, "train.epochs=1", "topology.degree=1", "method.tune_epochs=1", "workers=1"]
    only = [
        "--only",
        "fedavg,fedavg-ft,cifar10,pathological",
        "--data-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "o"),
    ]
    result = dispfl_reproduce("main", "--scale", "desktop", *tiny, *only)
    assert result.code == 0, result.output
    assert "hours, or" in result.output
    assert result.output.index("hours, or") < result.output.index("round 1/2")
    assert rounds_run(result) == 2
    assert len(json.loads((tmp_path / "o/main/results.json").read_text())["rows"]) == 2


def test_missing_data_is_reported_before_anything_runs(tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        *SMALL_AT_PAPER_SCALE,
        "--data-dir",
        tmp_path,
        "--out",
        tmp_path / "out",
        "--yes",
    ]
    assert refusal(DataError, *arguments).startswith(
        "The files of cifar10 were not found: looked for data_batch_1.bin"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sparsty"], "There is no experiment 'sparsty'. Did you mean sparsity?"),
        (
            ["rounds=3"],
            "Name the table or figure before rounds=3; dispfl reproduce --list has the names.",
        ),
        (["sparsity", "roundz=3"], "Unknown key roundz. Did you mean rounds?"),
        (["sparsity", "--only", "ring"], "--only 'ring' matches no label of these runs."),
        (["none.toml"], "The config file none.toml does not exist."),
        (
            ["masks", "--budget", "bytes"],
            "masks compares masks, not scores: omit --budget bytes.",
        ),
        (
            ["sparsity", "--budget", "hours"],
            "--budget is hours, but a run of dispfl has no devices by whose times they are",
        ),
    ],
)
def test_an_error_is_one_sentence_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(ConfigError, *arguments).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_the_help_has_an_example() -> None:
    assert "Example: dispfl reproduce sparsity" in dispfl_reproduce("--help").output
