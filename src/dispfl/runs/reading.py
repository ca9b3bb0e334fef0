"""What a run left, finished or cut: its peers' last saved states, their labels and the layout of their model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.data.catalogue import describe
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import SERVER, PeerState
from dispfl.models.registry import Model
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.directory import MADE_IN_PYTHON, read_config
from dispfl.runs.split import read_split


def saved_rounds(path: Path) -> int:
    """After how many rounds the newest complete checkpoint was written."""
    config = read_config(path)
    finished = Checkpoints(path / "checkpoints").finished_rounds()
    if not finished:
        raise RunError(f"{path} has no complete checkpoint: no round was finished yet. {_go_on(path, config)}")
    return finished[-1]


def final_states(path: Path) -> dict[str, PeerState]:
    """The states in the newest complete checkpoint by name, in roster order; a server method's server comes last."""
    rounds = saved_rounds(path)
    try:
        steps = Checkpoints(path / "checkpoints").load(rounds)
        if not steps:
            raise RunError(f"The checkpoint of round {rounds} in {path} is empty.")
    except RunError as damage:
        raise RunError(f"{damage} {_go_on(path, read_config(path))}") from damage
    return {name: steps[name].state for name in sorted(steps)}


def personal_states(path: Path) -> dict[str, PeerState]:
    """The same, of the peers alone."""
    return {name: state for name, state in final_states(path).items() if name != SERVER}


class SavedStates(Mapping[str, PeerState]):
    """The peers' states in the newest complete checkpoint, read when looked at: there may be too many to hold."""

    def __init__(self, path: Path, roster: Sequence[str]) -> None:
        self._checkpoints, self._rounds = Checkpoints(path / "checkpoints"), saved_rounds(path)
        self._roster = roster

    def __getitem__(self, peer: str) -> PeerState:
        return self._checkpoints.load(self._rounds, [peer])[peer].state

    def __iter__(self) -> Iterator[str]:
        return iter(self._roster)

    def __len__(self) -> int:
        return len(self._roster)


def label_counts(path: Path) -> Tensor | None:
    """How many training samples of each class a peer has (peers, classes); None where the run saved no split."""
    read_config(path)
    saved = read_split(path)
    return saved[1] if saved else None


def layout_of(path: Path) -> Layout:
    """The layout of the run's model, which must be a built-in one."""
    config = read_config(path)
    if MADE_IN_PYTHON in config:
        raise RunError(f"{path} was made in Python: its model is the caller's own, and only its caller has its layout.")
    try:
        pictures = describe(config["data"]["name"])
        with torch.device("meta"):  # shapes alone, no memory
            module = Model(**config["model"]).build(pictures.shape[0], pictures.classes, pictures.shape[1])
    except (KeyError, TypeError, ConfigError) as problem:
        why = str(problem).rstrip(".")
        raise RunError(f"{path / 'config.toml'} does not name a built-in model and a known data set: {why}.") from None
    return Layout.of(module)


def _go_on(path: Path, config: dict[str, Any]) -> str:
    """How the run makes good what is missing: it begins again at the last checkpoint that is whole."""
    how = "Federation.run(..., resume=True)" if MADE_IN_PYTHON in config else f"dispfl run --resume {path}"
    return f"Go on with the run: {how}."
