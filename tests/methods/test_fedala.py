"""FedALA: the combination and its weights by hand, and for how long they are learnt."""

from collections.abc import Callable

import pytest
import torch
from messages import refused
from one_sample import dense, one_sample
from rounds import FinishedRound
from torch import Tensor

from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, PeerState, initial_state
from dispfl.methods.fedala import COMBINATION, FedALA, has_converged
from dispfl.methods.fedavg import FedAvg
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
RunAll = Callable[..., list[FinishedRound]]


def output(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss a * b, whose gradient in b is a."""
    return outputs.sum()


def stepped(
    method: FedALA, trainer: Trainer, own: tuple[float, float], combination: float | None
) -> PeerState:
    """A peer with its own a and b receives 2 and 3; b is the head."""
    state = initial_state(torch.tensor(own), torch.ones(2, dtype=torch.bool))
    if combination is not None:
        memory = {COMBINATION: torch.tensor([combination])}
        state = PeerState(state.model, state.next_mask, memory=memory)
    return method.step(trainer, state, dense(2.0, 3.0))


def test_one_step_of_the_weights_and_one_of_the_model_by_hand(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    trainer = trainer_for(one_sample(make_context, output, factors=2))
    after = stepped(FedALA(weight_lr=0.1), trainer, (5.0, 1.0), 0.5)
    # a is the global model's, 2, and so is the gradient in b; b goes from 1 to 3.
    weight = 0.5 - 0.1 * 2.0 * (3.0 - 1.0)
    start = 1.0 + (3.0 - 1.0) * weight
    assert after.memory[COMBINATION].tolist() == pytest.approx([weight])
    assert after.model.values.tolist() == pytest.approx([2.0 - 0.1 * start, start - 0.1 * 2.0])
    assert after.upload is not None
    assert after.upload.values.equal(after.model.values)
    assert trainer.report.train_loss == pytest.approx(2.0 * start)


@pytest.mark.parametrize(("weight_lr", "weight", "start"), [(9.0, 0.0, 1.0), (-9.0, 1.0, 3.0)])
def test_weights_stay_between_0_and_1(
    make_context: MakeContext,
    trainer_for: TrainerFor,
    weight_lr: float,
    weight: float,
    start: float,
) -> None:
    trainer = trainer_for(one_sample(make_context, output, factors=2, lr=1e-6))
    method = FedALA().model_copy(update={"weight_lr": weight_lr})
    after = stepped(method, trainer, (5.0, 1.0), 0.5)
    assert after.memory[COMBINATION].tolist() == [weight]
    assert after.model.values[1].item() == pytest.approx(start, abs=1e-4)


def test_the_first_weights_are_ones_and_learnt_until_the_loss_has_converged(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    """With a tiny rate the loss hardly changes: eleven epochs, as many samples. Then one epoch."""
    trainer = trainer_for(one_sample(make_context, output, factors=2))
    after = stepped(FedALA(weight_lr=1e-6), trainer, (5.0, 1.0), None)
    assert after.memory[COMBINATION].tolist() == pytest.approx([1.0], abs=1e-4)
    assert [passes.samples for passes in trainer.report.passes] == [11, 1]
    trainer = trainer_for(one_sample(make_context, output, factors=2))
    stepped(FedALA(weight_lr=1e-6), trainer, (5.0, 1.0), 1.0)
    assert [passes.samples for passes in trainer.report.passes] == [1, 1]
    assert trainer.report.passes[0].trained == [0, 1]  # the head alone


def test_losses_have_converged_when_the_last_ten_hardly_differ() -> None:
    assert not has_converged([1.0] * 10)
    assert has_converged([9.0] + [1.0] * 10)
    assert not has_converged([1.0, 1.0] + [0.0, 1.0] * 5)


def test_a_peer_whose_model_is_the_global_one_combines_nothing(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """So the first round is FedAvg's, and the weights are learnt from the second one on."""
    first, second = run_all(make_context(method=FedALA(cohort=3)))
    fedavg = run_all(make_context(method=FedAvg(cohort=3)))[0]
    assert first.states[SERVER].model.values.equal(fedavg.states[SERVER].model.values)
    for state in (first.states["000"], initial_states(make_context(method=FedALA()))["000"]):
        assert COMBINATION not in state.memory
    assert second.states["000"].memory[COMBINATION].shape == (8 * 3 + 3,)
    assert second.evaluated is None


def test_the_weights_are_learnt_on_a_share_of_the_data_that_changes(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """16 of 20 samples, in each of the epochs."""
    context = make_context(method=FedALA(cohort=3), rounds=3, train=Train(epochs=1, batch_size=8))
    third = run_all(context)[2]
    for peer in context.roster:
        assert [passes.samples for passes in third.steps[peer].report.passes] == [16, 20]


def test_the_score_of_the_combined_model_is_reported_as_mixed(
    make_context: MakeContext, run_all: RunAll
) -> None:
    for step in run_all(make_context(method=FedALA(cohort=3), rounds=1))[0].steps.values():
        assert step.report.mixed is not None


def test_other_parameters_can_be_combined(make_context: MakeContext, run_all: RunAll) -> None:
    last = run_all(make_context(method=FedALA(cohort=3, combined=("*",))))[-1]
    assert last.states["000"].memory[COMBINATION].shape == (67,)


def test_a_pattern_that_matches_nothing_is_refused(make_context: MakeContext) -> None:
    with refused(ConfigError, key="method.combined"):
        make_context(method=FedALA(combined=("nothing.*",))).check()
