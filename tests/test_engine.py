"""The in-process engine: results that no number of threads changes, and errors that come out as they are."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from rounds import Played
from torch import Tensor, nn
from torch.utils.data import Dataset

from dispfl.core.live import LiveModel
from dispfl.core.train import Samples
from dispfl.data.batches import DatasetSamples
from dispfl.engines.inprocess import InProcess, draws_globally
from dispfl.runs.records import weights_sha256
from dispfl.work import Part, PeerData, Setting

MakeSetting = Callable[..., Setting]
Play = Callable[..., list[Played]]


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def digests(round_: Played) -> list[str]:
    return [weights_sha256(step.state.model) for step in round_.steps.values()]


def parts_of(setting: Setting) -> list[Part]:
    return [Part(peer, 0) for peer in setting.roster]


@pytest.mark.parametrize(
    "changes", [{}, {"model": dropout_net}, {"model": batch_norm_net}], ids=["plain", "drop", "bn"]
)
def test_one_two_and_three_threads_give_identical_weights(
    make_setting: MakeSetting, play: Play, changes: dict[str, Any]
) -> None:
    setting = make_setting(peers=4, **changes)
    one, two, three = (digests(play(setting, threads)[-1]) for threads in (1, 2, 3))
    assert one == two == three
    assert len(set(one)) == 4


def test_the_callers_place_in_the_global_generator_does_not_matter(make_setting: MakeSetting, play: Play) -> None:
    setting = make_setting(model=dropout_net)
    first = digests(play(setting)[-1])
    torch.rand(7)
    assert digests(play(setting)[-1]) == first


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A user's data with a transform of its own, which draws from torch's global generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4), torch.tensor(row % 3)


def noisy(setting: Setting) -> Setting:
    return replace(setting, peers={p: PeerData(DatasetSamples(Noisy()), d.test) for p, d in setting.peers.items()})


def test_dropout_and_random_data_are_found_to_draw_globally_and_a_plain_network_is_not(
    make_setting: MakeSetting,
) -> None:
    cases = [
        (make_setting(), False),
        (make_setting(model=dropout_net), True),
        (make_setting(model=batch_norm_net), False),
        (noisy(make_setting()), True),
    ]
    for setting, expected in cases:
        live = LiveModel(setting.module())
        buffers, state = live.read_buffers(), torch.get_rng_state()
        assert draws_globally(setting, live) == expected
        assert torch.get_rng_state().equal(state)
        assert all(live.read_buffers()[name].equal(buffer) for name, buffer in buffers.items())


def test_random_data_give_identical_weights_with_one_and_three_threads(make_setting: MakeSetting, play: Play) -> None:
    setting = noisy(make_setting())
    assert digests(play(setting, 1)[-1]) == digests(play(setting, 3)[-1])


class UsersOwnError(Exception):
    """Something of the user's own."""


class Squeamish(nn.Module):
    """A network that cannot bear an input above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise UsersOwnError("too large for me")
        outputs: Tensor = self.linear(x)
        return outputs


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_in_a_users_network_comes_out_as_itself_and_the_engine_can_go_on(
    make_setting: MakeSetting, threads: int
) -> None:
    setting = make_setting(peers=3, model=Squeamish)
    inputs = setting.peers["002"].train.inputs  # type: ignore[attr-defined]
    good = inputs.clone()
    inputs[5] = 1000.0
    with closing(InProcess(setting, threads)) as engine:
        engine.recall(0)
        with pytest.raises(UsersOwnError, match="too large for me"):
            list(engine.steps(parts_of(setting)))
        inputs.copy_(good)
        engine.recall(0)
        assert sorted(peer for peer, _ in engine.steps(parts_of(setting))) == ["000", "001", "002"]


def threads_used(setting: Setting, meeting: threading.Barrier | None) -> int:
    """How many threads three peers train on; with a barrier, all have to meet in every step."""
    names = set()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        if meeting:
            meeting.wait(timeout=60)
        return nn.functional.cross_entropy(outputs, labels)

    watched = replace(setting, task=replace(setting.task, loss=loss))
    with closing(InProcess(watched, 3)) as engine:
        engine.recall(0)
        list(engine.steps(parts_of(watched)))
    return len(names)


def test_three_peers_train_side_by_side_on_three_threads_and_take_turns_where_they_draw_globally(
    make_setting: MakeSetting,
) -> None:
    assert threads_used(make_setting(peers=3), threading.Barrier(3)) == 3
    assert threads_used(make_setting(peers=3, model=dropout_net), None) == 1


def test_leaving_off_in_the_middle_stops_what_is_running_between_two_batches(make_setting: MakeSetting) -> None:
    """Peer 000 finishes; peer 001 would train for minutes, and is stopped when the caller goes away."""
    setting = make_setting(peers=2)
    finished, short = threading.Event(), setting.peers["001"].train

    class Lengthy:
        def __len__(self) -> int:
            return len(short)

        def batches(self, size: int, *, rng: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(20_000):
                yield from short.batches(size, rng=rng)
            finished.set()

        def take(self, rows: Tensor) -> Samples:
            return short.take(rows)

    peers = {**setting.peers, "001": replace(setting.peers["001"], train=Lengthy())}
    setting = replace(setting, peers=peers)
    with closing(InProcess(setting, 2)) as engine:
        engine.recall(0)
        outcomes = engine.steps(parts_of(setting))
        assert next(iter(outcomes))[0] == "000"
        outcomes.close()  # type: ignore[attr-defined]
    assert not finished.is_set()


def test_with_more_threads_than_peers_a_peer_gets_several(make_setting: MakeSetting) -> None:
    for threads, peers, each in ((4, 2, 2), (4, 3, 1), (1, 3, 1), (3, 1, 3)):
        with closing(InProcess(make_setting(peers=peers), threads)) as engine:
            assert engine.threads_each == each
