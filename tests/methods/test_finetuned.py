"""Fine-tuned models are evaluated and never carried forward."""

from collections.abc import Callable
from dataclasses import replace
from math import nan

import pytest
import torch
from rounds import FinishedRound

from dispfl.core.task import Task
from dispfl.core.train import Trainer
from dispfl.methods.base import Method, PeerState
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.round.context import RunContext

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
RunAll = Callable[..., list[FinishedRound]]

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
    make_context: MakeContext,
    run_all: RunAll,
    bits: Callable[[PeerState], dict[str, bytes]],
    plain: Method,
    tuned: Method,
) -> None:
    without, with_tuning = (
        run_all(make_context(method=method, rounds=3)) for method in (plain, tuned)
    )
    for one, other in zip(without, with_tuning, strict=True):
        assert {name: bits(state) for name, state in one.states.items()} == {
            name: bits(state) for name, state in other.states.items()
        }
        assert one.ledger == other.ledger
        for peer in one.steps:
            reports = [
                replace(round_.steps[peer].report, scores={}, test_loss=None)
                for round_ in (one, other)
            ]
            assert reports[0] == reports[1]


@PAIRS
@pytest.mark.parametrize(("rate", "lr"), [("initial", 0.1), ("current", 0.1 * 0.998**2)])
def test_the_evaluated_model_is_the_global_one_after_five_epochs_on_the_peers_own_data(
    make_context: MakeContext,
    trainer_for: TrainerFor,
    run_all: RunAll,
    plain: Method,
    tuned: Method,
    rate: str,
    lr: float,
) -> None:
    tuned = tuned.model_copy(update={"tune_rate": rate})
    context = make_context(method=tuned, rounds=3)
    last = run_all(context)[-1]
    assert last.evaluated is not None
    weights, mask = plain.global_model(last.states).unpack()
    for peer, step in last.steps.items():
        trainer = trainer_for(context, peer, 2)
        learned = trainer.learn(weights, mask, 5, lr=lr)
        assert last.evaluated[peer].model.unpack()[0].equal(learned)
        assert last.evaluated[peer].model.mask.unpack().equal(mask)
        assert step.report.score == trainer.score(learned)


@pytest.mark.parametrize("kind", [FedAvgFT, DPSGDFT])
@pytest.mark.parametrize(
    ("every", "eval_every", "evaluated"),
    [
        (2, 1, [False, True, False, True, True]),
        (10, 1, [False] * 4 + [True]),
        (1, 3, [False, False, True, False, True]),
    ],
)
def test_models_are_evaluated_only_every_n_rounds_and_after_the_last(
    make_context: MakeContext,
    run_all: RunAll,
    kind: type[FedAvgFT],
    every: int,
    eval_every: int,
    evaluated: list[bool],
) -> None:
    rounds = run_all(make_context(method=kind(tune_every=every), eval_every=eval_every, rounds=5))
    assert [round_.steps["000"].report.score is not None for round_ in rounds] == evaluated
    assert [round_.evaluated is not None for round_ in rounds] == evaluated


@pytest.mark.parametrize("kind", [FedAvgFT, DPSGDFT])
def test_the_default_is_five_epochs_every_ten_rounds_at_the_initial_rate(
    kind: type[FedAvgFT],
) -> None:
    fine_tuning = kind().fine_tuning
    assert (fine_tuning.epochs, fine_tuning.every, fine_tuning.rate) == (5, 10, "initial")


def test_a_failed_fine_tuning_is_reported_and_the_untuned_model_evaluated(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """One batch a round for each of two peers, so the third and the fourth loss are those of
    tuning."""
    losses = iter([1.0, 1.0, nan, nan])
    task = Task(
        loss=lambda outputs, _: (
            (next(losses) if outputs.requires_grad else 1) * outputs.square().mean()
        )
    )
    context = make_context(peers=2, method=FedAvgFT(cohort=2, tune_epochs=1), task=task, rounds=1)
    peers = {
        p: replace(data, train=data.train.take(torch.arange(8)))
        for p, data in context.data.peers.items()
    }
    [round_] = run_all(replace(context, data=context.data.with_peers(peers)))
    assert round_.server is not None
    assert round_.evaluated is not None
    for peer, step in round_.steps.items():
        assert step.report.failure is not None
        assert step.report.failure.startswith(
            f"Peer {peer}, round 0: the training loss became infinite or nan"
        )
        assert round_.evaluated[peer].model.values.equal(round_.server.model.values)
        assert step.report.score is not None
