"""Runs whose peers go on without late models: their records and limits; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.config import compose
from dispfl.core.quantities import SIMULATED
from dispfl.errors import ConfigError, RunError
from dispfl.runs.async_clock import run_cost
from dispfl.runs.deadline_clock import DeadlineRunClock
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.prepare import prepare
from dispfl.runs.timing import another_fleet

TINY = [
    "peers=4",
    "rounds=4",
    "topology.degree=2",
    "partition.samples_per_peer=12",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "train.batch_size=8",
    "workers=1",
]
CLASSES = ["classes.fast={share=0.5, speed=2e9}", "classes.slow={speed=2e9, up=8}"]
LATE = [*TINY, *CLASSES, "deadline=0.1"]


def a_run(out: Path, *settings: str) -> list[dict[str, Any]]:
    ExperimentRun.create(compose({}, settings), out).run()
    return read_metrics(out)


def missed(records: list[dict[str, Any]]) -> int:
    return sum(bool(record["missed_links"]) for record in records)


@pytest.mark.parametrize(
    "settings",
    [
        ["method=dispfl"],
        ["method=dispfl", "method.structure=channels", "method.density=[0.3,0.8]"],
        ["method=dispfl", "method.robust=clip", "method.byzantine=1", "topology.degree=3"],
        ["method=dispfl", "wire.exchange=push"],
        ["method=dispfl", "wire.values=float16"],
        ["method=dispfl", "attack=noise", "byzantine=0.25"],
        ["method=dpsgd"],
        ["method=fedfomo"],
        ["privacy.epsilon=4", "method.alpha_0=0"],
        ["vmap_peers=2"],
    ],
    ids=" ".join,
)
def test_bytes_are_known_before_a_round_and_times_are_found_again_from_the_records(
    settings: list[str], tmp_path: Path
) -> None:
    records = a_run(tmp_path / "run", *LATE, *settings)
    assert missed(records) >= 1
    _, _, context = prepare(compose({}, [*LATE, *settings]))
    cost = run_cost(context)
    for t, record in enumerate(records):
        clock = DeadlineRunClock(context, cost, records[: t + 1])
        assert clock.advance(record) == record[SIMULATED]
        per_peer = record[SIMULATED]["waiting"]["per_peer"]
        assert all(seconds >= 0 for seconds in per_peer)


def test_the_number_of_workers_changes_nothing_and_a_longer_deadline_does(tmp_path: Path) -> None:
    digests = {}
    for deadline, workers in ((0.1, 1), (0.1, 3), (10, 1)):
        path = tmp_path / f"{deadline}-{workers}"
        records = a_run(path, *LATE, f"deadline={deadline}", f"workers={workers}")
        summary = read_summary(path)
        assert summary is not None
        digests[deadline, workers] = summary["weights_sha256"]
        assert (missed(records) > 0) == (deadline == 0.1)
    assert digests[0.1, 1] == digests[0.1, 3] != digests[10, 1]


def test_an_extended_run_gives_what_a_longer_one_gives(tmp_path: Path) -> None:
    settings = [*LATE, "eval_every=3", "method.horizon=4"]
    longer = a_run(tmp_path / "longer", *settings, "rounds=5")
    a_run(tmp_path / "run", *settings, "rounds=2")
    ExperimentRun.resume(tmp_path / "run", ["rounds=5"]).run()
    extended = read_metrics(tmp_path / "run")
    for record in (*longer, *extended):
        record.pop("seconds")
        record.pop("peer_seconds")
    assert extended == longer


@pytest.mark.parametrize(
    "settings",
    [
        [*CLASSES, "schedule=async"],
        [],
        [*CLASSES, "method=fedavg"],
        [*CLASSES, "method=dfedpgp"],
        [*CLASSES, "method.affinity=head"],
        [*CLASSES, "topology.offline_prob=0.1"],
        [*CLASSES, "wire.coding=zstd"],
        [*CLASSES, "average_buffers=true", "model=resnet18"],
    ],
    ids=" ".join,
)
def test_what_does_not_work_with_a_deadline_is_refused(settings: list[str]) -> None:
    with refused(ConfigError, key="deadline"):
        compose({}, [*TINY, *settings, "deadline=5"])


def test_neighbours_with_weights_are_refused(tmp_path: Path) -> None:
    matrix = tmp_path / "graph.csv"
    matrix.write_text("0.5,0.5,0,0\n0,0.5,0.5,0\n0,0,0.5,0.5\n0.5,0,0,0.5\n")
    peers = [setting for setting in TINY if not setting.startswith("topology")]
    with refused(ConfigError, key="deadline"):
        compose({}, [*peers, *CLASSES, "topology=file", f"topology.path={matrix}", "deadline=5"])


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "inf"])
def test_a_deadline_is_a_number_above_zero(deadline: str) -> None:
    with refused(ConfigError, key="deadline"):
        compose({}, [*TINY, *CLASSES, f"deadline={deadline}"])


@pytest.mark.parametrize("settings", [["deadline=0.1"], ["schedule=async"]], ids=" ".join)
def test_the_times_that_a_run_has_are_shown_without_another_fleet(
    settings: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    records = a_run(path, *TINY, *CLASSES, *settings)
    result = CliRunner().invoke(app, ["time", str(path), "--json"])
    assert result.exit_code == 0, result.output
    [timed] = json.loads(result.stdout)
    assert timed["hours"] == records[-1][SIMULATED]["hours"]


def test_a_run_with_a_deadline_is_not_timed_on_another_fleet() -> None:
    config = compose({}, LATE).to_toml()
    with refused(RunError):
        another_fleet(config, {"fleet": "phones"})
