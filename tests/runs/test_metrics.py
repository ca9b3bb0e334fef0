"""What is written down of a round and of a run, against numbers worked out by hand."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dispfl.core.packed import PackedModel
from dispfl.core.report import Passes, Report
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.costs.flops import ForwardCost
from dispfl.data.batches import ResidentSamples
from dispfl.methods.base import initial_state
from dispfl.methods.local import Local
from dispfl.round.context import RunContext, StepResult
from dispfl.round.ledger import MessageCost
from dispfl.round.round import Round
from dispfl.runs.metrics import (
    Metrics,
    flops_of,
    groups,
    kernel_flops_of,
    last,
    mean_peer_seconds,
    round_metrics,
    spread,
    summarize,
    versions,
    weights_sha256,
)
from dispfl.testing.rounds import simulated_context

KEYS = [
    "round",
    "metric",
    "scores",
    "test_loss",
    "train_score",
    "validation",
    "global_test",
    "mixed",
    "backdoor",
    "train_loss",
    "mask_change",
    "overlap",
    "affinity",
    "epsilon",
    "steps",
    "staleness",
    "withstands",
    "discarded",
    "peer_seconds",
    "logged",
    "busiest",
    "traffic",
    "links",
    "missed_links",
    "similarities",
    "message_bytes",
    "senders",
    "flops_per_peer",
    "flops_total",
    "kernel_flops",
    "failures",
    "seconds",
    "simulated",
]


COST = ForwardCost((2, 1), (6, 3))
"""A layer 2 -> 3: 6 weights at 2 operations and 3 biases at 1 for each sample; 15 if all are
kept."""


def a_round(reports: dict[str, Report], messages: Sequence[MessageCost] = ()) -> Round:
    return Round(
        {
            peer: StepResult(report, [message for message in messages if message.receiver == peer])
            for peer, report in reports.items()
        }
    )


def a_context(method: Any, samples: int = 7, batch: int = 4) -> RunContext:
    data = ResidentSamples(torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.int64))
    return simulated_context(
        {"000": PeerData(data, data), "001": PeerData(data, data)},
        model=lambda: nn.Linear(2, 3),
        method=method,
        train=Train(epochs=2, batch_size=batch),
        rounds=5,
        eval_every=2,
    )


def test_spread_of_one_and_three_is_two_plus_minus_one() -> None:
    assert spread([1.0, 3.0]) == {"mean": 2.0, "std": 1.0, "per_peer": [1.0, 3.0]}


def test_a_missing_value_is_null_and_not_in_the_mean() -> None:
    assert spread([1.0, None, 3.0]) == {"mean": 2.0, "std": 1.0, "per_peer": [1.0, None, 3.0]}
    assert spread([None, None]) is None


def test_a_round_of_two_peers() -> None:
    reports = {
        "000": Report(
            scores={"accuracy": 0.5},
            test_loss=1.5,
            mixed=0.25,
            train_loss=2.0,
            mask_change=0.1,
            overlap=0.5,
            seconds=2.0,
            passes=[Passes(1, [6, 3])],
        ),
        "001": Report(
            scores={"accuracy": 1.0},
            mixed=0.75,
            train_loss=1.0,
            mask_change=0.3,
            passes=[Passes(3, [6, 3])],
        ),
    }
    record = round_metrics(3, a_round(reports), Task(), COST, 1.23456)
    assert list(record) == KEYS
    assert record["round"] == 3
    assert record["metric"] == "accuracy"
    assert record["scores"] == {
        "accuracy": {
            "higher_is_better": True,
            "format": ".3f",
            "mean": 0.75,
            "std": 0.25,
            "per_peer": [0.5, 1.0],
        }
    }
    assert record["mixed"]["mean"] == 0.5
    assert record["test_loss"]["per_peer"] == [1.5, None]
    assert record["train_loss"]["per_peer"] == [2.0, 1.0]
    assert record["mask_change"]["mean"] == pytest.approx(0.2)
    assert record["overlap"] == {"mean": 0.5, "std": 0.0, "per_peer": [0.5, None]}
    assert record["flops_per_peer"] == (45 + 135) / 2
    assert record["flops_total"] == 45 + 135
    assert record["failures"] == {}
    assert record["seconds"] == 1.235
    assert record["peer_seconds"]["per_peer"] == [2.0, 0.0]


def test_unmeasured_values_are_null_and_idle_peers_do_not_count() -> None:
    working = Report(train_loss=1.0, passes=[Passes(10, [6, 3])])
    record = round_metrics(0, a_round({"000": Report(), "001": working}), Task(), COST, 0)
    assert (record["scores"], record["mixed"], record["mask_change"]) == ({}, None, None)
    assert (record["flops_per_peer"], record["flops_total"]) == (450, 450)
    assert record["peer_seconds"]["per_peer"] == [None, 0.0]
    assert round_metrics(0, a_round({"000": Report()}), Task(), COST, 0)["flops_per_peer"] == 0


def test_failures_are_sentences_by_peer() -> None:
    record = round_metrics(
        0,
        a_round({"000": Report(train_loss=1.0), "001": Report(failure="It broke.")}),
        Task(),
        COST,
        0,
    )
    assert record["failures"] == {"001": "It broke."}


def test_the_busiest_node_hears_two_neighbours() -> None:
    """6 and 10 weights kept: 24 and 40 bytes of values, 3 bytes of mask each; all three receive
    from both others."""
    sent = {"000": 24, "001": 40, "002": 24}
    messages = [
        MessageCost(sender, receiver, size, size + 3)
        for receiver in sent
        for sender, size in sent.items()
        if sender != receiver
    ]
    record = round_metrics(0, a_round(dict.fromkeys(sent, Report()), messages), Task(), COST, 0)
    # Down: 000 and 002 receive from 24 + 40 + 2 x 3; 001 receives from 24 + 24 + 2 x 3. Up: 001
    # sends 2 x (40 + 3), more than anyone receives from.
    assert record["busiest"] == {
        "paper_mb": 64 / 1e6,
        "wire_mb": 86 / 1e6,
        "wire_up_mb": 86 / 1e6,
        "wire_down_mb": 70 / 1e6,
        "peer": "001",
        "connections": 2,
    }
    assert record["traffic"] == {"000": [54, 70], "001": [86, 54], "002": [54, 70]}


def test_a_round_without_traffic_has_no_busiest_node() -> None:
    record = round_metrics(0, a_round({"000": Report()}), Task(), COST, 0)
    assert (record["busiest"]["wire_mb"], record["busiest"]["peer"], record["traffic"]) == (
        0,
        None,
        {},
    )


def test_flops_of_two_epochs_over_seven_samples_with_half_the_weights() -> None:
    """A layer 2 -> 3: 6 weights at 2 operations, 3 biases at 1. Kept: 3 weights and 3 biases, so 9
    a sample.

    3 x (2 epochs x 7 samples x 9) = 378; Dis-PFL adds the mask search, 3 x 4 samples x 15 dense =
    180.
    """
    learning, search = Passes(2 * 7, [3, 3]), Passes(4, [6, 3])
    assert flops_of(Report(passes=[learning]), COST) == 378
    assert flops_of(Report(passes=[learning, search]), COST) == 378 + 180


def test_the_digest_is_that_of_the_dense_little_endian_floats() -> None:
    packed = PackedModel.pack(torch.tensor([1.5, 9.0, -2.0]), torch.tensor([True, False, True]))
    assert weights_sha256(packed) == hashlib.sha256(struct.pack("<3f", 1.5, 0.0, -2.0)).hexdigest()


def test_minus_zero_has_the_digest_of_zero() -> None:
    everything = torch.tensor([True])
    minus, plus = (PackedModel.pack(torch.tensor([zero]), everything) for zero in (-0.0, 0.0))
    assert weights_sha256(minus) == weights_sha256(plus)


def test_the_last_value_skips_rounds_without_evaluation() -> None:
    records: list[Metrics] = [{"mixed": 1}, {"mixed": 2}, {"mixed": None}]
    assert last(records, "mixed") == 2
    assert last(records[2:], "mixed") is None


def test_with_eval_every_2_the_second_fourth_and_last_of_five_rounds_are_evaluated() -> None:
    context = a_context(Local())
    assert [t for t in range(5) if context.evaluates(t)] == [1, 3, 4]


def test_a_summary_averages_the_rounds_and_keeps_the_last_accuracy() -> None:
    records = [
        {
            "metric": "accuracy",
            "scores": {"accuracy": accuracy} if accuracy else {},
            "test_loss": None,
            "validation": None,
            "global_test": None,
            "busiest": {"paper_mb": mb, "wire_mb": 2 * mb, "connections": int(mb)},
            "flops_per_peer": 100 * mb,
            "flops_total": 200 * mb,
            "failures": failures,
            "seconds": 0.25,
            "peer_seconds": {"mean": mb, "std": 0.0, "per_peer": [mb, mb]},
        }
        for accuracy, mb, failures in ((None, 1.0, {"000": "It broke."}), ({"mean": 0.5}, 3.0, {}))
    ]
    state = initial_state(torch.ones(9), torch.ones(9, dtype=torch.bool))
    summary = summarize(a_context(Local()), records, {"000": state, "001": state})
    assert summary["method"] == "local"
    assert (summary["rounds"], summary["peers"], summary["failures"]) == (2, 2, 1)
    assert summary["scores"] == {"accuracy": {"mean": 0.5}}
    assert summary["busiest"] == {
        "paper_mb_per_round": 2.0,
        "wire_mb_per_round": 4.0,
        "connections": 3,
    }
    assert (summary["flops_per_peer_round"], summary["flops_total_round"], summary["seconds"]) == (
        200,
        400,
        0.5,
    )
    assert summary["seconds_per_peer_round"] == 2.0
    assert (
        summary["weights_sha256"]
        == [hashlib.sha256(struct.pack("<9f", *[1.0] * 9)).hexdigest()] * 2
    )
    assert 10 < summary["peak_rss_mb"] < 100_000
    assert summary["versions"] == versions()
    assert summary["versions"]["torch"] == torch.__version__


def test_groups_of_peers_of_unequal_density_have_a_score_each() -> None:
    accuracy = {"per_peer": [0.2, 0.4, 0.9, None]}
    assert groups([0.5, 0.5, 1.0, 1.0], accuracy) == [
        {"density": 0.5, "peers": 2, "mean": pytest.approx(0.3), "std": pytest.approx(0.1)},
        {"density": 1.0, "peers": 2, "mean": 0.9, "std": 0.0},
    ]
    assert groups([0.5] * 4, accuracy) == []


def test_groups_have_the_seconds_of_their_peers_over_the_rounds_in_which_they_train() -> None:
    """Peer 0 takes 1 and 3 s, peer 1 trains once, in 4 s; peers 2 and 3 take 8 s each time."""
    records: list[Metrics] = [
        {"peer_seconds": {"mean": 0.0, "per_peer": [1.0, None, 8.0, 8.0]}},
        {"peer_seconds": None},
        {"peer_seconds": {"mean": 0.0, "per_peer": [3.0, 4.0, 8.0, 8.0]}},
    ]
    seconds = mean_peer_seconds(records)
    assert seconds == [2.0, 4.0, 8.0, 8.0]
    found = groups([0.5, 0.5, 1.0, 1.0], {"per_peer": [0.2, 0.4, 0.9, 0.9]}, seconds)
    assert [group["seconds"] for group in found] == [3.0, 8.0]
    assert mean_peer_seconds([{"round": 0}]) is None


def test_kernels_compute_what_masks_of_weights_leave_out_and_evaluations() -> None:
    """Of 6 weights and 3 biases, 3 weights are left out: 15 operations instead of 9 a sample.

    Training counts 3 of those for each sample, evaluation one.
    """
    learning = Passes(2 * 7, [3, 3])
    report = Report(passes=[learning], computed=[6, 3], evaluations=[Passes(2, [6, 3])])
    assert kernel_flops_of(report, COST) == 14 * 3 * 15 + 2 * 15
    assert kernel_flops_of(Report(passes=[learning]), COST) == 378  # a small network
    bias = replace(COST, before=(frozenset(), frozenset()))
    trained = Report(passes=[Passes(1, [3, 3], [0, 1])], computed=[6, 3])
    assert kernel_flops_of(trained, bias) == 15 + 3  # forward, and the gradient of all 3 biases
    assert kernel_flops_of(Report(evaluations=[Passes(2, [6, 3])]), COST) is None
