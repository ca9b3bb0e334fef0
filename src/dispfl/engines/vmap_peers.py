"""Training of several peers at once with `vmap`, as one stack of models.

A step of a tiny network mostly consists of the overhead of calling torch, which a stack pays once
for all its peers. Networks with more computation, convolutions above all, gain nothing. Sums are
computed in another order than for single peers, so results are equal up to rounding, not to the
bit.

A peer's step is written as one peer sees it: it calls `learn` and continues with the trained
weights. So each step of a stack runs on its own thread, which only advances while
`PausableStep.advance` waits for it, up to the next call of `learn` or to the end. No step waits for
another, so a peer that fails or trains more often than others does not block them.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.func import vmap

from dispfl.core.flat_module import FlatModule
from dispfl.core.inputs import Inputs, forward_with, stacked, tensors_of, with_each
from dispfl.core.layout import Layout
from dispfl.core.masks import keep_, mask_bits, restore_
from dispfl.core.packed import Mask
from dispfl.core.samples import Samples
from dispfl.core.task import Task
from dispfl.core.train import Train, Trainer, ascent, step_clock
from dispfl.core.trained_part import Part, TrainedPart
from dispfl.errors import NonFiniteError
from dispfl.round.context import PeerTask, RunContext, StepResult

MakeTrainer = Callable[..., Trainer]
SampleKind = tuple[Hashable, ...]
"""A peer's training settings, its number of samples, and the shapes and types of an input and of a
label."""


class PeerGroups:
    """Groups peers whose batches can be stacked, up to a maximum size."""

    def __init__(self, context: RunContext, size: int) -> None:
        self._context = context
        self._size = size
        self._kinds: dict[str, SampleKind] = {}

    def of(self, tasks: Iterable[PeerTask]) -> Iterator[list[PeerTask]]:
        """Yield the tasks in groups, in their order; tasks without training stay alone."""
        filling: dict[SampleKind, list[PeerTask]] = {}
        for task in tasks:
            if self._size == 1 or (task.idle and not task.fine_tuning):
                yield [task]
                continue
            kind = self._kind(task.peer)
            group = filling.setdefault(kind, [])
            group.append(task)
            if len(group) == self._size:
                yield filling.pop(kind)
        yield from filling.values()

    def _kind(self, peer: str) -> SampleKind:
        """Return what peers of a stack must have in common.

        It is looked up once per run, because reading a sample of a Dataset may take long.
        """
        if peer not in self._kinds:
            train = self._context.data.peers[peer].train
            inputs, labels = next(train.batches(1))
            tensors = [*tensors_of(inputs), labels]
            shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
            self._kinds[peer] = (self._context.train_of(peer), len(train), shapes)
        return self._kinds[peer]


# Steps that pause where they train


@dataclass(frozen=True)
class LearnCall:
    """The arguments of a call of `learn` that waits to be run with others."""

    trainer: Trainer
    weights: Tensor
    mask: Tensor | Mask
    steps: int
    lr: float
    only: Part | None
    name: str

    @cached_property
    def part(self) -> TrainedPart:
        """What the call trains."""
        return TrainedPart.of(self.mask, self.only, self.trainer.network.layout)


@dataclass
class StackedTrainer(Trainer):
    """A trainer that defers plain training, so that it runs for many peers at once."""

    defer: Callable[[LearnCall], Tensor] | None = None

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
        """Train as `Trainer.learn`, up to rounding.

        With samples of its own, a proximal term or a correction, it trains alone.
        """
        stackable = samples is None and prox is None and correction is None
        if self.defer is None or not stackable:
            return super().learn(
                weights,
                mask,
                epochs,
                steps=steps,
                samples=samples,
                lr=lr,
                prox=prox,
                correction=correction,
                only=only,
                name=name,
            )
        steps = self.step_count(epochs, steps, self.train)
        if lr is None:
            lr = self.settings.rate(self.t, self.T)
        call = LearnCall(self, weights, mask, steps, lr, only, name)
        if call.part.is_empty:
            return weights.clone()
        return self.defer(call)


class PausableStep:
    """One peer's step on its own thread, which runs only while `advance` waits for it."""

    def __init__(self, step: Callable[[MakeTrainer], StepResult]) -> None:
        self.call: LearnCall | None = None
        """The call of `learn` that it waits for, if any."""
        self.learned: Tensor | BaseException | None = None
        """The result of that call."""
        self._step = step
        self._done: Future[StepResult] = Future()
        self._step_may_run = threading.Semaphore(0)
        self._caller_may_run = threading.Semaphore(0)
        self._threads = torch.get_num_threads()
        threading.Thread(target=self._run, name="dispfl-vmap-peers", daemon=True).start()

    def advance(self) -> None:
        """Run until the step calls `learn` or is done."""
        self._step_may_run.release()
        self._caller_may_run.acquire()

    def result(self) -> StepResult:
        """Return the step's result, or raise its exception."""
        return self._done.result()

    def _run(self) -> None:
        self._step_may_run.acquire()
        torch.set_num_threads(self._threads)  # a thread does not inherit it
        try:
            self._done.set_result(self._step(partial(StackedTrainer, defer=self._learn)))
        except BaseException as problem:
            self._done.set_exception(problem)
        finally:
            self._caller_may_run.release()

    def _learn(self, call: LearnCall) -> Tensor:
        trainer = call.trainer
        paused_at = step_clock(trainer.network)
        self.call = call
        self._caller_may_run.release()
        self._step_may_run.acquire()
        # The training adds its own time.
        trainer.report.seconds -= step_clock(trainer.network) - paused_at

        learned = self.learned
        self.call = None
        self.learned = None
        if isinstance(learned, BaseException):
            raise learned
        assert learned is not None
        return learned


def run_stacked(steps: Iterable[Callable[[MakeTrainer], StepResult]]) -> list[StepResult]:
    """Run the steps of several peers that share one network.

    Each step receives a function that makes its trainer.
    """
    pausable_steps = list(map(PausableStep, steps))
    for step in pausable_steps:
        step.advance()
    while calls := _pending_calls(pausable_steps):
        learned = _learn_all(list(calls.values()))
        for step, result in zip(calls, learned, strict=True):
            step.learned = result
        for step in calls:
            step.advance()
    return [step.result() for step in pausable_steps]


def _pending_calls(steps: Iterable[PausableStep]) -> dict[PausableStep, LearnCall]:
    """Return the calls of `learn` that steps wait for."""
    return {step: step.call for step in steps if step.call is not None}


def _learn_all(calls: Sequence[LearnCall]) -> list[Tensor | BaseException]:
    """Return each call's weights or exception; calls of networks of one size are stacked.

    Under masks of units, peers of different densities have networks of different sizes. Those that
    train a part of their weights are stacked with each other.
    """
    stacks: dict[tuple[Layout, bool], list[int]] = {}
    for index, call in enumerate(calls):
        trains_all = call.part.only is None
        stacks.setdefault((call.trainer.network.layout, trains_all), []).append(index)

    learned: dict[int, Tensor | BaseException] = {}
    for indices in stacks.values():
        results = _learn_stack([calls[index] for index in indices])
        learned.update(zip(indices, results, strict=True))
    return [learned[index] for index in range(len(calls))]


def _learn_stack(calls: Sequence[LearnCall]) -> Sequence[Tensor | BaseException]:
    """Return each call's weights or exception.

    An exception of the stack, such as an interruption, ends all calls.
    """
    trainers = [call.trainer for call in calls]
    lengths_and_rates = {(call.steps, call.lr) for call in calls}
    if len(calls) == 1 or len(lengths_and_rates) > 1 or not train_alike(trainers):
        return list(map(_learn_alone, calls))
    [(steps, lr)] = lengths_and_rates
    weights = [call.weights for call in calls]
    parts = [call.part for call in calls]
    try:
        return learn_stacked(trainers, weights, parts, steps, lr)
    except BaseException as problem:  # raised again in every step
        return [problem] * len(calls)


def _learn_alone(call: LearnCall) -> Tensor | BaseException:
    trainer = call.trainer
    began = step_clock(trainer.network)
    try:
        return Trainer.learn(
            trainer,
            call.weights,
            call.mask,
            steps=call.steps,
            lr=call.lr,
            only=call.only,
            name=call.name,
        )
    except BaseException as problem:  # raised again in the step
        return problem
    finally:
        trainer.report.seconds += step_clock(trainer.network) - began


# Training of a stack


def train_alike(trainers: Sequence[Trainer]) -> bool:
    """Whether these peers train in equal steps of plain SGD, on a model without buffers."""
    kinds_of_steps = set()
    for trainer in trainers:
        if trainer.run.optimizer is not None or not trainer.settings.is_plain:
            return False
        if trainer.network.buffer_names:
            return False
        kinds_of_steps.add(
            (trainer.t, trainer.settings, trainer.task, len(trainer.train), trainer.network.layout)
        )
    return len(kinds_of_steps) == 1


def vmap_supports(network: FlatModule, task: Task, samples: Samples) -> bool:
    """Whether `vmap` can train a stack of this model, which is tried on one batch."""
    if network.buffer_names or network.precision != "float32":
        return False
    if network.memory_format != "contiguous":
        return False
    inputs, labels = next(samples.batches(2))
    x = with_each(stacked([inputs]), network.to_device)
    y = network.to_device(labels.unsqueeze(0))
    stack_of_one = {}
    for name, parameter in network.module.named_parameters():
        if parameter.requires_grad:
            stack_of_one[name] = parameter.detach().clone().unsqueeze(0).requires_grad_()
    try:
        losses = vmap(_loss(network, task))(stack_of_one, x, y)
        torch.autograd.grad(losses.sum(), list(stack_of_one.values()))
    except Exception:  # an error of the user's own code is raised again when a peer trains alone
        return False
    return True


def _loss(
    network: FlatModule, task: Task
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]:
    """Return the loss function of one model with its own weights on its own batch."""

    def loss(parameters: Mapping[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
        return task.loss(forward_with(network.module, parameters, x), y)

    return loss


def learn_stacked(
    trainers: Sequence[Trainer],
    weights: Sequence[Tensor],
    parts: Sequence[TrainedPart],
    steps: int,
    lr: float,
) -> list[Tensor | NonFiniteError]:
    """Return the result of `Trainer.learn` for each peer, or the error that ended it.

    All train a part of their weights, or none does.
    """
    first = trainers[0]
    settings = first.settings
    network = first.network
    began = step_clock(network)
    network.module.train()
    stack = WeightStack(network, weights, parts)

    loss_of_each = vmap(_loss(network, first.task))
    losses = []
    samples = 0
    batches_of_each = [trainer.batches(steps=steps) for trainer in trainers]
    for batches in zip(*batches_of_each, strict=True):
        inputs, labels = zip(*batches, strict=True)
        x = with_each(stacked(inputs), network.to_device)
        y = network.to_device(torch.stack(labels))
        losses.append(stack.backward(loss_of_each, x, y))
        if settings.sam_rho:
            w = stack.flat.clone()
            stack.flat.add_(ascent(stack.grad, stack.bits, settings.sam_rho))
            stack.backward(loss_of_each, x, y)
            stack.flat.copy_(w)
        noise = _noise(trainers, stack.flat)
        _sgd_steps(stack.flat, stack.grad, stack.bits, lr, settings, noise)
        stack.restore_frozen()
        samples += settings.passes_per_step * y.shape[1]

    mean_losses = torch.stack(losses).mean(0).cpu()
    for trainer in trainers:
        trainer.report.seconds += (step_clock(network) - began) / len(trainers)
    rows = stack.flat.cpu().unbind()
    results = []
    for trainer, learned, part, loss in zip(trainers, rows, parts, mean_losses, strict=True):
        results.append(_finish(trainer, learned, part, loss, samples))
    return results


class WeightStack:
    """The weights of peers that train at once, one row each."""

    def __init__(
        self, network: FlatModule, weights: Sequence[Tensor], parts: Sequence[TrainedPart]
    ) -> None:
        self.flat = network.to_device(torch.stack(list(weights)))
        self.grad = torch.zeros_like(self.flat)
        self.bits = None
        """The bits of the trained weights; None: all are trained."""
        flags = [part.flags for part in parts if part.flags is not None]
        if flags:
            self.bits = mask_bits(network.to_device(torch.stack(flags)))
        self._frozen = None
        frozen_rows = []
        for part, row in zip(parts, self.flat, strict=True):
            values = part.frozen_values(row)
            if values is not None:
                frozen_rows.append(values)
        if frozen_rows:
            self._frozen = torch.stack(frozen_rows)

        layout = network.layout
        trained = [True] * len(layout.names)
        if self._frozen is not None:
            trained = list(map(any, zip(*(part.parameters or () for part in parts), strict=True)))
        self._parameters: dict[str, Tensor] = {}
        """Views of the weights, one for each parameter."""
        self._gradients: dict[str, Tensor] = {}
        """Views of the gradients of those that are trained."""
        parameters = zip(layout.names, layout.slices, layout.shapes, trained, strict=True)
        for name, where, shape, is_trained in parameters:
            # Through .data: autograd must not record the steps on `flat` as a part of the next
            # forward pass.
            view = self.flat[:, where].view(len(self.flat), *shape).data
            self._parameters[name] = view.requires_grad_(is_trained)
            if is_trained:
                self._gradients[name] = self.grad[:, where].view(len(self.flat), *shape)

    def backward(self, loss_of_each: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return each peer's loss on its batch, and compute their gradients, `grad`."""
        losses = loss_of_each(self._parameters, x, y)
        trained_parameters = [self._parameters[name] for name in self._gradients]
        gradients = torch.autograd.grad(losses.sum(), trained_parameters)
        for view, gradient in zip(self._gradients.values(), gradients, strict=True):
            view.copy_(gradient)
        return losses.detach()

    def restore_frozen(self) -> None:
        """Set the weights that are not trained to the values with which training began."""
        if self._frozen is not None:
            assert self.bits is not None
            restore_(self.flat, self.bits, self._frozen)


def _noise(trainers: Sequence[Trainer], flat: Tensor) -> Tensor | None:
    """Draw each peer's noise from its own stream."""
    drawn = [trainer.draw_noise(flat.shape[1]) for trainer in trainers]
    noise = [values for values in drawn if values is not None]
    return trainers[0].network.to_device(torch.stack(noise)) if noise else None


def _sgd_steps(
    flat: Tensor, grad: Tensor, bits: Tensor | None, lr: float, s: Train, noise: Tensor | None
) -> None:
    """`sgd_step` on the rows of a matrix, each with its own norm."""
    if bits is not None:
        keep_(grad, bits)
    if s.clip_norm:
        norms = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad.mul_((s.clip_norm / (norms + 1e-6)).clamp(max=1.0))
    flat.mul_(1 - lr * s.weight_decay).add_(grad, alpha=-lr)
    if noise is not None:
        flat.add_(noise if bits is None else keep_(noise, bits), alpha=-lr)


def _finish(
    trainer: Trainer, learned: Tensor, part: TrainedPart, loss: Tensor, samples: int
) -> Tensor | NonFiniteError:
    """Complete one peer's report and return its weights."""
    trainer.report.passes.append(part.passes._replace(samples=samples))
    try:
        trainer.check_finite(loss, "training loss")
        trainer.check_finite(learned, "weights")
    except NonFiniteError as problem:
        return problem
    trainer.report.train_loss = float(loss)
    return learned.clone()
