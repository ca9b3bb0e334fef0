"""`dispfl peer accept` with several files, and sites that begin with a roster's settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from messages import refused
from typer.testing import CliRunner

from dispfl.cli import prompts
from dispfl.cli.peer import app
from dispfl.errors import ConfigError, DispflError
from dispfl.peer.membership.invite import InviteError
from dispfl.peer.membership.roster import Roster, RosterError
from dispfl.peer.site import Site

SHARED: dict[str, Any] = {
    "seed": 7,
    "rounds": 20,
    "smallest_density": 0.3,
    "data": {"name": "custom", "label": "diagnosis", "classes": ["well", "ill"]},
    "model": {"name": "mlp"},
    "method": {"name": "dispfl", "density": 0.5},
}


def peer(*words: str | Path, typed: str | None = None, code: int = 0) -> str:
    """Run a command and return its output; errors are raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if isinstance(result.exception, DispflError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Site]:
    """Four sites by name, with their invites beside their folders."""
    for name in ("alice", "bob", "carol", "dave"):
        listen = f"{name}.example.org:7600"
        peer("init", tmp_path / name, "--name", name, "--listen", listen)
        invite = (tmp_path / name / f"{name}.invite").read_text()
        (tmp_path / f"{name}.invite").write_text(invite)
    return {name: Site.open(tmp_path / name) for name in ("alice", "bob", "carol", "dave")}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who answers questions."""
    monkeypatch.setattr(prompts, "at_terminal", lambda: True)


def states(site: Site) -> dict[str, str]:
    return {member.name: member.state for member in site.members.all()}


# several invites


def test_several_invites_are_accepted_after_one_question_that_lists_all_fingerprints(
    sites: dict[str, Site], tmp_path: Path, terminal: None
) -> None:
    files = sorted(tmp_path.glob("*.invite"))
    output = peer("accept", tmp_path / "alice", *files, typed="y\n")
    assert "Left out the invite of this site, alice." in output
    for name in ("bob", "carol", "dave"):
        assert f"{name} at {name}.example.org:7600" in output
        assert sites[name].identity.fingerprint in output.replace(" ", "").replace("\n", "")
    assert states(sites["alice"]) == {"bob": "accepted", "carol": "accepted", "dave": "accepted"}
    assert "Are all" not in peer("accept", tmp_path / "alice", *files)  # nothing new to compare


def test_without_a_yes_and_without_a_terminal_all_stay_pending_until_they_are_confirmed(
    sites: dict[str, Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{name}.invite" for name in ("bob", "carol")]
    peer("accept", tmp_path / "alice", *files)
    assert states(sites["alice"]) == {"bob": "pending", "carol": "pending"}
    monkeypatch.setattr(prompts, "at_terminal", lambda: True)
    output = peer("accept", tmp_path / "alice", *files, typed="n\n")
    assert states(sites["alice"]) == {"bob": "pending", "carol": "pending"}
    assert f"dispfl peer confirm {tmp_path / 'alice'} bob carol" in output
    peer("confirm", tmp_path / "alice", "bob", "carol")
    assert states(sites["alice"]) == {"bob": "accepted", "carol": "accepted"}


def test_told_fingerprints_accept_the_sites_that_have_them_and_a_wrong_one_accepts_none(
    sites: dict[str, Site], tmp_path: Path
) -> None:
    files = [tmp_path / f"{name}.invite" for name in ("bob", "carol", "dave")]
    told = []
    for name in ("dave", "bob"):
        told += ["--fingerprint", sites[name].identity.fingerprint]
    with refused(InviteError):
        peer("accept", tmp_path / "alice", *files, *told, "--fingerprint", "12 34")
    assert states(sites["alice"]) == {}
    peer("accept", tmp_path / "alice", *files, *told)
    assert states(sites["alice"]) == {"bob": "accepted", "carol": "pending", "dave": "accepted"}


def test_one_invite_that_is_refused_accepts_none(sites: dict[str, Site], tmp_path: Path) -> None:
    damaged = tmp_path / "carol.invite"
    damaged.write_text("dispfl1-" + "A" * 40)
    with refused(InviteError):
        peer("accept", tmp_path / "alice", tmp_path / "bob.invite", damaged)
    assert states(sites["alice"]) == {}


def test_a_file_that_no_site_accepts_is_refused(sites: dict[str, Site], tmp_path: Path) -> None:
    for content in ('{"other": 1}', "{", "[" * 100_000, "{}" + "[" * 100_000):
        (tmp_path / "file").write_text(content)
        with pytest.raises(DispflError):
            peer("accept", tmp_path / "alice", tmp_path / "file")


# a roster with settings


@pytest.fixture
def roster(tmp_path: Path) -> Path:
    """A roster of ann and ben without members, with settings."""
    (tmp_path / "federation.toml").write_text(tomli_w.dumps(SHARED))
    (tmp_path / "ben.pub").write_text(peer("roster", "key", tmp_path / "ben.key", "--name", "ben"))
    peer(
        *("roster", "init", tmp_path / "hearts.roster", "--federation", "hearts"),
        *("--threshold", "2", "--key", tmp_path / "ann.key", "--admin", tmp_path / "ben.pub"),
        *("--config", tmp_path / "federation.toml"),
    )
    return tmp_path / "hearts.roster"


def create(folder: Path, roster: Path, *words: str | Path, typed: str | None = None) -> str:
    return peer(
        *("init", folder, "--name", folder.name, "--listen", "192.0.2.7:7600"),
        *("--roster", roster, *words),
        typed=typed,
    )


def test_one_file_and_one_fingerprint_make_a_site_with_the_settings_of_the_federation(
    roster: Path, tmp_path: Path
) -> None:
    fingerprint = Roster.load(roster).fingerprint
    own = ("data.path=patients.csv", "method.density=0.4")
    output = create(tmp_path / "alice", roster, "--fingerprint", fingerprint, *own)
    assert "to an administrator. Once the roster is signed:" in output

    site = Site.open(tmp_path / "alice")
    config = site.config()
    assert (site.info.federation, config.rounds, config.seed) == ("hearts", 20, 7)
    assert (config.density, config.least_density) == (0.4, 0.3)
    assert str(config.data.path).endswith("/patients.csv")  # type: ignore[attr-defined]
    assert "Waiting for a roster" in peer("status", tmp_path / "alice")

    create(tmp_path / "bob", roster, "--fingerprint", fingerprint, *own)
    invites = [tmp_path / name / f"{name}.invite" for name in ("alice", "bob")]
    peer("roster", "add", roster, *invites, "--key", tmp_path / "ann.key")
    peer("roster", "sign", roster, "--key", tmp_path / "ben.key")
    accepted = peer("accept", tmp_path / "alice", roster)  # the administrators are known
    assert "Version 1 of the roster is in force: 1 other sites are accepted by it." in accepted
    assert states(site) == {"bob": "accepted"}
    late = create(tmp_path / "carol", roster, "--fingerprint", fingerprint, *own)
    assert "carol" in late
    assert states(Site.open(tmp_path / "carol")) == {"alice": "accepted", "bob": "accepted"}


def test_the_fingerprint_covers_the_settings(roster: Path, tmp_path: Path) -> None:
    told = Roster.load(roster).fingerprint
    content = json.loads(roster.read_text())
    content["roster"]["settings"]["rounds"] = 21
    roster.write_text(json.dumps(content))
    with pytest.raises(RosterError, match=f"not {told}. Nothing was accepted"):
        create(tmp_path / "alice", roster, "--fingerprint", told, "data.path=x.csv")
    with pytest.raises(RosterError, match="then repeat the command with --fingerprint"):
        create(tmp_path / "alice", roster, "data.path=x.csv")
    assert not (tmp_path / "alice").exists()


def test_an_operator_at_a_terminal_is_asked_for_the_fingerprint(
    roster: Path, tmp_path: Path, terminal: None
) -> None:
    with pytest.raises(RosterError, match="Compare it with theirs by phone"):
        create(tmp_path / "alice", roster, "data.path=x.csv", typed="n\n")
    create(tmp_path / "alice", roster, "data.path=x.csv", typed="y\n")
    invite = tmp_path / "alice/alice.invite"
    peer("roster", "add", roster, invite, "--key", tmp_path / "ann.key", typed="n\n", code=1)
    assert Roster.load(roster).signers() == []
    peer("roster", "sign", roster, "--key", tmp_path / "ann.key", typed="y\n")
    assert Roster.load(roster).signers() == ["ann"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", {"path": "/etc/passwd"}),
        ("data", {"test_path": "/etc/passwd"}),
        ("data", {"dir": "/"}),
        ("data", {"hub": "someone/else"}),
        ("data", {"factory": "os:getcwd"}),
        ("model", "antigravity:Net"),
        ("model", {"factory": "antigravity:net"}),
        ("method", {"name": "antigravity:Method"}),
        ("topology", "antigravity:Graph"),
        ("metric", ["accuracy", "antigravity:metric"]),
        ("limits", {"max_body": 1}),
        ("deadlines", {"min": 1}),
        ("privacy", {"epsilon": 1000}),
        ("threads", 64),
        ("device", "cuda"),
        ("validation", 0.9),
        ("listen", "0.0.0.0:1"),
        ("allow_networks", []),
        ("name", "mallory"),
    ],
)
def test_a_roster_sets_nothing_that_is_a_sites_own_and_names_no_code(
    key: str, value: object, roster: Path, tmp_path: Path
) -> None:
    """Neither by an administrator's mistake, nor by a file that somebody has made by hand."""
    (tmp_path / "other.toml").write_text(tomli_w.dumps({**SHARED, key: value}))
    with pytest.raises(ConfigError, match=r"each site's own|names code") as refusal:
        peer(
            *("roster", "init", tmp_path / "other.roster", "--federation", "hearts"),
            *("--threshold", "1", "--key", tmp_path / "ann.key"),
            *("--config", tmp_path / "other.toml"),
        )
    assert str(refusal.value.key).startswith(key)

    content = json.loads(roster.read_text())
    content["roster"]["settings"][key] = value
    roster.write_text(json.dumps(content))
    fingerprint = Roster.load(roster).fingerprint
    with pytest.raises(ConfigError, match=r"each site's own|names code"):
        create(tmp_path / "alice", roster, "--fingerprint", fingerprint, "data.path=x.csv")
    assert not (tmp_path / "alice").exists()


def test_a_mistake_in_the_settings_of_a_roster_is_found_when_it_is_created(
    tmp_path: Path,
) -> None:
    (tmp_path / "other.toml").write_text("rounds = -1")
    with refused(ConfigError, key="rounds"):
        peer(
            *("roster", "init", tmp_path / "other.roster", "--federation", "hearts"),
            *("--threshold", "1", "--key", tmp_path / "ann.key"),
            *("--config", tmp_path / "other.toml"),
        )
    assert not (tmp_path / "ann.key").exists()


def test_a_roster_and_a_config_file_exclude_each_other(roster: Path, tmp_path: Path) -> None:
    fingerprint = Roster.load(roster).fingerprint
    for words in (("--config", tmp_path / "federation.toml"), ("--federation", "banks")):
        with refused(ConfigError, key="roster"):
            create(tmp_path / "alice", roster, "--fingerprint", fingerprint, *words)


def test_a_roster_without_members_needs_no_signature_and_takes_nobody_away(
    roster: Path, tmp_path: Path
) -> None:
    founding = roster.read_text()
    fingerprint = Roster.load(roster).fingerprint
    for name in ("alice", "bob"):
        create(tmp_path / name, roster, "--fingerprint", fingerprint, "data.path=x.csv")
    peer("roster", "add", roster, tmp_path / "bob/bob.invite", "--key", tmp_path / "ann.key")
    peer("roster", "sign", roster, "--key", tmp_path / "ben.key")
    peer("accept", tmp_path / "alice", roster)
    roster.write_text(founding)
    peer("accept", tmp_path / "alice", roster, "--fingerprint", fingerprint)
    assert states(Site.open(tmp_path / "alice")) == {"bob": "accepted"}

    smuggled = json.loads(founding)
    smuggled["roster"]["members"] = [(tmp_path / "bob/bob.invite").read_text().strip()]
    with pytest.raises(RosterError, match="Version 0 of a roster has no members"):
        Roster.read(json.dumps(smuggled))
    smuggled["roster"]["version"] = 1
    with pytest.raises(RosterError, match="is signed by 0 of the 2 administrators"):
        Roster.read(json.dumps(smuggled)).verify()
