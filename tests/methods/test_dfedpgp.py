"""DFedPGP: a round by hand, and real push-sum: the true mean on graphs that favour some peers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_sample import one_sample
from torch import Tensor, nn

from dispfl import DFedPGP, Federation, Train
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState, initial_state
from dispfl.round.context import RunContext
from dispfl.round.exchange import exchange_graph, mixing_weights
from dispfl.testing.rounds import tiny_context
from dispfl.topology import GraphTopology, RandomRegular

UNEVEN = [[0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 0, 0]]
"""Strongly connected; 001 has three receivers, 002 one."""


def model(body: float, head: float | None, **tensors: Any) -> PackedModel:
    flags = torch.tensor([True, head is not None])
    return PackedModel.pack(torch.tensor([body, head or 0.0]), flags).with_tensors(**tensors)


def test_a_round_by_hand(
    make_context: Callable[..., RunContext], trainer_for: Callable[..., Trainer]
) -> None:
    """The network is u v x with x = 1; the gradients of (u v)^2 / 2 are v^2 u and u^2 v."""
    context = one_sample(make_context, factors=2, lr=0.3)
    trainer = replace(trainer_for(context), mixing_weights={"000": 0.5, "001": 0.5})
    start = initial_state(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool))
    state = replace(start, memory={"push_sum": torch.tensor(1.0)})
    after = DFedPGP(head_lr=0.1).step(trainer, state, {"001": model(3.0, None, push_sum=0.5)})

    o = 0.5 * 1.0 + 0.5 * 0.5
    z = (0.5 * 1.0 * 1.0 + 0.5 * 0.5 * 3.0) / o
    v = 2.0 - 0.1 * z**2 * 2.0
    u = o * z - 0.3 * v**2 * z
    assert after.memory["push_sum"].item() == pytest.approx(o)
    assert after.model.values.tolist() == pytest.approx([u / o, v])

    published = DFedPGP().publish(after)
    assert published.tensors["push_sum"].item() == pytest.approx(o)


def test_dfedalt_averages_plainly_and_sends_no_weight(
    make_context: Callable[..., RunContext], trainer_for: Callable[..., Trainer]
) -> None:
    context = one_sample(make_context, factors=2, lr=0.3)
    state = initial_state(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool))
    alt = DFedPGP(push_sum=False, head_lr=0.1)
    after = alt.step(trainer_for(context), state, {"001": model(3.0, None)})
    v = 2.0 - 0.1 * 2.0**2 * 2.0
    assert after.model.values.tolist() == pytest.approx([2.0 - 0.3 * v**2 * 2.0, v])
    assert alt.publish(after).tensors == {}
    assert after.memory == {}


def weights_of(topology: Any, **settings: Any) -> dict[str, dict[str, float]]:
    context = tiny_context(DFedPGP(**settings), 4, topology=topology)
    return mixing_weights(context, 0, exchange_graph(context, 0))


def test_senders_divide_their_models_among_receivers_and_themselves() -> None:
    weights = weights_of(GraphTopology(UNEVEN))
    assert weights["000"] == pytest.approx({"000": 1 / 3, "001": 1 / 4, "002": 1 / 2})
    for sender in weights:
        assert sum(row.get(sender, 0.0) for row in weights.values()) == pytest.approx(1)
    scaled = weights_of(GraphTopology((torch.tensor(UNEVEN) + torch.eye(4)) * 3.0))
    assert scaled["000"] == pytest.approx(weights["000"])
    assert weights_of(GraphTopology(UNEVEN), push_sum=False) == {}


class Apart(DFedPGP):
    """DFedPGP whose peers start from different weights."""

    @property
    def independent_init(self) -> bool:
        return True


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def bodies_after(rounds: int, *, push_sum: bool) -> Tensor:
    """Every peer's body after some rounds on the uneven graph in which nothing is learned."""
    data = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    federation = Federation(
        net,
        [(data, data)] * 4,
        Apart(push_sum=push_sum, head_lr=1e-30),
        UNEVEN,
        rounds=rounds,
        eval_every=rounds,
        workers=1,
        train=Train(lr=1e-30, weight_decay=0, epochs=1),
    )
    run = federation.run()
    return torch.stack([state.model.values[:9] for state in run.states.values()])


def test_push_sum_reaches_the_true_mean_where_plain_averages_do_not() -> None:
    early = bodies_after(1, push_sum=True)
    late = bodies_after(30, push_sum=True)
    context = tiny_context(Apart(), 4)
    assert late.std(0).max() < 1e-5 < early.std(0).max()

    first = Federation(net, [((torch.zeros(2, 2), torch.tensor([0, 1])),) * 2] * 4, Apart(), "full")
    starts = torch.stack([first._context.peer_weights(name)[:9] for name in context.roster])
    assert torch.allclose(late[0], starts.mean(0), atol=1e-5)
    plain = bodies_after(30, push_sum=False)
    assert plain.std(0).max() < 1e-5  # they agree, but on another mean
    assert (plain[0] - starts.mean(0)).abs().max() > 0.01


def test_on_a_regular_graph_push_sum_weights_stay_1() -> None:
    from dispfl.testing.rounds import run_all_rounds

    context = tiny_context(DFedPGP(), 5, topology=RandomRegular(degree=2), rounds=3)
    for state in run_all_rounds(context)[-1].states.values():
        assert state.memory["push_sum"].item() == pytest.approx(1, abs=1e-6)


def test_a_weight_that_is_nearly_lost_begins_again(
    make_context: Callable[..., RunContext], trainer_for: Callable[..., Trainer]
) -> None:
    """The neighbour that has the rest of it does not respond."""
    context = one_sample(make_context, factors=2)
    trainer = replace(trainer_for(context), mixing_weights={"000": 0.5, "001": 0.5})
    start = initial_state(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool))
    state: PeerState = replace(start, memory={"push_sum": torch.tensor(1e-6)})
    assert DFedPGP().step(trainer, state, {}).memory["push_sum"].item() == 1.0
