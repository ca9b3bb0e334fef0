"""SCAFFOLD: the steps of a peer and of the server by hand, and what is sent."""

from collections.abc import Callable

import pytest
import torch
from messages import refused
from one_sample import dense, one_sample
from rounds import FinishedRound

from dispfl.core.packed import PackedModel
from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, PeerState, empty_state, initial_state
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.scaffold import CONTROL, SCAFFOLD, with_control
from dispfl.round.context import RunContext

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
RunAll = Callable[..., list[FinishedRound]]


def controlled(value: float, control: float) -> PackedModel:
    return dense(value).with_tensors(control=torch.tensor([control]))


def test_two_corrected_steps_by_hand(make_context: MakeContext, trainer_for: TrainerFor) -> None:
    """The gradient of y^2 / 2 is y; x = 4, c = 3, c_i = 1."""
    context = one_sample(make_context, epochs=2)
    state = empty_state(context.layout)
    state = PeerState(state.model, state.next_mask, memory={CONTROL: torch.tensor([1.0])})
    after = SCAFFOLD().step(trainer_for(context), state, controlled(4.0, 3.0))
    first = 4.0 - 0.1 * (4.0 + 3.0 - 1.0)
    second = first - 0.1 * (first + 3.0 - 1.0)
    control = 1.0 - 3.0 + (4.0 - second) / (2 * 0.1)
    assert control == pytest.approx((4.0 + first) / 2)  # the mean of the two gradients
    assert after.upload is not None
    assert after.upload.values.tolist() == pytest.approx([second])
    assert after.upload.tensors[CONTROL].tolist() == pytest.approx([control - 1.0])
    assert after.memory[CONTROL].tolist() == pytest.approx([control])


def test_weight_decay_is_part_of_the_gradient_and_clipping_leaves_the_correction(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    context = one_sample(make_context, weight_decay=0.5, clip_norm=1.0)
    after = SCAFFOLD().step(trainer_for(context), empty_state(context.layout), controlled(4.0, 3.0))
    assert after.upload is not None
    assert after.upload.values.tolist() == pytest.approx([4.0 - 0.1 * (1.0 + 0.5 * 4.0 + 3.0)])
    assert after.memory[CONTROL].tolist() == pytest.approx([1.0 + 0.5 * 4.0])


def test_the_server_adds_mean_changes_of_models_and_a_share_of_those_of_controls() -> None:
    """Two of four peers upload: the model moves by their mean, the control by a quarter of each."""
    server = initial_state(torch.tensor([1.0]), torch.ones(1, dtype=torch.bool))
    server = with_control(server, torch.tensor([10.0]))
    uploads = {"000": controlled(3.0, 4.0), "002": controlled(7.0, -12.0)}
    samples = {"000": 1, "001": 1, "002": 99, "003": 1}  # they do not weigh
    for server_lr, expected in ((1.0, 1.0 + (2.0 + 6.0) / 2), (0.5, 1.0 + (2.0 + 6.0) / 4)):
        after = SCAFFOLD(server_lr=server_lr).aggregate(server, uploads, samples)
        assert after.model.values.tolist() == pytest.approx([expected])
        assert after.model.tensors[CONTROL].tolist() == pytest.approx([10.0 + (4.0 - 12.0) / 4])


def test_the_servers_control_is_the_mean_of_all_peers_controls(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """Of the peers that have not taken part, it is 0."""
    last = run_all(make_context(peers=4, method=SCAFFOLD(cohort=2), rounds=3))[-1]
    controls = []
    for peer, state in last.states.items():
        if peer != SERVER:
            controls.append(state.memory.get(CONTROL, torch.zeros(67)))
    control = last.states[SERVER].model.tensors[CONTROL]
    torch.testing.assert_close(control, torch.stack(controls).mean(0))


def test_the_first_round_is_fedavgs_and_later_ones_are_not(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """Peers have equally many samples, so the plain mean is FedAvg's."""
    scaffold, fedavg = (
        [round_.states[SERVER].model.values for round_ in run_all(make_context(method=method))]
        for method in (SCAFFOLD(cohort=3), FedAvg(cohort=3))
    )
    torch.testing.assert_close(scaffold[0], fedavg[0])
    assert not torch.allclose(scaffold[1], fedavg[1])


def test_twice_as_much_is_sent_as_by_fedavg(make_context: MakeContext, run_all: RunAll) -> None:
    scaffold, fedavg = (
        run_all(make_context(method=method, rounds=1))[0].ledger
        for method in (SCAFFOLD(cohort=3), FedAvg(cohort=3))
    )
    for link, count in fedavg.paper.items():
        assert scaffold.paper[link] == 2 * count == 2 * 4 * 67
        assert 2 * 4 * 67 < scaffold.wire[link] < 2 * fedavg.wire[link] + 40


@pytest.mark.parametrize("train", [Train(momentum=0.9), Train(optimizer="adamw")])
def test_other_optimizers_than_plain_sgd_are_refused(
    make_context: MakeContext, train: Train
) -> None:
    with refused(ConfigError, key="train.optimizer"):
        make_context(method=SCAFFOLD(), train=train).check()


def test_private_parameters_are_refused() -> None:
    with refused(ConfigError, key="method.private"):
        SCAFFOLD(private=("head",))
