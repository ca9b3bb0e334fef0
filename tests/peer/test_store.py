"""A peer's run directory."""

import contextlib
import json
from pathlib import Path

import torch

from dispfl.core.packed import PackedModel
from dispfl.core.train import Report, Task
from dispfl.costs.flops import ForwardCost
from dispfl.costs.ledger import MessageCost
from dispfl.methods.base import PeerState
from dispfl.peer.store import PeerStore, report_of, rounds_of
from dispfl.round.context import StepResult
from dispfl.runs.directory import read_config

COST = ForwardCost((2,), (3,))


def a_store(folder: Path) -> contextlib.closing[PeerStore]:
    return contextlib.closing(PeerStore(folder, "alice", {"seed": "0"}, {"rounds": 4, "seed": 0}, COST, Task()))


def a_step() -> StepResult:
    model = PackedModel.pack(torch.zeros(3), torch.ones(3, dtype=torch.bool))
    report = Report(scores={"accuracy": 0.5}, passes=[(10, [3])])
    return StepResult(report, (MessageCost("bob", "alice", 12, 40),), state=PeerState(model, model.mask))


def test_a_line_is_one_of_a_runs_metrics_and_has_the_report_and_the_messages(tmp_path: Path) -> None:
    with a_store(tmp_path / "run") as store:
        store.save(0, a_step(), ["bob"], ["carol"])
    line = rounds_of(tmp_path / "run")[0]
    assert line["scores"]["accuracy"]["per_peer"] == [0.5]
    assert line["busiest"] | {"peer": None} == {
        "paper_mb": 12e-6,
        "wire_mb": 40e-6,
        "wire_up_mb": 40e-6,
        "wire_down_mb": 40e-6,
        "peer": None,
    }
    assert line["flops_total"] == 3 * 10 * 2 * 3  # three passes, ten samples, two operations for each of three weights
    assert (line["heard"], line["missed"]) == (["bob"], ["carol"])
    assert report_of(line) == (a_step().report, tuple(a_step().messages))


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
    assert {t: entry["heard"] for t, entry in rounds_of(folder).items()} == {0: ["bob"], 1: [], 2: ["bob"]}


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
    assert {t: entry["heard"] for t, entry in rounds_of(folder).items()} == {2: ["bob"], 3: []}


def test_other_lines_are_ignored(tmp_path: Path) -> None:
    lines = [
        b"\0\0\0\0",
        b"7",
        b"[]",
        b'{"at": 1}',
        json.dumps({"round": 4, "heard": []}).encode(),
        b'{"round": 5, "hea',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert rounds_of(tmp_path) == {4: {"round": 4, "heard": []}}
