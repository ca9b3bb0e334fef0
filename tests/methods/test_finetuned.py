"""Fine-tuning: judged, never carried forward."""

from collections.abc import Callable
from dataclasses import replace
from math import nan

import pytest
import torch
from rounds import Played

from dispfl.core.train import Task, Trainer
from dispfl.methods.base import Method, PeerState
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.work import Setting

MakeSetting = Callable[..., Setting]
TrainerFor = Callable[..., Trainer]
Play = Callable[..., list[Played]]

PAIRS = pytest.mark.parametrize(
    ("plain", "tuned"),
    [
        (FedAvg(cohort=2), FedAvgFT(cohort=2, tune_every=1)),
        (DPSGD(), DPSGDFT(tune_every=1)),
        (DPSGD(density=0.5), DPSGDFT(density=0.5, tune_every=1)),
    ],
    ids=["fedavg", "dpsgd", "sparse dpsgd"],
)


@PAIRS
def test_tuning_is_never_carried_forward(
    make_setting: MakeSetting, play: Play, bits: Callable[[PeerState], dict[str, bytes]], plain: Method, tuned: Method
) -> None:
    without, with_tuning = (play(make_setting(method=method, rounds=3)) for method in (plain, tuned))
    for one, other in zip(without, with_tuning, strict=True):
        assert {name: bits(state) for name, state in one.states.items()} == {
            name: bits(state) for name, state in other.states.items()
        }
        assert one.ledger == other.ledger
        for peer in one.steps:
            assert replace(one.steps[peer].report, score=None) == replace(other.steps[peer].report, score=None)


@PAIRS
@pytest.mark.parametrize(("rate", "lr"), [("initial", 0.1), ("current", 0.1 * 0.998**2)])
def test_what_is_judged_is_the_shared_model_after_five_epochs_on_the_peers_own_data(
    make_setting: MakeSetting, trainer_for: TrainerFor, play: Play, plain: Method, tuned: Method, rate: str, lr: float
) -> None:
    tuned = tuned.model_copy(update={"tune_rate": rate})
    setting = make_setting(method=tuned, rounds=3)
    last = play(setting)[-1]
    assert last.judged is not None
    weights, mask = plain.shared(last.states).unpack()
    for peer, step in last.steps.items():
        trainer = trainer_for(setting, peer, 2)
        learned = trainer.learn(weights, mask, 5, lr=lr)
        assert last.judged[peer].model.unpack()[0].equal(learned)
        assert last.judged[peer].model.mask.unpack().equal(mask)
        assert step.report.score == trainer.score(learned)


@pytest.mark.parametrize("kind", [FedAvgFT, DPSGDFT])
@pytest.mark.parametrize(
    ("every", "eval_every", "scored"),
    [
        (2, 1, [False, True, False, True, True]),
        (10, 1, [False] * 4 + [True]),
        (1, 3, [False, False, True, False, True]),
    ],
)
def test_it_is_scored_only_every_n_rounds_and_after_the_last(
    make_setting: MakeSetting, play: Play, kind: type[FedAvgFT], every: int, eval_every: int, scored: list[bool]
) -> None:
    rounds = play(make_setting(method=kind(tune_every=every), eval_every=eval_every, rounds=5))
    assert [round_.steps["000"].report.score is not None for round_ in rounds] == scored
    assert [round_.judged is not None for round_ in rounds] == scored


@pytest.mark.parametrize("kind", [FedAvgFT, DPSGDFT])
def test_unless_told_otherwise_five_epochs_every_ten_rounds_at_the_initial_rate(kind: type[FedAvgFT]) -> None:
    tuning = kind().tuning
    assert (tuning.epochs, tuning.every, tuning.rate) == (5, 10, "initial")


def test_a_tuning_that_fails_is_told_and_the_untuned_model_is_judged(make_setting: MakeSetting, play: Play) -> None:
    """One batch a round for each of two peers, so the third and the fourth loss are those of tuning."""
    losses = iter([1.0, 1.0, nan, nan])
    task = Task(loss=lambda outputs, labels: next(losses) * outputs.square().mean())
    setting = make_setting(peers=2, method=FedAvgFT(tune_epochs=1), task=task, rounds=1)
    peers = {p: replace(data, train=data.train.take(torch.arange(8))) for p, data in setting.peers.items()}
    [round_] = play(replace(setting, peers=peers))
    assert round_.server is not None
    assert round_.judged is not None
    for peer, step in round_.steps.items():
        assert step.report.failure is not None
        assert step.report.failure.startswith(f"Peer {peer}, round 0: the training loss became infinite or nan")
        assert round_.judged[peer].model.values.equal(round_.server.model.values)
        assert step.report.score is not None
