"""`dispfl attack`, as a user types it."""

import json
from pathlib import Path

import pytest
from program import Dispfl

from dispfl.cli.attack import attack_grid, attack_table, measure
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.runs.directory import read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.grid import GridRun
from dispfl.runs.loop import RunObserver

TINY = [
    "peers=5",
    "rounds=2",
    "topology=full",
    "model=mlp",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]


def test_rules_attacks_and_shares_make_one_table_and_are_not_run_twice(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    arguments = [
        "attack",
        *TINY,
        "--rules",
        "none,clip",
        "--attacks",
        "backdoor",
        "--byzantine",
        "0,0.2",
        "--jobs",
        2,
        "--out",
        tmp_path,
    ]
    result = dispfl(*arguments)
    assert (result.code, result.err) == (0, "")
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["clip@backdoor-0.2", "clip@none", "none@backdoor-0.2", "none@none"]
    table = (tmp_path / "attack.md").read_text()
    assert table in result.out
    heading, _, undisturbed, attacked, *_ = table.splitlines()
    assert heading.replace(" ", "") == "|attack|Byzantinepeers|none|clip|"
    assert undisturbed.startswith("| none     |              0% | ")
    assert attacked.startswith("| backdoor |             20% | ")
    # The share of Byzantine peers, and of each rule the backdoor's success.
    assert attacked.count("%") == 3
    csv_heading, first, *_ = (tmp_path / "attack.csv").read_text().splitlines()
    assert csv_heading == "rule,attack,byzantine,seeds,mean,worst,retained,backdoor"
    assert first.startswith("none,none,0.0,1,")
    before = (tmp_path / "none@none" / "seed-0" / "summary.json").stat().st_mtime_ns
    again = dispfl(*arguments)
    assert again.code == 0
    assert "round" not in again.out.partition("| attack")[0]
    assert (tmp_path / "none@none" / "seed-0" / "summary.json").stat().st_mtime_ns == before


def test_the_table_marks_what_falls_below_95_percent_of_the_same_peers_unattacked(
    tmp_path: Path,
) -> None:
    # Peer 2, the worst, is Byzantine: without an attack the honest ones have a mean of 0.8, and all
    # four 0.65.
    scores = {
        ("none", "none", 0.0): [0.7, 0.8, 0.2, 0.9],
        ("clip", "none", 0.0): [0.7, 0.7, 0.3, 0.9],
        ("none", "alie", 0.25): [0.6, 0.8, None, 0.85],
        ("clip", "alie", 0.25): [0.7, 0.7, None, 0.89],
    }
    cells = []
    for (rule, attack, share), per_peer in scores.items():
        path = tmp_path / f"{rule}-{attack}"
        path.mkdir()
        score = {"per_peer": per_peer, "mean": 0.5}
        record = {"round": 1, "metric": "accuracy", "scores": {"accuracy": score}}
        (path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        row = {"rule": rule, "attack": attack, "byzantine": f"{share:g}"}
        cells.append(GridRun(row, Experiment(), path))
    table = attack_table(measure(cells))
    assert table.markdown().splitlines() == [
        "| attack | Byzantine peers |        none |      clip |",
        "| ------ | --------------: | ----------: | --------: |",
        "| none   |              0% |   65.0 (20) | 65.0 (30) |",
        "| alie   |             25% | 75.0 (60) * | 76.3 (70) |",
        "",
        "- Mean (worst) accuracy of the honest peers in %; 1 seed.",
        "- * marks less than 95% of what the same peers reach by the plain average without"
        " Byzantine peers.",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--attacks", "sing-flip"], "attack 'sing-flip' does not exist. Did you mean sign-flip?"),
        (["--byzantine", "20"], "--byzantine must be in [0, 1), got 20. For 20% write 0.2."),
        (
            ["--rules", ""],
            "--rules is empty; omit it for its default, or give values separated by commas.",
        ),
        (["--byzantine", ","], "--byzantine is empty; omit it for its default"),
        (["--byzantine", "few"], "--byzantine must be shares separated by commas"),
        (
            ["byzantine=0.2"],
            "byzantine=0.2 is what this command varies; use --attacks, --byzantine and --rules.",
        ),
        (["--rules", "median"], "method.robust must be"),
        (["method=fedfomo"], "method=fedfomo has no method.robust; choose one of dispfl, "),
        (
            ["topology=ring", "method.byzantine=1"],
            "method.byzantine is 1, but a peer receives 2 models in a round",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    options: list[str], sentence: str, dispfl: Dispfl, tmp_path: Path
) -> None:
    result = dispfl("attack", *TINY, *options, "--out", tmp_path / "grid")
    assert result.code == 1
    assert sentence in result.err
    assert not (tmp_path / "grid").exists()


def test_an_attacked_run_that_is_interrupted_continues_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    def cell(out: Path):  # type: ignore[no-untyped-def]
        return attack_grid([*TINY, "rounds=3"], {}, ["trim"], ["noise"], [0.2], 1, out)[0]

    def stop(record: dict[str, object]) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    whole, broken = cell(tmp_path / "whole"), cell(tmp_path / "broken")
    ExperimentRun.create(whole.experiment, whole.path).run()
    with pytest.raises(KeyboardInterrupt):
        ExperimentRun.create(broken.experiment, broken.path).run(RunObserver(round=stop))
    ExperimentRun.resume_as(broken.experiment, broken.path).run()
    uninterrupted = read_summary(whole.path)
    resumed = read_summary(broken.path)
    assert uninterrupted is not None
    assert resumed is not None
    assert uninterrupted["weights_sha256"] == resumed["weights_sha256"]
    # The Byzantine peer is not scored.
    assert uninterrupted["scores"]["accuracy"]["per_peer"].count(None) == 1


def test_the_same_settings_without_the_command_are_refused_for_real_peers(
    dispfl: Dispfl, tmp_path: Path
) -> None:
    result = dispfl("up", *TINY, "attack=noise", "byzantine=0.2", "--out", tmp_path / "up")
    assert result.code == 1
    assert "attack is noise, which only a simulation has" in result.err
    with pytest.raises(ConfigError):
        attack_grid(["attack=noise"], {}, ["none"], [], [0.1], 1, tmp_path)
