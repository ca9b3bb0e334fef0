"""`dispfl peer roster`, as two of three administrators and a site type it."""

import json
from pathlib import Path

import pytest
from messages import refused
from typer.testing import CliRunner

from dispfl.cli.peer import app
from dispfl.errors import ConfigError, DispflError
from dispfl.peer.membership.identity import IdentityError, readable_fingerprint
from dispfl.peer.membership.roster import RosterError
from dispfl.peer.site import Site


def peer(*words: str | Path, code: int = 0) -> str:
    """Run a command and return its output; errors are raised."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, DispflError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three sites and their invites, three administrators' keys, and an empty roster."""
    for number, name in enumerate(("alice", "bob", "carol")):
        peer(
            "init",
            tmp_path / name,
            "--name",
            name,
            "--listen",
            f"127.0.0.1:{7600 + number}",
            "--federation",
            "hearts",
        )
        (tmp_path / f"{name}.invite").write_text(peer("invite", tmp_path / name))
    for name in ("ann", "ben", "cat"):
        (tmp_path / f"{name}.pub").write_text(
            peer("roster", "key", tmp_path / f"{name}.key", "--name", name)
        )
    admins = [
        word
        for name in ("ann", "ben", "cat")
        for word in ("--admin", str(tmp_path / f"{name}.pub"))
    ]
    peer(
        "roster",
        "init",
        tmp_path / "hearts.roster",
        "--federation",
        "hearts",
        "--threshold",
        "2",
        *admins,
    )
    return tmp_path


def sign(folder: Path, *names: str) -> str:
    return [
        peer("roster", "sign", folder / "hearts.roster", "--key", folder / f"{name}.key")
        for name in names
    ][-1]


def test_a_site_accepts_a_roster_once_and_removal_revokes(folder: Path) -> None:
    roster, alice = folder / "hearts.roster", folder / "alice"
    added = peer(
        "roster", "add", roster, *(folder / f"{name}.invite" for name in ("alice", "bob", "carol"))
    )
    assert (
        "Version 1 of the roster has 3 members. Not signed yet; 2 more of the 3 administrators must"
        " sign it." in added
    )
    assert readable_fingerprint(Site.open(folder / "bob").identity.fingerprint)[0] in added
    assert "Signed by ann; 1 more" in sign(folder, "ann")
    with refused(RosterError):
        peer("accept", alice, roster)
    assert "Signed by ann, ben; it is complete" in sign(folder, "ben")
    shown = json.loads(peer("roster", "show", roster, "--json"))
    assert (
        shown["version"],
        shown["signed_by"],
        [member["name"] for member in shown["members"]],
    ) == (
        1,
        ["ann", "ben"],
        ["alice", "bob", "carol"],
    )
    with pytest.raises(
        RosterError,
        match=f"administrators is {shown['fingerprint']}. Compare it with theirs by phone",
    ):
        peer("accept", alice, roster)
    accepted = peer(
        "accept",
        alice,
        roster,
        "--fingerprint",
        " ".join(readable_fingerprint(shown["fingerprint"])),
    )
    assert accepted == "Version 1 of the roster is in force: 2 other sites are accepted by it.\n"
    assert "carol  accepted by roster" in peer("status", alice)
    assert "Version 2 of the roster has 2 members. Not signed yet" in peer(
        "roster", "remove", roster, "carol"
    )
    sign(folder, "ben", "cat")
    peer("accept", alice, roster)  # the administrators are known
    assert "carol  revoked by roster" in peer("status", alice)
    events = [json.loads(line)["event"] for line in peer("log", alice, "--json").splitlines()]
    assert events == ["accepted", "accepted", "roster", "revoked", "roster"]


def test_a_fork_is_refused_and_shown(folder: Path) -> None:
    roster, alice = folder / "hearts.roster", folder / "alice"
    peer("roster", "add", roster, folder / "alice.invite", folder / "bob.invite")
    draft = roster.read_text()
    sign(folder, "ann", "ben")
    fingerprint = json.loads(peer("roster", "show", roster, "--json"))["fingerprint"]
    peer("accept", alice, roster, "--fingerprint", fingerprint)
    roster.write_text(draft)
    peer("roster", "add", roster, folder / "carol.invite")
    sign(folder, "ann", "cat")
    assert "Refused: version 1 does not succeed the roster that is in force" in peer(
        "accept", alice, roster, code=1
    )
    assert "FORK: another roster with version 1 was signed" in peer("status", alice)
    assert Site.open(alice).members.names() == ["bob"]


def test_a_site_that_is_not_on_the_roster_is_told(folder: Path) -> None:
    roster = folder / "hearts.roster"
    peer("roster", "add", roster, folder / "bob.invite")
    sign(folder, "ann", "ben")
    fingerprint = json.loads(peer("roster", "show", roster, "--json"))["fingerprint"]
    output = peer("accept", folder / "alice", roster, "--fingerprint", fingerprint)
    assert "This site, alice, is not on it: send an administrator its invite." in output
    assert "bob at 127.0.0.1:7601" in peer("roster", "show", roster)


def test_mistakes_of_administrators_have_a_sentence(folder: Path, tmp_path: Path) -> None:
    roster, pub = folder / "hearts.roster", str(folder / "ann.pub")
    with refused(RosterError):
        peer("roster", "init", roster, "--federation", "hearts", "--threshold", "1", "--admin", pub)
    with refused(ConfigError, key="--threshold"):
        peer(
            "roster",
            "init",
            tmp_path / "new",
            "--federation",
            "hearts",
            "--threshold",
            "2",
            "--admin",
            pub,
        )
    with refused(ConfigError):
        peer(
            "roster",
            "init",
            tmp_path / "new",
            "--federation",
            "h",
            "--threshold",
            "1",
            "--admin",
            pub,
            "--admin",
            pub,
        )
    for word, sentence in {
        "nobody": (
            r"'nobody' is neither an administrator's public key, NAME:KEY, nor a file: No such file"
            r" or directory"
        ),
        "ann:AAAA": r"An administrator's public key is NAME:KEY, .* got 'ann:AAAA'",
    }.items():
        with pytest.raises(DispflError, match=sentence):
            peer(
                "roster",
                "init",
                tmp_path / "new",
                "--federation",
                "hearts",
                "--threshold",
                "1",
                "--admin",
                word,
            )
    with refused(ConfigError):
        peer("roster", "add", roster, "eve.invite")
    with refused(RosterError):
        peer("roster", "key", folder / "ann.key", "--name", "ann")
    with refused(RosterError):
        peer("roster", "sign", roster, "--key", pub)
    with refused(RosterError):
        peer("roster", "show", tmp_path / "nowhere")
    assert (folder / "ann.key").stat().st_mode & 0o777 == 0o600


def test_an_administrators_key_that_others_can_read_signs_nothing(folder: Path) -> None:
    peer("roster", "add", folder / "hearts.roster", folder / "bob.invite")
    (folder / "ann.key").chmod(0o644)
    with refused(IdentityError):
        sign(folder, "ann")
    assert "Not signed yet" in peer("roster", "show", folder / "hearts.roster")
