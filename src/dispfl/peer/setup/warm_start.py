"""A site of a new federation that begins with the model of an earlier site.

`dispfl peer init --warm-start OLD` copies the model, under its mask, into the new site. Its first
state is that model instead of the first weights that all sites share; those stay in the spec. What
the model takes in and gives out has to be the same, and so has the share of weights that it keeps.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dispfl.core.report import Report
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError
from dispfl.files import make_folder, read_regular, write_atomically
from dispfl.methods.base import PeerState
from dispfl.peer.site import WARM_START, Site
from dispfl.round.context import StepResult
from dispfl.runs.directory import read_config

if TYPE_CHECKING:
    from dispfl.peer.setup.local_setup import LocalSetup

_SPEC = "spec.json"
_COMPARED = ("layout", "classes", "columns", "input_shape")
"""Entries of the spec that both federations have in common."""


def read_model(old: Path) -> tuple[PeerState, dict[str, str]]:
    """Return the newest model of a site, and what it fits to."""
    site = Site.open(old)
    checkpoints = Checkpoints(site.run_folder / "checkpoints")
    finished = checkpoints.finished_rounds()
    if not finished:
        raise RunError(f"{old} has no complete round yet, and so no model to begin with.")
    state = checkpoints.load(finished[-1])[site.name].next_state
    spec = read_config(site.run_folder)["spec"]
    fits_to = {key: str(spec[key]) for key in _COMPARED if key in spec}
    return PeerState(state.model, state.next_mask, state.buffers), fits_to


def write_warm_start(site: Site, state: PeerState, fits_to: dict[str, str]) -> None:
    """Keep a model as the first state of a new site."""
    folder = site.folder / WARM_START
    make_folder(folder, 0o700)
    checkpoints = Checkpoints(folder)
    checkpoints.add(0, site.name, StepResult(Report(), state=state))
    checkpoints.complete(0)
    write_atomically(folder / _SPEC, json.dumps(fits_to).encode())


def warm_state(site: Site, setup: "LocalSetup") -> PeerState | None:
    """Return the first state that a site was created with; None if it begins anew."""
    folder = site.folder / WARM_START
    if not folder.exists():
        return None
    check_private_start(is_private=setup.run.settings.privacy.enabled)
    try:
        fits_to = json.loads(read_regular(folder / _SPEC))
        state = Checkpoints(folder).load(1)[site.name].next_state
    except (OSError, ValueError, KeyError) as problem:
        raise RunError(
            f"The first model in {folder} cannot be read: {problem}. Create the site again, or"
            " delete this folder to begin without it."
        ) from None
    for key, value in setup.spec.items():
        if key in _COMPARED and fits_to.get(key) != value:
            raise ConfigError(
                f"The model of --warm-start does not fit: its {key} is {fits_to.get(key)}, and in"
                f" this federation it is {value}. Create the site without --warm-start.",
                key=key,
            )
    _check_density(setup, state)
    return state


def _check_density(setup: "LocalSetup", state: PeerState) -> None:
    """Refuse a model that keeps other than the announced share: the others would refuse it."""
    expected = setup.run.method.kept_counts(setup.layout, setup.density)
    for mask in (state.model.mask, state.next_mask):
        if mask.kept_per_layer(setup.layout) != list(expected):
            share = state.model.mask.kept / setup.layout.size
            raise ConfigError(
                f"The model of --warm-start keeps {share:.3g} of all weights, and method.density is"
                f" {setup.density:g}. Use the density and layers of the earlier federation, or"
                " create the site without --warm-start.",
                key="method.density",
            )


def check_private_start(*, is_private: bool) -> None:
    """Refuse a warm start of private training."""
    if is_private:
        raise ConfigError(
            "A private site cannot begin with the model of another run (--warm-start): the budget"
            " of this run does not cover what that model has learned from the same data.",
            key="privacy",
        )
