"""Steps of several peers on one worker, which run one at a time, except that they train together as
one stack.

A step is written as one peer sees it: it calls `learn` and continues with the trained weights. So
each step runs on its own thread, which only advances while `PausableStep.advance` waits for it, up
to the next call of `learn` or to the end. No step waits for another, so a peer that fails or trains
more often than others does not block them.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import Mask
from dispfl.core.samples import Samples
from dispfl.core.stacked import can_stack, learn_stacked
from dispfl.core.train import Trainer, step_clock
from dispfl.round.context import PeerTask, RunContext, StepResult

MakeTrainer = Callable[..., Trainer]
SampleKind = tuple[Hashable, ...]
"""The number of samples of a peer, and the shapes and types of an input and of a label."""


@dataclass(frozen=True)
class LearnCall:
    """The arguments of a call of `learn` that waits to be run with others."""

    trainer: Trainer
    weights: Tensor
    mask: Tensor | Mask
    steps: int
    lr: float
    name: str


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
        name: str = "model",
    ) -> Tensor:
        """As `Trainer.learn`, up to rounding; with its own samples or a proximal term, trains
        alone."""
        if self.defer is None or samples is not None or prox is not None:
            return super().learn(
                weights, mask, epochs, steps=steps, samples=samples, lr=lr, prox=prox, name=name
            )
        steps = steps or self.settings.local_steps(len(self.train), epochs)
        lr = lr or self.settings.rate(self.t, self.T)
        return self.defer(LearnCall(self, weights, mask, steps, lr, name))


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
        paused = step_clock(call.trainer.network)
        self.call = call
        self._caller_may_run.release()
        self._step_may_run.acquire()
        call.trainer.report.seconds -= (
            step_clock(call.trainer.network) - paused
        )  # the training adds its own time
        learned = self.learned
        self.call = None
        self.learned = None
        if isinstance(learned, BaseException):
            raise learned
        assert learned is not None
        return learned


def run_stacked(steps: Iterable[Callable[[MakeTrainer], StepResult]]) -> list[StepResult]:
    """Run the steps of several peers that share one network; each receives a function that makes
    its trainer."""
    paused = [PausableStep(step) for step in steps]
    for step in paused:
        step.advance()
    while waiting := [step for step in paused if step.call is not None]:
        calls = [step.call for step in waiting if step.call is not None]
        for step, learned in zip(waiting, _learn_all(calls), strict=True):
            step.learned = learned
        for step in waiting:
            step.advance()
    return [step.result() for step in paused]


def _learn_all(calls: Sequence[LearnCall]) -> Sequence[Tensor | BaseException]:
    """Return each call's weights or exception. Calls of networks of one size are stacked: under
    masks of units, peers of different densities have networks of different sizes.
    """
    learned: dict[int, Tensor | BaseException] = {}
    by_layout: dict[Layout, list[int]] = {}
    for k, call in enumerate(calls):
        by_layout.setdefault(call.trainer.network.layout, []).append(k)
    for group in by_layout.values():
        learned |= zip(group, _learn_stack([calls[k] for k in group]), strict=True)
    return [learned[k] for k in range(len(calls))]


def _learn_stack(calls: Sequence[LearnCall]) -> Sequence[Tensor | BaseException]:
    """Return each call's weights or exception; an exception of the stack, such as an interruption,
    ends all calls."""
    trainers = [call.trainer for call in calls]
    lengths_and_rates = {(call.steps, call.lr) for call in calls}
    if len(calls) == 1 or len(lengths_and_rates) > 1 or not can_stack(trainers):
        return [_learn_alone(call) for call in calls]
    weights = [call.weights for call in calls]
    masks = [call.mask for call in calls]
    try:
        return learn_stacked(trainers, weights, masks, *lengths_and_rates.pop())
    except BaseException as problem:  # raised again in every step
        return [problem] * len(calls)


def _learn_alone(call: LearnCall) -> Tensor | BaseException:
    trainer = call.trainer
    began = step_clock(trainer.network)
    try:
        return Trainer.learn(
            trainer, call.weights, call.mask, steps=call.steps, lr=call.lr, name=call.name
        )
    except BaseException as problem:  # raised again in the step
        return problem
    finally:
        trainer.report.seconds += step_clock(trainer.network) - began


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
        """Looked up once per run: reading a sample of a Dataset may take long."""
        if peer not in self._kinds:
            train = self._context.data.peers[peer].train
            inputs, labels = next(train.batches(1))
            shapes = inputs.shape[1:], labels.shape[1:]
            self._kinds[peer] = (len(train), *shapes, inputs.dtype, labels.dtype)
        return self._kinds[peer]
