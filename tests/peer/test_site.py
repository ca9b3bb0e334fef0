"""The site's folder: creation, opening, and messages for mistakes in it."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.data.batches import data_digest
from dispfl.data.datasets import CustomData
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.local import Local
from dispfl.models.settings import CustomModel
from dispfl.peer.membership.identity import Identity, IdentityError, is_successor
from dispfl.peer.setup.local_setup import local_setup
from dispfl.peer.setup.roster_settings import roster_settings
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.topology import Full, Ring


def make(
    folder: Path, name: str = "alice", config: dict[str, Any] | None = None, **where: Any
) -> Site:
    where = {"listen": "127.0.0.1:7600", "federation": "hospitals"} | where
    return Site.create(folder, SiteInfo(name=name, **where), SiteConfig(**config or {}).to_toml())


def rewrite(site: Site, old: str, new: str) -> None:
    file = site.folder / "site.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def test_a_site_is_opened_as_it_was_created(tmp_path: Path) -> None:
    config = {
        "rounds": 3,
        "method": {"name": "dispfl", "density": 0.2},
        "topology": {"name": "ring"},
    }
    made = make(
        tmp_path / "alice", config=config, listen="[::]:7600", advertise="alice.example.org:7600"
    )
    site = Site.open(tmp_path / "alice")
    assert (site.name, site.info.federation, site.info.listen) == (
        "alice",
        "hospitals",
        "[::]:7600",
    )
    assert str(site.info.address) == "alice.example.org:7600"
    assert site.identity.fingerprint == made.identity.fingerprint
    assert (site.config().rounds, site.config().method, site.config().topology) == (
        3,
        DisPFL(density=0.2),
        Ring(),
    )
    assert site.members.names() == []
    assert site.status() is None
    assert site.run_folder == tmp_path / "alice" / "run"


def test_two_sites_accept_each_other(tmp_path: Path) -> None:
    alice = make(tmp_path / "alice")
    bob = make(tmp_path / "bob", "bob", listen="127.0.0.1:7601")
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    assert alice.members.participants(0) == bob.members.participants(0) == ["alice", "bob"]


def test_a_rotated_site_has_a_certificate_that_follows_its_old_one(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    site.rotate()
    identity = Site.open(tmp_path / "alice").identity
    assert is_successor(identity.certificate, identity.issuers[0])
    assert identity.issuers[0] == site.identity.certificate
    with refused(ConfigError):
        site.rotate()
    assert Site.open(tmp_path / "alice").identity.fingerprint == identity.fingerprint


def test_a_clock_that_was_ahead_at_the_last_rotation_does_not_prevent_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(tmp_path / "alice")
    first = site.rotate()
    monkeypatch.setattr(Identity, "age", -86_400.0)
    assert is_successor(site.rotate().certificate, first.certificate)


def test_site_toml_holds_all_settings_except_those_of_a_simulation(tmp_path: Path) -> None:
    make(tmp_path / "alice")
    content = tomllib.loads((tmp_path / "alice" / "site.toml").read_text())
    assert content["method"]["density"] == 0.5
    assert set(content) >= {
        "name",
        "listen",
        "federation",
        "seed",
        "rounds",
        "data",
        "model",
        "train",
        "wire",
    }
    assert not set(content) & {"peers", "partition", "engine"}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"name": "al ice"}, "name must be 1 to 40 letters .* got 'al ice'"),
        ({"name": "a" * 41}, "name must be 1 to 40 letters"),
        ({"name": "-a"}, "not start with a dash"),
        ({"name": "server"}, "name cannot be 'server'"),
        ({"federation": "the banks"}, "federation must be 1 to 40 letters .* got 'the banks'"),
        ({"listen": "7600"}, "An address is HOST:PORT, got '7600'"),
        (
            {"listen": "0.0.0.0:7600"},
            r"Other sites cannot connect to 0.0.0.0:7600; .*--advertise HOST:PORT",
        ),
        (
            {"listen": "alice:7600", "advertise": "[::]:7600"},
            r"Other sites cannot connect to \[::\]:7600",
        ),
        ({"adverties": "alice:7600"}, "Unknown key adverties. Did you mean advertise?"),
    ],
)
def test_invalid_site_infos_are_refused(
    tmp_path: Path, where: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "alice", **{"name": "alice", **where})
    assert not (tmp_path / "alice").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": {"name": "fedavg"}},
            "method fedavg needs a server, which real sites do not have. Use one of: dispfl, local",
        ),
        ({"method": {"name": "dispfle"}}, "method 'dispfle' does not exist. Did you mean dispfl?"),
        ({"method": {"density": 20}}, r"method.density must be in \(0, 1\], got 20"),
        ({"method": {"density": [0.2, 0.5]}}, "method.density must be one number at a site"),
        ({"smallest_density": 0.6}, r"method.density is 0.5, below smallest_density \(0.6\)"),
        ({"topology": {"name": "rign"}}, "topology 'rign' does not exist. Did you mean ring?"),
        ({"model": {"name": "cnnn"}}, "model 'cnnn' does not exist. Did you mean cnn?"),
        (
            {"train": {"lr": 0.1, "bacth": 3}},
            "Unknown key train.bacth. Did you mean train.batch_size?",
        ),
        ({"round": 3}, "Unknown key round. Did you mean rounds?"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"limits": {"stall_timeout": 0}}, r"limits\.stall_timeout must be above 0, got 0"),
        (
            {"limits": {"stal": 5}},
            r"Unknown key limits\.stal\. Did you mean limits\.stall_timeout\?",
        ),
        ({"deadlines": {"min": -1}}, r"deadlines\.min must be above 0, got -1"),
        ({"deadlines": {"mim": 1}}, r"Unknown key deadlines\.mim\. Did you mean deadlines\.min\?"),
        (
            {"deadlines": {"min": 9, "max": 5}},
            r"deadlines\.min is 9 and deadlines\.max 5; min must not exceed max",
        ),
        ({"deadlines": 30}, r"deadlines must be a table, got 30"),
    ],
)
def test_invalid_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SiteConfig(**config)


def test_the_default_topology_is_full_and_the_default_smallest_density_is_the_sites() -> None:
    assert SiteConfig().topology == Full()
    assert SiteConfig(method=DisPFL(density=0.2)).least_density == 0.2
    assert SiteConfig(method=DisPFL(density=0.2), smallest_density=0.1).least_density == 0.1
    assert SiteConfig(method=Local()).density == 1.0


def test_a_site_may_have_custom_data_and_a_custom_model(tmp_path: Path) -> None:
    make(
        tmp_path / "alice",
        config={"data": {"path": "samples.csv"}, "model": {"factory": "mine:net"}},
    )
    (tmp_path / "alice" / "mine.py").touch()
    config = Site.open(tmp_path / "alice", trust=True).config()
    assert config.data == CustomData(path="samples.csv")
    assert config.model == CustomModel(factory="mine:net")


def test_limits_and_deadlines_are_set_in_their_tables(tmp_path: Path) -> None:
    site = make(
        tmp_path / "alice", config={"limits": {"stall_timeout": 5}, "deadlines": {"min": 60}}
    )
    content = tomllib.loads((site.folder / "site.toml").read_text())
    assert content["limits"]["stall_timeout"] == 5
    assert content["limits"]["max_connections"] == 512  # all settings are written
    rewrite(site, "startup = 600.0", "startup = 7200.0")
    config = Site.open(site.folder).config()
    assert (config.limits.stall_timeout, config.limits.connect_timeout) == (5.0, 10.0)
    deadlines = config.deadlines.start()
    assert (deadlines.min, deadlines.startup, deadlines.max, deadlines.deadline) == (
        60.0,
        7200.0,
        3600.0,
        7200.0,
    )


def test_a_wrong_setting_is_found_when_the_settings_are_used(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    rewrite(site, "\n[train]", "\n[training]")
    opened = Site.open(site.folder)  # `status` and `revoke` still work
    with refused(ConfigError, key="training"):
        opened.config()


def test_opening_another_folder_says_how_to_create_a_site(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            RunError,
            match=f"{folder} is not a site: it has no site.toml.*dispfl peer init {folder}",
        ):
            Site.open(folder)


def test_a_site_is_not_created_in_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with refused(RunError):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_settings_are_refused_by_name(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    (site.folder / "site.toml").write_text("name = ")
    with refused(RunError):
        Site.open(site.folder)


def test_a_name_that_differs_from_the_certificate_is_refused(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    rewrite(site, 'name = "alice"', 'name = "alicia"')
    with refused(RunError):
        Site.open(site.folder)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    (site.folder / "identity" / "key.pem").chmod(0o644)
    with refused(IdentityError):
        Site.open(site.folder)


def test_an_unreadable_status_is_refused(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    site.run_folder.mkdir()
    for content in ("{", "[]"):
        (site.run_folder / "status.json").write_text(content)
        with refused(RunError):
            site.status()


def test_the_identity_is_the_one_in_the_folder(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    assert Identity.load(site.folder / "identity").fingerprint == site.invite().fingerprint


def test_a_site_holds_out_validation_data_from_its_own_training_data(tmp_path: Path) -> None:
    """A tenth of the 4,000 bundled images; the same ones each time."""
    site = make(tmp_path / "alice", config={"validation": 0.1})
    data, again = (local_setup(site).run.data.peers["alice"] for _ in range(2))
    assert data.validation is not None
    assert again.validation is not None
    assert (len(data.train), len(data.validation)) == (3600, 400)
    assert data_digest([data.validation]) == data_digest([again.validation])
    assert local_setup(make(tmp_path / "bob", "bob")).run.data.peers["bob"].validation is None


def test_real_sites_average_robustly_unless_stated_and_simulations_as_in_the_paper() -> None:
    assert SiteConfig.compose({}, ["method.density=0.2"]).method == DisPFL(
        density=0.2, robust="clip", byzantine=0.2
    )
    assert SiteConfig.compose({}, ["method.robust=none"]).method == DisPFL()
    assert SiteConfig.compose({"method": {"name": "dpsgd"}}).method == DPSGD(robust="clip")
    assert SiteConfig.compose({}, ["method=dpsgd", "method.robust=none"]).method == DPSGD()
    assert SiteConfig.compose({}, ["method=local"]).method == Local()  # averages nothing
    assert Experiment().method == DisPFL()


def test_the_comment_in_site_toml_names_what_all_sites_must_have_in_common(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    comment, _, settings = (site.folder / "site.toml").read_text().partition("\n\n")
    equal = " ".join(comment.replace("#", "").split()).partition("Equal at all sites")[2]
    compared = {entry.partition(".")[0] for entry in local_setup(site).spec} - {
        "protocol",
        "layout",
        "first_weights",
    }
    assert {"seed", "method", "topology", "classes"} < compared
    assert [
        name for name in compared if name.replace("_", " ") not in equal.replace("_", " ")
    ] == []
    own = (
        tomllib.loads(settings).keys() - compared - {"model"}
    )  # compared by its layout and first weights
    assert {"train", "metric", "threads", "deadlines"} < own
    assert [name for name in own - {"name", "data"} if name in equal] == []


@pytest.mark.parametrize("name", ["members.json", "spec.json", "audit.jsonl", "identity/key.pem"])
def test_a_pipe_in_the_folder_of_a_site_is_refused_and_blocks_nothing(
    name: str, tmp_path: Path
) -> None:
    site = make(tmp_path / "alice")
    file = site.folder / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with refused((RunError, IdentityError)):
        opened = Site.open(site.folder)
        opened.spec_changes.current()
        opened.members.file.audit_log()


def test_a_site_that_waits_for_nobody_has_this_term_and_no_deadlines() -> None:
    config = SiteConfig.compose({"schedule": "async"}, ["schedule.hours=20:00-06:00"])
    assert config.is_async
    assert not config.pulls
    assert SiteConfig.compose({}, ["schedule=async"]).is_async
    assert SiteConfig.compose(config.to_toml()) == config
    assert not SiteConfig().is_async
    for setting, key in (("deadlines.min=5", "deadlines"), ("alone_rounds=2", "alone_rounds")):
        with refused(ConfigError, key=key):
            SiteConfig.compose({}, ["schedule=async", setting])
    with refused(ConfigError, key="schedule"):
        SiteConfig.compose({}, ["schedule=async", "method=dfedpgp"])
    assert roster_settings({"schedule": {"mode": "async"}}) == {"schedule": {"mode": "async"}}
    with refused(ConfigError, key="schedule.hours"):
        roster_settings({"schedule": {"mode": "async", "hours": "20:00-06:00"}})
