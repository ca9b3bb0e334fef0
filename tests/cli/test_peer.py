"""`dispfl peer`, as people type it at two sites."""

import contextlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dispfl.cli.peer import app
from dispfl.errors import ConfigError, DispflError, RunError
from dispfl.peer.address import Address
from dispfl.peer.certificates import readable
from dispfl.peer.identity import Identity
from dispfl.peer.invite import InviteError
from dispfl.peer.records import Record
from dispfl.peer.site import Site
from dispfl.runs.directory import RunDirectory
from dispfl.up import free_ports


def peer(*words: str | Path, typed: str | None = None) -> str:
    """What a command prints; what it refuses is raised here, and printed as a sentence by `dispfl`."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if isinstance(result.exception, DispflError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def alice(tmp_path: Path) -> Path:
    peer("init", tmp_path / "alice", "--name", "alice", "--listen", "127.0.0.1:7600", "--federation", "hospitals")
    return tmp_path / "alice"


@pytest.fixture
def bob(tmp_path: Path) -> Path:
    peer("init", tmp_path / "bob", "--name", "bob", "--listen", "[fd00::1]:7601", "--federation", "hospitals")
    return tmp_path / "bob"


def test_two_sites_are_made_and_accept_each_other(alice: Path, bob: Path) -> None:
    said = peer("accept", alice, peer("invite", bob))
    first, second = readable(Site.open(bob).identity.fingerprint)
    assert "Accepted bob at [fd00::1]:7601" in said
    assert f"    {first}\n    {second}\n" in said
    peer("accept", bob, peer("invite", alice))
    assert Site.open(alice).members.names() == ["bob"]
    assert Site.open(bob).members.names() == ["alice"]


def test_init_says_where_the_site_is_and_what_comes_next(tmp_path: Path) -> None:
    words = ("--name", "alice", "--listen", "0.0.0.0:7600", "--advertise", "alice.example.org:7600")
    said = peer("init", tmp_path / "my site", *words)
    assert "Others reach it at alice.example.org:7600" in said
    assert f"dispfl peer invite '{tmp_path / 'my site'}'" in said
    assert readable(Site.open(tmp_path / "my site").identity.fingerprint)[0] in said


def test_an_invite_is_one_line_that_may_be_pasted_in_pieces_or_piped(alice: Path, bob: Path) -> None:
    invite = peer("invite", bob)
    assert invite.startswith("dispfl1-")
    assert invite.count("\n") == 1
    assert "Accepted bob" in peer("accept", alice, invite[:300], invite[300:])
    assert "Accepted bob" in peer("accept", alice, "-", typed=invite)


def test_an_invite_may_be_a_file(alice: Path, bob: Path, tmp_path: Path) -> None:
    (tmp_path / "bob.invite").write_text(peer("invite", bob))
    assert "Accepted bob" in peer("accept", alice, tmp_path / "bob.invite")
    with pytest.raises(InviteError, match=r"An invite begins with dispfl1-, got 'nowhere\.invi'"):
        peer("accept", alice, "nowhere.invite")


def test_an_invite_from_before_a_rotation_needs_nothing_done(alice: Path, bob: Path) -> None:
    old = peer("invite", bob)
    peer("accept", alice, old)
    peer("rotate", bob)
    peer("accept", alice, peer("invite", bob))
    with pytest.raises(InviteError, match="bob is accepted already, and has changed its key since") as caught:
        peer("accept", alice, old)
    assert "revoke" not in str(caught.value)


def test_a_site_without_members_does_not_train_alone_unless_told_to(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b,y\n" + "1,2,x\n2,1,z\n" * 8)
    data = ("model=mlp", f"data.path={tmp_path / 'table.csv'}", "data.label=y", "rounds=1")
    peer("init", tmp_path / "alice", "--name", "alice", "--listen", f"127.0.0.1:{free_ports(1)[0]}", *data)
    with pytest.raises(
        RunError, match=r"Nobody is accepted yet, so alice would train alone: exchange .*, or say --alone"
    ):
        peer("run", tmp_path / "alice")
    assert not (tmp_path / "alice" / "run").exists()
    peer("run", tmp_path / "alice", "--alone")
    assert status(tmp_path / "alice")["node"]["state"] == "finished"


def test_settings_come_from_a_file_under_words(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text('rounds = 7\nsmallest_density = 0.1\n[method]\nname = "dispfl"\ndensity = 0.4\n')
    words = ("--name", "alice", "--listen", "a:1", "-c", config, "method.density=0.2", "seed=3")
    peer("init", tmp_path / "alice", *words)
    plan = Site.open(tmp_path / "alice").plan()
    assert (plan.rounds, plan.seed, plan.density, plan.least_density) == (7, 3, 0.2, 0.1)


def test_how_long_a_site_waits_is_set_in_a_file_and_by_words(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text("[pace]\nfloor = 60\nfactor = 2\n[limits]\nstall = 5\n")
    peer("init", tmp_path / "alice", "--name", "alice", "--listen", "a:1", "-c", config, "pace.factor=4", "rounds=3")
    plan = Site.open(tmp_path / "alice").plan()
    assert (plan.pace.floor, plan.pace.factor, plan.limits.stall, plan.rounds) == (60, 4, 5, 3)


def test_a_site_trains_on_one_thread_unless_told_otherwise(tmp_path: Path) -> None:
    for name, words in {"alice": [], "bob": ["threads=3"]}.items():
        peer("init", tmp_path / name, "--name", name, "--listen", "a:1", *words)
    assert [Site.open(tmp_path / name).plan().threads for name in ("alice", "bob")] == [1, 3]


def test_data_named_from_here_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peer("init", "alice", "--name", "alice", "--listen", "a:1", "data.path=samples.csv")
    assert tomllib.loads(Path("alice/site.toml").read_text())["data"]["path"] == str(tmp_path / "samples.csv")


def test_a_sparse_graph_may_be_planned_before_anyone_is_there(tmp_path: Path) -> None:
    words = ("--name", "alice", "--listen", "a:1", "topology=random", "topology.degree=20")
    peer("init", tmp_path / "alice", *words)
    content = tomllib.loads((tmp_path / "alice" / "site.toml").read_text())
    assert (content["topology"]["name"], content["topology"]["degree"]) == ("random", 20)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["peers=8"], "peers is for simulated runs: a site is one peer with its own data"),
        (["partition.alpha=0.3"], "partition is for simulated runs"),
        (["method=ditto"], "method ditto needs a server"),
        (["method.densty=0.3"], r"Unknown key method\.densty\. Did you mean method\.density\?"),
        (["--smallest-density", "0.9"], r"method\.density is 0\.5, below smallest_density \(0\.9\)"),
        (["pace.floor=0"], r"pace\.floor must be above 0, got 0"),
        (["pace=3"], r"pace is a table, got 'pace=3'\. Say which of its settings is meant: pace\.KEY=VALUE"),
        (["pace.floor=soon"], r"pace\.floor must be a number, got 'soon'"),
        (["limits.flor=1"], r"Unknown key limits\.flor"),
        (["-c", "nowhere.toml"], r"nowhere\.toml does not exist"),
        (["--listen", "0.0.0.0:7600"], "--advertise HOST:PORT"),
    ],
)
def test_a_site_that_cannot_be_is_refused_and_nothing_is_left(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        peer("init", tmp_path / "alice", "--name", "alice", "--listen", "a:1", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_site_is_not_made_twice(alice: Path) -> None:
    with pytest.raises(RunError, match="exists already and is not empty"):
        peer("init", alice, "--name", "alice", "--listen", "a:1")


def test_a_damaged_invite_is_refused(alice: Path, bob: Path) -> None:
    invite = peer("invite", bob)
    damaged = invite[:60] + ("A" if invite[60] != "A" else "B") + invite[61:]
    with pytest.raises(InviteError, match=r"The invite is damaged: its checksum is wrong\. Copy it again"):
        peer("accept", alice, damaged)


def test_a_revoked_member_is_shown_as_such_until_it_is_accepted_again(alice: Path, bob: Path) -> None:
    invite = peer("invite", bob)
    peer("accept", alice, invite)
    assert "Revoked bob" in peer("revoke", alice, "bob")
    assert [member["state"] for member in status(alice)["members"]] == ["revoked"]
    peer("accept", alice, invite)
    assert [member["state"] for member in status(alice)["members"]] == ["accepted"]


def test_a_rotated_site_prints_its_new_fingerprint(alice: Path) -> None:
    old = Site.open(alice).identity.fingerprint
    said = peer("rotate", alice)
    new = Site.open(alice).identity.fingerprint
    assert new != old
    assert readable(new)[1] in said


# status


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(peer("status", folder, "--json"))
    return found


def test_the_status_of_a_new_site_says_what_is_missing(alice: Path) -> None:
    said = peer("status", alice)
    assert said.startswith("alice of the federation hospitals, reached at 127.0.0.1:7600\n")
    assert f"The node has not run yet: dispfl peer run {alice}\n" in said
    assert f"Nobody is accepted yet: dispfl peer accept {alice} INVITE\n" in said


def test_the_status_shows_members_and_those_that_are_merely_known(alice: Path, bob: Path) -> None:
    peer("accept", alice, peer("invite", bob))
    carol = Identity.make("carol")
    record = Record.sign(carol, "hospitals", Address("carol.example.org", 7602), 0.5, 0, 1)
    Site.open(alice).members.merge([record.to_json()])
    found = status(alice)
    assert [(member["name"], member["address"]) for member in found["members"]] == [("bob", "[fd00::1]:7601")]
    assert [(known["name"], known["fingerprint"]) for known in found["known"]] == [("carol", carol.fingerprint)]
    said = peer("status", alice)
    assert "[fd00::1]:7601" in said
    assert readable(Site.open(bob).identity.fingerprint)[0] in said
    assert "Known to others, not accepted here" in said
    assert readable(carol.fingerprint)[1] in said


def test_the_status_shows_what_the_node_wrote(alice: Path, bob: Path) -> None:
    peer("accept", alice, peer("invite", bob))
    now = time.time()
    heard = {"round": 5, "last_seen": now - 575, "received_bytes": 1_234_000, "sent_bytes": 0}
    node = {
        "round": 5,
        "rounds": 16,
        "state": "asking",
        "updated": now - 7200,
        "deadline_seconds": 30.0,
        "peers": {"bob": {**heard, "answered": 4, "missed": 1}, "carol": {"round": -1}},
        "refused": {"unknown": {"not-a-member": 3}, "bob": {"stale": 2}},
    }
    (alice / "run").mkdir()
    (alice / "run" / "status.json").write_text(json.dumps(node))
    with contextlib.closing(RunDirectory(alice / "run")):  # its lock is held as long as the node runs
        assert (status(alice)["node"], status(alice)["running"]) == (node, True)
        lines = [" ".join(line.split()) for line in peer("status", alice).splitlines()]
    assert "Round 5 of 16, asking; others have 30 s to answer. Written 2 hours ago." in lines
    assert "bob 5 10 min ago 1.23 MB 0.00 MB 4 1" in lines
    assert "carol - - 0.00 MB 0.00 MB 0 0" in lines
    assert "bob stale 2" in lines
    assert "unknown not-a-member 3" in lines


@pytest.mark.parametrize(("state", "shown"), [("learning", "not running"), ("stopped", "stopped")])
def test_the_status_of_a_node_whose_process_is_gone_says_so(alice: Path, state: str, shown: str) -> None:
    """However it ended, and however lately: nobody holds the lock."""
    (alice / "run").mkdir()
    (alice / "run" / ".lock").touch()
    node = {"round": 5, "rounds": 16, "state": state, "updated": time.time(), "deadline_seconds": 30.0}
    (alice / "run" / "status.json").write_text(json.dumps(node))
    said = peer("status", alice)
    assert f"Round 5 of 16, {shown}. Written 0 s ago. To go on: dispfl peer run {alice}\n" in said


def test_looking_after_a_site_does_not_load_torch(alice: Path) -> None:
    code = (
        "import sys\n"
        "from dispfl.cli.peer import app\n"
        "for command in ('invite', 'status', 'rotate'):\n"
        "    app([command, sys.argv[1]], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(alice)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.splitlines()[-1] == "False"
