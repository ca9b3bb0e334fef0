"""Which model is a peer's own: what it would use from now on, out of a run directory, finished or cut."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfl.config import Experiment, compose
from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.core.rng import forked_generators
from dispfl.data.catalogue import describe
from dispfl.data.datasets import Data, Pictures
from dispfl.data.datasets import load as load_data
from dispfl.data.own.samples import OwnSamples, Scaling
from dispfl.data.own.settings import OwnData
from dispfl.errors import ConfigError, RunError
from dispfl.export.card import Card
from dispfl.methods.base import PeerState
from dispfl.models.own import OwnModel
from dispfl.models.registry import Model
from dispfl.roster import roster_names
from dispfl.round import peer_step
from dispfl.runs.directory import MADE_IN_PYTHON, read_config, read_metrics
from dispfl.runs.reading import final_states, saved_rounds
from dispfl.runs.records import weights_sha256
from dispfl.runs.split import read_split
from dispfl.work import Setting, Work


@dataclass(frozen=True)
class Personal:
    """A peer's network with its weights, and what is to be said of it."""

    network: nn.Module
    card: Card


def personal_model(path: Path, peer: str, data_dir: Path | None = None) -> Personal:
    """The model of one peer, by place in the roster or by name.

    Its own; or its share of a model that all share, fine-tuned on its own data as in the run where the method says so.
    The data set's files are needed to fine-tune, and where only they say what the classes and the inputs are.
    """
    experiment = _experiment(path, peer, data_dir)
    name = _name(path, peer, roster_names(experiment.peers))
    rounds, states = saved_rounds(path), final_states(path)
    data = load_data(experiment.data) if needs_data(experiment.data) or experiment.method.tuning else None
    about = about_inputs(experiment.data, data)
    state = _shared_or_own(experiment, states, name)
    accuracy = _accuracy(path, rounds, name)
    if experiment.method.tuning:
        assert data is not None
        state, accuracy = tuned(_setting(path, experiment, data), name, state, rounds - 1, experiment.threads)
    card = Card(
        **about,
        model=None if isinstance(experiment.model, OwnModel) else experiment.model,
        data=experiment.data.name,
        method=experiment.method.name,
        seed=experiment.seed,
        rounds=rounds,
        peer=name,
        accuracy=accuracy,
        density=state.model.mask.kept / state.model.mask.size,
        weights_sha256=weights_sha256(state.model),
        dispfl=version("dispfl"),
    )
    return Personal(network_with(experiment.model, card, state), card)


def needs_data(settings: Data) -> bool:
    """Whether only the data themselves say what their classes are."""
    return isinstance(settings, OwnData) or not describe(settings.name).class_names


def about_inputs(settings: Data, data: Pictures | OwnSamples | None) -> dict[str, Any]:
    """What the model wants and what its outputs mean; from the data themselves, where only they say it."""
    if isinstance(data, OwnSamples):
        return _about_table(data)
    if isinstance(settings, OwnData):
        assert data is not None
        return {"classes": data.classes, "shape": data.shape, "mean": data.mean, "std": data.std}
    spec = describe(settings.name)
    classes = data.classes if data else spec.class_names
    return {"classes": classes, "shape": spec.shape, "mean": spec.mean, "std": spec.std}


def _about_table(data: OwnSamples) -> dict[str, Any]:
    if not data.columns:
        raise ConfigError(
            f"`dispfl export` writes models for pictures and tables, and these inputs are of shape {list(data.shape)}; "
            "save the weights of the checkpoint with your own code."
        )
    scaling = data.scaling or Scaling.none(len(data.columns))
    return {
        "classes": data.classes,
        "shape": data.shape,
        "mean": tuple(scaling.mean.tolist()),
        "std": tuple(scaling.std.tolist()),
        "columns": data.columns,
        "label": data.label,
    }


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


def tuned(setting: Setting, name: str, state: PeerState, t: int, threads: int) -> tuple[PeerState, float | None]:
    """The model after the run's own fine-tuning, and its score: the same bits, from the same streams and threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(setting.peers)))
    try:
        with forked_generators(setting.device):
            work = Work(name, t, state, {}, idle=True, tuning=setting.method.tuning)
            step = peer_step(setting, LiveModel(setting.module()), work)
    finally:
        torch.set_num_threads(before)
    return step.state, step.report.score


def _setting(path: Path, experiment: Experiment, data: Pictures | OwnSamples) -> Setting:
    saved = read_split(path)
    if saved is None:
        raise RunError(f"{path} has no split.safetensors, which says whose data are whose: the model cannot be tuned.")
    split, counts = saved
    if not split.label_counts(data.train_labels, len(data.classes)).equal(counts):
        raise RunError(f"The data set {data.name} is not the one that {path} was run with: its labels differ.")
    return experiment.setting(data, split)


def _accuracy(path: Path, rounds: int, name: str) -> float | None:
    """The peer's score after so many rounds, if there was one."""
    records = read_metrics(path)[rounds - 1 : rounds]
    scores = records[0]["accuracy"] if records else None
    return scores["per_peer"][int(name)] if scores else None


def network_with(model: Model, card: Card, state: PeerState, home: Path | None = None) -> nn.Module:
    """The network with a peer's weights; `home` is where a network of the user's own is looked for."""
    network = card.network() if card.model else model.network(card.shape, len(card.classes), home)
    layout = Layout.of(network)
    if layout.size != state.model.mask.size:
        raise RunError(f"The checkpoint has {state.model.mask.size:,} weights; the run's network has {layout.size:,}.")
    weights = dict(zip(layout.names, layout.views(state.model.unpack()[0]), strict=True))
    network.load_state_dict({**weights, **state.buffers}, assign=True)
    return network
