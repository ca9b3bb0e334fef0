"""Reading a run returns its final states; everything else is refused with a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import nn

from dispfl.channels.channel_mask import ChannelLayout, ChannelMask
from dispfl.data.split import Split
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import RunError
from dispfl.federation import Federation
from dispfl.methods.base import PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.fedavg import FedAvg
from dispfl.runs.directory import (
    RunDirectory,
    final_states,
    label_counts,
    layout_of,
    personal_states,
    saved_rounds,
    write_split,
)
from dispfl.runs.run import Run

CNN = {"data": {"name": "fashion-sample"}, "model": {"name": "cnn"}}


@pytest.fixture
def run(
    tmp_path: Path, net: Callable[[], nn.Module], points: Callable[[int, int], Any]
) -> Callable[..., Run]:
    """`run(method)`: two rounds of three tiny peers, in a run directory."""

    def make(method: Any) -> Run:
        peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
        return Federation(net, peers, method, workers=1, rounds=2).run(out=tmp_path / "run")

    return make


def bare(path: Path, config: dict[str, Any] | None = None) -> Path:
    """A run directory with nothing but a config."""
    RunDirectory.create(path, {"rounds": 2, **(config or {})}).close()
    return path


def test_final_states_are_those_at_the_end_of_the_run(
    run: Callable[..., Run], bits: Callable[[PeerState], dict[str, bytes]]
) -> None:
    done = run(DisPFL(density=0.5))
    assert done.out
    states = final_states(done.out)
    assert list(states) == ["000", "001", "002"]
    assert {name: bits(state) for name, state in states.items()} == {
        n: bits(s) for n, s in done.states.items()
    }
    assert saved_rounds(done.out) == 2


def test_the_server_is_the_last_state_and_not_a_personal_one(run: Callable[..., Run]) -> None:
    done = run(FedAvg(cohort=2))
    assert done.out
    assert list(final_states(done.out)) == ["000", "001", "002", "server"]
    assert list(personal_states(done.out)) == ["000", "001", "002"]


def test_a_partial_round_does_not_count(run: Callable[..., Run]) -> None:
    """What a kill in round 3 leaves: a part, and no `complete.json`."""
    done = run(DisPFL())
    assert done.out
    two, three = (done.out / "checkpoints" / f"round-00000{rounds}" for rounds in (2, 3))
    three.mkdir()
    (three / "part-000.safetensors").write_bytes((two / "part-000.safetensors").read_bytes()[:100])
    assert saved_rounds(done.out) == 2
    assert len(final_states(done.out)) == 3


def test_a_folder_that_is_not_a_run_is_a_sentence(tmp_path: Path) -> None:
    for read in (final_states, label_counts, layout_of, saved_rounds):
        with refused(RunError):
            read(tmp_path / "none")


def test_a_run_without_a_finished_round_says_how_to_resume_it(tmp_path: Path) -> None:
    path = bare(tmp_path / "run")
    with pytest.raises(RunError) as refusal:
        final_states(path)
    assert (
        str(refusal.value)
        == f"{path} has no complete checkpoint: no round was finished yet. Resume the run: dispfl"
        f" run --resume {path}."
    )


@pytest.mark.parametrize("damage", ["truncated", "lost", "unlisted"])
def test_a_damaged_checkpoint_says_how_to_repair_it(run: Callable[..., Run], damage: str) -> None:
    done = run(DisPFL())
    assert done.out
    folder = done.out / "checkpoints" / "round-000002"
    part = folder / "part-000.safetensors"
    if damage == "truncated":
        part.write_bytes(part.read_bytes()[:100])
    elif damage == "lost":
        part.unlink()
    else:
        (folder / "complete.json").write_text('{"version": 2, "rounds": 2, "parts": []}')
    with refused(RunError):
        final_states(done.out)


def test_label_counts_are_those_of_the_split(tmp_path: Path) -> None:
    path = bare(tmp_path / "run")
    assert label_counts(path) is None
    train, test = (tuple(torch.arange(first, first + 2) for first in (0, 2)) for _ in range(2))
    counts = torch.tensor([[2, 0], [1, 1]])
    write_split(path, Split(train, test), counts)
    read = label_counts(path)
    assert read is not None
    assert read.equal(counts)


def test_a_damaged_split_is_a_sentence(tmp_path: Path) -> None:
    path = bare(tmp_path / "run")
    (path / "split.safetensors").write_bytes(b"no such thing")
    with refused(RunError):
        label_counts(path)


def test_the_layout_is_that_of_the_configured_model_on_its_data(tmp_path: Path) -> None:
    """The small network on 28x28 grey images of ten classes: 105,962 parameters, the last ten a
    bias."""
    layout = layout_of(bare(tmp_path / "run", CNN))
    assert layout.size == 105_962
    assert (layout.names[0], layout.shapes[0]) == ("conv1.weight", (16, 1, 3, 3))
    assert (layout.names[-1], layout.shapes[-1]) == ("linear.bias", (10,))


def test_the_layout_of_a_run_with_channels_has_their_units(tmp_path: Path) -> None:
    method = {"name": "dispfl", "structure": "channels", "keep": ["conv1"]}
    layout = layout_of(bare(tmp_path / "run", CNN | {"method": method}))
    assert isinstance(layout, ChannelLayout)
    assert layout.size == 105_962
    assert [(group.name, group.units) for group in layout.groups] == [("conv2", 32), ("hidden", 64)]


def test_final_states_with_channels_are_those_at_the_end_of_the_run(
    run: Callable[..., Run], bits: Callable[[PeerState], dict[str, bytes]]
) -> None:
    done = run(DisPFL(density=0.5, structure="channels"))
    assert done.out
    states = final_states(done.out)
    assert all(isinstance(state.model.mask, ChannelMask) for state in states.values())
    assert {name: bits(state) for name, state in states.items()} == {
        n: bits(s) for n, s in done.states.items()
    }


def test_the_layout_of_a_model_made_in_python_is_refused(tmp_path: Path) -> None:
    with refused(RunError):
        layout_of(bare(tmp_path / "run", {"made_in_python": True}))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model": {"name": "cnn"}}, "'data'"),
        (CNN | {"model": {"name": "alexnet"}}, "'alexnet' does not exist"),
        (CNN | {"model": "cnn"}, "must be a mapping"),
        (CNN | {"data": {"name": "fashion-simple"}}, "Did you mean fashion-sample"),
    ],
)
def test_a_config_without_a_known_model_is_a_sentence(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    with refused(RunError) as refusal:
        layout_of(bare(tmp_path / "run", config))
    assert why in str(refusal.value)
    assert not str(refusal.value).endswith("..")


def test_checkpoints_are_only_read(run: Callable[..., Run]) -> None:
    done = run(DisPFL())
    assert done.out
    before = sorted(path.name for path in done.out.rglob("*"))
    final_states(done.out)
    assert sorted(path.name for path in done.out.rglob("*")) == before
    assert Checkpoints(done.out / "checkpoints").finished_rounds() == [1, 2]
