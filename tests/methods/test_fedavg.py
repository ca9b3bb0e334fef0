"""FedAvg: the server's weighted mean by hand, and a peer that keeps nothing."""

from collections.abc import Callable

import pytest
import torch
from messages import refused
from rounds import FinishedRound

from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER
from dispfl.methods.fedavg import FedAvg, weighted_mean
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states
from dispfl.topology import RandomRegular

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def dense(*values: float) -> PackedModel:
    return PackedModel.pack(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))


def test_samples_of_1_and_3_weigh_a_quarter_and_three_quarters() -> None:
    uploads = {"000": dense(4.0, 0.0), "001": dense(8.0, -4.0)}
    mean = weighted_mean(uploads, {"000": 1, "001": 3})
    assert mean.tolist() == [0.25 * 4 + 0.75 * 8, 0.75 * -4]


def test_only_peers_that_sent_a_model_count_towards_the_total() -> None:
    mean = weighted_mean({"001": dense(8.0)}, {"000": 100, "001": 3})
    assert mean.tolist() == [8.0]


def test_the_server_takes_the_weighted_mean_of_what_its_cohort_learned(
    make_context: MakeContext,
    trainer_for: Callable[..., Trainer],
    run_all: Callable[..., list[FinishedRound]],
) -> None:
    """Three peers with 20, 20 and 10 samples: 0.4, 0.4 and 0.2."""
    context = make_context(method=FedAvg(cohort=3), rounds=1)
    few = context.data.peers["002"].train.take(torch.arange(10))
    context = make_context(
        method=FedAvg(cohort=3),
        rounds=1,
        peers={**context.data.peers, "002": PeerData(few, context.data.peers["002"].test)},
    )
    weights, mask = initial_states(context)[SERVER].model.unpack()
    learned = [trainer_for(context, peer).learn(weights, mask) for peer in context.roster]
    expected = 0.4 * learned[0] + 0.4 * learned[1] + 0.2 * learned[2]
    [round_] = run_all(context)
    assert round_.server is not None
    torch.testing.assert_close(round_.server.model.values, expected, rtol=1e-6, atol=1e-7)


def test_a_peer_keeps_no_model_and_is_evaluated_with_the_global_one(
    make_context: MakeContext,
    trainer_for: Callable[..., Trainer],
    run_all: Callable[..., list[FinishedRound]],
) -> None:
    context = make_context(method=FedAvg(cohort=1))
    last = run_all(context)[-1]
    assert last.server is not None
    assert last.evaluated is not None
    for peer, step in last.steps.items():
        assert step.next_state.model.mask.kept == 0
        assert last.evaluated[peer].model.values.equal(last.server.model.values)
        assert last.evaluated[peer].next_mask.kept == 67
        assert step.report.score == trainer_for(context, peer).score(last.server.model.values)


def test_the_cohort_is_ten_of_the_online_peers_and_changes_every_round() -> None:
    roster = [f"{k:03d}" for k in range(30)]
    cohorts = [FedAvg(cohort=10).pick(0, t, roster) for t in range(20)]
    assert all(len(set(cohort)) == 10 and cohort == sorted(cohort) for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) == 20
    assert {peer for cohort in cohorts for peer in cohort} == set(
        roster
    )  # missed by 20 draws: (2/3)^20, 0.03 %
    assert FedAvg(cohort=10).pick(0, 0, roster[:4]) == roster[:4]
    assert FedAvg(cohort=10).pick(0, 0, []) == []


def test_the_cohort_hardly_depends_on_which_other_peers_are_online() -> None:
    roster = [f"{k:03d}" for k in range(30)]
    whole = FedAvg(cohort=10).pick(0, 0, roster)
    gone = whole[0]
    assert set(whole) - {gone} <= set(
        FedAvg(cohort=10).pick(0, 0, [peer for peer in roster if peer != gone])
    )


@pytest.mark.parametrize(
    ("topology", "connections"),
    [
        ("random", 4),
        ("ring", 2),
        ("full", 15),
        ("grid", 4),
        ("exponential", 4),
    ],  # 1, 2, 4 and 8 further on
)
def test_the_cohort_follows_the_topologys_degree_unless_stated(
    topology: str, connections: int
) -> None:
    words = [f"topology={topology}", "peers=16"]
    assert vars(compose({}, ["method=fedavg", *words]).method)["cohort"] == connections
    assert vars(compose({}, ["method=ditto", *words, "method.cohort=9"]).method)["cohort"] == 9
    assert compose({}, ["method=fedavg", *words]).to_toml()["method"]["cohort"] == connections


def test_a_server_of_a_federation_made_in_python_has_the_topologys_connections(
    make_context: MakeContext, run_all: RunAll
) -> None:
    (round_,) = run_all(
        make_context(peers=5, method=FedAvg(), topology=RandomRegular(degree=3), rounds=1)
    )
    assert len([link for link in round_.ledger.paper if link[1] == SERVER]) == 3


def test_an_empty_cohort_is_refused() -> None:
    with refused(ConfigError, key="method.cohort"):
        FedAvg(cohort=0)
