"""Which model is a peer's own: what it would use from now on, out of a run directory, finished or cut."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from dispfl.config import Experiment, compose
from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.data.catalogue import describe
from dispfl.data.datasets import Pictures
from dispfl.data.datasets import load as load_data
from dispfl.errors import ConfigError, RunError
from dispfl.export.card import Card
from dispfl.methods.base import PeerState
from dispfl.roster import roster_names
from dispfl.round import Setting, Work, peer_step
from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics
from dispfl.runs.reading import final_states, saved_rounds
from dispfl.runs.records import weights_sha256
from dispfl.runs.split import read_split


@dataclass(frozen=True)
class Personal:
    """A peer's network with its weights, and what is to be said of it."""

    network: nn.Module
    card: Card


def personal_model(path: Path, peer: str, data_dir: Path | None = None) -> Personal:
    """The model of one peer, by place in the roster or by name.

    Its own; or its share of a model that all share, fine-tuned on its own data as in the run where the method says so.
    The data set's files are needed to fine-tune, and where only they name the classes.
    """
    experiment = _experiment(path, peer, data_dir)
    name = _name(path, peer, roster_names(experiment.peers))
    rounds, states = saved_rounds(path), final_states(path)
    spec = describe(experiment.data.name)
    pictures = load_data(experiment.data) if experiment.method.tuning or not spec.class_names else None
    state = _shared_or_own(experiment, states, name)
    accuracy = _accuracy(path, rounds, name)
    if experiment.method.tuning:
        assert pictures is not None
        state, accuracy = _tuned(_setting(path, experiment, pictures), name, state, rounds - 1, experiment.threads)
    card = Card(
        classes=pictures.classes if pictures else spec.class_names,
        shape=spec.shape,
        mean=spec.mean,
        std=spec.std,
        model=experiment.model,
        data=spec.name,
        method=experiment.method.name,
        seed=experiment.seed,
        rounds=rounds,
        peer=name,
        accuracy=accuracy,
        density=state.model.mask.kept / state.model.mask.size,
        weights_sha256=weights_sha256(state.model),
        dispfl=version("dispfl"),
    )
    return Personal(_network(card, state), card)


def _experiment(path: Path, peer: str, data_dir: Path | None) -> Experiment:
    config = read_config(path)
    if MADE_IN_PYTHON in config:
        raise RunError(
            f"{path} was made in Python, and only its maker can build its network: export it there, "
            f"with dispfl.export.formats.save(run.model({peer}), Card(...), PATH)."
        )
    words = ["device=cpu"]  # wherever it was trained
    if data_dir is not None:
        words.append(f"data.dir={json.dumps(str(data_dir), ensure_ascii=False)}")  # quoted as TOML quotes too
    return compose(config, words)


def _name(path: Path, peer: str, roster: list[str]) -> str:
    if peer in roster:
        return peer
    if peer.isdecimal() and int(peer) < len(roster):
        return roster[int(peer)]
    raise ConfigError(f"There is no peer {peer} in {path}; there are {len(roster)}, from {roster[0]} to {roster[-1]}.")


def _shared_or_own(experiment: Experiment, states: Mapping[str, PeerState], name: str) -> PeerState:
    method, state = experiment.method, states[name]
    if not method.shares:
        return state
    model = method.judged(state, method.shared(states))
    return replace(state, model=model, next_mask=model.mask)


def _tuned(setting: Setting, name: str, state: PeerState, t: int, threads: int) -> tuple[PeerState, float | None]:
    """The model after the run's own fine-tuning, and its score: the same bits, from the same streams and threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(setting.peers)))
    try:
        with torch.random.fork_rng(devices=[]):
            work = Work(name, t, state, {}, idle=True, tuning=setting.method.tuning)
            step = peer_step(setting, LiveModel(setting.module()), work)
    finally:
        torch.set_num_threads(before)
    return step.state, step.report.score


def _setting(path: Path, experiment: Experiment, pictures: Pictures) -> Setting:
    saved = read_split(path)
    if saved is None:
        raise RunError(f"{path} has no split.safetensors, which says whose data are whose: the model cannot be tuned.")
    split, counts = saved
    if not split.label_counts(pictures.train_labels, len(pictures.classes)).equal(counts):
        raise RunError(f"The data set {pictures.name} is not the one that {path} was run with: its labels differ.")
    return experiment.setting(pictures, split)


def _accuracy(path: Path, rounds: int, name: str) -> float | None:
    """The peer's score after so many rounds, if there was one."""
    records = read_metrics(path)[rounds - 1 : rounds]
    scores = records[0]["accuracy"] if records else None
    return scores["per_peer"][int(name)] if scores else None


def _network(card: Card, state: PeerState) -> nn.Module:
    network = card.network()
    layout = Layout.of(network)
    if layout.size != state.model.mask.size:
        raise RunError(f"The checkpoint has {state.model.mask.size:,} weights; the run's network has {layout.size:,}.")
    weights = dict(zip(layout.names, layout.views(state.model.unpack()[0]), strict=True))
    network.load_state_dict({**weights, **state.buffers}, assign=True)
    return network
