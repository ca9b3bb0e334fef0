"""The site's folder: made once, opened by every command, and every mistake in it explained."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dispfl.data.own.settings import OwnData
from dispfl.errors import ConfigError, RunError
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.local import Local
from dispfl.models.own import OwnModel
from dispfl.peer.certificates import follows
from dispfl.peer.identity import Identity, IdentityError
from dispfl.peer.plan import Plan
from dispfl.peer.site import Site, Whereabouts
from dispfl.topology import Full, Ring


def make(folder: Path, name: str = "alice", plan: dict[str, Any] | None = None, **where: Any) -> Site:
    where = {"listen": "127.0.0.1:7600", "federation": "hospitals"} | where
    return Site.create(folder, Whereabouts(name=name, **where), Plan(**plan or {}).to_toml())


def rewrite(site: Site, old: str, new: str) -> None:
    file = site.folder / "site.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def test_a_site_is_opened_as_it_was_made(tmp_path: Path) -> None:
    plan = {"rounds": 3, "method": {"name": "dispfl", "density": 0.2}, "topology": {"name": "ring"}}
    made = make(tmp_path / "alice", plan=plan, listen="[::]:7600", advertise="alice.example.org:7600")
    site = Site.open(tmp_path / "alice")
    assert (site.name, site.where.federation, site.where.listen) == ("alice", "hospitals", "[::]:7600")
    assert str(site.where.address) == "alice.example.org:7600"
    assert site.identity.fingerprint == made.identity.fingerprint
    assert (site.plan().rounds, site.plan().method, site.plan().topology) == (3, DisPFL(density=0.2), Ring())
    assert site.members.names() == []
    assert site.status() is None
    assert site.run_folder == tmp_path / "alice" / "run"


def test_two_sites_accept_each_other(tmp_path: Path) -> None:
    alice = make(tmp_path / "alice")
    bob = make(tmp_path / "bob", "bob", listen="127.0.0.1:7601")
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    assert alice.members.roster(0) == bob.members.roster(0) == ["alice", "bob"]


def test_a_rotated_site_has_a_certificate_that_follows_its_old_one(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    site.rotate()
    site.rotate()
    identity = Site.open(tmp_path / "alice").identity
    assert follows(identity.certificate, identity.issuers[0])
    assert identity.issuers[1] == site.identity.certificate


def test_the_settings_are_written_down_in_full_without_what_only_a_simulation_has(tmp_path: Path) -> None:
    make(tmp_path / "alice")
    content = tomllib.loads((tmp_path / "alice" / "site.toml").read_text())
    assert content["method"]["density"] == 0.5
    assert set(content) >= {"name", "listen", "federation", "seed", "rounds", "data", "model", "train", "wire"}
    assert not set(content) & {"peers", "partition", "engine"}


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"name": "al ice"}, "name must be 1 to 40 letters .* got 'al ice'"),
        ({"name": "a" * 41}, "name must be 1 to 40 letters"),
        ({"name": "-a"}, "no dash first"),
        ({"name": "server"}, "name cannot be 'server'"),
        ({"federation": "the banks"}, "federation must be 1 to 40 letters .* got 'the banks'"),
        ({"listen": "7600"}, "An address is HOST:PORT, got '7600'"),
        ({"listen": "0.0.0.0:7600"}, r"Nobody can call 0.0.0.0:7600; .*--advertise HOST:PORT"),
        ({"listen": "alice:7600", "advertise": "[::]:7600"}, r"Nobody can call \[::\]:7600"),
        ({"adverties": "alice:7600"}, "Unknown key adverties. Did you mean advertise?"),
    ],
)
def test_whereabouts_that_cannot_be_are_refused(tmp_path: Path, where: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(tmp_path / "alice", **{"name": "alice", **where})
    assert not (tmp_path / "alice").exists()


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"method": {"name": "fedavg"}},
            "method fedavg needs a server, and sites have none. Use one of: dispfl, local",
        ),
        ({"method": {"name": "dispfle"}}, "method 'dispfle' does not exist. Did you mean dispfl?"),
        ({"method": {"density": 20}}, r"method.density must be in \(0, 1\], got 20"),
        ({"method": {"density": [0.2, 0.5]}}, "method.density must be one number at a site"),
        ({"smallest_density": 0.6}, r"method.density is 0.5, below smallest_density \(0.6\)"),
        ({"topology": {"name": "rign"}}, "topology 'rign' does not exist. Did you mean ring?"),
        ({"model": {"name": "cnnn"}}, "model.name 'cnnn' does not exist. Did you mean cnn?"),
        ({"train": {"lr": 0.1, "bacth": 3}}, "Unknown key train.bacth. Did you mean train.batch?"),
        ({"round": 3}, "Unknown key round. Did you mean rounds?"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"limits": {"stall": 0}}, r"limits\.stall must be above 0, got 0"),
        ({"limits": {"stal": 5}}, r"Unknown key limits\.stal\. Did you mean limits\.stall\?"),
        ({"pace": {"floor": -1}}, r"pace\.floor must be above 0, got -1"),
        ({"pace": {"flor": 1}}, r"Unknown key pace\.flor\. Did you mean pace\.floor\?"),
        ({"pace": {"floor": 9, "ceiling": 5}}, r"pace\.floor is 9 and pace\.ceiling 5; the floor is what is waited"),
        ({"pace": 30}, r"pace must be a table or a name, got 30"),
    ],
)
def test_plans_that_cannot_be_are_refused(plan: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Plan(**plan)


def test_everyone_hears_everyone_and_the_smallest_density_is_ours_unless_said() -> None:
    assert Plan().topology == Full()
    assert Plan(method=DisPFL(density=0.2)).least_density == 0.2
    assert Plan(method=DisPFL(density=0.2), smallest_density=0.1).least_density == 0.1
    assert Plan(method=Local()).density == 1.0


def test_a_site_may_have_data_and_a_network_of_its_own(tmp_path: Path) -> None:
    make(tmp_path / "alice", plan={"data": {"path": "samples.csv"}, "model": {"factory": "mine:net"}})
    plan = Site.open(tmp_path / "alice").plan()
    assert plan.data == OwnData(path="samples.csv")
    assert plan.model == OwnModel(factory="mine:net")


def test_limits_and_pace_are_set_in_tables_of_their_own(tmp_path: Path) -> None:
    site = make(tmp_path / "alice", plan={"limits": {"stall": 5}, "pace": {"floor": 60}})
    content = tomllib.loads((site.folder / "site.toml").read_text())
    assert content["limits"]["stall"] == 5
    assert content["limits"]["connections"] == 512  # written down in full, to be found and changed
    rewrite(site, "first = 600.0", "first = 7200.0")
    plan = Site.open(site.folder).plan()
    assert (plan.limits.stall, plan.limits.connect) == (5.0, 10.0)
    pace = plan.pace.begin()
    assert (pace.floor, pace.first, pace.ceiling, pace.deadline) == (60.0, 7200.0, 3600.0, 7200.0)


def test_a_mistake_in_the_file_is_found_where_it_matters(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    rewrite(site, "\n[train]", "\n[training]")
    opened = Site.open(site.folder)  # a site with a wrong plan can still be looked at, and revoke
    with pytest.raises(ConfigError, match=r"Unknown key training\. Did you mean train\?"):
        opened.plan()


def test_a_folder_that_is_no_site_says_how_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match=f"{folder} is not a site: it has no site.toml.*dispfl peer init {folder}"):
            Site.open(folder)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="exists already and is not empty"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_settings_are_refused_by_name(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    (site.folder / "site.toml").write_text("name = ")
    with pytest.raises(RunError, match=r"site\.toml cannot be read"):
        Site.open(site.folder)


def test_another_name_than_the_certificates_is_refused(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    rewrite(site, 'name = "alice"', 'name = "alicia"')
    with pytest.raises(RunError, match=r"calls the site alicia, its certificate alice. Write alice again"):
        Site.open(site.folder)


def test_an_open_key_stops_every_command(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    (site.folder / "identity" / "key.pem").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Site.open(site.folder)


def test_a_status_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    site.run_folder.mkdir()
    for content in ("{", "[]"):
        (site.run_folder / "status.json").write_text(content)
        with pytest.raises(RunError, match=r"status\.json"):
            site.status()


def test_the_identity_is_the_one_in_the_folder(tmp_path: Path) -> None:
    site = make(tmp_path / "alice")
    assert Identity.load(site.folder / "identity").fingerprint == site.invite().fingerprint
