"""Shared fixtures: tiny peers, and their rounds in this process. A round takes a few milliseconds."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import settings
from rounds import FinishedRound, run_all_rounds
from torch import Tensor, nn

from dispfl.core.live import LiveModel
from dispfl.core.train import Task, Train, Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import PeerData, RunContext
from dispfl.topology import Full, peer_names

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and a test that changes their number must not leak it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def labelled_points(count: int, which: int) -> tuple[Tensor, Tensor]:
    """Points in four dimensions, labelled 0, 1 or 2 by the largest of their first three coordinates."""
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(which))
    return points, points[:, :3].argmax(1)


def peers_with_points(count: int) -> dict[str, PeerData]:
    return {
        name: PeerData(
            ResidentSamples(*labelled_points(20, which)), ResidentSamples(*labelled_points(10, 1000 + which))
        )
        for which, name in enumerate(peer_names(count))
    }


def tiny_net() -> nn.Module:
    """4 x 8 + 8 + 8 x 3 + 3 = 67 parameters."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def points() -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """`points(count, which)`: labelled points in four dimensions, three classes."""
    return labelled_points


@pytest.fixture
def net() -> Callable[[], nn.Module]:
    """A network of 67 parameters for these points."""
    return tiny_net


@pytest.fixture
def make_context() -> Callable[..., RunContext]:
    """`make_context(peers=3, method=..., ...)`: peers with 20 training and 10 test points each, or as given."""

    def make(peers: int | Mapping[str, PeerData] = 3, **changes: Any) -> RunContext:
        data = peers_with_points(peers) if isinstance(peers, int) else peers
        defaults: dict[str, Any] = {
            "model": tiny_net,
            "peers": data,
            "method": DisPFL(),
            "topology": Full(),
            "train": Train(epochs=1, batch_size=8),
            "task": Task(),
            "seed": 0,
            "rounds": 2,
        }
        return RunContext(**defaults | changes)

    return make


@pytest.fixture
def run_all() -> Callable[..., list[FinishedRound]]:
    """`run_all(context, workers=1)`: all rounds of a run, one after another."""
    return run_all_rounds


@pytest.fixture
def trainer_for() -> Callable[..., Trainer]:
    """`trainer_for(context, peer="000", t=0)`: the trainer of one peer in one round, as its method's step gets it."""

    def make(context: RunContext, peer: str = "000", t: int = 0) -> Trainer:
        data, live = context.peers[peer], LiveModel(context.module())
        return Trainer(
            live=live,
            train=data.train,
            test=data.test,
            settings=context.train,
            task=context.task,
            seed=context.seed,
            peer=peer,
            t=t,
            T=context.rounds,
            roster=context.roster,
            buffers=live.read_buffers(),
        )

    return make


@pytest.fixture
def bits() -> Callable[[PeerState], dict[str, bytes]]:
    """`bits(state)`: every bit of a state, by name."""

    def read(state: PeerState) -> dict[str, bytes]:
        tensors = {
            "values": state.model.values,
            "mask": state.model.mask.bits,
            "next_mask": state.next_mask.bits,
            **{f"buffers/{name}": tensor for name, tensor in state.buffers.items()},
            **{f"memory/{name}": tensor for name, tensor in state.memory.items()},
        }
        if state.upload is not None:
            tensors |= {"sent/values": state.upload.values, "sent/mask": state.upload.mask.bits}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    return read
