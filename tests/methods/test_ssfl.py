"""SSFL: the saliency and the common mask by hand, how peers agree on it, and what it costs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from one_sample import one_sample
from rounds import FinishedRound

from dispfl.config import compose
from dispfl.core.layout import Layout
from dispfl.core.packed import PackedModel
from dispfl.core.train import Trainer
from dispfl.methods.base import PeerState
from dispfl.methods.ssfl import SSFL, held_by_most, saliency, top_scores
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.topology import Full, Ring

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def test_the_saliency_by_hand(
    make_context: MakeContext, trainer_for: Callable[..., Trainer]
) -> None:
    """The network is u v x with x = 1; the gradients of (u v)^2 / 2 are v^2 u and u^2 v."""
    trainer = trainer_for(one_sample(make_context, factors=2))
    u, v = 3.0, -2.0
    scores = saliency(trainer, torch.tensor([u, v]))
    assert scores.tolist() == [abs(v**2 * u * u), abs(u**2 * v * v)] == [36.0, 36.0]
    assert trainer.report.train_loss == (u * v) ** 2 / 2


def test_the_highest_scores_of_all_layers_are_kept_and_all_vectors() -> None:
    """6 of 12 weights: a bias of 2, and the 4 highest of the 10 others."""
    layout = Layout(("a", "bias", "b"), ((2, 3), (2,), (2, 2)))
    scores = torch.tensor([9.0, 1, 8, 1, 1, 1, 0, 0, 7, 6, 1, 1])
    kept = top_scores(scores, 0.5, layout)
    assert kept.nonzero().flatten().tolist() == [0, 2, 6, 7, 8, 9]


def method_of(context: RunContext) -> SSFL:
    assert isinstance(context.method, SSFL)
    return context.method


def states_after(context: RunContext, rounds: list[FinishedRound], t: int) -> dict[str, PeerState]:
    return {peer: rounds[t].states[peer] for peer in context.roster}


def test_peers_that_all_receive_from_each_other_have_one_mask_which_never_changes(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(method=SSFL(density=0.6), topology=Full(), rounds=4)
    assert method_of(context).score_rounds == 1
    rounds = run_all(context)
    scored = states_after(context, rounds, 0)
    mean = torch.stack([state.memory["scores"] for state in scored.values()]).mean(0)
    mask = top_scores(mean, 0.6, context.layout)
    for t in (1, 2, 3):
        for state in states_after(context, rounds, t).values():
            assert state.model.mask.unpack().equal(mask)
            assert state.memory == {}
    for state in scored.values():  # nothing is trained before
        assert state.model.values.equal(context.first_weights)


def test_on_a_ring_more_rounds_of_scores_bring_the_masks_closer(
    make_context: MakeContext, run_all: RunAll
) -> None:
    def differing(score_rounds: int) -> int:
        method = SSFL(density=0.5, score_rounds=score_rounds)
        context = make_context(peers=8, method=method, topology=Ring(), rounds=score_rounds + 1)
        states = run_all(context)[-1].states.values()
        masks = torch.stack([state.model.mask.unpack() for state in states])
        return int((masks.any(0) & ~masks.all(0)).sum())

    counts = [differing(score_rounds) for score_rounds in (0, 1, 12)]
    assert counts[0] > counts[1] > counts[2]
    assert method_of(make_context(peers=8, method=SSFL(), topology=Ring())).score_rounds == 4


def test_a_peer_that_joins_late_takes_the_mask_of_most_neighbours(
    make_context: MakeContext, trainer_for: Callable[..., Trainer], run_all: RunAll
) -> None:
    context = make_context(method=SSFL(), topology=Full(), rounds=4)
    states = run_all(context)[-1].states
    late = initial_states(context)["000"]
    models = {peer: method_of(context).publish(states[peer]) for peer in ("001", "002")}
    after = method_of(context).step(replace(trainer_for(context), t=3), late, models)
    assert after.model.mask.unpack().equal(states["001"].model.mask.unpack())

    three = [torch.tensor([True, True, False]), torch.tensor([True, False, True])]
    received = {str(k): PackedModel.pack(torch.zeros(3), mask) for k, mask in enumerate(three)}
    assert held_by_most(received).tolist() == [True, False, False]


def test_scores_of_a_straggler_are_not_averaged_into_models(
    make_context: MakeContext, trainer_for: Callable[..., Trainer], run_all: RunAll
) -> None:
    context = make_context(method=SSFL(), topology=Full(), rounds=3)
    rounds = run_all(context)
    state = rounds[-1].states["000"]
    straggler = method_of(context).publish(rounds[0].states["001"])
    trainer = replace(trainer_for(context), t=3)
    with_scores = method_of(context).step(trainer, state, {"001": straggler})
    alone = method_of(context).step(replace(trainer_for(context), t=3), state, {})
    assert with_scores.model.values.equal(alone.model.values)


def test_the_exchange_of_scores_is_paid_for() -> None:
    """Round 0 sends empty masks, the next round dense scores, and then half of the weights."""
    settings = ["method=ssfl", "peers=3", "rounds=4", "topology=full", "model=mlp"]
    settings += ["partition.samples_per_peer=20", "partition.test_samples_per_peer=20"]
    run = compose({}, [*settings, "train.epochs=1", "workers=1"]).run(progress=False)
    sent = [record["busiest"]["paper_mb"] for record in run.metrics]
    size = run.states["000"].model.mask.size
    flag = 1e-6  # one byte says whether it is a model
    assert sent[0] < 0.1 * sent[1]
    assert sent[1] == pytest.approx(2 * (4 * size / 1e6 + flag), abs=1e-5)
    assert sent[2] == sent[3] == pytest.approx(sent[1] / 2, rel=0.01)
