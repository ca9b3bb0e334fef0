"""The in-process engine: results that do not depend on the number of threads, and errors raised
unchanged."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from messages import refused
from rounds import FinishedRound
from torch import Tensor, nn
from torch.utils.data import Dataset

from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel
from dispfl.core.samples import PeerData, Samples
from dispfl.core.train import Trainer
from dispfl.data.batches import DatasetSamples
from dispfl.engines.inprocess import InProcess, uses_global_rng
from dispfl.errors import RunError
from dispfl.methods.base import PeerState
from dispfl.methods.local import Local
from dispfl.round.context import PeerTask, RunContext
from dispfl.runs.metrics import weights_sha256

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def digests(round_: FinishedRound) -> list[str]:
    return [weights_sha256(step.next_state.model) for step in round_.steps.values()]


def tasks_of(context: RunContext) -> list[PeerTask]:
    return [PeerTask(peer, 0) for peer in context.roster]


@pytest.mark.parametrize(
    "changes", [{}, {"model": dropout_net}, {"model": batch_norm_net}], ids=["plain", "drop", "bn"]
)
def test_one_two_and_three_threads_give_identical_weights(
    make_context: MakeContext, run_all: RunAll, changes: dict[str, Any]
) -> None:
    context = make_context(peers=4, **changes)
    one, two, three = (digests(run_all(context, threads)[-1]) for threads in (1, 2, 3))
    assert one == two == three
    assert len(set(one)) == 4


def test_the_state_of_the_callers_global_generator_does_not_matter(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(model=dropout_net)
    first = digests(run_all(context)[-1])
    torch.rand(7)
    assert digests(run_all(context)[-1]) == first


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A user's data with a random transform, which draws from torch's global generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4), torch.tensor(row % 3)


def noisy(context: RunContext) -> RunContext:
    return replace(
        context,
        data=context.data.with_peers(
            {p: PeerData(DatasetSamples(Noisy()), d.test) for p, d in context.data.peers.items()}
        ),
    )


def test_dropout_and_random_data_use_the_global_generator_and_a_plain_network_does_not(
    make_context: MakeContext,
) -> None:
    cases = [
        (make_context(), False),
        (make_context(model=dropout_net), True),
        (make_context(model=batch_norm_net), False),
        (noisy(make_context()), True),
    ]
    for context, expected in cases:
        network = FlatModule(context.module())
        buffers, state = network.read_buffers(), torch.get_rng_state()
        assert uses_global_rng(context, network) == expected
        assert torch.get_rng_state().equal(state)
        assert all(network.read_buffers()[name].equal(buffer) for name, buffer in buffers.items())


def test_random_data_give_identical_weights_with_one_and_three_threads(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = noisy(make_context())
    assert digests(run_all(context, 1)[-1]) == digests(run_all(context, 3)[-1])


class UserError(Exception):
    """A user's exception."""


class RejectsLargeInputs(nn.Module):
    """A network that raises for an input above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise UserError("too large")
        outputs: Tensor = self.linear(x)
        return outputs


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_in_a_users_network_is_the_cause_of_a_sentence_and_the_engine_stays_usable(
    make_context: MakeContext, threads: int
) -> None:
    context = make_context(peers=3, model=RejectsLargeInputs)
    inputs = context.data.peers["002"].train.inputs  # type: ignore[attr-defined]
    good = inputs.clone()
    inputs[5] = 1000.0
    with closing(InProcess(context, threads)) as engine:
        engine.restore(0)
        with refused(RunError) as raised:
            list(engine.run_tasks(tasks_of(context)))
        assert isinstance(raised.value.__cause__, UserError)
        inputs.copy_(good)
        engine.restore(0)
        assert sorted(peer for peer, _ in engine.run_tasks(tasks_of(context))) == [
            "000",
            "001",
            "002",
        ]


def threads_used(context: RunContext, meeting: threading.Barrier | None) -> int:
    """How many threads three peers train on; with a barrier, all have to meet in every step."""
    names = set()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        if meeting:
            meeting.wait(timeout=60)
        return nn.functional.cross_entropy(outputs, labels)

    watched = replace(context, task=replace(context.task, loss=loss))
    with closing(InProcess(watched, 3)) as engine:
        engine.restore(0)
        list(engine.run_tasks([replace(task, evaluate=False) for task in tasks_of(watched)]))
    return len(names)


def test_three_peers_train_on_three_threads_or_on_one_if_they_use_the_global_generator(
    make_context: MakeContext,
) -> None:
    assert threads_used(make_context(peers=3), threading.Barrier(3)) == 3
    assert threads_used(make_context(peers=3, model=dropout_net), None) == 1


def test_closing_the_iterator_stops_running_steps_between_two_batches(
    make_context: MakeContext,
) -> None:
    """Peer 000 finishes; peer 001 would train for minutes, and is stopped when the caller closes
    the iterator."""
    context = make_context(peers=2)
    finished, short = threading.Event(), context.data.peers["001"].train

    class EndlessSamples:
        def __len__(self) -> int:
            return 20_000 * len(short)

        def batches(
            self, size: int, *, rng: torch.Generator | None = None
        ) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(20_000):
                yield from short.batches(size, rng=rng)
            finished.set()

        def take(self, rows: Tensor) -> Samples:
            return short.take(rows)

    peers = {
        **context.data.peers,
        "001": replace(context.data.peers["001"], train=EndlessSamples()),
    }
    context = replace(context, data=context.data.with_peers(peers))
    with closing(InProcess(context, 2)) as engine:
        engine.restore(0)
        results = engine.run_tasks(tasks_of(context))
        assert next(iter(results))[0] == "000"
        results.close()  # type: ignore[attr-defined]
    assert not finished.is_set()


class Interrupted(Local):
    """Its step receives Ctrl-C on its own thread, so that the wait of the main thread goes on."""

    stopped: ClassVar[list[str]] = []

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        time.sleep(0.3)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                trainer.before_batch()
            except InterruptedError:
                self.stopped.append(trainer.peer)
                raise
            time.sleep(0.01)
        return state


def test_ctrl_c_that_does_not_end_a_wait_stops_the_running_step(make_context: MakeContext) -> None:
    """As when the signal arrives just before the main thread waits."""
    context = make_context(peers=1, method=Interrupted())
    with closing(InProcess(context, 1)) as engine:
        engine.restore(0)
        with pytest.raises(KeyboardInterrupt):
            list(engine.run_tasks(tasks_of(context)))
    assert Interrupted.stopped == ["000"]


def test_with_more_threads_than_peers_a_peer_gets_several(make_context: MakeContext) -> None:
    for threads, peers, each in ((4, 2, 2), (4, 3, 1), (1, 3, 1), (3, 1, 3)):
        with closing(InProcess(make_context(peers=peers), threads)) as engine:
            assert engine.threads_each == each
