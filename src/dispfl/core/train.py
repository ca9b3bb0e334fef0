"""Local training of one peer in one round: SGD under a mask, the dense gradient, and evaluation."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.core.masks import keep_, kept_per_layer, mask_bits
from dispfl.core.packed import PackedMask
from dispfl.core.rng import stream
from dispfl.core.units import UnitMask
from dispfl.errors import NonFiniteError
from dispfl.settings import Settings


class Train(Settings):
    """Local training: plain SGD, the paper's appendix "Hyper-Parameters"."""

    table: ClassVar[str] = "train"
    epochs: int = Field(default=5, ge=1)
    """Passes over the peer's data in a round."""
    batch_size: int = Field(default=128, ge=1)
    """Samples in a step."""
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of round 0."""
    lr_decay: float = Field(default=0.998, gt=0, le=1)
    """Factor on the learning rate after each round."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """L2 penalty, added to the gradient after clipping."""
    clip_norm: float = Field(default=10.0, ge=0)
    """The masked gradient is clipped to this norm; 0 disables clipping."""
    noise_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the Gaussian noise on every kept weight's gradient, after clipping: Theorem 1's sigma."""

    def rate(self, t: int) -> float:
        """Return the learning rate of round t."""
        return self.lr * self.lr_decay**t


class Samples(Protocol):
    """One peer's training or test data, as batches of (inputs, labels)."""

    def __len__(self) -> int: ...

    def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """With a generator: shuffled and augmented, for training. Without: in order and as they are."""
        ...

    def take(self, rows: Tensor) -> "Samples":
        """Return some of the samples."""
        ...


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose largest output is the label's."""
    return int((outputs.argmax(1) == labels).sum()) / len(labels)


@dataclass(frozen=True)
class Task:
    """The loss to minimize and the metric to report; by default those of classification."""

    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    metric: Callable[[Tensor, Tensor], float] = accuracy


@dataclass
class Report:
    """Measurements of one peer in one round. `None` means not measured."""

    score: float | None = None
    """The metric on the peer's test data after the step."""
    mixed: float | None = None
    """The same after mixing and before training."""
    loss: float | None = None
    """Mean training loss over the steps of the round's last call of `learn`."""
    mask_change: float | None = None
    """The share of kept weights that the evolved mask replaces."""
    overlap: float | None = None
    """The share of the peer's kept weights that a neighbour holds too, on average over the received models."""
    failure: str | None = None
    """Why the peer's step was abandoned, as a sentence."""
    seconds: float = field(default=0.0, compare=False)
    """The time that the step computed, as `step_clock` measures it."""
    passes: list[tuple[int, list[int]]] = field(default_factory=list)
    """The training done: samples passed forward and backward, and the weights kept in each layer meanwhile."""

    def __post_init__(self) -> None:
        self.passes = [(samples, list(kept)) for samples, kept in self.passes]  # JSON gives lists for tuples


@dataclass
class Trainer:
    """Training context of one peer in one round: a live model, its data, its random streams, and the report."""

    live: LiveModel
    train: Samples
    test: Samples
    settings: Train
    task: Task
    seed: int
    peer: str
    t: int
    T: int
    roster: Sequence[str] = ()
    """All peers' names, in the order of every sum."""
    evaluate: bool = True
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The peer's buffers: those of its state at first, then those after the last call of `learn`."""
    first_weights: Callable[[], Tensor] = lambda: torch.empty(0)
    """Returns the flat weights of the whole network that all peers started from."""
    before_batch: Callable[[], None] = lambda: None
    """Called before every batch; an exception that it raises ends the step."""
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.batch_rng = self.stream("batches")
        self._noise = self.stream("noise") if self.settings.noise_std else None

    def stream(self, purpose: str) -> torch.Generator:
        """Return the random stream of this peer and round for one purpose."""
        return stream(self.seed, purpose, self.peer, self.t)

    def peer_stream(self, purpose: str) -> torch.Generator:
        """Return the random stream of this peer for one purpose, the same in every round."""
        return stream(self.seed, purpose, self.peer)

    def draw_noise(self, size: int) -> Tensor | None:
        """Draw one step's noise, on the host so that it is the same on every device; None without noise."""
        return torch.empty(size).normal_(0, self.settings.noise_std, generator=self._noise) if self._noise else None

    def learn(
        self,
        weights: Tensor,
        mask: Tensor | PackedMask,
        epochs: int | None = None,
        *,
        samples: Samples | None = None,
        lr: float | None = None,
        prox: tuple[float, Tensor] | None = None,
    ) -> Tensor:
        """Local sparse SGD under a fixed mask.

        Algorithm 1, lines 8-13:  w <- w - eta * m_k * g(w), with the masked gradient clipped and weight decay added,
        and Gaussian noise if `noise_std` is set (appendix, "Main proof": g(w) + N(0, sigma^2 I)).
        By default: the settings' epochs, all training samples, this round's learning rate. `prox` = (mu, w_0) adds
        the proximal term mu / 2 * |w - w_0|^2 to the loss.
        """
        s, live = self.settings, self.live
        epochs, lr = epochs or s.epochs, lr or s.rate(self.t)
        samples = self.train if samples is None else samples
        live.load(weights, self.buffers)
        live.module.train()
        flags = weight_flags(mask)
        bits = None if flags is None else mask_bits(live.to_device(flags))
        anchor = prox and (prox[0], live.to_device(prox[1]))
        losses = []
        for _ in range(epochs):
            for x, y in samples.batches(s.batch_size, rng=self.batch_rng):
                self.before_batch()
                losses.append(self._backward(x, y))
                noise = self.draw_noise(weights.numel())
                drawn = None if noise is None else live.to_device(noise)
                sgd_step(live.weights, live.grad, bits, lr, s.weight_decay, s.clip_norm, anchor, drawn)
        self.report.passes.append((epochs * len(samples), trained_per_layer(flags, live.layout)))
        loss = torch.stack(losses).mean()
        learned = live.read()
        self.check_finite(loss, "training loss")
        self.check_finite(learned, "weights")
        self.report.loss, self.buffers = float(loss), live.read_buffers()
        return learned

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the dense gradient on one batch of the peer's training data (Algorithm 2, line 2)."""
        self.live.load(weights, self.buffers)
        self.live.module.train()
        x, y = next(self.train.batches(self.settings.batch_size, rng=self.stream("evolve")))
        self._backward(x, y)
        self.report.passes.append((len(y), list(self.live.layout.sizes)))
        gradient = self.live.grad.to("cpu", copy=True)
        self.check_finite(gradient, "gradient")
        return gradient

    def score(self, weights: Tensor, samples: Samples | None = None) -> float:
        """Return the task's metric on the peer's test data, or on other samples."""
        return float(self.task.metric(*self._predict(weights, self.test if samples is None else samples)))

    def loss(self, weights: Tensor, samples: Samples) -> float:
        """Return the task's loss on some samples, without training on them."""
        return float(self.task.loss(*self._predict(weights, samples)))

    @torch.no_grad()
    def _predict(self, weights: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        self.live.load(weights, self.buffers)
        self.live.module.eval()
        outputs, labels = [], []
        for x, y in samples.batches(EVALUATION_BATCH):
            outputs.append(self.live(x))
            labels.append(self.live.to_device(y))
        return torch.cat(outputs), torch.cat(labels)

    def observe_mixed(self, weights: Tensor) -> None:
        """Evaluate the model between mixing and training, in rounds with evaluation."""
        if self.evaluate:
            self.report.mixed = self.score(weights)

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.live.grad.zero_()
        loss = self.task.loss(self.live(x), self.live.to_device(y))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def check_finite(self, values: Tensor, what: str) -> None:
        if not torch.isfinite(values).all():
            raise NonFiniteError(
                f"Peer {self.peer}, round {self.t}: the {what} became infinite or nan, so the peer keeps its last good "
                f"state. A smaller train.lr (now {self.settings.lr:g}) or train.clip_norm usually helps."
            )


EVALUATION_BATCH = 500


def weight_flags(mask: Tensor | PackedMask) -> Tensor | None:
    """Return a flat mask of the live network's weights; None under a mask of units, whose small network keeps all."""
    if isinstance(mask, UnitMask):
        return None
    return mask.unpack() if isinstance(mask, PackedMask) else mask


def trained_per_layer(flags: Tensor | None, layout: Layout) -> list[int]:
    """Return the number of trained weights of each layer."""
    return list(layout.sizes) if flags is None else kept_per_layer(flags, layout)


def step_clock(live: LiveModel) -> float:
    """Return a clock's seconds, to measure a step: processor time where a step has one thread, so that other work on
    the machine does not count; otherwise wall time.
    """
    one_thread = live.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if one_thread else time.perf_counter()


def sgd_step(
    weights: Tensor,
    grad: Tensor,
    bits: Tensor | None,
    lr: float,
    weight_decay: float,
    clip_norm: float,
    prox: tuple[float, Tensor] | None = None,
    noise: Tensor | None = None,
) -> None:
    """One step in place on flat vectors: mask, clip, decay, apply the proximal term, descend, add noise.

    Without `bits` nothing is masked.
    """
    if bits is not None:
        keep_(grad, bits)
    scale = clip_scale(grad, clip_norm) if clip_norm else 1.0
    mu, anchor = prox or (0.0, None)
    if weight_decay or mu:
        weights.mul_(1 - lr * (weight_decay + mu))
    if anchor is not None:
        weights.add_(anchor, alpha=lr * mu)
    if isinstance(scale, Tensor):
        weights.addcmul_(grad, scale, value=-lr)
    else:
        weights.add_(grad, alpha=-lr * scale)
    if noise is not None:
        weights.add_(noise if bits is None else keep_(noise, bits), alpha=-lr)


def clip_scale(grad: Tensor, clip_norm: float) -> float | Tensor:
    """Return the factor, at most 1, that clips a gradient's norm: a number on the CPU, a tensor on other devices.

    Reading a number from a device waits until all computations before it are done, while the host could prepare the
    next batch. On the CPU there is nothing to wait for, and a number saves one pass over the weights.
    """
    norm = torch.linalg.vector_norm(grad)
    if grad.device.type == "cpu":
        return min(1.0, clip_norm / (float(norm) + 1e-6))
    scale: Tensor = clip_norm / (norm + 1e-6)
    return scale.clamp(max=1.0)
