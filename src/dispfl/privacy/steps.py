"""Differentially private training of one peer: secret batches, clipped gradients, secret noise.

DP-SGD (Abadi et al., 2016, Algorithm 1) under a mask m. With every sample of the peer's n in the
batch B with probability q = batch size / n, independently (Poisson sampling):

    g_i  <-  m * grad l_i(w)                               the masked gradient of one sample
    g_i  <-  g_i / max(1, |g_i| / C)                       clipped to norm C
    g    <-  (sum_{i in B} g_i + N(0, (sigma C)^2 m)) / (q n)

Sampling and noise come from a secret key that never leaves the peer, not from the run's seed, which
all members know: who knows them can subtract the noise. So do crops, flips and dropout, of every
step anew: one sample more in a batch changes what the others draw, and who knows all draws would
see that. A sample without a finite gradient adds nothing.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import pi
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import grad, vmap

from dispfl.core.flat_module import FlatModule
from dispfl.core.inputs import Inputs, forward_with, take_rows, with_each
from dispfl.core.masks import mask_bits
from dispfl.core.rng import seed_globally, stream
from dispfl.core.samples import Samples
from dispfl.errors import ConfigError
from dispfl.settings import Settings

KEY_BYTES = 32
CHUNK_VALUES = 1 << 22
"""Per-sample gradients are computed for so many samples at once that they have this many values.

So many fit the cache.
"""
CHUNK_SAMPLES = 4
"""The fewest samples at once."""


class Privacy(Settings):
    """Differential privacy of single samples, for all that a peer publishes; off by default."""

    table: ClassVar[str] = "privacy"
    epsilon: float | None = Field(default=None, gt=0)
    """The budget: a peer stops training before a round that would exceed it.

    Without a noise multiplier, the noise is chosen so that the budget lasts for all rounds.
    """
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The delta of the guarantee; well below one over the number of a peer's samples."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise, as a multiple of `clip`."""
    clip: float = Field(default=1.0, gt=0)
    """The norm to which the gradient of each sample is clipped, instead of `train.clip_norm`."""

    @model_validator(mode="after")
    def _stated(self) -> Self:
        if self.enabled:
            return self
        for name in ("clip", "delta"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"privacy.{name} is set, but neither privacy.epsilon nor"
                    " privacy.noise_multiplier: nothing would be private. Give one of them, for"
                    " example privacy.epsilon=4.",
                    key=f"privacy.{name}",
                )
        return self

    @property
    def enabled(self) -> bool:
        """Whether training is private."""
        return self.epsilon is not None or self.noise_multiplier is not None


@dataclass(frozen=True)
class SecretStream:
    """Unpredictable random numbers: SHAKE-256 of a secret key and of names."""

    key: bytes = field(repr=False)

    def _bytes(self, count: int, names: tuple[str | int, ...]) -> bytes:
        label = "/".join(f"{type(name).__name__}:{name}" for name in names).encode()
        length = len(self.key).to_bytes(2, "little")
        return hashlib.shake_256(length + self.key + label).digest(count)

    def bernoulli(self, n: int, rate: float, *names: str | int) -> Tensor:
        """Return which of n samples are drawn, each with this probability, in ascending order."""
        words = np.frombuffer(self._bytes(8 * n, names), "<u8")
        return torch.from_numpy(np.flatnonzero(words < np.uint64(min(rate, 1.0) * (2**64 - 2**11))))

    def number(self, *names: str | int) -> int:
        """Return a number of 63 bits."""
        return int.from_bytes(self._bytes(8, names), "little") >> 1

    def normal(self, size: int, *names: str | int) -> Tensor:
        """Return standard normal numbers (Box and Muller).

        A radius has 64 random bits, so that numbers reach 9.5. With 32 bits they would end at 6.8,
        and among the weights of a large model some are at the end more often than a small delta
        allows.
        """
        half = (size + 1) // 2
        drawn = self._bytes(12 * half, names)
        uniform = (np.frombuffer(drawn, "<u8", half).astype(np.float64) + 0.5) / 2**64
        turns = (np.frombuffer(drawn, "<u4", half, 8 * half).astype(np.float64) + 0.5) / 2**32
        radius = np.sqrt(-2 * np.log(uniform))
        angle = 2 * pi * turns
        numbers = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(numbers[:size]).float()


@dataclass
class PrivateSteps:
    """The private steps of one peer in one round."""

    secret: SecretStream
    names: tuple[str | int, ...]
    """Who takes the steps, and when: no two steps have the same batches and noise."""
    noise_multiplier: float
    clip: float
    rate: float
    """The probability q with which a sample is in a batch."""
    batch_size: float
    """The expected number of samples in a batch, q n."""
    remaining: int | None = None
    """Steps that the budget still allows; None without a budget."""
    taken: int = 0
    """Steps taken so far; each has noise of its own."""

    def batches(self, samples: Samples, steps: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield Poisson batches, augmented, which may be empty.

        Torch's global generator, from which dropout and the transforms of a Dataset draw, is seeded
        before each.
        """
        x, y = next(samples.take(torch.tensor([0])).batches(1))
        for _ in range(steps):
            number = self.secret.number("augment", *self.names, self.taken)
            seed_globally(number, "torch")
            rng = stream(number, "batch")
            rows = self.secret.bernoulli(len(samples), self.rate, "batch", *self.names, self.taken)
            if len(rows):
                # In one batch: a last batch of a single sample would be merged with the one before.
                yield next(samples.take(rows).batches(len(rows), rng=rng))
            else:
                yield take_rows(x, slice(0)), y[:0]

    def gradient_(
        self,
        network: FlatModule,
        loss: Callable[[Tensor, Tensor], Tensor],
        x: Inputs,
        y: Tensor,
        flags: Tensor | None,
        *,
        peer: str,
    ) -> None:
        """Set `network.grad` to the noisy mean of the samples' masked and clipped gradients."""
        self.check_budget(peer)
        sum_clipped_(network, loss, x, y, flags, self.clip)
        self.add_noise_(network.grad, flags)

    def check_budget(self, peer: str) -> None:
        """Refuse a step that the budget does not allow: more of them than the method announced."""
        if self.remaining is not None and self.taken >= self.remaining:
            raise ConfigError(
                f"Peer {peer} has no privacy budget for another step; the method takes more steps"
                " in a round than its `private_steps` says."
            )

    def add_noise_(self, total: Tensor, flags: Tensor | None) -> None:
        """Turn the sum of clipped gradients, in place, into their noisy mean."""
        noise = self.secret.normal(total.numel(), "noise", *self.names, self.taken).to(total.device)
        if flags is not None:
            noise = torch.where(flags, noise, 0.0)
        total.add_(noise, alpha=self.noise_multiplier * self.clip).div_(self.batch_size)
        self.taken += 1


def sum_clipped_(
    network: FlatModule,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Inputs,
    y: Tensor,
    flags: Tensor | None,
    clip: float,
) -> None:
    """Set `network.grad` to the sum of the samples' masked gradients, each clipped to a norm.

    It is 0 for an empty batch. A gradient that is not finite counts as 0: no norm bounds it, and a
    step that fails because of one sample reveals that the sample is there.
    """
    network.grad.zero_()
    module = network.module
    parameters = {}
    values = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
            values[name] = parameter.detach()
    bits = None
    if flags is not None:
        bits = dict(zip(network.layout.names, network.layout.views(mask_bits(flags)), strict=True))

    def sample_loss(weights: dict[str, Tensor], inputs: Inputs, label: Tensor) -> Tensor:
        batch = with_each(inputs, lambda tensor: tensor[None])
        return loss(forward_with(module, weights, batch), label[None])

    sample_gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")
    chunk = max(CHUNK_SAMPLES, CHUNK_VALUES // max(1, network.layout.size))
    for start in range(0, len(y), chunk):
        rows = slice(start, start + chunk)
        gradients = sample_gradients(values, take_rows(x, rows), y[rows])
        if bits is not None:
            gradients = _masked(gradients, bits)
        norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        is_finite = norm.isfinite()
        scale = torch.where(is_finite, (clip / (norm + 1e-12)).clamp(max=1.0), 0.0)
        if not is_finite.all():
            gradients = {name: g.nan_to_num(0.0, 0.0, 0.0) for name, g in gradients.items()}
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.add_(torch.tensordot(scale, gradients[name], 1))


def _masked(gradients: Mapping[str, Tensor], bits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the masked gradients of samples.

    As in `keep_`, but not in place: the gradients of an unused parameter share their memory.
    """
    masked = {}
    for name, gradient in gradients.items():
        masked[name] = (gradient.view(torch.int32) & bits[name]).view(torch.float32)
    return masked


def check_private_network(module: nn.Module) -> None:
    """Refuse a network whose outputs for one sample depend on the other samples of a batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                "privacy needs a network without batch norm, which mixes the samples of a batch; "
                f"{name or 'the model'} is {type(layer).__name__}. Use GroupNorm.",
                key="privacy",
            )
