"""A real site's own model: what it has learned so far, out of its folder, also while its node runs."""

from importlib.metadata import version
from pathlib import Path

from dispfl.errors import RunError
from dispfl.export.card import Card
from dispfl.export.personal import Personal, about_inputs, needs_data, network_with, personal_model, tuned
from dispfl.methods.base import PeerState
from dispfl.models.own import OwnModel
from dispfl.peer.share import data_of, setting_of_site
from dispfl.peer.site import SITE, Site
from dispfl.peer.store import rounds_of
from dispfl.runs.checkpoint import Checkpoints
from dispfl.runs.records import weights_sha256


def is_site(path: Path) -> bool:
    """Whether a folder is a site's and not a run directory."""
    return (path / SITE).is_file()


def site_model(path: Path, data_dir: Path | None = None) -> Personal:
    """The site's model after the last round that it has finished; fine-tuned on its data where the method says so.

    A consensus (D-PSGD's) cannot be had at a single site: its own model is what it has of it.
    """
    site = Site.open(path)
    if site.where.federation == "up" and (path.parent.parent / "config.toml").exists():
        return personal_model(path.parent.parent, site.name, data_dir)  # its settings are the run's
    plan = site.plan(device="cpu")  # wherever it was trained
    if data_dir is not None:
        plan = plan.model_copy(update={"data": plan.data.model_copy(update={"dir": str(data_dir)})})
    rounds, state = _newest(site)
    data = data_of(site, plan) if needs_data(plan.data) or plan.method.tuning else None
    about = about_inputs(plan.data, data)
    accuracy = rounds_of(site.run_folder).get(rounds - 1, {}).get("report", {}).get("score")
    if plan.method.tuning:
        assert data is not None
        state, accuracy = tuned(setting_of_site(site, plan, data), site.name, state, rounds - 1, threads=1)
    card = Card(
        **about,
        model=None if isinstance(plan.model, OwnModel) else plan.model,
        data=plan.data.name,
        method=plan.method.name,
        seed=plan.seed,
        rounds=rounds,
        peer=site.name,
        accuracy=accuracy,
        density=state.model.mask.kept / state.model.mask.size,
        weights_sha256=weights_sha256(state.model),
        dispfl=version("dispfl"),
    )
    return Personal(network_with(plan.model, card, state, site.folder), card)


def _newest(site: Site) -> tuple[int, PeerState]:
    """How many rounds are finished and the state after them."""
    checkpoints = Checkpoints(site.run_folder / "checkpoints")
    finished = checkpoints.finished_rounds()
    if not finished:
        raise RunError(f"{site.folder} has finished no round yet. Take part: dispfl peer run {site.folder}")
    return finished[-1], checkpoints.load(finished[-1])[site.name].state
