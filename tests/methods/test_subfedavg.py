"""SubFedAvg: what is pruned, when, how far, and the server's average over keepers, by hand."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from rounds import FinishedRound
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.masks import kept_per_layer
from dispfl.core.metric import Metric
from dispfl.core.packed import PackedModel
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import SERVER, PeerState, initial_state
from dispfl.methods.subfedavg import SubFedAvg, pruned
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

MakeContext = Callable[..., RunContext]
TrainerFor = Callable[..., Trainer]
LAYOUT = Layout.from_shapes({"weight": (2, 5), "bias": (4,)})
WEIGHTS = torch.tensor([5.0, -1.0, 4.0, 3.0, -2.0, 6.0, 7.0, 8.0, 9.0, 10.0, *[0.01] * 4])


def dropped(mask: Tensor) -> list[int]:
    return (~mask).nonzero().squeeze(1).tolist()


def everything() -> Tensor:
    return torch.ones(14, dtype=torch.bool)


def test_the_smallest_weights_are_pruned_and_one_dimensional_parameters_kept() -> None:
    assert dropped(pruned(WEIGHTS, everything(), 0.3, 0.1, LAYOUT)) == [
        1,
        3,
        4,
    ]  # 30 % of 10; the bias is smaller


def test_a_second_pruning_takes_its_share_of_what_is_left() -> None:
    once = pruned(WEIGHTS, everything(), 0.3, 0.1, LAYOUT)
    assert dropped(pruned(WEIGHTS, once, 0.3, 0.1, LAYOUT)) == [0, 1, 2, 3, 4]  # 30 % of 7 is 2
    assert dropped(once) == [1, 3, 4]


@pytest.mark.parametrize(("target", "gone"), [(12 / 14, [1, 4]), (13 / 14, [1]), (1.0, [])])
def test_pruning_stops_at_the_target_density(target: float, gone: list[int]) -> None:
    assert dropped(pruned(WEIGHTS, everything(), 0.3, target, LAYOUT)) == gone


def test_repeated_pruning_ends_exactly_at_the_target() -> None:
    layout = Layout.from_shapes({"one": (10, 10), "two": (10, 10), "bias": (10,)})
    weights, mask = (
        torch.randn(210, generator=torch.Generator().manual_seed(0)),
        torch.ones(210, dtype=torch.bool),
    )
    for _ in range(40):
        mask = pruned(weights, mask, 0.1, 0.5, layout)
    assert int(mask.sum()) == 105
    assert kept_per_layer(mask, layout)[2] == 10


def test_a_target_of_29_percent_of_100_is_29() -> None:
    layout, mask = Layout.from_shapes({"weight": (10, 10)}), torch.ones(100, dtype=torch.bool)
    assert (
        int(pruned(torch.arange(100.0), mask, 0.9, 0.29, layout).sum()) == 29
    )  # 0.29 * 100 is 28.999... in floats


def test_a_layer_never_loses_its_last_weight() -> None:
    layout, mask = (
        Layout.from_shapes({"weight": (1, 2), "large": (10, 10)}),
        torch.ones(102, dtype=torch.bool),
    )
    for _ in range(5):
        mask = pruned(torch.arange(102.0), mask, 0.99, 0.01, layout)
    assert kept_per_layer(mask, layout) == [1, 1]


def kept_after_a_step(context: RunContext, trainer_for: TrainerFor) -> int:
    method, states = context.method, initial_states(context)
    assert isinstance(method, SubFedAvg)
    received = method.broadcast(states[SERVER], states["000"])
    state = method.step(trainer_for(context), states["000"], received)
    assert state.upload is state.model
    return state.model.mask.kept


EAGER: dict[str, Any] = {"prune": 0.3, "density": 0.1, "min_change": 0.0, "min_accuracy": 0.0}


def test_a_peer_prunes_while_masks_change_and_accuracy_is_good(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    context = make_context(method=SubFedAvg(**EAGER), train=Train(epochs=5, batch_size=4))
    assert kept_after_a_step(context, trainer_for) == 67 - 9 - 7  # 30 % of 32 and of 24


@pytest.mark.parametrize(
    "change",
    [{"min_change": 1.0}, {"min_accuracy": 1.0}, {"density": 1.0}, {"prune": 0.01}],
    ids=[
        "the mask must move by more",
        "accuracy must be higher",
        "the target is reached",
        "less than one weight",
    ],
)
def test_each_condition_alone_prevents_pruning(
    make_context: MakeContext, trainer_for: TrainerFor, change: dict[str, float]
) -> None:
    context = make_context(
        method=SubFedAvg(**{**EAGER, **change}), train=Train(epochs=5, batch_size=4)
    )
    assert kept_after_a_step(context, trainer_for) == 67


def test_a_single_epoch_has_nothing_to_compare_so_nothing_is_pruned(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    assert (
        kept_after_a_step(
            make_context(method=SubFedAvg(**EAGER), train=Train(epochs=1)), trainer_for
        )
        == 67
    )


@pytest.mark.parametrize(
    ("accuracy", "higher", "kept"),
    [(0.5, True, 67), (0.51, True, 51), (0.5, False, 67), (0.49, False, 51)],
)
def test_a_score_of_exactly_one_half_is_not_better_than_it_and_it_is_that_on_the_training_data(
    make_context: MakeContext, trainer_for: TrainerFor, accuracy: float, higher: bool, kept: int
) -> None:
    elsewhere = 0.0 if higher else 1.0
    share = Metric(
        lambda _, labels: accuracy if len(labels) == 20 else elsewhere,
        "share",
        higher_is_better=higher,
    )
    task = Task(metrics=(share,))  # 20 samples to train on, 10 to test
    method = SubFedAvg(**{**EAGER, "min_accuracy": 0.5})
    context = make_context(method=method, task=task, train=Train(epochs=5, batch_size=4))
    assert kept_after_a_step(context, trainer_for) == kept


def test_all_epochs_are_trained_whether_or_not_it_prunes(
    make_context: MakeContext, trainer_for: TrainerFor
) -> None:
    context = make_context(method=SubFedAvg(cohort=10), train=Train(epochs=5, batch_size=8))
    trainer, states = trainer_for(context), initial_states(context)
    SubFedAvg(min_change=1.0).step(trainer, states["000"], states[SERVER].model)
    assert trainer.report.passes == [(20, [32, 8, 24, 3], None), (80, [32, 8, 24, 3], None)]


def model(*values: float | None) -> PackedModel:
    """A model that does not hold what is None."""
    mask = torch.tensor([value is not None for value in values])
    return PackedModel.pack(torch.tensor([value or 0.0 for value in values]), mask)


def test_the_server_averages_over_holders_and_keeps_its_value_where_there_are_none() -> None:
    server = initial_state(torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.ones(4, dtype=torch.bool))
    sent = {"000": model(4.0, 2.0, None, 0.0), "001": model(8.0, None, None, 3.0)}
    after: PeerState = SubFedAvg().aggregate(
        server, sent, {"000": 1, "001": 99}
    )  # samples do not weigh
    assert after.model.values.tolist() == [6.0, 2.0, 1.0, 1.5]
    assert after.model.mask.kept == 4
    assert server.model.values.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_peer_is_sent_and_evaluated_with_the_global_model_under_its_own_mask() -> None:
    server = initial_state(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool))
    peer = initial_state(torch.tensor([9.0, 0.0, 9.0]), torch.tensor([True, False, True]))
    for given in (
        SubFedAvg().broadcast(server, peer),
        SubFedAvg().evaluated_model(peer, server.model),
    ):
        assert given.unpack()[0].tolist() == [1.0, 0.0, 3.0]
        assert given.mask.kept == 2


def test_over_many_rounds_peers_get_sparser_each_in_its_own_way_down_to_the_target(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    method = SubFedAvg(cohort=10, prune=0.2, density=0.5, min_accuracy=0.0, min_change=0.0)
    rounds = run_all(make_context(method=method, train=Train(epochs=3, batch_size=4), rounds=12))
    kept = [
        [step.next_state.model.mask.kept for step in round_.steps.values()] for round_ in rounds
    ]
    for before, after in pairwise(kept):
        assert all(
            33 <= now <= then for now, then in zip(after, before, strict=True)
        )  # 0.5 * 67 = 33.5
    assert min(kept[-1]) < 45
    masks = [step.next_state.model.mask.unpack() for step in rounds[-1].steps.values()]
    assert not masks[0].equal(masks[1])
    assert all(mask[32:40].all() and mask[64:].all() for mask in masks)  # the biases
    assert rounds[-1].states[SERVER].model.mask.kept == 67
