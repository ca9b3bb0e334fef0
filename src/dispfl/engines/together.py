"""Several peers' steps on one worker, one at a time, except that they learn from their data all at once.

A peer's step is written as one peer sees it: it calls `learn` and goes on with what it has learned. So each gets a
thread of its own, which only ever runs while `Member.go_on` waits for it, up to where it wants to learn or is done.
Nobody waits for another peer, and so no peer that fails or learns more often than others keeps them waiting.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dispfl.core.batched import can_learn_together, learn_together
from dispfl.core.train import Samples, Trainer
from dispfl.errors import ConfigError
from dispfl.work import Part, Setting, Step

MakeTrainer = Callable[..., Trainer]
Kind = tuple[Hashable, ...]
"""How many samples a peer has, and the shapes and types of an input and of a label."""


def check_together(together: int, engine: str) -> None:
    """Refuse stacks of peers where nobody makes them."""
    if together > 1 and engine != "inprocess":
        raise ConfigError(f"together is {together}, but engine={engine} trains peers one by one; use engine=inprocess.")


@dataclass(frozen=True)
class Lesson:
    """What a peer wants to learn."""

    trainer: Trainer
    weights: Tensor
    mask: Tensor
    epochs: int


@dataclass
class LearningTogether(Trainer):
    """A peer's hands, that leave plain learning to someone who does it for many."""

    ask: Callable[[Lesson], Tensor] | None = None

    def learn(
        self,
        weights: Tensor,
        mask: Tensor,
        epochs: int | None = None,
        *,
        samples: Samples | None = None,
        lr: float | None = None,
        pull: tuple[float, Tensor] | None = None,
    ) -> Tensor:
        """As `Trainer.learn`, up to rounding; with samples, a rate or a pull of its own, the peer learns by itself."""
        if self.ask is None or samples is not None or lr is not None or pull is not None:
            return super().learn(weights, mask, epochs, samples=samples, lr=lr, pull=pull)
        return self.ask(Lesson(self, weights, mask, epochs or self.settings.epochs))


class Member:
    """One peer's step on a thread of its own, which runs only while `go_on` waits for it."""

    def __init__(self, step: Callable[[MakeTrainer], Step]) -> None:
        self.lesson: Lesson | None = None
        """What it waits to learn, if it does."""
        self.learned: Tensor | BaseException | None = None
        """What came of that."""
        self._step = step
        self._done: Future[Step] = Future()
        self._its_turn, self._our_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._threads = torch.get_num_threads()
        threading.Thread(target=self._run, name="dispfl-together", daemon=True).start()

    def go_on(self) -> None:
        """Let it run until it wants to learn or is done."""
        self._its_turn.release()
        self._our_turn.acquire()

    def result(self) -> Step:
        """Its step, or what it failed with."""
        return self._done.result()

    def _run(self) -> None:
        self._its_turn.acquire()
        torch.set_num_threads(self._threads)  # a thread does not inherit it
        try:
            self._done.set_result(self._step(partial(LearningTogether, ask=self._learn)))
        except BaseException as problem:
            self._done.set_exception(problem)
        finally:
            self._our_turn.release()

    def _learn(self, lesson: Lesson) -> Tensor:
        self.lesson = lesson
        self._our_turn.release()
        self._its_turn.acquire()
        learned, self.lesson, self.learned = self.learned, None, None
        if isinstance(learned, BaseException):
            raise learned
        assert learned is not None
        return learned


def steps_together(steps: Iterable[Callable[[MakeTrainer], Step]]) -> list[Step]:
    """What comes of some peers' steps that share one live model; each is given how to make its trainer."""
    members = [Member(step) for step in steps]
    for member in members:
        member.go_on()
    while waiting := [member for member in members if member.lesson is not None]:
        lessons = [member.lesson for member in waiting if member.lesson is not None]
        for member, learned in zip(waiting, _taught(lessons), strict=True):
            member.learned = learned
        for member in waiting:
            member.go_on()
    return [member.result() for member in members]


def _taught(lessons: Sequence[Lesson]) -> Sequence[Tensor | BaseException]:
    """What each has learned, or why it could not; what ends the stack, such as an interruption, ends all of it."""
    trainers = [lesson.trainer for lesson in lessons]
    epochs = {lesson.epochs for lesson in lessons}
    if len(lessons) == 1 or len(epochs) > 1 or not can_learn_together(trainers):
        return [_taught_alone(lesson) for lesson in lessons]
    weights, masks = [lesson.weights for lesson in lessons], [lesson.mask for lesson in lessons]
    try:
        return learn_together(trainers, weights, masks, epochs.pop())
    except BaseException as problem:  # it comes out of every member's step
        return [problem] * len(lessons)


def _taught_alone(lesson: Lesson) -> Tensor | BaseException:
    try:
        return Trainer.learn(lesson.trainer, lesson.weights, lesson.mask, lesson.epochs)
    except BaseException as problem:  # it comes out of the member's step
        return problem


class Stacks:
    """Who may learn with whom: peers whose batches can lie on one another, up to so many at a time."""

    def __init__(self, setting: Setting, size: int) -> None:
        self._setting, self._size = setting, size
        self._kinds: dict[str, Kind] = {}

    def of(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """The parts in groups, as they come; those that do not learn stay alone."""
        filling: dict[Kind, list[Part]] = {}
        for part in parts:
            if self._size == 1 or (part.idle and not part.tuning):
                yield [part]
                continue
            kind = self._kind(part.peer)
            group = filling.setdefault(kind, [])
            group.append(part)
            if len(group) == self._size:
                yield filling.pop(kind)
        yield from filling.values()

    def _kind(self, peer: str) -> Kind:
        """Looked at once a run: a sample of a Dataset may take long to read."""
        if peer not in self._kinds:
            train = self._setting.peers[peer].train
            self._kinds[peer] = (len(train), *((part.shape[1:], part.dtype) for part in next(train.batches(1))))
        return self._kinds[peer]
