"""Private steps: clipped gradients of single samples, secret batches and noise."""

import copy
import math

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional

from dispfl import SmallCNN
from dispfl.core.flat_module import FlatModule
from dispfl.core.rng import seed_globally
from dispfl.core.samples import PeerData
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, TrainingRun
from dispfl.data.batches import ImageTransform, ResidentSamples
from dispfl.errors import ConfigError
from dispfl.privacy import steps
from dispfl.privacy.steps import (
    Privacy,
    PrivateSteps,
    SecretStream,
    check_private_network,
    sum_clipped_,
)

KEY = bytes(range(32))


def product(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss whose gradient for one sample of a linear model is label x input."""
    return (outputs.squeeze(1) * labels).sum()


def linear(inputs: int = 2) -> FlatModule:
    return FlatModule(nn.Linear(inputs, 1, bias=False))


def private_steps(
    noise: float = 1.0, clip: float = 1.0, rate: float = 0.5, batch: float = 2.0
) -> PrivateSteps:
    return PrivateSteps(SecretStream(KEY), ("000", 0), noise, clip, rate, batch)


def test_a_long_gradient_is_clipped_and_a_short_one_is_not() -> None:
    network, x, y = linear(), torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2)
    sum_clipped_(network, product, x, y, None, clip=1.0)
    torch.testing.assert_close(network.grad, torch.tensor([0.6 + 0.3, 0.8 + 0.4]))


def test_weights_outside_the_mask_have_no_part_in_the_norm_and_in_the_gradient() -> None:
    network, x = linear(), torch.tensor([[3.0, 4.0]])
    sum_clipped_(network, product, x, torch.ones(1), torch.tensor([True, False]), clip=2.0)
    torch.testing.assert_close(
        network.grad, torch.tensor([2.0, 0.0])
    )  # norm 3 under the mask, not 5


def test_a_parameter_that_the_network_does_not_use_has_the_gradient_zero_under_a_mask() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(2, 1, bias=False), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.used(x)
            return outputs

    network, flags = (
        FlatModule(Unused()),
        torch.tensor([True, False, True, True, False]),
    )  # `spare` comes first
    sum_clipped_(
        network, product, torch.tensor([[3.0, 4.0], [5.0, 0.0]]), torch.ones(2), flags, clip=2.0
    )
    assert network.grad.tolist() == [0.0, 0.0, 0.0, 4.0, 0.0]


def test_an_empty_batch_has_the_gradient_zero() -> None:
    network = linear()
    network.grad.fill_(7.0)
    sum_clipped_(network, product, torch.empty(0, 2), torch.empty(0), None, clip=1.0)
    assert network.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_sum_is_that_of_autograd_sample_by_sample_for_any_chunk(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CHUNK_SAMPLES", chunk)
    monkeypatch.setattr(steps, "CHUNK_VALUES", 1)
    torch.manual_seed(0)
    network = FlatModule(SmallCNN(1, 10, 28))
    x, y = torch.randn(7, 1, 28, 28), torch.arange(7)
    flags = torch.rand(network.layout.size) < 0.5
    expected = torch.zeros(network.layout.size)
    for i in range(7):
        network.grad.zero_()
        functional.cross_entropy(network(x[i : i + 1]), y[i : i + 1]).backward()
        g = torch.where(flags, network.grad, 0.0)
        expected += g / max(1.0, float(g.norm()) / 0.5)
    sum_clipped_(network, functional.cross_entropy, x, y, flags, clip=0.5)
    torch.testing.assert_close(network.grad, expected, rtol=1e-4, atol=1e-6)


def test_one_sample_more_changes_the_sum_by_at_most_the_clip_norm() -> None:
    torch.manual_seed(0)
    network = FlatModule(SmallCNN(1, 10, 28))
    x, y = 10 * torch.randn(6, 1, 28, 28), torch.arange(6)
    sums = []
    for n in (5, 6):
        sum_clipped_(network, functional.cross_entropy, x[:n], y[:n], None, clip=0.7)
        sums.append(network.grad.clone())
    assert 0.5 < float((sums[1] - sums[0]).norm()) <= 0.7 + 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_sample_without_a_finite_gradient_norm_counts_as_no_sample(value: float) -> None:
    network, x = linear(), torch.tensor([[3.0, 4.0], [value, 1.0], [value, value]])
    sum_clipped_(network, product, x, torch.ones(3), None, clip=1.0)
    torch.testing.assert_close(network.grad, torch.tensor([0.6, 0.8]))


def test_noise_has_the_stated_scale_is_divided_by_the_expected_batch_and_stays_under_the_mask() -> (
    None
):
    steps = private_steps(noise=3.0, clip=0.5, batch=4.0)
    flags = torch.arange(200_000) % 2 == 0
    total = torch.zeros(200_000)
    steps.add_noise_(total, flags)
    held = total[flags]
    assert held.std().item() == pytest.approx(3.0 * 0.5 / 4.0, rel=0.01)
    assert abs(held.mean().item()) < 0.005
    assert held.abs().max() > 3 * held.std()  # tails
    assert not total[~flags].any()


def test_every_step_round_and_peer_has_its_own_noise_and_a_repeated_step_the_same() -> None:
    secret = SecretStream(KEY)
    draws = [
        secret.normal(1000, "noise", *names)
        for names in (("000", 0, 0), ("000", 0, 1), ("000", 1, 0), ("001", 0, 0))
    ]
    draws.append(SecretStream(KEY[::-1]).normal(1000, "noise", "000", 0, 0))
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.15
    assert torch.equal(draws[0], secret.normal(1000, "noise", "000", 0, 0))


def test_noise_reaches_beyond_nine_standard_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of zeros are the smallest uniform number, 0.5 / 2^64, so the radius sqrt(2 * 65 ln 2),
    at the angle 0."""
    monkeypatch.setattr(SecretStream, "_bytes", lambda self, count, names: bytes(count))
    assert float(SecretStream(KEY).normal(1, "noise")[0]) == pytest.approx(
        math.sqrt(130 * math.log(2)), rel=1e-4
    )


def test_flips_come_from_the_secret_key_anew_in_every_step() -> None:
    """All 40 samples are in every batch, in some order; an image is 1 0, or 0 1 if it is
    flipped."""
    images = torch.tensor([255, 0], dtype=torch.uint8).view(1, 1, 2, 1).expand(40, 1, 2, 1)
    samples = ResidentSamples(
        images, torch.arange(40), None, ImageTransform((0.0,), (1.0,), flip=True)
    )

    def flips(key: bytes) -> list[list[int]]:
        steps, found = PrivateSteps(SecretStream(key), ("000", 0), 1.0, 1.0, 1.0, 40.0), []
        for _ in range(2):
            [(x, y)] = steps.batches(samples, 1)
            found.append(x[y.argsort(), 0, 0, 1].int().tolist())
            steps.add_noise_(torch.zeros(1), None)
        return found

    first, second = flips(KEY)
    assert 8 < sum(first) < 32
    assert first != second
    assert flips(KEY) == [first, second]
    assert flips(KEY[::-1])[0] != first


def test_dropout_comes_from_the_secret_key_anew_in_every_step() -> None:
    """Training of one peer, of one round and public seed, with two keys."""

    def gradients(key: bytes) -> list[list[float]]:
        network = FlatModule(nn.Sequential(nn.Dropout(), nn.Linear(30, 1, bias=False)))
        samples = ResidentSamples(torch.ones(1, 30), torch.ones(1))
        trainer = Trainer(
            network,
            PeerData(samples, samples),
            TrainingRun(Train(), Task(loss=product), seed=0, rounds=1),
            "000",
            0,
        )
        trainer.private, found = (
            PrivateSteps(SecretStream(key), ("000", 0), 1e-9, 100.0, 1.0, 1.0),
            [],
        )
        seed_globally(0, "torch", "000", 0)
        trainer.begin(network.read(), torch.ones(30, dtype=torch.bool))
        for x, y in trainer.batches(steps=2):
            trainer.backward(x, y)
            found.append(
                network.grad.round().tolist()
            )  # 2 where a weight's input is kept, 0 where it is dropped
        return found

    first, second = gradients(KEY)
    assert set(first) == {0.0, 2.0}
    assert first != second
    assert gradients(KEY) == [first, second]
    assert gradients(KEY[::-1])[0] != first


def test_names_that_read_alike_are_different_streams() -> None:
    secret = SecretStream(KEY)
    assert not torch.equal(secret.normal(8, "a", "1"), secret.normal(8, "a", 1))


def test_a_batch_holds_each_sample_with_the_sampling_rate_and_sizes_vary() -> None:
    samples = ResidentSamples(torch.arange(200.0)[:, None], torch.arange(200))
    steps = private_steps(rate=0.25, batch=50.0)
    sizes, seen = [], torch.zeros(200)
    for _ in range(200):
        (x, y), *_ = steps.batches(samples, 1)
        assert torch.equal(x.squeeze(1).long(), y)
        sizes.append(len(y))
        seen[y] += 1
        steps.add_noise_(torch.zeros(1), None)
    assert sum(sizes) / 200 == pytest.approx(50, rel=0.05)
    assert torch.tensor(sizes).float().std().item() == pytest.approx(
        (200 * 0.25 * 0.75) ** 0.5, rel=0.2
    )
    assert seen.min() > 20
    assert seen.max() < 90


def test_sampling_with_rate_one_takes_everybody_and_a_tiny_rate_may_take_nobody() -> None:
    samples = ResidentSamples(torch.randn(20, 2), torch.zeros(20))
    [(_, everybody)] = private_steps(rate=1.0).batches(samples, 1)
    assert len(everybody) == 20
    [(nobody, _)] = private_steps(rate=1e-9).batches(samples, 1)
    assert nobody.shape == (0, 2)


def test_a_network_with_batch_norm_is_refused_by_its_layer() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with refused(ConfigError, key="privacy"):
        check_private_network(network)
    check_private_network(copy.deepcopy(network)[:1])


@pytest.mark.parametrize("given", [{"delta": 1e-6}, {"clip": 2.0}])
def test_settings_that_would_protect_nothing_are_refused(given: dict[str, float]) -> None:
    with refused(ConfigError):
        Privacy(**given)
    assert not Privacy().enabled


def test_the_key_is_not_in_the_text_of_a_stream() -> None:
    assert "key" not in repr(SecretStream(KEY))
