"""Ditto: one step of both models by hand, and who trains what for how long."""

from collections.abc import Callable

import pytest
import torch
from rounds import FinishedRound
from torch import Tensor, nn

from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.methods.base import SERVER, PeerState, initial_state
from dispfl.methods.ditto import Ditto
from dispfl.methods.fedavg import FedAvg
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]


def one_weight(value: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([value]), torch.ones(1, dtype=torch.bool)


def sloped(make_context: MakeContext) -> RunContext:
    """One peer, one weight w, one sample, and the loss 2 w: a gradient of 2 everywhere. A step goes
    0.1 times that."""
    sample = ResidentSamples(torch.ones(1, 1), torch.zeros(1))
    return make_context(
        peers={"000": PeerData(sample, sample)},
        model=lambda: nn.Linear(1, 1, bias=False),
        train=Train(lr=0.1, weight_decay=0, clip_norm=0),
        task=Task(loss=lambda outputs, labels: 2 * outputs.sum()),
    )


def stepped(
    method: Ditto, make_context: MakeContext, trainer_for: TrainerFor, v: float, w: float
) -> PeerState:
    """What becomes of a personal weight v when the server sends w."""
    trainer = trainer_for(sloped(make_context))
    return method.step(trainer, initial_state(*one_weight(v)), PackedModel.pack(*one_weight(w)))


def test_one_proximal_step_by_hand(make_context: MakeContext, trainer_for: TrainerFor) -> None:
    state = stepped(
        Ditto(global_epochs=1, personal_epochs=1), make_context, trainer_for, v=5.0, w=1.0
    )
    assert state.upload is not None
    # The global model: 1 - 0.1 * 2. The personal one: 5 - 0.1 * (2 + 0.5 * (5 - 1)), pulled to what
    # was received.
    assert state.upload.values.tolist() == pytest.approx([0.8])
    assert state.model.values.tolist() == pytest.approx([4.6])


def test_two_proximal_steps_by_hand(make_context: MakeContext, trainer_for: TrainerFor) -> None:
    state = stepped(
        Ditto(global_epochs=1, personal_epochs=2), make_context, trainer_for, v=5.0, w=1.0
    )
    assert state.model.values.tolist() == pytest.approx(
        [4.6 - 0.1 * (2 + 0.5 * 3.6)]
    )  # still towards 1, not 0.8


def test_the_default_is_two_global_and_three_personal_epochs(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    state = stepped(Ditto(prox_mu=0.0), make_context, trainer_for, v=5.0, w=1.0)
    assert state.upload is not None
    assert state.upload.values.tolist() == pytest.approx([1 - 2 * 0.2])
    assert state.model.values.tolist() == pytest.approx([5 - 3 * 0.2])
    assert Ditto().prox_mu == 0.5


def test_both_trainings_are_reported(make_context: MakeContext, trainer_for: TrainerFor) -> None:
    trainer = trainer_for(sloped(make_context))
    Ditto().step(trainer, initial_state(*one_weight(5.0)), PackedModel.pack(*one_weight(1.0)))
    assert trainer.report.passes == [(2, [1], None), (3, [1], None)]


def test_the_global_model_is_fedavgs_with_as_many_epochs(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    ditto = run_all(make_context(method=Ditto(cohort=10, global_epochs=2), rounds=1))[0].states[
        SERVER
    ]
    fedavg = run_all(
        make_context(method=FedAvg(cohort=10), train=Train(epochs=2, batch_size=8), rounds=1)
    )[0].states[SERVER]
    assert ditto.model.values.equal(fedavg.model.values)


def test_a_peer_is_evaluated_with_its_personal_model_and_keeps_it_while_idle(
    make_context: MakeContext, trainer_for: TrainerFor, run_all: Callable[..., list[FinishedRound]]
) -> None:
    context = make_context(method=Ditto(cohort=1), rounds=1)
    [round_] = run_all(context)
    [worked] = [peer for peer, step in round_.steps.items() if step.report.train_loss is not None]
    for peer, step in round_.steps.items():
        assert step.next_state.model.values.equal(initial_states(context)[peer].model.values) == (
            peer != worked
        )
        assert step.report.score == trainer_for(context, peer).score(step.next_state.model.values)
    assert round_.evaluated is None
