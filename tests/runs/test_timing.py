"""A run with a clock learns the same, and its times follow from its records on any fleet."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from typer.testing import CliRunner

from dispfl.cli import app
from dispfl.config import compose
from dispfl.core.quantities import SIMULATED
from dispfl.errors import ConfigError, RunError
from dispfl.report.comparison import compare
from dispfl.report.page import write_report
from dispfl.report.result_tables import comparison_table
from dispfl.report.runs import Budget, read_run
from dispfl.runs.directory import read_metrics, read_summary
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.links import decode_sizes
from dispfl.runs.timing import PHASES, another_fleet, round_work, timed_records, times_by_class

TINY = [
    "peers=4",
    "rounds=3",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]


def a_run(out: Path, *settings: str) -> Path:
    ExperimentRun.create(compose({}, [*TINY, *settings]), out).run()
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    a_run(folder / "plain")
    a_run(folder / "clocked", "fleet=phones")
    a_run(folder / "server", "method=fedavg", "fleet=phones")
    return folder


def test_a_clock_does_not_change_what_is_learned(runs: Path) -> None:
    plain = read_metrics(runs / "plain")
    clocked = read_metrics(runs / "clocked")
    summaries = [read_summary(runs / name) or {} for name in ("plain", "clocked")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    for before, after in zip(plain, clocked, strict=True):
        for key in ("scores", "train_loss", "links", "message_bytes", "kernel_flops"):
            assert before[key] == after[key]
        assert before[SIMULATED] is None
        assert after[SIMULATED]["hours"] > 0


@pytest.mark.parametrize("name", ["clocked", "server"])
def test_times_computed_afterwards_are_those_of_the_run(runs: Path, name: str) -> None:
    run = read_run(runs / name)
    fleet = another_fleet(run.config, {})
    assert timed_records(run.records, fleet, run.roster) == run.records
    slower = another_fleet(run.config, {"fleet": "phones", "network": {"latency": 5000}})
    timed = timed_records(run.records, slower, run.roster)
    assert timed[-1][SIMULATED]["hours"] > run.records[-1][SIMULATED]["hours"]


def test_a_record_has_the_mean_times_of_each_class(runs: Path) -> None:
    run = read_run(runs / "clocked")
    positions: dict[str, list[int]] = {}
    for position, peer in enumerate(run.roster):
        positions.setdefault(run.device_class_of[peer], []).append(position)
    assert len(positions) == 3  # phones: 1 of 4 peers is old, 2 are common and 1 is new
    for record in run.records:
        simulated = record[SIMULATED]
        assert simulated["classes"].keys() == positions.keys()
        for phase in (*PHASES, "busy"):
            for name, of_class in positions.items():
                seconds = [simulated[phase]["per_peer"][position] for position in of_class]
                mean = sum(seconds) / len(of_class)
                assert simulated["classes"][name][phase] == pytest.approx(mean)


def test_the_same_work_takes_the_same_energy_whether_devices_are_always_online(runs: Path) -> None:
    run = read_run(runs / "plain")
    energies = []
    for daily in (None, "00:00-00:10"):
        device = {"speed": 1e5, "watts": 20, "daily": daily}
        fleet = another_fleet(run.config, {"classes": {"all": device}})
        timed = timed_records(run.records, fleet, run.roster)
        energies.append([record[SIMULATED]["energy"] for record in timed])
        [of_class] = times_by_class(timed, run.roster, fleet.class_of)
        assert (of_class.hours["offline"] > 20) == (daily is not None)
    assert energies[0] == energies[1]


def test_a_record_has_every_byte_of_the_ledger(runs: Path) -> None:
    for name in ("plain", "server"):
        run = read_run(runs / name)
        for record in run.records:
            sent: dict[str, int] = dict.fromkeys(record["traffic"], 0)
            work = round_work(record, run.roster)
            for message in work.messages:
                sent[message.sender] += message.size
                sent[message.receiver] += message.request
            assert sent == {node: up for node, (up, _) in record["traffic"].items()}


def test_kernels_do_all_of_a_masked_layer_but_only_the_kept_channels(
    runs: Path, tmp_path: Path
) -> None:
    [masked, *_] = read_metrics(runs / "plain")
    channels = a_run(tmp_path / "run", "rounds=1", "eval_every=2", "method.structure=channels")
    [small, *_] = read_metrics(channels)
    assert masked["kernel_flops"]["mean"] > masked["flops_per_peer"]
    assert small["kernel_flops"]["mean"] < 0.7 * masked["kernel_flops"]["mean"]


def test_a_resumed_run_has_the_times_of_an_uninterrupted_one(tmp_path: Path) -> None:
    out = a_run(tmp_path / "run", "fleet=phones", "method=local")
    whole = [record[SIMULATED] for record in read_metrics(out)]
    (out / "summary.json").unlink()
    for checkpoint in (out / "checkpoints").glob("round-3*"):
        shutil.rmtree(checkpoint)
    ExperimentRun.resume(out).run()
    assert [record[SIMULATED] for record in read_metrics(out)] == whole


def test_runs_are_compared_by_simulated_hours(runs: Path) -> None:
    named = [({"method": name}, runs / name) for name in ("clocked", "server")]
    comparison = compare(named, Budget.HOURS, targets=[0.01])
    totals = [row.hours for row in comparison.rows]
    assert comparison.limit == min(total for total in totals if total is not None)
    table = comparison_table(comparison, ["score", "hours", "hours-to-0.01"]).markdown()
    assert "hours to 0.01" in table
    with refused(RunError):
        compare([({"method": "plain"}, runs / "plain")], Budget.HOURS)


def test_the_report_has_a_timeline(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report([runs / "clocked", runs / "server"], page)
    text = page.read_text()
    assert 'id="time"' in text
    assert 'class="computing"' in text
    assert "By simulated time" in text


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["time", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_times_runs_and_draws_them(runs: Path, tmp_path: Path) -> None:
    figure = tmp_path / "timeline.png"
    text = command(runs / "plain", "fleet=hospitals", "--targets", "0.01", "-o", figure)
    assert "clinic, 2 peers" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    [values] = json.loads(command(runs / "plain", "fleet=phones", "--json"))
    clocked: Any = read_summary(runs / "clocked")
    assert values["hours"] == clocked[SIMULATED]["hours"]


@pytest.mark.parametrize("arguments", [(), ("rounds=3",), ("fleet=phones", "-o", "a.gif")], ids=str)
def test_what_the_command_cannot_do_is_refused(runs: Path, arguments: tuple[str, ...]) -> None:
    with refused(ConfigError):
        command(runs / "plain", *arguments)


@pytest.mark.parametrize(
    "text", ["1:5", "1:5;0:x", "9:5;", "1:5?-3;", "0:5;", "1-0:5;", "1;", "1:9999999999999999;"]
)
def test_damaged_sizes_are_refused(text: str) -> None:
    with refused(RunError):
        decode_sizes(text, ["a", "b"])


def test_a_run_without_sizes_cannot_be_timed(runs: Path) -> None:
    [record, *_] = read_metrics(runs / "plain")
    with refused(RunError):
        round_work({**record, "message_bytes": None}, [*"abcd"])
