"""DFedAvgM and DFedSAM: steps by hand, their training defaults, and whose models are evaluated."""

from collections.abc import Callable

import pytest
from one_sample import dense, one_sample
from rounds import FinishedRound

from dispfl.config import compose
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import initial_state
from dispfl.methods.dfedavgm import DFedAvgM
from dispfl.methods.dfedsam import DFedSAM
from dispfl.methods.dpsgd import DPSGD
from dispfl.round.context import RunContext

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]


def test_a_round_of_dfedavgm_by_hand(make_context: MakeContext, trainer_for: TrainerFor) -> None:
    """The gradient of w^2 / 2 is w; 2 and 6 are averaged, then two steps with momentum."""
    context = one_sample(make_context, epochs=2, momentum=0.9)
    state = initial_state(dense(2.0).values, dense(2.0).mask)
    after = DFedAvgM().step(trainer_for(context), state, {"001": dense(6.0)})
    w = (2.0 + 6.0) / 2
    v = w
    w -= 0.1 * v
    v = 0.9 * v + w
    w -= 0.1 * v
    assert after.model.values.tolist() == pytest.approx([w])
    assert w == pytest.approx(2.88)


def test_a_step_of_dfedsam_takes_the_gradient_further_up(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    context = one_sample(make_context, sam_rho=0.5)
    state = initial_state(dense(2.0).values, dense(2.0).mask)
    after = DFedSAM().step(trainer_for(context), state, {"001": dense(6.0)})
    assert after.model.values.tolist() == pytest.approx([4.0 - 0.1 * (4.0 + 0.5)])


def test_a_method_changes_the_defaults_of_training_and_a_user_overrides_them() -> None:
    assert compose({}, ["method=dfedavgm"]).train.momentum == 0.9
    sam = compose({}, ["method=dfedsam"]).train
    assert (sam.momentum, sam.sam_rho) == (0.9, 0.01)
    assert compose({}, ["method=dfedsam", "train.momentum=0.0"]).train.momentum == 0
    assert compose({}, ["method=dfedsam", "train.optimizer=adam"]).train.momentum == 0
    assert compose({}, ["method=dpsgd"]).train.momentum == 0

    saved = compose({}, ["method=dfedsam", "train.sam_rho=0.2"]).to_toml()
    assert compose(saved).train.sam_rho == 0.2


def test_with_the_same_training_it_is_d_psgd_evaluated_personally(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    train = Train(epochs=1, batch_size=8, momentum=0.0)
    plain = run_all(make_context(method=DPSGD(), rounds=2, train=train))[-1].steps
    personal = run_all(make_context(method=DFedAvgM(), rounds=2, train=train))[-1].steps
    for peer, step in plain.items():
        assert personal[peer].next_state.model.values.equal(step.next_state.model.values)
    assert len({step.report.test_loss for step in personal.values()}) > 1
