"""Runs whose peers do not wait: their records, costs and limits; what is refused."""

from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.cli.run import describe_run
from dispfl.config import compose
from dispfl.core.quantities import SIMULATED
from dispfl.costs.steps import step_operations
from dispfl.errors import ConfigError, RunError
from dispfl.report.comparison import compare
from dispfl.report.page import write_report
from dispfl.report.result_tables import legend
from dispfl.report.run_tables import time_notes
from dispfl.report.runs import Budget, read_run
from dispfl.report.timeline import timeline
from dispfl.report.units import bytes_text
from dispfl.round.exchange import published_model
from dispfl.round.round import initial_states
from dispfl.runs.async_clock import message_sizes, run_cost, steps_in_run
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
    "schedule=async",
    "classes.fast={share=0.5, speed=2e9}",
    "classes.slow={speed=7e8}",
]


def a_run(out: Path, *settings: str) -> list[dict[str, Any]]:
    ExperimentRun.create(compose({}, [*TINY, *settings]), out).run()
    return read_metrics(out)


@pytest.mark.parametrize(
    "settings",
    [
        ["method=dispfl"],
        ["method=dispfl", "method.structure=channels", "method.density=[0.3,0.8]"],
        ["method=dispfl", "method.private=head", "method.robust=clip", "method.byzantine=0"],
        ["method=dpsgd", "method.density=0.5"],
        ["method=fedfomo"],
        ["method=dfedsam"],
        ["method=local"],
    ],
    ids=" ".join,
)
def test_operations_and_bytes_are_known_before_a_step_begins(
    settings: list[str], tmp_path: Path
) -> None:
    records = a_run(tmp_path / "run", "eval_every=4", *settings)
    experiment = compose({}, [*TINY, *settings])
    _, _, context = prepare(experiment)
    sizes = message_sizes(context)
    for peer, state in initial_states(context).items():
        assert sizes[peer].wire == context.codec.model_size(published_model(context, state))

    cost = run_cost(context)
    steps = 0
    for record in records[:-1]:  # the last one is evaluated
        links = (record["links"] or "").split(";")
        for k, peer in enumerate(context.roster):
            taken = record["steps"]["per_peer"][k]
            models = 0 if links[k] == "-" else len(_positions(links[k]))
            if taken == 1:
                expected = step_operations(context, cost, peer, models)
                assert record["kernel_flops"]["per_peer"][k] == expected
                steps += 1
    assert steps >= 4


def _positions(entry: str) -> list[int]:
    positions: list[int] = []
    for part in entry.split():
        first, _, last = part.partition("-")
        positions += range(int(first), int(last or first) + 1)
    return positions


def test_lines_are_at_equal_hours_and_all_that_reads_runs_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "run"
    records = a_run(path, "hours_per_round=0.001", "method=dpsgd-ft", "method.tune_every=2")
    hours = [record[SIMULATED]["hours"] for record in records]
    assert hours == pytest.approx([0.001, 0.002, 0.003, 0.004])
    steps = [record["steps"]["per_peer"] for record in records]
    assert sum(of_round[0] or 0 for of_round in steps) > sum(of_round[3] or 0 for of_round in steps)
    assert any(record["staleness"] for record in records)
    assert all(record["busiest"]["wire_mb"] > 0 for record in records)
    summary = read_summary(path)
    assert summary is not None
    assert summary[SIMULATED]["busy"] == 1.0

    write_report([path], path / "report.html")
    compare([({"schedule": "async"}, path)], Budget.HOURS)
    assert read_run(path).records == records
    with refused(RunError):
        another_fleet({**compose({}, TINY).to_toml()}, {"fleet": "phones"})


def test_records_say_who_computes_and_sends_and_how_many_steps_a_class_takes(
    tmp_path: Path,
) -> None:
    """In rounds of 0.01 hours, 36 s, devices of class night are online for a minute: for the first
    round, and for 24 s of the second one."""
    path = tmp_path / "run"
    devices = [
        "classes.fast={share=0.5, speed=2e7, up=0.1, watts=10}",
        'classes.slow={speed=7e6, up=2, watts=10, daily="00:00-00:01"}',
    ]
    records = a_run(path, "hours_per_round=0.01", "rounds=3", *devices)
    slow = [record[SIMULATED]["classes"]["slow"] for record in records]
    assert [times["computing"] for times in slow] == [36, 24, 0]
    assert [times["offline"] for times in slow] == [0, 12, 36]
    assert [record[SIMULATED]["energy"] * 360 for record in records] == pytest.approx(
        [2 * 36 + 2 * 36, 2 * 36 + 2 * 24, 2 * 36]
    )
    for record in records:
        classes = record[SIMULATED]["classes"]
        assert classes["fast"]["sending"] <= classes["fast"]["computing"] == 36
        taken = record["steps"]["per_peer"]
        assert classes["fast"]["steps"] == (taken[0] + taken[1]) / 2
        assert classes["slow"]["sending"] <= classes["slow"]["computing"]
    assert records[0][SIMULATED]["classes"]["fast"]["sending"] > 20
    fast, slow_peers = read_summary(path)[SIMULATED]["classes"]  # type: ignore[index]
    assert fast["steps"] > 2 * slow_peers["steps"] > 0
    assert fast["sending_hours"] > slow_peers["sending_hours"] > 0

    run = read_run(path)
    drawn = {phase.name for peer in range(4) for phase in timeline(run, peer)}
    assert drawn == {"computing", "sending", "offline"}
    [first, second] = list(time_notes(read_summary(path)[SIMULATED]))[:2]  # type: ignore[index]
    assert "meanwhile sending" in first
    assert first.split("steps")[1] != second.split("steps")[1]


def test_a_comparison_by_hours_says_which_rounds_are_too_short(tmp_path: Path) -> None:
    """Four rounds of half a step of a fast peer end before the first synchronous round."""
    named = []
    for schedule in ("sync", "async"):
        settings = ["hours_per_round=1e-6"] if schedule == "async" else []
        a_run(tmp_path / schedule, f"schedule={schedule}", *settings)
        named.append(({"schedule": schedule}, tmp_path / schedule))
    comparison = compare(named, Budget.HOURS)
    total = read_run(tmp_path / "sync").hours
    assert total is not None
    [note] = [line for line in legend(comparison) if "no evaluated round" in line]
    assert f"with hours_per_round={total / 4:.2g} it has as many as " in note

    a_run(tmp_path / "equal", f"hours_per_round={total / 4}")
    named[1] = ({"schedule": "async"}, tmp_path / "equal")
    assert not compare(named, Budget.HOURS).lacks_scores


def test_steps_of_one_round_wait_for_the_models_of_others_in_it(tmp_path: Path) -> None:
    """In two long rounds peers take the steps of eight short ones, on more threads."""
    digests = []
    for rounds, hours, workers in ((8, 0.0002, 1), (2, 0.0008, 3)):
        path = tmp_path / str(rounds)
        settings = [f"rounds={rounds}", f"hours_per_round={hours}", f"workers={workers}"]
        records = a_run(path, *settings, "method.alpha_0=0", "train.schedule=constant")
        summary = read_summary(path)
        assert summary is not None
        digests.append(summary["weights_sha256"])
    assert digests[0] == digests[1]
    assert max(records[0]["steps"]["per_peer"]) >= 3


@pytest.mark.parametrize("hours", [0.0002, 0.000002])
def test_an_extended_run_gives_what_a_longer_one_gives(hours: float, tmp_path: Path) -> None:
    """In some rounds of 0.000002 hours nobody finishes a step, so that no state changes."""
    settings = ["eval_every=3", "method.horizon=4", "staleness.reuse=true"]
    settings.append(f"hours_per_round={hours}")
    longer = a_run(tmp_path / "longer", *settings, "rounds=5")
    a_run(tmp_path / "run", *settings, "rounds=2")
    ExperimentRun.resume(tmp_path / "run", ["rounds=5"]).run()
    extended = read_metrics(tmp_path / "run")
    has_idle_round = any(record["steps"] is None for record in longer)
    assert has_idle_round == (hours == 0.000002)
    for record in (*longer, *extended):
        record.pop("seconds")
        record.pop("peer_seconds")
    assert extended == longer


def test_a_privacy_budget_lasts_for_a_peer_s_own_steps(tmp_path: Path) -> None:
    """Fast peers take more steps, each with more noise: all spend the same in the end."""
    settings = ["privacy.epsilon=4", "method.alpha_0=0"]
    records = a_run(tmp_path / "run", *settings)
    spent = records[-1]["epsilon"]["per_peer"]
    last = [value for value in spent if value is not None]
    assert all(3.5 < epsilon <= 4.0 for epsilon in last)
    assert not any(record["failures"] for record in records)
    _, _, context = prepare(compose({}, [*TINY, *settings]))
    steps = steps_in_run(context)
    assert steps["000"] > 2 * steps["003"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["method=fedavg"], "schedule"),
        (["method=da-dpfl"], "schedule"),
        (["method=dfedpgp"], "schedule"),
        (["method.affinity=head"], "schedule"),
        (["method=ssfl"], "schedule"),
        (["topology.offline_prob=0.1"], "topology.offline_prob"),
        (["wire.coding=zstd"], "wire.coding"),
        (["memory_limit=1"], "memory_limit"),
        (["schedule=sync", "hours_per_round=1"], "hours_per_round"),
        (["schedule=sync", "staleness.reuse=true"], "staleness.reuse"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_needs_rounds_is_refused_before_there_is_a_run(
    settings: list[str], key: str, tmp_path: Path
) -> None:
    with refused(ConfigError, key=key):
        a_run(tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["dispfl", "local"])
def test_the_first_lines_say_what_a_step_costs(method: str, tmp_path: Path) -> None:
    created = ExperimentRun.create(compose({}, [*TINY, f"method={method}"]), tmp_path / "run")
    size = message_sizes(created.context)["000"].wire
    traffic = {"dispfl": f"a model of {bytes_text(size)} to 2 peers", "local": "nothing is sent"}
    last_line = describe_run(created)[-1]
    assert last_line.startswith(f"A step of a peer: {traffic[method]}, ")
    created.directory.close()


def test_memory_that_changes_nothing_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_run(tmp_path / "run", "schedule=sync", "classes.fast={share=0.5, speed=2e9, memory=100}")
    assert "classes.fast.memory is 100" in caplog.text
    caplog.clear()
    fitted = ["method.density=fit", "method.structure=channels"]
    a_run(tmp_path / "fit", "classes.fast={share=0.5, speed=2e9, memory=100}", *fitted)
    assert "memory" not in caplog.text


def test_peers_without_devices_are_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="schedule"):
        ExperimentRun.create(compose({}, ["schedule=async"]), tmp_path / "run")
