"""A peer's personal model after the newest complete round, of a run or of a real site."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dispfl.config import MADE_IN_PYTHON, compose
from dispfl.core.flat_module import loaded_network
from dispfl.core.layout import Layout
from dispfl.core.rng import global_stream
from dispfl.data.labelled import InputFormat
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment, NamedSettings
from dispfl.export.card import Card
from dispfl.methods.base import PeerState, evaluated_state
from dispfl.models.settings import CustomModel
from dispfl.runs.directory import final_states, read_metrics, saved_rounds, trusted_config
from dispfl.runs.metrics import main_scores, weights_sha256
from dispfl.runs.saved import fine_tune, run_inputs, saved_context, site_inputs

if TYPE_CHECKING:
    from dispfl.peer.site import Site  # needs the extra `peer`


@dataclass(frozen=True)
class PersonalModel:
    """The network that computes a peer's model, with its weights, and its card."""

    network: nn.Module
    card: Card


def personal_model(
    path: Path, peer: str, data_dir: Path | None = None, *, trust: bool = False
) -> PersonalModel:
    """Return the model of one peer of a run, given by its index or its name.

    This is the model that the run evaluates: the peer's own, or the shared one, fine-tuned as in
    the run if the method does so. Classes, columns and scaling are those it was trained with: the
    data are read only to fine-tune. A run of somebody else whose config names code needs `trust`.
    """
    experiment = _experiment(path, peer, data_dir, trust)
    name = _name(path, peer, experiment.roster)
    rounds = saved_rounds(path)
    states = final_states(path)
    inputs = _describe_inputs(run_inputs(path, experiment.data))
    state = _evaluated_state(experiment, inputs, states, name)
    score = _score(path, rounds, experiment.roster.index(name))
    if experiment.method.fine_tuning:
        _, context = saved_context(path, experiment)
        state, score = fine_tune(context, name, state, rounds - 1, experiment.workers)
    return _personal(experiment, inputs, name, rounds, state, score)


def site_model(path: Path, data_dir: Path | None = None, *, trust: bool = False) -> PersonalModel:
    """Return a site's model after its newest complete round, fine-tuned if the method does so.

    Its node may be running. A consensus model (D-PSGD's) needs the models of all sites: the site's
    own is returned instead.
    """
    from dispfl.peer.setup.local_setup import site_context
    from dispfl.peer.setup.site_data import SiteData
    from dispfl.peer.site import Site
    from dispfl.peer.state.store import report_of, rounds_of

    site = Site.open(path, trust=trust)
    if site.info.federation == "up" and (path.parent.parent / "config.toml").exists():
        # Its settings are the run's.
        return personal_model(path.parent.parent, site.name, data_dir, trust=trust)
    config = site.config(device="cpu")  # whatever device it was trained on
    if data_dir is not None:
        data_settings = config.data.model_copy(update={"dir": str(data_dir)})
        config = config.model_copy(update={"data": data_settings})
    rounds, state = _newest(site)
    inputs = _describe_inputs(site_inputs(site.run_folder, config.data))
    record = rounds_of(site.run_folder).get(rounds - 1)
    score = report_of(record)[0].score if record else None
    if config.method.fine_tuning:
        context = site_context(SiteData.read(site, config))
        state, score = fine_tune(context, site.name, state, rounds - 1, threads=1)
    return _personal(config, inputs, site.name, rounds, state, score, site.folder)


def _personal(
    settings: NamedSettings,
    inputs: Mapping[str, Any],
    name: str,
    rounds: int,
    state: PeerState,
    score: float | None,
    folder: Path | None = None,
) -> PersonalModel:
    """Build the network with the peer's weights, and its card.

    A custom network is imported from the folder.
    """
    model = settings.model
    mask = state.model.mask
    card = Card(
        **inputs,
        model=None if isinstance(model, CustomModel) else model,
        data=settings.data.name,
        method=settings.method.name,
        seed=settings.seed,
        rounds=rounds,
        peer=name,
        metric=settings.make_task(folder).metric.name,
        score=score,
        density=mask.kept / mask.size,
        structure=mask.structure,
        parameters=mask.kept,
        whole_parameters=mask.size,
        weights_sha256=weights_sha256(state.model),
        dispfl=version("dispfl"),
    )
    with global_stream(settings.seed, "model"):  # as in the run, for frozen parameters
        network = model.network(card.shape, len(card.classes), folder)
    layout = Layout.of(network)
    if layout.size != mask.size:
        raise RunError(
            f"The checkpoint has {mask.size:,} weights; the run's network has {layout.size:,}."
        )
    if not mask.fits(layout):
        raise RunError(
            "The channels of the checkpoint are not those of the run's network: its layers have"
            " changed."
        )
    return PersonalModel(loaded_network(network, state.model, state.buffers), card)


def _describe_inputs(inputs: InputFormat) -> dict[str, Any]:
    """The fields of the card that describe inputs and outputs."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if inputs.normalization is not None:
        mean, std = inputs.normalization
    return {
        "classes": inputs.classes,
        "shape": inputs.shape,
        "mean": mean,
        "std": std,
        "tensors": dict(inputs.tensors) or None,
        "text": inputs.text,
        "tokenizer": inputs.tokenizer,
        "columns": inputs.columns or None,
        "label": inputs.label,
        "task": inputs.task,
        "target_mean": inputs.unit and inputs.unit.mean,
        "target_std": inputs.unit and inputs.unit.std,
    }


def _experiment(path: Path, peer: str, data_dir: Path | None, trust: bool) -> Experiment:
    config = trusted_config(path, trust=trust)
    if MADE_IN_PYTHON in config:
        raise RunError(
            f"{path} was made in Python, and only that program can build its network: export it"
            f" there, with dispfl.export.formats.save_model(run.model({peer}), Card(...), PATH)."
        )
    overrides = ["device=cpu"]  # whatever device it was trained on
    if data_dir is not None:
        quoted = json.dumps(str(data_dir), ensure_ascii=False)  # JSON quotes as TOML does
        overrides.append(f"data.dir={quoted}")
    return compose(config, overrides)


def _name(path: Path, peer: str, roster: list[str]) -> str:
    if peer in roster:
        return peer
    if peer.isdecimal() and int(peer) < len(roster):
        return roster[int(peer)]
    raise ConfigError(
        f"There is no peer {peer} in {path}; there are {len(roster)}, from {roster[0]} to"
        f" {roster[-1]}."
    )


def _evaluated_state(
    experiment: Experiment,
    inputs: Mapping[str, Any],
    states: Mapping[str, PeerState],
    name: str,
) -> PeerState:
    """The peer's state, with the shared model if the method evaluates that."""
    method = experiment.method
    state = states[name]
    if not method.evaluates_global:
        return state
    private = None
    if method.private:
        network = experiment.model.network(inputs["shape"], len(inputs["classes"]))
        private = method.private_mask(Layout.of(network))
    return evaluated_state(method, state, method.global_model(states), private)


def _score(path: Path, rounds: int, index: int) -> float | None:
    """The score of a peer of the roster after this many rounds, if it was evaluated then."""
    records = read_metrics(path)[rounds - 1 : rounds]
    scores = main_scores(records[0]) if records else None
    return scores["per_peer"][index] if scores else None


def _newest(site: "Site") -> tuple[int, PeerState]:
    """The number of complete rounds and the state after them."""
    checkpoints = Checkpoints(site.run_folder / "checkpoints")
    finished = checkpoints.finished_rounds()
    if not finished:
        raise RunError(
            f"{site.folder} has no complete round yet. Start the node: dispfl peer run"
            f" {site.folder}"
        )
    return finished[-1], checkpoints.load(finished[-1])[site.name].next_state
