"""Noise on every gradient: masked, scaled, after clipping, from a separate stream."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import refused
from rounds import FinishedRound
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule
from dispfl.core.optimizers import sgd_step
from dispfl.core.rng import stream
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.methods.base import PeerState, ServerMethod
from dispfl.registry import METHODS
from dispfl.round.context import RunContext
from dispfl.topology import Full

SIZE = 10_000


def trainer(noise: float, slope: float = 0.0, samples: int = 1, **changes: Any) -> Trainer:
    """A model of 10,000 weights, the loss `slope * sum(w)`, batches of one sample and a learning
    rate of 0.1."""
    settings = {
        "epochs": 1,
        "batch_size": 1,
        "lr": 0.1,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "noise_std": noise,
    }
    data = ResidentSamples(torch.ones(samples, SIZE), torch.arange(float(samples)))
    return Trainer(
        network=FlatModule(nn.Linear(SIZE, 1, bias=False)),
        data=PeerData(data, data),
        run=TrainingRun(
            settings=Train(**settings | changes.pop("settings", {})),
            task=Task(loss=changes.pop("loss", lambda outputs, labels: slope * outputs.sum())),
            seed=changes.pop("seed", 5),
            rounds=10,
        ),
        **{"peer": "001", "t": 0, **changes},
    )


ZERO, ALL = torch.zeros(SIZE), torch.ones(SIZE, dtype=torch.bool)
HALF = torch.arange(SIZE) % 2 == 0


def drawn(sigma: float, t: int = 0, peer: str = "001") -> Tensor:
    return torch.empty(SIZE).normal_(0, sigma, generator=stream(5, "noise", peer, t))


def test_a_step_without_a_gradient_moves_by_the_learning_rate_times_the_noise() -> None:
    learned = trainer(noise=2.0).learn(ZERO, ALL)
    assert learned.equal(-0.1 * drawn(2.0))
    assert float(learned.std()) == pytest.approx(0.1 * 2.0, rel=0.03)
    assert float(learned.mean()) == pytest.approx(0.0, abs=0.01)


def test_weights_outside_the_mask_get_no_noise_and_those_inside_the_same_as_without_one() -> None:
    dense, sparse = (trainer(noise=2.0).learn(ZERO, mask) for mask in (ALL, HALF))
    assert sparse[~HALF].view(torch.int32).count_nonzero() == 0
    assert sparse[HALF].equal(dense[HALF])


def test_noise_comes_after_clipping_and_is_not_clipped_itself() -> None:
    """The gradient of 10,000 ones has norm 100 and is clipped to norm 1, that is to 0.01 a
    weight."""
    learned = trainer(noise=2.0, slope=1.0, settings={"clip_norm": 1.0}).learn(ZERO, ALL)
    torch.testing.assert_close(learned, -0.1 * (0.01 + drawn(2.0)))


def test_a_step_with_noise_by_hand() -> None:
    weights, grad = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 4.0, 100.0])
    bits = torch.tensor([-1, -1, 0], dtype=torch.int32)  # the third is not kept
    sgd_step(weights, grad, bits, 0.1, 0.5, 1.0, shift=torch.tensor([7.0, -7.0, 7.0]))
    # The gradient (3, 4) is clipped to (0.6, 0.8); decay adds 0.5 * (1, 2).
    assert weights.tolist() == pytest.approx(
        [1 - 0.1 * (0.6 + 7 + 0.5), 2 - 0.1 * (0.8 - 7 + 1.0), 0.0]
    )


def test_every_step_of_a_round_has_different_noise() -> None:
    first, second = trainer(noise=1.0), trainer(noise=1.0, samples=2)
    one_step, two_steps = first.learn(ZERO, ALL), second.learn(ZERO, ALL)
    assert float(two_steps.std()) == pytest.approx(
        0.1 * 2**0.5, rel=0.03
    )  # independent: variances add
    assert first.learn(one_step, ALL).equal(two_steps)  # a second stretch of learning draws on


def test_noise_is_reproducible_and_differs_between_peers_rounds_and_seeds() -> None:
    same, again, peer, t, seed = (
        trainer(noise=1.0, **who).learn(ZERO, ALL)
        for who in ({}, {}, {"peer": "002"}, {"t": 1}, {"seed": 6})
    )
    assert again.equal(same)
    for other in (peer, t, seed):
        assert float(torch.corrcoef(torch.stack([same, other]))[0, 1]) == pytest.approx(0, abs=0.05)


def test_noise_does_not_change_the_order_of_batches_or_torchs_global_generator() -> None:
    def seen(noise: float) -> list[float]:
        order: list[float] = []

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            order.append(float(labels))
            return outputs.sum() * 0

        one_trainer = trainer(noise, samples=20, loss=loss)
        before = torch.get_rng_state()
        one_trainer.learn(ZERO, ALL)
        assert torch.get_rng_state().equal(before)
        return order

    assert seen(1.0) == seen(0.0) != sorted(seen(0.0))


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_invalid_noise_is_refused_by_name(wrong: float) -> None:
    with refused(ConfigError, key="train.noise_std"):
        Train(noise_std=wrong)


RunAll = Callable[..., list[FinishedRound]]
Bits = Callable[[PeerState], dict[str, bytes]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_reproducibly_with_noise(
    method: str, make_context: Callable[..., RunContext], run_all: RunAll, bits: Bits
) -> None:
    def weights(noise: float, workers: int = 1) -> list[bytes]:
        train = Train(epochs=1, batch_size=8, noise_std=noise)
        kind = METHODS[method]
        everyone: dict[str, Any] = {}
        if issubclass(kind, ServerMethod):
            everyone["cohort"] = 3  # who is not selected does not train
        if method == "fedbn":
            everyone["private"] = "head"  # the tiny network has no normalization layer
        context = make_context(
            peers=3, method=kind(name=method, **everyone), topology=Full(), train=train, rounds=2
        )
        last = run_all(context, workers)[-1]
        return [bits(state)["values"] for state in (last.evaluated or last.states).values()]

    noisy, silent = weights(0.1), weights(0.0)
    assert weights(0.1, workers=2) == noisy
    assert all(a != b for a, b in zip(noisy, silent, strict=True))
