"""A peer's rounds on its disk."""

import contextlib
from pathlib import Path

import torch

from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.train import Report
from dispfl.methods.base import PeerState
from dispfl.peer.store import ROUNDS, PeerStore, rounds_of
from dispfl.work import Step


def a_step() -> Step:
    mask = torch.ones(3, dtype=torch.bool)
    return Step(PeerState(PackedModel.pack(torch.zeros(3), mask), PackedMask.pack(mask)), Report(score=0.5))


def test_a_line_that_a_power_cut_tore_costs_its_own_round_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with contextlib.closing(PeerStore(folder, "alice", {})) as store:
        for t in range(2):
            store.save(t, a_step(), ["bob"], [])
    written = (folder / ROUNDS).read_bytes()
    (folder / ROUNDS).write_bytes(written[:-20])
    assert sorted(rounds_of(folder)) == [0]
    with contextlib.closing(PeerStore(folder, "alice", {})) as store:
        store.save(1, a_step(), [], ["bob"])
        store.save(2, a_step(), ["bob"], [])
    assert {t: entry["heard"] for t, entry in rounds_of(folder).items()} == {0: ["bob"], 1: [], 2: ["bob"]}


def test_a_line_that_is_no_round_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ROUNDS).write_bytes(b'\0\0\0\0\n7\n[]\n{"at": 1}\n{"round": 4, "heard": []}\n{"round": 5, "hea')
    assert rounds_of(tmp_path) == {4: {"round": 4, "heard": []}}
