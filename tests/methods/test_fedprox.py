"""FedProx: two proximal steps by hand, and FedAvg without the proximal term."""

from collections.abc import Callable

import pytest
from one_sample import dense, one_sample
from rounds import FinishedRound

from dispfl.core.train import Trainer
from dispfl.methods.base import SERVER
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedprox import FedProx
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

MakeContext = Callable[..., RunContext]


def test_two_proximal_steps_by_hand(
    make_context: MakeContext, trainer_for: Callable[..., Trainer]
) -> None:
    """The gradient of w^2 / 2 is w; the global model is 4, mu is 2, the rate 0.1."""
    context = one_sample(make_context, epochs=2)
    state = initial_states(context)["000"]
    after = FedProx(prox_mu=2.0).step(trainer_for(context), state, dense(4.0))
    first = 4.0 - 0.1 * (4.0 + 2 * 0)
    second = first - 0.1 * (first + 2 * (first - 4.0))
    assert after.upload is not None
    assert after.upload.values.tolist() == pytest.approx([second])
    assert second == pytest.approx(3.32)


def test_without_the_proximal_term_it_is_fedavg_and_with_it_peers_stay_closer(
    make_context: MakeContext, run_all: Callable[..., list[FinishedRound]]
) -> None:
    fedavg, unpulled, pulled = (
        run_all(make_context(method=method, rounds=1))[0].states[SERVER].model.values
        for method in (FedAvg(cohort=2), FedProx(cohort=2, prox_mu=0), FedProx(cohort=2, prox_mu=5))
    )
    start = initial_states(make_context(method=FedAvg(cohort=2)))[SERVER].model.values
    assert unpulled.equal(fedavg)
    assert (pulled - start).norm() < 0.9 * (fedavg - start).norm()
