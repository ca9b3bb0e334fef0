"""A round with a server: which peers train, what it costs, and peers that fail or are offline."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from math import nan

import pytest
import torch
from rounds import FinishedRound, PresetEngine, run_from
from torch import Tensor, nn

from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.train import Train
from dispfl.data.batches import ResidentSamples
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, Method, PeerState
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.methods.local import Local
from dispfl.methods.subfedavg import SubFedAvg
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.topology import Full

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]
Points = Callable[[int, int], tuple[Tensor, Tensor]]
DENSE = 4 * 67
"""Bytes of a dense tiny model as the paper counts them."""


def trained_peers(round_: FinishedRound) -> set[str]:
    return {peer for peer, step in round_.steps.items() if step.report.train_loss is not None}


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=3), Ditto(cohort=3), SubFedAvg(cohort=3)], ids=lambda m: m.name
)
def test_only_the_cohort_trains_and_the_others_do_not_change(
    make_context: MakeContext, bits: Callable[[PeerState], dict[str, bytes]], method: FedAvg
) -> None:
    context = make_context(peers=6, method=method)
    states = initial_states(context)
    cohort = method.pick(0, 0, context.roster)
    with closing(PresetEngine(context, 1)) as engine:
        round_ = run_from(context, states, 0, engine)
    assert trained_peers(round_) == set(cohort)
    assert len(cohort) == 3
    for peer in set(context.roster) - set(cohort):
        assert bits(round_.steps[peer].next_state) == bits(states[peer])
    assert all(step.report.score is not None for step in round_.steps.values())


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=3), FedAvgFT(cohort=3), Ditto(cohort=3)], ids=lambda m: m.name
)
def test_each_of_the_cohort_downloads_and_uploads_one_dense_model_and_the_server_is_the_busiest(
    make_context: MakeContext, run_all: RunAll, method: FedAvg
) -> None:
    context = make_context(peers=6, method=method)
    for t, round_ in enumerate(run_all(context)):
        cohort = method.pick(0, t, context.roster)
        assert round_.ledger.paper == {
            link: DENSE for peer in cohort for link in ((SERVER, peer), (peer, SERVER))
        }
        busiest = round_.ledger.busiest()
        assert busiest.peer == SERVER
        assert busiest.paper == 3 * DENSE
        assert busiest.wire == 3 * (
            DENSE + 28
        )  # a header; no mask, because everyone keeps everything


def test_subfedavgs_peers_are_charged_for_their_kept_weights(
    make_context: MakeContext, run_all: RunAll
) -> None:
    method = SubFedAvg(cohort=10, prune=0.3, min_accuracy=0.0, min_change=0.0)
    first, second = run_all(make_context(method=method, train=Train(epochs=5, batch_size=4)))
    kept = {peer: step.next_state.model.mask.kept for peer, step in first.steps.items()}
    assert min(kept.values()) == 67 - 9 - 7
    for peer, count in kept.items():
        assert first.ledger.paper[SERVER, peer] == DENSE
        assert first.ledger.paper[peer, SERVER] == second.ledger.paper[SERVER, peer] == 4 * count


def test_with_all_peers_offline_the_server_keeps_its_model_and_all_are_still_evaluated(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(method=FedAvg(cohort=10), topology=Full(offline_prob=1.0))
    for round_ in run_all(context):
        assert round_.server is not None
        assert round_.server.model.values.equal(initial_states(context)[SERVER].model.values)
        assert not round_.ledger.wire
        assert not trained_peers(round_)
        assert all(step.report.score is not None for step in round_.steps.values())


def with_broken_data(context: RunContext, *peers: str) -> RunContext:
    """The context in which some peers' training inputs are nan."""
    broken = ResidentSamples(torch.full((20, 4), nan), torch.zeros(20, dtype=torch.int64))
    return replace(
        context,
        data=context.data.with_peers(
            {
                p: PeerData(broken, d.test) if p in peers else d
                for p, d in context.data.peers.items()
            }
        ),
    )


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=10), Ditto(cohort=10), SubFedAvg(cohort=10)], ids=lambda m: m.name
)
def test_a_failing_peer_sends_nothing_and_the_server_aggregates_the_others(
    make_context: MakeContext, run_all: RunAll, method: FedAvg
) -> None:
    [round_] = run_all(with_broken_data(make_context(method=method, rounds=1), "001"))
    assert round_.steps["001"].report.failure is not None
    assert ("001", SERVER) not in round_.ledger.paper
    assert (SERVER, "001") in round_.ledger.paper
    sent = {peer for peer, receiver in round_.ledger.paper if receiver == SERVER}
    assert sent == {"000", "002"}
    assert round_.server is not None
    assert round_.server.model.values.isfinite().all()


def test_if_all_fail_the_server_keeps_its_model(make_context: MakeContext, run_all: RunAll) -> None:
    context = with_broken_data(
        make_context(method=FedAvg(cohort=10), rounds=1), "000", "001", "002"
    )
    [round_] = run_all(context)
    assert round_.server is not None
    assert round_.server.model.values.equal(initial_states(context)[SERVER].model.values)


def test_an_upload_of_the_last_round_in_a_checkpoint_is_not_used_in_the_next(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = with_broken_data(make_context(method=FedAvg(cohort=10), rounds=2), "001")
    states = run_all(context)[0].states
    old = PackedModel.pack(torch.full((67,), 1e6), torch.ones(67, dtype=torch.bool))
    stale = {**states, "001": replace(states["001"], upload=old)}
    with closing(PresetEngine(context, 1)) as engine:
        clean, resumed = (run_from(context, start, 1, engine) for start in (states, stale))
    assert clean.server is not None
    assert resumed.server is not None
    assert resumed.server.model.values.equal(clean.server.model.values)
    assert resumed.ledger == clean.ledger
    assert resumed.steps["001"].next_state.upload is None


def test_unequal_samples_reach_the_server_as_weights(
    make_context: MakeContext, run_all: RunAll
) -> None:
    seen: list[Mapping[str, int]] = []

    class Watched(FedAvg):
        def aggregate(
            self, server: PeerState, sent: Mapping[str, PackedModel], samples: Mapping[str, int]
        ) -> PeerState:
            seen.append(samples)
            return super().aggregate(server, sent, samples)

    context = make_context(method=Watched(cohort=3), rounds=1)
    few = replace(
        context.data.peers["001"], train=context.data.peers["001"].train.take(torch.arange(5))
    )
    run_all(replace(context, data=context.data.with_peers({**context.data.peers, "001": few})))
    assert seen == [{"000": 20, "001": 5, "002": 20}]


def flops(method: Method, net: Callable[[], nn.Module], points: Points) -> tuple[float, float]:
    """A peer's and the federation's operations in round 0 of four peers with 20 samples each, at 5
    epochs."""
    peers = [(points(20, which), points(10, 1000 + which)) for which in range(4)]
    [record] = (
        Federation(
            net, peers, method, Full(), train=Train(epochs=5, batch_size=8), workers=1, rounds=1
        )
        .run()
        .metrics
    )
    return record["flops_per_peer"], record["flops_total"]


FORWARD = 2 * 4 * 8 + 8 + 2 * 8 * 3 + 3


@pytest.mark.parametrize(
    "method",
    [
        Local(),
        FedAvg(cohort=10),
        FedAvgFT(cohort=10),
        Ditto(cohort=10),
        DPSGD(),
        DPSGDFT(),
        SubFedAvg(cohort=10),
    ],
    ids=lambda m: m.name,
)
def test_a_peers_round_costs_the_same_in_all_dense_methods(
    method: Method, net: Callable[[], nn.Module], points: Points
) -> None:
    assert flops(method, net, points) == (3 * 5 * 20 * FORWARD, 4 * 3 * 5 * 20 * FORWARD)


def test_fedfomo_trains_on_nine_tenths_of_the_data_and_costs_accordingly(
    net: Callable[[], nn.Module], points: Points
) -> None:
    assert flops(FedFOMO(), net, points)[0] == 3 * 5 * 18 * FORWARD


@pytest.mark.parametrize(
    "method", [FedAvg(cohort=1), Ditto(cohort=1), SubFedAvg(cohort=1)], ids=lambda m: m.name
)
def test_the_federations_total_counts_the_cohort_only(
    method: Method, net: Callable[[], nn.Module], points: Points
) -> None:
    assert flops(method, net, points) == (3 * 5 * 20 * FORWARD, 3 * 5 * 20 * FORWARD)
