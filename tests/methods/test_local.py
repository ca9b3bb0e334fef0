"""Local: everyone alone."""

from collections.abc import Callable
from dataclasses import replace

import torch
from rounds import FinishedRound

from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel
from dispfl.core.train import Train, Trainer
from dispfl.methods.local import Local
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.round import initial_states, peer_step

MakeContext = Callable[..., RunContext]


def test_a_round_is_the_settings_epochs_of_training_and_nothing_else(
    make_context: MakeContext,
    trainer_for: Callable[..., Trainer],
    run_all: Callable[..., list[FinishedRound]],
) -> None:
    context = make_context(method=Local(), train=Train(epochs=5, batch_size=8), rounds=1)
    [round_] = run_all(context)
    for peer in context.roster:
        weights, mask = initial_states(context)[peer].model.unpack()
        assert round_.steps[peer].next_state.model.values.equal(
            trainer_for(context, peer).learn(weights, mask)
        )
        assert round_.steps[peer].report.passes == [(5 * 20, [32, 8, 24, 3], None)]
    assert not round_.ledger.wire


def test_a_received_model_is_not_used(make_context: MakeContext) -> None:
    context = make_context(method=Local())
    network, state = FlatModule(context.module()), initial_states(context)["000"]
    stranger = PackedModel.pack(torch.full((67,), 9.0), torch.ones(67, dtype=torch.bool))
    alone = peer_step(context, network, PeerTask("000", 0), state, {})
    received = peer_step(context, network, PeerTask("000", 0), state, {"001": stranger})
    assert received.next_state.model.values.equal(alone.next_state.model.values)


def test_other_peers_data_do_not_matter(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    context = make_context(method=Local())
    swapped = replace(
        context,
        data=context.data.with_peers({**context.data.peers, "001": context.data.peers["002"]}),
    )
    one, other = (run_all(given)[-1].steps for given in (context, swapped))
    assert one["000"].state.model.values.equal(other["000"].state.model.values)
    assert not one["001"].state.model.values.equal(other["001"].state.model.values)
