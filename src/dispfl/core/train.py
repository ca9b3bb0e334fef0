"""Local training of one peer in one round: steps under a mask, the gradient, and evaluation."""

import re
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import cos, isfinite, pi
from numbers import Integral, Real
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, SupportsFloat

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from dispfl.core.flat_module import FlatModule
from dispfl.core.inputs import Inputs, sample_count, with_each
from dispfl.core.layout import Layout
from dispfl.core.masks import keep_, mask_bits, restore_
from dispfl.core.optimizers import (
    Moments,
    OptimizerFactory,
    OptimizerName,
    as_parameter,
    named_optimizer,
    optimizer_step,
    own_optimizer,
    sgd_step,
)
from dispfl.core.packed import Mask, WeightMask
from dispfl.core.report import TAKEN_NAMES, Passes, Report
from dispfl.core.rng import stream
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import Task
from dispfl.core.trained_part import Part, TrainedPart
from dispfl.errors import ConfigError, NonFiniteError
from dispfl.settings import Settings

UnitInterval = Annotated[float, Field(ge=0, lt=1)]


class Train(Settings):
    """Local training: by default plain SGD, the paper's appendix "Hyper-Parameters"."""

    table: ClassVar[str] = "train"
    epochs: int = Field(default=5, ge=1)
    """Passes over the peer's data in a round."""
    steps: int | None = Field(default=None, ge=1)
    """Steps in a round, instead of epochs; any number, also less than an epoch."""
    batch_size: int = Field(default=32, ge=1)
    """Samples in a step."""
    optimizer: OptimizerName = "sgd"
    """sgd: plain SGD unless there is a momentum; adam: with an L2 penalty; adamw: with decoupled
    weight decay."""
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of round 0, after the warm-up; 0.001 unless stated with adam and adamw."""
    schedule: Literal["constant", "exponential", "cosine", "step"] = "exponential"
    """How the learning rate changes from round to round; cosine: to 0 after the last round."""
    lr_decay: float = Field(default=0.998, gt=0, le=1)
    """Factor on the learning rate: after each round (exponential), or after every `lr_step` rounds
    (step)."""
    lr_step: int = Field(default=30, ge=1)
    """Rounds between two changes of the learning rate, with schedule=step."""
    warmup: int = Field(default=0, ge=0)
    """Rounds at the beginning in which the learning rate increases in equal steps."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's momentum instead of the classical one."""
    betas: tuple[UnitInterval, UnitInterval] = (0.9, 0.999)
    """Decay rates of the first and the second moment of adam and adamw."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of adam and adamw."""
    keep_moments: bool = False
    """Keep momentum and moments between rounds; by default every round begins without them, as in
    the authors' code."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """L2 penalty, added to the gradient after clipping; with adamw: decoupled weight decay."""
    clip_norm: float = Field(default=10.0, ge=0)
    """The masked gradient is clipped to this norm; 0 disables clipping."""
    noise_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the Gaussian noise on every kept weight's gradient, after clipping:
    Theorem 1's sigma.

    It is drawn from the seed, which all members know, so that they can subtract it; private noise
    is `privacy`.
    """
    sam_rho: float = Field(default=0.0, ge=0)
    """Sharpness-aware minimization (SAM): each step takes the gradient this far up the slope, which
    costs a second pass; 0 disables it."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_adam(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("optimizer") in ("adam", "adamw"):
            return {"lr": 1e-3, **values}
        return values

    @model_validator(mode="after")
    def _momentum_fits(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"train.momentum is {self.momentum:g}, which {self.optimizer} does not use; use"
                " train.betas.",
                key="train.momentum",
            )
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "train.nesterov needs a momentum: give train.momentum too, for example 0.9.",
                key="train.nesterov",
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether training is plain SGD, which remembers nothing from step to step."""
        return self.optimizer == "sgd" and not self.momentum

    def rate(self, t: float, T: int) -> float:
        """Return the learning rate of round t of T, or at any time between two rounds."""
        if t < self.warmup:
            return self.lr * (t + 1) / (self.warmup + 1)
        match self.schedule:
            case "constant":
                return self.lr
            case "exponential":
                return float(self.lr * self.lr_decay**t)
            case "cosine":
                return self.lr * (1 + cos(pi * (t - self.warmup) / max(1, T - self.warmup))) / 2
            case "step":
                return float(self.lr * self.lr_decay ** (t // self.lr_step))

    @property
    def depends_on_rounds(self) -> str:
        """Why a finished run cannot be extended: what depends on the number of rounds, if any."""
        if self.schedule == "cosine":
            return "the learning rate of train.schedule=cosine depends on it"
        return ""

    @property
    def duration(self) -> str:
        """How long a round trains, in words: `5 epochs`."""
        if self.steps is None:
            return _counted(self.epochs, "epoch")
        return _counted(self.steps, "step")

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of batches that so many samples make."""
        return batch_count(samples, self.batch_size)

    def local_steps(self, samples: int, epochs: int | None = None) -> int:
        """Return the steps of a round on so many samples, or of some epochs."""
        if self.steps is not None and epochs is None:
            return self.steps
        return (epochs or self.epochs) * self.steps_per_epoch(samples)

    def samples_trained(self, samples: int, epochs: int | None = None) -> int:
        """Return how many samples a round passes forward and backward; SAM passes each twice."""
        return self.samples_of_steps(samples, self.local_steps(samples, epochs))

    def samples_of_steps(self, samples: int, steps: int) -> int:
        """Return how many of so many samples these steps pass forward and backward."""
        full_epochs, last_steps = divmod(steps, self.steps_per_epoch(samples))
        in_batches = full_epochs * samples + last_steps * min(self.batch_size, samples)
        return self.passes_per_step * in_batches

    @property
    def passes_per_step(self) -> int:
        """How often a step passes its batch forward and backward."""
        return 2 if self.sam_rho else 1


class PrivateTraining(Protocol):
    """How a peer trains with differential privacy (privacy/steps.py: PrivateSteps)."""

    batch_size: float
    """The expected number of samples in a batch."""
    remaining: int | None
    """Steps that the budget still allows; None without a budget."""
    taken: int
    """Steps taken so far."""

    def batches(self, samples: Samples, steps: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield secret random batches, which may be empty."""
        ...

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
        """Set `network.grad` to the noisy, masked mean of the samples' clipped gradients."""
        ...


@dataclass(frozen=True)
class TrainingRun:
    """What local training needs of a run; the same for all peers and rounds."""

    settings: Train
    task: Task
    seed: int
    rounds: int
    optimizer: OptimizerFactory | None = None
    """Makes the optimizer, instead of the one of the settings."""
    first_weights: Callable[[], Tensor] = lambda: torch.empty(0)
    """Returns the flat weights of the whole network that all peers started from."""
    layout: Layout = field(default_factory=lambda: Layout((), ()))
    """The layout of the whole network, of which a peer may train a small one."""


@dataclass
class Trainer:
    """One peer in one round: its network, its data, its random streams, and its report."""

    network: FlatModule
    data: PeerData
    run: TrainingRun
    peer: str
    t: int
    passed: float | None = None
    """With `schedule = "async"`, where t counts the peer's own steps: the rounds that have passed
    when its step begins."""
    requested: int = 0
    """Models that the peer requested in this round; fewer may have been received."""
    mixing_weights: Mapping[str, float] | None = None
    """How much each neighbour's model, and the peer's own, counts in its average; None: all the
    same."""
    evaluate: bool = True
    """Whether the peer's model is evaluated in this round."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The peer's buffers: those of its state, then those after the last call of `learn`."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """What the optimizer remembers of each model that `learn` has trained, by its name."""
    private: PrivateTraining | None = None
    """With privacy: draws batches and noise in secret, and counts steps."""
    before_batch: Callable[[], None] = lambda: None
    """Called before every batch; an exception that it raises ends the step."""
    report: Report = field(default_factory=Report)
    step_is_over: bool = False
    """Whether the step is done, so that nothing more is recorded."""

    def __post_init__(self) -> None:
        self.batch_rng = self.stream("batches")
        self._noise = self.stream("noise") if self.settings.noise_std else None
        self._part: TrainedPart | None = None
        self._bits: Tensor | None = None
        self._frozen: Tensor | None = None
        self._is_observing = False

    # what methods read

    @property
    def train(self) -> Samples:
        """The peer's training data."""
        return self.data.train

    def hold_back(self, count: int) -> Samples:
        """Return so many training samples, the same in every round, to choose between models by.

        The rest of the step trains on the others: `train` no longer has them.
        """
        order = torch.randperm(len(self.train), generator=self.peer_stream("validation"))
        held_back = self.train.take(order[:count].sort().values)
        self.data = replace(self.data, train=self.train.take(order[count:].sort().values))
        return held_back

    @property
    def test(self) -> Samples:
        """The peer's test data."""
        return self.data.test

    @property
    def validation(self) -> Samples | None:
        """The peer's validation data, if it has any."""
        return self.data.validation

    @property
    def settings(self) -> Train:
        """The settings of local training."""
        return self.run.settings

    @property
    def task(self) -> Task:
        """The loss and the metrics."""
        return self.run.task

    @property
    def T(self) -> int:  # noqa: N802 (the paper's symbol)
        """Rounds of the run. A method whose step uses it overrides `Method.depends_on_rounds`."""
        return self.run.rounds

    @property
    def now(self) -> float:
        """The rounds that have passed, by which learning rate and prune rate change."""
        return self.t if self.passed is None else self.passed

    def first_weights(self) -> Tensor:
        """Return the flat weights of the whole network that all peers started from."""
        return self.run.first_weights()

    def mixing_weights_of(self, peers: Iterable[str]) -> list[float] | None:
        """Return how much the model of each of these peers counts; None: all the same.

        It is the product of the topology's weight and the affinity, where there are any. A member
        that is no neighbour, because our method chooses it or because it stands in for one that
        does not respond, has the weight of the mean neighbour.
        """
        affinities = self.report.affinities
        if self.mixing_weights is None and affinities is None:
            return None
        of_neighbours = {**(self.mixing_weights or {})}
        own_weight = of_neighbours.pop(self.peer, 1.0)
        stand_in = 0.0 if self.mixing_weights else 1.0
        if of_neighbours:
            stand_in = fmean(of_neighbours.values())

        weights = []
        for peer in peers:
            weight = own_weight if peer == self.peer else of_neighbours.get(peer, stand_in)
            weights.append(weight * (affinities or {}).get(peer, 1.0))
        return weights

    def stream(self, purpose: str) -> torch.Generator:
        """Return the random stream of this peer and round for one purpose."""
        return stream(self.run.seed, purpose, self.peer, self.t)

    def peer_stream(self, purpose: str) -> torch.Generator:
        """Return the random stream of this peer for one purpose, the same in every round."""
        return stream(self.run.seed, purpose, self.peer)

    def draw_noise(self, size: int) -> Tensor | None:
        """Draw one step's noise; None without noise.

        It is drawn on the host, so that it is the same on every device.
        """
        if self._noise is None:
            return None
        return torch.empty(size).normal_(0, self.settings.noise_std, generator=self._noise)

    def draw_shift(self, correction: Tensor | None = None) -> Tensor | None:
        """Return what one step adds to its clipped gradient: noise, a correction, both or None."""
        noise = self.draw_noise(self.network.weights.numel())
        if noise is None:
            return correction
        noise = self.network.to_device(noise)
        if correction is not None:
            noise.add_(correction)
        return noise

    def log(self, name: str, value: SupportsFloat) -> None:
        """Record a number of this peer in this round, under a name of your own.

        It is in the run's metrics, data frames, trackers and reports, with its mean and standard
        deviation over the peers that log it in the round. Log a name once in a step, and only where
        there is a finite number.
        """
        problem = ""
        number = _as_number(value)
        if not isinstance(name, str) or not LOGGED_NAME.fullmatch(name):
            problem = "a name has up to 64 letters, digits, - and _, and begins with a letter"
        elif name in TAKEN_NAMES or name in {metric.name for metric in self.task.metrics}:
            problem = "a run records another quantity under this name; use a name of your own"
        elif name.endswith("_std"):
            problem = "names that end in _std are those of standard deviations; use another name"
        elif name in self.report.logged:
            problem = "it is logged already in this step; log one number, such as the mean"
        elif number is None or not isfinite(number):
            problem = "it must be a finite number; log it only in rounds in which there is one"
        elif self.step_is_over:
            problem = "the peer's step is over; log in `step`"
        if number is None or problem:
            raise ConfigError(
                f"Peer {self.peer}, round {self.t}: trainer.log({name!r}, {reprlib.repr(value)})"
                f" cannot be recorded: {problem}.",
                key="trainer.log",
            )
        self.report.logged[name] = number

    def learn(
        self,
        weights: Tensor,
        mask: Tensor | Mask,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        samples: Samples | None = None,
        lr: float | None = None,
        prox: tuple[float, Tensor] | None = None,
        correction: Tensor | None = None,
        only: Part | None = None,
        name: str = "model",
    ) -> Tensor:
        """Local sparse training under a fixed mask.

        Algorithm 1, lines 8-13:  w <- w - eta * m_k * g(w), with the masked gradient clipped and
        weight decay added, and Gaussian noise if `noise_std` is set (appendix, "Main proof": g(w) +
        N(0, sigma^2 I)); or with another optimizer of the settings in place of SGD. By default: the
        settings' epochs or steps, all training samples, this round's learning rate. `prox` = (mu,
        w_0) adds the proximal term mu / 2 * |w - w_0|^2 to the loss; `correction` is added to every
        gradient, after clipping. A method that trains several models names them, so that each has
        its own moments.

        `only` trains a part of the weights: patterns of parameters' names, "head" and "norm", or a
        flag for each weight of the whole network. The rest is frozen at its value, and so are its
        moments; gradients are clipped to the norm of the part's gradient. If the mask keeps nothing
        of the part, the weights are returned as they are.
        """
        s = self.settings
        network = self.network
        if lr is None:
            lr = s.rate(self.now, self.T)
        part = TrainedPart.of(mask, only, network.layout)
        if part.is_empty:
            return weights.clone()

        self._begin(weights, part)
        bits = self._bits
        anchor = prox and (prox[0], network.to_device(prox[1]))
        if correction is not None:
            correction = network.to_device(correction.clone())
        optimizer, flat = self._optimizer(lr)
        packed = WeightMask.pack(mask) if isinstance(mask, Tensor) else mask
        moments = self.moments.get(name, Moments(packed, {}))
        if optimizer is not None:
            moments.restore(optimizer, flat, packed)
        clip_norm = 0.0 if self.private else s.clip_norm
        losses = []
        for x, y in self.batches(epochs, steps=steps, samples=samples):
            losses.append(self.backward(x, y))
            shift = self.draw_shift(correction)
            if optimizer is not None:
                optimizer_step(optimizer, flat, bits, clip_norm, anchor, shift)
            else:
                w = network.weights
                sgd_step(w, network.grad, bits, lr, s.weight_decay, clip_norm, anchor, shift)
            self.restore_frozen()

        learned = self.end(torch.stack(losses).mean())
        if optimizer is not None:
            if part.only is not None:
                moments.restore_frozen(optimizer, flat, packed, network.to_device(part.only))
            new_moments = Moments.of(optimizer, flat, packed, s.keep_moments)
            if new_moments:
                self.moments[name] = new_moments
        return learned

    def _optimizer(self, lr: float) -> tuple[Optimizer | None, Tensor]:
        """Return the optimizer and the parameter that it updates.

        None for plain SGD, which `sgd_step` computes.
        """
        s = self.settings
        network = self.network
        if self.run.optimizer is None and s.is_plain:
            return None, network.weights
        flat = as_parameter(network.weights, network.grad)
        if self.run.optimizer is not None:
            return own_optimizer(self.run.optimizer, flat, network.layout, lr / s.lr), flat
        options = s.model_dump(include={"weight_decay", "momentum", "nesterov", "betas", "eps"})
        return named_optimizer(s.optimizer, flat, lr=lr, **options), flat

    # for methods with a training loop of their own

    def begin(self, weights: Tensor, mask: Tensor | Mask, only: Part | None = None) -> None:
        """Begin to train these weights: load them into `network`.

        A loop then changes `network.weights` in place. With `only`, as in `learn`, it calls
        `restore_frozen` after a step that may have changed the rest. The operations of every
        `backward` from now on are counted for this mask.
        """
        self._begin(weights, TrainedPart.of(mask, only, self.network.layout))

    def _begin(self, weights: Tensor, part: TrainedPart) -> None:
        network = self.network
        network.load(weights, self.buffers)
        network.module.train()
        network.train_only(part.parameters)
        self._part = part
        self._bits = None
        self._frozen = None
        if part.flags is not None:
            self._bits = mask_bits(network.to_device(part.flags))
        self._frozen = part.frozen_values(network.weights)
        self.report.passes.append(part.passes)

    def restore_frozen(self) -> None:
        """Set the weights that are not trained to the values with which training began."""
        if self._frozen is not None:
            assert self._bits is not None
            restore_(self.network.weights, self._bits, self._frozen)

    def batches(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        samples: Samples | None = None,
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield shuffled and augmented batches: those of some epochs, or a number of steps.

        By default as many as the settings say, of all training samples. With privacy each is a
        secret draw, and may be empty.
        """
        if samples is None:
            samples = self.train
        steps = self.step_count(epochs, steps, samples)
        if self.private is not None:
            for batch in self.private.batches(samples, steps):
                self.before_batch()
                yield batch
            return
        while True:
            for batch in samples.batches(self.settings.batch_size, rng=self.batch_rng):
                self.before_batch()
                yield batch
                steps -= 1
                if not steps:
                    return

    def step_count(self, epochs: int | None, steps: int | None, samples: Samples) -> int:
        """Return a number of steps: as given, or those of some epochs, or of the settings."""
        for name, count in (("epochs", epochs), ("steps", steps)):
            if count is not None and not (isinstance(count, Integral) and count >= 1):
                raise ConfigError(
                    f"`{name}` must be a whole number of at least 1, got {count!r}; omit it to"
                    " train as the settings say.",
                    key=name,
                )
        if steps is not None:
            return steps
        return self.settings.local_steps(len(samples), epochs)

    def backward(self, x: Inputs, y: Tensor) -> Tensor:
        """Return the loss on a batch, and compute its gradient, `network.grad`, without the mask.

        With `train.sam_rho` it is the gradient g(w + rho g(w) / |g(w)|) of sharpness-aware
        minimization (Foret et al., 2021), where g(w) is masked. With privacy it is the gradient of
        `privacy/steps.py`, masked, and the loss is secret: 0 is returned.
        """
        if self.private is not None:
            return self._private_backward(self.private, x, y)
        loss = self._compute_gradient(x, y)
        if self.settings.sam_rho:
            network = self.network
            w = network.weights.clone()
            network.weights.add_(ascent(network.grad, self._bits, self.settings.sam_rho))
            self._compute_gradient(x, y)
            network.weights.copy_(w)
        return loss

    def _compute_gradient(self, x: Inputs, y: Tensor) -> Tensor:
        """Set `network.grad` to the gradient of the loss on a batch, and return the loss."""
        self.network.grad.zero_()
        loss = self.task.loss(self.network(x), self.network.to_device(y))
        loss.backward()  # type: ignore[no-untyped-call]
        self._count_samples(len(y))
        self.network.uncharged -= sample_count(x)
        return loss.detach()

    def _count_samples(self, samples: int) -> None:
        passes = self.report.passes
        passes[-1] = passes[-1]._replace(samples=passes[-1].samples + samples)

    def _private_backward(self, private: PrivateTraining, x: Inputs, y: Tensor) -> Tensor:
        network = self.network
        flags = self._part.flags if self._part else None
        if flags is not None:
            flags = network.to_device(flags)
        inputs = with_each(x, lambda tensor: network.to_device(tensor).contiguous())
        labels = network.to_device(y)
        private.gradient_(network, self.task.loss, inputs, labels, flags, peer=self.peer)

        self._count_samples(round(private.batch_size))  # the number of samples is secret
        return torch.zeros((), device=network.device)

    def end(self, loss: Tensor | float) -> Tensor:
        """Return the trained weights and report the mean loss; both must be finite."""
        learned = self.network.read()
        self.check_finite(torch.as_tensor(loss), "training loss")
        self.check_finite(learned, "weights")
        self.report.train_loss = None if self.private else float(loss)
        self.buffers = self.network.read_buffers()
        return learned

    def charge_own_loop(self, mask: Mask) -> None:
        """Charge the samples that a method passed through `network` without `backward`.

        They are charged under the mask of its result.
        """
        if self.network.uncharged > 0:
            passes = TrainedPart.of(mask, None, self.network.layout).passes
            self.report.passes.append(passes._replace(samples=self.network.uncharged))
            self.network.uncharged = 0

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the dense gradient on one batch of the peer's training data (Algorithm 2, line 2).

        Deviation 17: the network is in training mode.
        """
        self.begin(weights, torch.ones_like(weights, dtype=torch.bool))
        if self.private is not None:
            self._private_backward(self.private, *next(self.private.batches(self.train, 1)))
        else:
            batches = self.train.batches(self.settings.batch_size, rng=self.stream("evolve"))
            self._compute_gradient(*next(batches))
        gradient = self.network.grad.to("cpu", copy=True)
        self.check_finite(gradient, "gradient")
        return gradient

    def score(
        self,
        weights: Tensor,
        samples: Samples | None = None,
        metric: Callable[[Tensor, Tensor], float] | None = None,
    ) -> float:
        """Return the task's main metric, or another, on the peer's test data or other samples."""
        self._check_not_private(samples)
        if samples is None:
            samples = self.test
        if metric is None:
            metric = self.task.metric
        outputs, labels = self._predict(weights, samples)
        return metric(outputs, labels)

    def loss(self, weights: Tensor, samples: Samples) -> float:
        """Return the task's loss on some samples, without training on them."""
        self._check_not_private(samples)
        return float(self.task.loss(*self._predict(weights, samples)))

    def _check_not_private(self, samples: Samples | None) -> None:
        if self.private is not None and samples is not None and samples is not self.test:
            raise ConfigError(
                "privacy: a method may use training data in `learn`, `gradient` and `backward`"
                " only, which are accounted; this one evaluates a model on them.",
                key="privacy",
            )

    @torch.no_grad()
    def _predict(self, weights: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        self.network.load(weights, self.buffers)
        self.network.module.eval()
        outputs = []
        labels = []
        for x, y in samples.batches(EVALUATION_BATCH):
            outputs.append(self.network(x))
            labels.append(self.network.to_device(y))
        passes = Passes(len(samples), list(self.network.layout.sizes))
        (self.report.evaluations if self._is_observing else self.report.scored).append(passes)
        return torch.cat(outputs), torch.cat(labels)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Count what is scored as the round's evaluation, not as a part of the method's step."""
        self._is_observing = True
        try:
            yield
        finally:
            self._is_observing = False

    def observe(self, weights: Tensor) -> None:
        """Evaluate the model at the end of the step: all metrics and the loss on test data."""
        outputs, labels = self._predict(weights, self.test)
        self.report.scores = {metric.name: metric(outputs, labels) for metric in self.task.metrics}
        self.report.test_loss = float(self.task.loss(outputs, labels))

    def observe_mixed(self, weights: Tensor) -> None:
        """Evaluate the model between mixing and training, in rounds with evaluation."""
        if self.evaluate:
            began = step_clock(self.network)
            with self.observing():
                self.report.mixed = self.score(weights)
            self.report.seconds -= step_clock(self.network) - began

    def check_finite(self, values: Tensor, name: str) -> None:
        """Abandon the step if some values are not finite."""
        if not torch.isfinite(values).all():
            raise NonFiniteError(
                f"Peer {self.peer}, round {self.t}: the {name} became infinite or nan, so the peer"
                f" keeps its last good state. A smaller train.lr (now {self.settings.lr:g}) or"
                " train.clip_norm usually helps."
            )


EVALUATION_BATCH = 500
LOGGED_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def _as_number(value: object) -> float | None:
    """Return a number, or the only element of a tensor or an array, as a float; else None."""
    if isinstance(value, (Tensor, np.ndarray)) and len(value.reshape(-1)) == 1:
        value = value.item()
    return float(value) if isinstance(value, Real) else None


def batch_count(samples: int, batch: int) -> int:
    """Return the number of batches per epoch.

    A last batch of a single sample is merged into the one before.
    """
    full_batches, remainder = divmod(samples, batch)
    is_merged = remainder == 1 and full_batches > 0 and batch > 1
    if remainder == 0 or is_merged:
        return full_batches
    return full_batches + 1


def _counted(count: int, unit: str) -> str:
    """Return `1 epoch`, `5 epochs`."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def ascent(grad: Tensor, bits: Tensor | None, rho: float) -> Tensor:
    """Return the step of length rho up the masked gradient, which is masked in place."""
    if bits is not None:
        keep_(grad, bits)
    norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
    step: Tensor = grad * (rho / (norm + 1e-12))
    return step


def step_clock(network: FlatModule) -> float:
    """Return a clock's seconds, to measure a step.

    Processor time where a step has one thread, so that other work on the machine does not count;
    otherwise wall time.
    """
    if network.device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
