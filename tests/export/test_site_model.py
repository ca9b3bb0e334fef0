"""The model of a real site, from its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from PIL import Image
from typer.testing import CliRunner, Result

from dispfl.cli import app
from dispfl.config import compose
from dispfl.engines.checkpoint import Checkpoints
from dispfl.errors import ConfigError, RunError
from dispfl.export.personal import site_model
from dispfl.files import is_site
from dispfl.peer.local_federation import create_run, free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.store import rounds_of
from dispfl.runs.metrics import weights_sha256


def make(folder: Path, **plan: Any) -> Site:
    """A site with ten dark and ten light images, in its folder."""
    settings = {
        "data": {"path": "scans", "size": 28, "colour": False},
        "rounds": 2,
        "train": {"epochs": 1, "batch_size": 8},
    }
    where = SiteInfo(name="alice", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(folder, where, SiteConfig(**{**settings, **plan}).to_toml())
    for name, shade in (("dark", 20), ("light", 220)):
        (folder / "scans" / name).mkdir(parents=True)
        for k in range(10):
            Image.new("L", (28, 28), shade + k).save(folder / "scans" / name / f"{k}.png")
    return site


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site that has taken its two rounds, alone."""
    site = make(tmp_path_factory.mktemp("site") / "alice", method={"density": 0.4})
    run_site(site)
    return site


def dispfl(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def test_the_model_is_that_of_the_sites_last_round(finished: Site) -> None:
    personal = site_model(finished.folder)
    state = Checkpoints(finished.run_folder / "checkpoints").load(2)["alice"].state
    card = personal.card
    assert card.weights_sha256 == weights_sha256(state.model)
    assert card.score == rounds_of(finished.run_folder)[1]["report"]["scores"][str(card.metric)]
    assert (card.peer, card.rounds, card.classes, card.shape) == (
        "alice",
        2,
        ("dark", "light"),
        (1, 28, 28),
    )
    assert card.density == pytest.approx(0.4, abs=0.01)
    kept = sum(int(parameter.count_nonzero()) for parameter in personal.network.parameters())
    assert kept <= state.model.mask.kept


def test_the_exported_model_predicts(finished: Site, tmp_path: Path) -> None:
    to = tmp_path / "alice.safetensors"
    result = dispfl("export", finished.folder, "--to", to)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        f"{to}: peer alice of {finished.folder} after 2 rounds, accuracy "
    )
    predicted = dispfl("predict", to, finished.folder / "scans/light/3.png", "--json")
    assert predicted.exit_code == 0
    [prediction] = json.loads(predicted.stdout)
    assert {guess["class"] for guess in prediction["top"]} == {"dark", "light"}


def test_a_fine_tuned_model_is_tuned_on_the_sites_data(tmp_path: Path) -> None:
    site = make(tmp_path / "alice", method={"name": "dpsgd-ft"})
    run_site(site)
    state = Checkpoints(site.run_folder / "checkpoints").load(2)["alice"].state
    card = site_model(site.folder).card
    assert card.weights_sha256 != weights_sha256(state.model)
    assert card == site_model(site.folder).card


def test_a_custom_network_is_found_in_the_sites_folder(tmp_path: Path) -> None:
    site = make(tmp_path / "alice", model={"factory": "mynet_of_site:net"}, rounds=1)
    (site.folder / "mynet_of_site.py").write_text(
        "from torch import nn\n\n\ndef net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))\n"
    )
    run_site(Site.open(site.folder, trust=True))
    personal = site_model(site.folder)
    assert personal.card.model is None
    assert sum(parameter.numel() for parameter in personal.network.parameters()) == 28 * 28 * 2 + 2


def test_a_site_without_a_complete_round_is_refused(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    with refused(RunError):
        site_model(site.folder)


def test_a_site_has_one_model_and_a_run_one_for_each_peer(finished: Site, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    wrong = dispfl("export", finished.folder, "--peer", "bob", "--to", to)
    assert isinstance(wrong.exception, ConfigError)
    assert "is the site alice and has no model of bob; omit --peer." in str(wrong.exception)
    missing = dispfl("export", tmp_path, "--to", to)
    assert isinstance(missing.exception, ConfigError)
    assert "--peer is missing" in str(missing.exception)
    assert not to.exists()


def test_a_site_of_up_is_a_peer_of_its_run(tmp_path: Path) -> None:
    words = [
        "peers=2",
        "rounds=1",
        "topology=full",
        "partition.samples_per_peer=20",
        "partition.test_samples_per_peer=10",
    ]
    create_run(compose({}, words), tmp_path / "up")
    folder = tmp_path / "up/sites/001"
    assert is_site(folder)
    with pytest.raises(RunError, match=f"{tmp_path / 'up'} has no complete checkpoint"):
        site_model(folder)
