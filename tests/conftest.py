"""Shared fixtures: tiny peers, and their rounds in this process. A round takes a few
milliseconds."""

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule
from dispfl.core.samples import PeerData
from dispfl.core.train import Train, Trainer
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import RunContext
from dispfl.testing.rounds import (
    FinishedRound,
    labelled_points,
    run_all_rounds,
    simulated_context,
    tiny_network,
)
from dispfl.testing.rounds import bits as state_bits

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")

LONGEST_FIRST = ("peer", "engines", "cli", "runs", "test_plugins.py", "test_docs.py", "export")
"""Folders and files in tests/ that take longest begin first, so that no core is idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by `LONGEST_FIRST`; pytest collects a folder once, wherever `testpaths` names it."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder_or_file = item.path.relative_to(here).parts[0]
        return places.get(folder_or_file, len(places))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections, which runs ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and a test that changes their number must not leak
    it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Modules that a test writes and imports are not those of the next test with the same names."""
    modules_before = set(sys.modules)
    path_before = list(sys.path)
    yield
    sys.path[:] = path_before
    temporary = tempfile.gettempdir()
    for name in sys.modules.keys() - modules_before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and file.startswith(temporary):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folders of tests are not remembered in the state directory of who runs them, and Ray's
    workers do not wait until all other tests leave a processor idle."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        environment.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture
def points() -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """`points(count, which)`: labelled points in four dimensions, three classes."""
    return labelled_points


@pytest.fixture
def net() -> Callable[[], nn.Module]:
    """A network of 67 parameters for these points."""
    return tiny_network


@pytest.fixture
def make_context() -> Callable[..., RunContext]:
    """`make_context(peers=3, method=..., ...)`: peers with 20 training and 10 test points each, or
    as given."""

    def make(peers: int | Mapping[str, PeerData] = 3, **changes: Any) -> RunContext:
        return simulated_context(
            peers, **{"method": DisPFL(), "train": Train(epochs=1, batch_size=8), **changes}
        )

    return make


@pytest.fixture
def run_all() -> Callable[..., list[FinishedRound]]:
    """`run_all(context, workers=1)`: all rounds of a run, one after another."""
    return run_all_rounds


@pytest.fixture
def trainer_for() -> Callable[..., Trainer]:
    """`trainer_for(context, peer="000", t=0)`: the trainer of one peer in one round, as its
    method's step gets it."""

    def make(context: RunContext, peer: str = "000", t: int = 0) -> Trainer:
        network = FlatModule(context.module())
        return Trainer(
            network,
            context.data.peers[peer],
            context.training,
            peer,
            t,
            buffers=network.read_buffers(),
        )

    return make


@pytest.fixture
def bits() -> Callable[[PeerState], dict[str, bytes]]:
    """`bits(state)`: every bit of a state, by name."""

    return state_bits
