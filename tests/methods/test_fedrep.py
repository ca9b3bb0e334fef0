"""FedPer, FedRep and FedBN: which weights stay with a peer, and what is trained when, by hand."""

from collections.abc import Callable

import pytest
import torch
from messages import refused
from one_sample import dense, half_square, one_sample
from rounds import FinishedRound
from torch import nn

from dispfl.core.train import Train, Trainer
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, Method, empty_state
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedbn import FedBN
from dispfl.methods.fedrep import FedPer, FedRep
from dispfl.round.context import RunContext

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def normalized() -> nn.Module:
    """4 x 8 + 8 weights, 2 x 8 of the norm, 8 x 3 + 3 of the head."""
    return nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3))


def test_fedrep_trains_the_head_then_the_body_by_hand(
    make_context: MakeContext, trainer_for: Callable[..., Trainer]
) -> None:
    """The loss (phi h)^2 / 2 has the gradients phi^2 h in h and phi h^2 in phi."""
    context = one_sample(make_context, half_square, factors=2)
    trainer = trainer_for(context)
    method = FedRep(head_epochs=2, body_epochs=1)
    after = method.step(trainer, empty_state(context.layout), dense(2.0, 1.0))
    h = 1.0 - 0.1 * 4.0 * 1.0
    h = h - 0.1 * 4.0 * h
    phi = 2.0 - 0.1 * 2.0 * h**2
    assert after.upload is not None
    assert after.upload.values.tolist() == pytest.approx([phi, h])
    passes = [(entry.samples, entry.trained) for entry in trainer.report.passes]
    assert passes == [(2, [0, 1]), (1, [1, 0])]


@pytest.mark.parametrize(
    ("train", "steps"),
    [(Train(batch_size=8), (4 * 3, 3)), (Train(steps=10), (8, 2)), (Train(steps=1), (1, 1))],
)
def test_fedrep_has_epochs_of_its_own_and_divides_steps(
    train: Train, steps: tuple[int, int]
) -> None:
    assert FedRep()._steps(train, 20) == steps
    assert FedRep().private_steps(train, 20) == sum(steps)


@pytest.mark.parametrize(
    ("method", "private"),
    [
        (FedPer(cohort=2), slice(56, 83)),
        (FedRep(cohort=2), slice(56, 83)),
        (FedBN(cohort=2), slice(40, 56)),
        (FedPer(cohort=2, private=("0.*",)), slice(0, 40)),
    ],
    ids=["fedper", "fedrep", "fedbn", "first layer"],
)
def test_a_peer_is_evaluated_with_the_global_model_and_its_own_private_weights(
    make_context: MakeContext, run_all: RunAll, method: Method, private: slice
) -> None:
    last = run_all(make_context(method=method, model=normalized, rounds=3))[-1]
    assert last.evaluated is not None
    server, _ = last.states[SERVER].model.unpack()
    shared = torch.ones(83, dtype=torch.bool)
    shared[private] = False
    assert last.states[SERVER].model.mask.unpack().equal(shared)
    own_parts = []
    for peer in ("000", "001", "002"):
        weights, _ = last.evaluated[peer].model.unpack()
        assert weights[shared].equal(server[shared])
        own_parts.append(weights[private])
    assert not own_parts[0].equal(own_parts[1])
    assert not own_parts[1].equal(own_parts[2])


def test_only_shared_weights_are_sent(make_context: MakeContext, run_all: RunAll) -> None:
    sent = {FedAvg: 83, FedPer: 56, FedRep: 56, FedBN: 67}
    for method, count in sent.items():
        context = make_context(method=method(cohort=3), model=normalized, rounds=1)
        assert set(run_all(context)[0].ledger.paper.values()) == {4 * count}


def test_a_network_without_norms_has_nothing_to_keep(make_context: MakeContext) -> None:
    with refused(ConfigError, key="method.private"):
        make_context(method=FedBN()).check()
