"""APFL: steps of both models and of the mixing weight by hand, and what a peer keeps."""

from collections.abc import Callable

import pytest
import torch
from messages import refused
from one_sample import dense, one_sample
from rounds import FinishedRound

from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.apfl import ALPHA, APFL, LOCAL
from dispfl.methods.base import SERVER, PeerState
from dispfl.methods.fedavg import FedAvg
from dispfl.round.context import RunContext
from dispfl.testing.rounds import network_with_buffers

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
RunAll = Callable[..., list[FinishedRound]]


def remembering(v: float, alpha: float) -> PeerState:
    """A peer with the local model v, whose last mixture does not matter."""
    model = dense(9.0)
    memory = {LOCAL: torch.tensor([v]), ALPHA: torch.tensor(alpha)}
    return PeerState(model, model.mask, memory=memory)


def test_one_step_of_both_models_by_hand(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """v = 5 and w = 1 with equal weights are 3, which is also the gradient of z^2 / 2 there."""
    context = one_sample(make_context)
    trainer = trainer_for(context)
    after = APFL(adaptive=False).step(trainer, remembering(5.0, 0.5), dense(1.0))
    v = 5.0 - 0.1 * 0.5 * 3.0
    w = 1.0 - 0.1 * 1.0
    assert after.memory[LOCAL].tolist() == pytest.approx([v])
    assert after.upload is not None
    assert after.upload.values.tolist() == pytest.approx([w])
    assert after.model.values.tolist() == pytest.approx([(v + w) / 2])
    assert float(after.memory[ALPHA]) == 0.5
    assert trainer.report.train_loss == pytest.approx(3.0**2 / 2)
    assert sum(passes[0] for passes in trainer.report.passes) == 2  # one sample through each


def test_the_mixing_weight_takes_one_step_in_a_round(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """The slope of the loss in alpha is (v - w) times the gradient of the mixture, 4 * 3."""
    context = one_sample(make_context, lr=0.01, epochs=2)
    trainer = trainer_for(context)
    after = APFL().step(trainer, remembering(5.0, 0.5), dense(1.0))
    alpha = 0.5 - 0.01 * 4.0 * 3.0
    assert float(after.memory[ALPHA]) == pytest.approx(alpha)
    assert trainer.report.logged == {"alpha": pytest.approx(alpha)}
    v_1 = 5.0 - 0.01 * 0.5 * 3.0
    w_1 = 1.0 - 0.01 * 1.0
    v_2 = v_1 - 0.01 * alpha * (alpha * v_1 + (1 - alpha) * w_1)
    assert after.memory[LOCAL].tolist() == pytest.approx([v_2])


@pytest.mark.parametrize(("v", "alpha"), [(50.0, 0.0), (-50.0, 0.0), (0.9, 1.0)])
def test_the_mixing_weight_stays_between_0_and_1(
    make_context: MakeContext, trainer_for: TrainerFor, v: float, alpha: float
) -> None:
    context = one_sample(make_context, lr=1.0)
    before = remembering(v, 0.5 if alpha == 0 else 0.99)
    after = APFL().step(trainer_for(context), before, dense(1.0))
    assert float(after.memory[ALPHA]) == alpha


def test_the_global_model_is_fedavgs(make_context: MakeContext, run_all: RunAll) -> None:
    """Also with batch norm: each of the two models has running statistics of its own."""
    for network in ({}, {"model": network_with_buffers}):
        servers = [
            run_all(make_context(method=method, **network))[-1].states[SERVER].model.values
            for method in (FedAvg(cohort=2), APFL(cohort=2))
        ]
        assert servers[0].equal(servers[1])


def test_a_peer_first_mixes_what_it_received_with_the_common_start(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(method=APFL(cohort=3, alpha=1.0, adaptive=False), rounds=1)
    [round_] = run_all(context)
    for peer, state in round_.states.items():
        if peer != SERVER:
            assert state.model.values.equal(state.memory[LOCAL])
    assert round_.evaluated is None


@pytest.mark.parametrize("train", [Train(momentum=0.9), Train(optimizer="adam")])
def test_other_optimizers_than_plain_sgd_are_refused(
    make_context: MakeContext, train: Train
) -> None:
    with refused(ConfigError, key="train.optimizer"):
        make_context(method=APFL(), train=train).check()


def test_a_user_s_optimizer_is_refused(make_context: MakeContext) -> None:
    make = make_context(method=APFL(), optimizer=lambda flat, _: torch.optim.SGD([flat], 0.1))
    with refused(ConfigError, key="train.optimizer"):
        make.check()


def test_noise_reaches_both_models(make_context: MakeContext, run_all: RunAll) -> None:
    quiet, noisy = (
        run_all(make_context(method=APFL(cohort=3), train=Train(epochs=1, noise_std=std)))[0]
        for std in (0.0, 0.5)
    )
    assert not quiet.states["000"].memory[LOCAL].equal(noisy.states["000"].memory[LOCAL])
    assert not quiet.states[SERVER].model.values.equal(noisy.states[SERVER].model.values)
