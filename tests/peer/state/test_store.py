"""A peer's run directory."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from messages import refused
from small_disk import SmallDisk

from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes, Report
from dispfl.core.task import Task
from dispfl.costs.flops import ForwardCost
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.peer.state.status import NodeStatus
from dispfl.peer.state.store import (
    PeerStore,
    SavingThread,
    isolation_problem,
    reopen,
    report_of,
    rounds_of,
)
from dispfl.round.context import StepResult
from dispfl.round.ledger import MessageCost
from dispfl.runs.directory import read_config

COST = ForwardCost((2,), (3,))


def a_store(folder: Path) -> contextlib.closing[PeerStore]:
    return contextlib.closing(
        PeerStore(folder, "alice", {"seed": "0"}, {"rounds": 4, "seed": 0}, COST, Task())
    )


def a_step() -> StepResult:
    model = PackedModel.pack(torch.zeros(3), torch.ones(3, dtype=torch.bool))
    report = Report(scores={"accuracy": 0.5}, passes=[Passes(10, [3])])
    return StepResult(
        report, (MessageCost("bob", "alice", 12, 40),), state=PeerState(model, model.mask)
    )


def test_a_line_is_one_of_a_runs_metrics_and_has_the_report_and_the_messages(
    tmp_path: Path,
) -> None:
    with a_store(tmp_path / "run") as store:
        store.save(0, a_step(), ["bob"], ["carol"])
    line = rounds_of(tmp_path / "run")[0]
    assert line["scores"]["accuracy"]["per_peer"] == [0.5]
    assert line["busiest"] | {"peer": None} == {
        "paper_mb": 12e-6,
        "wire_mb": 40e-6,
        "wire_up_mb": 40e-6,
        "wire_down_mb": 40e-6,
        "connections": 1,
        "peer": None,
    }
    assert (
        line["flops_total"] == 3 * 10 * 2 * 3
    )  # three passes, ten samples, two operations for each of three weights
    assert (line["received"], line["missed"]) == (["bob"], ["carol"])
    assert report_of(line) == (a_step().report, tuple(a_step().messages))


def test_the_duration_of_a_round_does_not_depend_on_the_time_of_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a battery starts in 1970, and is set right later."""
    day, clock = 0.0, 100.0
    monkeypatch.setattr("time.time", lambda: day)
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with a_store(tmp_path / "run") as store:
        for t, jump in enumerate((1.8e9, -3600.0)):
            day, clock = day + 7 + jump, clock + 7
            store.save(t, a_step(), ["bob"], [])
    assert [entry["seconds"] for entry in rounds_of(tmp_path / "run").values()] == [7.0, 7.0]
    assert rounds_of(tmp_path / "run")[1]["time"] == day


def test_the_config_has_the_settings_the_peer_and_the_spec(tmp_path: Path) -> None:
    with a_store(tmp_path / "run"):
        pass
    assert read_config(tmp_path / "run") == {
        "rounds": 4,
        "seed": 0,
        "peers": 1,
        "peer": "alice",
        "spec": {"seed": "0"},
    }


def test_a_truncated_line_costs_only_its_own_round(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with a_store(folder) as store:
        for t in range(2):
            store.save(t, a_step(), ["bob"], [])
    written = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(written[:-20])
    assert sorted(rounds_of(folder)) == [0]
    with a_store(folder) as store:
        store.save(1, a_step(), [], ["bob"])
        store.save(2, a_step(), ["bob"], [])
    assert {t: entry["received"] for t, entry in rounds_of(folder).items()} == {
        0: ["bob"],
        1: [],
        2: ["bob"],
    }


def test_rounds_after_the_last_checkpoint_are_dropped_when_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with a_store(folder) as store:
        store.save(2, a_step(), ["bob"], [])  # it joined late
        store.save(3, a_step(), ["bob"], [])
    (folder / "checkpoints" / "round-000004" / "complete.json").unlink()
    with a_store(folder) as store:
        assert store.last()[0] == 3  # type: ignore[index]
        assert sorted(rounds_of(folder)) == [2]
        store.save(3, a_step(), [], ["bob"])
    assert {t: entry["received"] for t, entry in rounds_of(folder).items()} == {2: ["bob"], 3: []}


def test_other_lines_are_ignored(tmp_path: Path) -> None:
    lines = [
        b"\0\0\0\0",
        b"7",
        b"[]",
        b'{"at": 1}',
        json.dumps({"round": 4, "received": []}).encode(),
        b'{"round": 5, "hea',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert rounds_of(tmp_path) == {4: {"round": 4, "received": []}}


@pytest.fixture
def two_rounds(tmp_path: Path) -> Path:
    """The folder of a peer that has finished rounds 0 and 1."""
    with a_store(tmp_path / "run") as store:
        for t in range(2):
            store.save(t, a_step(), ["bob"], [])
    return tmp_path / "run"


def damage(folder: Path, rounds: int) -> bytes:
    """Change a byte of a checkpoint; return the damaged part."""
    part = folder / f"checkpoints/round-00000{rounds}/part-000.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return part.read_bytes()


def test_a_damaged_checkpoint_is_kept_and_the_one_before_it_resumed(
    two_rounds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = damage(two_rounds, 2)
    with a_store(two_rounds) as store:
        assert store.last()[0] == 1  # type: ignore[index]
    kept = two_rounds / "checkpoints/round-000002.damaged"
    assert (kept / "part-000.safetensors").read_bytes() == content
    assert caplog.messages == [
        f"The checkpoint {two_rounds / 'checkpoints/round-000002/part-000.safetensors'} is damaged"
        f" (the digest of peer alice does not match). It is kept as {kept}. Resuming from another"
        " round, if there is one."
    ]


def test_a_site_with_only_damaged_checkpoints_starts_again_and_keeps_them_with_its_metrics(
    two_rounds: Path,
) -> None:
    contents = {rounds: damage(two_rounds, rounds) for rounds in (1, 2)}
    with a_store(two_rounds) as store:
        assert store.last() is None
        store.save(0, a_step(), [], [])
    for rounds, content in contents.items():
        kept = two_rounds / f"checkpoints/round-00000{rounds}.damaged/part-000.safetensors"
        assert kept.read_bytes() == content
    assert sorted(rounds_of(two_rounds)) == [0]
    assert sorted(rounds_of(two_rounds / "checkpoints/round-000001.damaged")) == [0, 1]


def test_a_checkpoint_that_the_system_cannot_read_stops_the_site_and_nothing_changes(
    two_rounds: Path,
) -> None:
    manifest = two_rounds / "checkpoints/round-000002/complete.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # reading its beginning is a real EIO
    before = sorted(two_rounds.rglob("*"))
    with (
        a_store(two_rounds) as store,
        pytest.raises(RunError, match=r"cannot be read: Input/output error\."),
    ):
        store.last()
    assert sorted(two_rounds.rglob("*")) == before
    assert sorted(rounds_of(two_rounds)) == [0, 1]


class Saving:
    """A saving thread of a peer, its status and its log."""

    def __init__(self, store: PeerStore) -> None:
        self.status, self.events = NodeStatus(), list[tuple[str, Mapping[str, object]]]()
        self.thread = SavingThread(store, self.status, lambda *event: self.events.append(event))

    @property
    def unsaved(self) -> tuple[int, bool]:
        """The number of unsaved rounds, and whether there is a reason."""
        return self.status.unsaved_rounds, self.status.save_problem is not None


@pytest.fixture
def saving(small_disk: SmallDisk) -> Iterator[Saving]:
    with a_store(small_disk.path / "run") as store:
        yield Saving(store)


def test_rounds_that_a_full_disk_refuses_are_saved_with_the_next_one_that_fits(
    saving: Saving, small_disk: SmallDisk
) -> None:
    folder = small_disk.path / "run"

    async def story() -> None:
        await saving.thread.save(0, a_step(), ["bob"], [])
        small_disk.fill()
        for t in (1, 2):
            await saving.thread.save(t, a_step(), [], ["bob"])
            assert saving.unsaved == (t, True)
        assert [path.name for path in (folder / "checkpoints").glob("*/part-*")] == [
            "part-000.safetensors"
        ]
        small_disk.free()
        await saving.thread.save(3, a_step(), ["bob"], [])

    asyncio.run(story())
    saving.thread.close()
    assert saving.unsaved == (0, False)
    assert {t: entry["received"] for t, entry in rounds_of(folder).items()} == {
        0: ["bob"],
        1: [],
        2: [],
        3: ["bob"],
    }
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "round-000001",
        "round-000004",
    ]
    assert [event for event, _ in saving.events] == [
        "not saved",
        "saved",
    ]  # once, not for each round
    assert str(saving.events[0][1]["detail"]).startswith(
        f"No space left on device in {folder}; training continues"
    )


def test_the_last_round_is_waited_for_until_the_disk_has_space(
    saving: Saving, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavingThread, "RETRY_SECONDS", 0.05)

    async def story() -> None:
        retrying = asyncio.create_task(saving.thread.retry())
        small_disk.fill()
        await saving.thread.save(0, a_step(), [], [])
        waiting = asyncio.create_task(saving.thread.wait_until_saved())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        small_disk.free()
        await asyncio.wait_for(waiting, 60)
        retrying.cancel()

    asyncio.run(story())
    saving.thread.close()
    assert saving.thread.store.last()[0] == 1  # type: ignore[index]


def test_a_node_that_ends_on_a_full_disk_says_what_is_lost(
    saving: Saving, small_disk: SmallDisk
) -> None:
    small_disk.fill()
    asyncio.run(saving.thread.save(0, a_step(), [], []))
    saving.thread.close()
    assert saving.events[-1] == (
        "lost",
        {"rounds": 1, "detail": f"No space left on device in {small_disk.path}/run"},
    )


def test_a_site_that_was_alone_in_most_of_its_rounds_says_so(tmp_path: Path) -> None:
    with a_store(tmp_path / "run") as store:
        store.save(0, a_step(), [], [])  # nobody to receive from
        store.save(1, a_step(), [], ["carol"])
        assert isolation_problem(tmp_path / "run") is None
        store.save(2, a_step(), [], ["carol"])
        assert (isolation_problem(tmp_path / "run") or "").startswith(
            "2 of 3 rounds were trained without a model of any other site"
        )
        store.save(3, a_step(), ["bob"], ["carol"])
        assert isolation_problem(tmp_path / "run") is None


def test_a_site_that_waits_for_nobody_was_alone_if_it_last_received_in_the_first_half_of_the_rounds(
    tmp_path: Path,
) -> None:
    """However few steps it took: a slow one skips most of the rounds."""
    spec = {"seed": "0", "schedule": "async"}
    store = PeerStore(tmp_path / "run", "alice", spec, {"rounds": 60, "seed": 0}, COST, Task())
    with contextlib.closing(store):
        for t in (0, 2):
            store.save(t, a_step(), [], ["bob", "carol"])
        store.save(29, a_step(), ["bob"], [])
        assert isolation_problem(tmp_path / "run") is None
        store.save(59, a_step(), [], ["bob"])
        assert (isolation_problem(tmp_path / "run") or "").startswith(
            "3 of 4 rounds were trained without a model of any other site"
        )
    other = PeerStore(tmp_path / "other", "alice", spec, {"rounds": 60, "seed": 0}, COST, Task())
    with contextlib.closing(other):
        for t in (0, 2, 50):
            other.save(t, a_step(), [], ["bob"])
        other.save(59, a_step(), ["bob"], [])
        assert isolation_problem(tmp_path / "other") is None


def test_a_reopened_run_continues_after_its_last_received_model_and_loses_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with a_store(folder) as store:
        for t in range(6):
            store.save(t, a_step(), ["bob"] if t < 2 else [], ["carol"])
    (folder / "summary.json").write_text("{}")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()

    assert reopen(folder, "alice") == 2
    assert (folder / "metrics.jsonl").read_bytes().splitlines() == lines[:2]
    assert (folder / "metrics.1.reopened.jsonl").read_bytes().splitlines() == lines[2:]
    assert (folder / "summary.1.reopened.json").read_text() == "{}"
    assert not (folder / "summary.json").exists()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["round-000002", "round-000005.reopened", "round-000006.reopened"]
    with a_store(folder) as store:
        assert (store.last() or (0,))[0] == 2
        store.save(2, a_step(), ["bob"], [])
    assert sorted(rounds_of(folder)) == [0, 1, 2]

    assert reopen(folder, "alice", 1) == 1  # where the operator says
    assert sorted(rounds_of(folder)) == [0]
    assert (folder / "metrics.2.reopened.jsonl").exists()
    with refused(RunError):
        reopen(folder, "alice", 2)  # it has only one
    with refused(RunError):
        reopen(folder, "alice", 0)


def test_a_run_that_is_in_use_is_not_reopened(tmp_path: Path) -> None:
    with a_store(tmp_path / "run") as store:
        store.save(0, a_step(), ["bob"], [])
        with refused(RunError):
            reopen(tmp_path / "run", "alice")
