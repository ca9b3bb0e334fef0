"""Rounds one after another: a run stopped anywhere and resumed ends with the same result."""

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.data.batches import ResidentSamples
from dispfl.engines import checkpoint
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.inprocess import InProcess
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import RunContext
from dispfl.runs.directory import RunDirectory, read_metrics
from dispfl.runs.loop import RunObserver, restore, run_rounds
from dispfl.runs.metrics import Metrics, weights_sha256
from dispfl.testing.rounds import simulated_context

ROUNDS, PEERS = 4, 3
Outcome = tuple[list[str], list[Metrics]]
"""The digest of everyone's weights, and all records without their seconds."""


def points(count: int, which: int) -> ResidentSamples:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(which))
    return ResidentSamples(inputs, inputs[:, :3].argmax(1))


def a_context(**changes: Any) -> RunContext:
    values: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "peers": {f"00{k}": PeerData(points(8, k), points(8, 100 + k)) for k in range(PEERS)},
        "method": DisPFL(),
        "train": Train(epochs=1, batch_size=4),
        "rounds": ROUNDS,
    }
    return simulated_context(**values | changes)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run."""

    states: dict[str, PeerState]
    records: list[Metrics]


def run_in(
    path: Path, callbacks: RunObserver | None = None, context: RunContext | None = None
) -> RunEnd:
    """Resume the run in a directory, or start it there."""
    context = context or a_context()
    directory = (
        RunDirectory.open(path)
        if path.exists()
        else RunDirectory.create(path, {"rounds": context.settings.rounds})
    )
    engine = InProcess(context, 1, directory.checkpoints)
    try:
        history = run_rounds(
            context,
            engine,
            restore(context, engine, directory),
            directory,
            callbacks or RunObserver(),
        )
        return RunEnd(dict(engine.states), history.records)
    finally:
        engine.close()
        directory.close()


def result(history: RunEnd) -> Outcome:
    digests = [weights_sha256(state.model) for state in history.states.values()]
    return digests, [
        {k: v for k, v in record.items() if k not in ("seconds", "peer_seconds")}
        for record in history.records
    ]


def stop_at_call(count: int) -> Callable[[], None]:
    """A function that stops the run when it is called for the `count`th time."""
    calls = iter(range(1, count + 1))

    def call() -> None:
        if next(calls) == count:
            raise KeyboardInterrupt

    return call


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """An uninterrupted run: its directory, not to be changed, and its outcome."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, result(run_in(path))


@pytest.fixture
def finished(whole: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of the finished run's directory, to be damaged."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.fixture
def expected(whole: tuple[Path, Outcome]) -> Outcome:
    return whole[1]


def part(path: Path, rounds: int) -> Path:
    return path / f"checkpoints/round-{rounds:06d}/part-000.safetensors"


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def step_counts(path: Path) -> tuple[int, int]:
    """How many steps were done at the start, and how many were done after."""
    started: list[tuple[int, int]] = []
    steps: list[None] = []
    run_in(
        path,
        RunObserver(
            begin=lambda *numbers: started.append(numbers), step=lambda: steps.append(None)
        ),
    )
    assert [total for _, total in started] == [ROUNDS * PEERS]
    return started[0][0], len(steps)


def test_callbacks_are_called_for_every_step_and_every_round(tmp_path: Path) -> None:
    events: list[Any] = []
    callbacks = RunObserver(
        begin=lambda done, total: events.append((done, total)),
        step=lambda: events.append("step"),
        round=lambda record: events.append(record["round"]),
    )
    run_in(tmp_path / "run", callbacks)
    assert events == [
        (0, 12),
        *(event for t in range(ROUNDS) for event in ("step", "step", "step", t)),
    ]


def test_a_round_is_on_the_disk_before_its_callback(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def check_saved(record: Metrics) -> None:
        assert read_metrics(path)[-1] == record
        assert part(path, record["round"] + 1).with_name("complete.json").exists()

    assert len(run_in(path, RunObserver(round=check_saved)).records) == ROUNDS


@pytest.mark.parametrize("count", range(1, ROUNDS * PEERS + 1))
def test_finished_steps_are_kept_after_a_stop_at_any_step(
    tmp_path: Path, expected: Outcome, count: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "run", RunObserver(step=stop_at_call(count)))
    assert step_counts(tmp_path / "run") == (count, ROUNDS * PEERS - count)
    assert result(run_in(tmp_path / "run")) == expected


def test_both_parts_of_a_round_that_was_stopped_twice_are_used(
    tmp_path: Path, expected: Outcome
) -> None:
    path = tmp_path / "run"
    for count in (4, 1):  # one step of the second round, then one more
        with pytest.raises(KeyboardInterrupt):
            run_in(path, RunObserver(step=stop_at_call(count)))
    assert [file.name for file in sorted(part(path, 2).parent.iterdir())] == [
        f"part-00{k}.safetensors" for k in (0, 1)
    ]
    assert result(run_in(path)) == expected


def test_one_part_per_peer_gives_the_same_as_one_part_per_round(
    tmp_path: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_PARTS", 0.0)
    assert result(run_in(tmp_path / "run")) == expected
    manifest = json.loads(part(tmp_path / "run", ROUNDS).with_name("complete.json").read_text())
    assert manifest["parts"] == [f"part-00{k}.safetensors" for k in range(PEERS)]


def test_a_finished_run_is_restored_without_any_step(finished: Path, expected: Outcome) -> None:
    assert step_counts(finished) == (12, 0)
    assert result(run_in(finished)) == expected


def test_a_round_with_metrics_but_without_its_completion_is_not_repeated(
    finished: Path, expected: Outcome
) -> None:
    part(finished, 4).with_name("complete.json").unlink()
    assert step_counts(finished) == (12, 0)
    assert result(run_in(finished)) == expected


def test_a_truncated_newest_checkpoint_costs_one_round(
    finished: Path, expected: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    cut_in_half(part(finished, 4))
    with caplog.at_level(logging.WARNING, "dispfl"):
        assert step_counts(finished) == (9, 3)
    (warning,) = caplog.messages
    assert warning.startswith(f"The checkpoint {part(finished, 4)} is damaged (")
    assert warning.endswith("Resuming from another round.")
    assert result(run_in(finished)) == expected


def test_with_both_checkpoints_damaged_the_run_starts_again(
    finished: Path, expected: Outcome
) -> None:
    for rounds in (3, 4):
        cut_in_half(part(finished, rounds))
    assert step_counts(finished) == (0, 12)
    assert result(run_in(finished)) == expected


def test_a_newest_checkpoint_that_lost_its_part_costs_one_round(
    finished: Path, expected: Outcome
) -> None:
    part(finished, 4).unlink()
    assert step_counts(finished) == (9, 3)
    assert result(run_in(finished)) == expected


def test_damaged_steps_of_a_partial_round_are_repeated(
    finished: Path, expected: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    part(finished, 4).with_name("complete.json").unlink()
    cut_in_half(part(finished, 4))
    assert step_counts(finished) == (9, 3)
    assert caplog.messages[0].endswith("Repeating that part of the round.")
    assert result(run_in(finished)) == expected


def test_a_truncated_metrics_line_of_an_incomplete_round_is_rewritten(
    finished: Path, expected: Outcome
) -> None:
    part(finished, 4).with_name("complete.json").unlink()
    metrics = finished / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    assert result(run_in(finished)) == expected
    assert [record["round"] for record in read_metrics(finished)] == [0, 1, 2, 3]
    assert metrics.read_bytes().count(b"\n") == 4


def test_missing_metrics_lines_are_refused_before_the_run_starts(finished: Path) -> None:
    metrics = finished / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    with refused(RunError):
        run_in(finished)


def test_only_two_checkpoints_and_no_temporary_file_remain(finished: Path) -> None:
    (finished / "checkpoints/round-000001").mkdir()  # a deletion that was killed
    run_in(finished)
    found = sorted(
        path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()
    )
    assert found == [
        ".lock",
        *(
            f"checkpoints/round-00000{n}/{file}"
            for n in (3, 4)
            for file in ("complete.json", "part-000.safetensors")
        ),
        "config.toml",
        "metrics.jsonl",
    ]
    assert not (finished / "checkpoints/round-000001").exists()


def test_buffers_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    context = a_context(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "stopped", RunObserver(step=stop_at_call(7)), context)
    again, at_once = (
        run_in(tmp_path / "stopped", context=context),
        run_in(tmp_path / "at once", context=context),
    )
    assert result(again) == result(at_once)
    for peer, state in at_once.states.items():
        assert (
            int(state.buffers["0.num_batches_tracked"]) == ROUNDS * 2
        )  # 8 samples in batches of 4
        assert all(
            torch.equal(again.states[peer].buffers[name], buffer)
            for name, buffer in state.buffers.items()
        )


def test_a_failing_peer_is_logged_recorded_and_keeps_its_last_good_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Peer 001's loss is infinite in round 2: its weights stay those of round 1, the others'
    continue."""
    calls = itertools.count()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if not outputs.requires_grad:  # evaluation
            return nn.functional.cross_entropy(outputs, labels)
        # One thread: peers take 2 batches and a search batch a round, one after another in roster
        # order.
        t, within = divmod(next(calls), PEERS * 3)
        factor = float("inf") if t == 2 and within in (3, 4) else 1.0
        return nn.functional.cross_entropy(outputs, labels) * factor

    path = tmp_path / "run"
    failing = run_in(path, context=a_context(task=Task(loss=loss), rounds=3))
    (sentence,) = caplog.messages
    assert sentence.startswith("Peer 001, round 2: the training loss became infinite or nan")
    records = read_metrics(path)
    assert [record["failures"] for record in records] == [{}, {}, {"001": sentence}]
    assert records[2]["train_loss"]["per_peer"][1] is None
    before = Checkpoints(path / "checkpoints").load(2)
    healthy = run_in(tmp_path / "healthy", context=a_context(rounds=3))
    for peer, same_as in (
        ("000", healthy.states["000"]),
        ("001", before["001"].next_state),
        ("002", healthy.states["002"]),
    ):
        assert weights_sha256(failing.states[peer].model) == weights_sha256(same_as.model)
