"""`dispfl peer`, as typed at two sites."""

import contextlib
import getpass
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tables import small_table
from typer.testing import CliRunner

from dispfl.cli.peer import app
from dispfl.errors import ConfigError, DispflError, RunError
from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.identity import Identity, readable_fingerprint
from dispfl.peer.membership.invite import InviteError
from dispfl.peer.site import Site
from dispfl.runs.directory import RunDirectory


def peer(*words: str | Path, typed: str | None = None) -> str:
    """Run a command and return its output; errors are raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if isinstance(result.exception, DispflError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def alice(tmp_path: Path) -> Path:
    peer(
        "init",
        tmp_path / "alice",
        "--name",
        "alice",
        "--listen",
        "127.0.0.1:7600",
        "--federation",
        "hospitals",
    )
    return tmp_path / "alice"


@pytest.fixture
def bob(tmp_path: Path) -> Path:
    peer(
        "init",
        tmp_path / "bob",
        "--name",
        "bob",
        "--listen",
        "[fd00::1]:7601",
        "--federation",
        "hospitals",
    )
    return tmp_path / "bob"


def test_two_sites_are_created_and_accept_each_other(alice: Path, bob: Path) -> None:
    output = peer("accept", alice, peer("invite", bob))
    first, second = readable_fingerprint(Site.open(bob).identity.fingerprint)
    assert "bob at [fd00::1]:7601 is pending" in output
    assert f"    {first}\n    {second}\n" in output
    assert output.endswith(f"dispfl peer confirm {alice} bob\n")
    assert Site.open(alice).members.names() == []
    assert f"then: dispfl peer confirm {alice} bob" in peer("status", alice)
    assert peer("confirm", alice, "bob") == "Accepted bob at [fd00::1]:7601.\n"
    fingerprint = Site.open(alice).identity.fingerprint
    assert (
        peer("accept", bob, peer("invite", alice), "--fingerprint", fingerprint)
        == "Accepted alice at 127.0.0.1:7600.\n"
    )
    assert Site.open(alice).members.names() == ["bob"]
    assert Site.open(bob).members.names() == ["alice"]


def test_an_invite_with_another_fingerprint_is_refused(alice: Path, bob: Path) -> None:
    with pytest.raises(
        InviteError, match=r"The fingerprint of bob's invite is .*, not 1234\. Nothing was accepted"
    ):
        peer("accept", alice, peer("invite", bob), "--fingerprint", "1234")
    assert status(alice)["members"] == []


def test_an_address_outside_the_allowed_networks_is_refused_by_name(alice: Path, bob: Path) -> None:
    config = alice / "site.toml"
    config.write_text(
        config.read_text().replace("allow_networks = []", 'allow_networks = ["10.0.0.0/8"]')
    )
    with pytest.raises(
        InviteError, match=r"bob is at \[fd00::1\]:7601, which is not in allow_networks"
    ):
        peer("accept", alice, peer("invite", bob))
    config.write_text(config.read_text().replace("10.0.0.0/8", "10.0.0.1/8", 1))
    with pytest.raises(
        ConfigError, match=r"allow_networks has '10\.0\.0\.1/8': .* for example 10\.0\.0\.0/8"
    ):
        peer("status", alice)


def test_init_prints_the_address_and_the_next_step(tmp_path: Path) -> None:
    words = ("--name", "alice", "--listen", "0.0.0.0:7600", "--advertise", "alice.example.org:7600")
    output = peer("init", tmp_path / "my site", *words)
    assert "Others reach it at alice.example.org:7600" in output
    assert f"send '{tmp_path / 'my site'}/alice.invite' to every other site" in output
    assert f"dispfl peer run '{tmp_path / 'my site'}'" in output
    assert (tmp_path / "my site/alice.invite").read_text() == peer("invite", tmp_path / "my site")
    assert readable_fingerprint(Site.open(tmp_path / "my site").identity.fingerprint)[0] in output


def test_init_with_a_relay_says_that_its_owner_needs_the_invite(tmp_path: Path) -> None:
    output = peer("init", tmp_path / "a", "--name", "a", "--relay", "wss://relay.example.org:443")
    receivers = "every other site and the owner of each relay"
    assert f"send {tmp_path}/a/a.invite to {receivers}, and accept theirs:" in output


def test_an_invite_may_be_pasted_with_line_breaks_or_piped(alice: Path, bob: Path) -> None:
    invite = peer("invite", bob)
    assert invite.startswith("dispfl1-")
    assert invite.count("\n") == 1
    assert "bob at" in peer("accept", alice, invite[:300], invite[300:])
    assert "bob at" in peer("accept", alice, "-", typed=invite)


def test_an_invite_may_be_a_file(alice: Path, bob: Path, tmp_path: Path) -> None:
    (tmp_path / "bob.invite").write_text(peer("invite", bob))
    assert "bob at" in peer("accept", alice, tmp_path / "bob.invite")
    missing = (
        r"'nowhere\.invite' is neither an invite, which begins with dispfl1-, nor a file: No such"
        r" file"
    )
    with pytest.raises(ConfigError, match=missing):
        peer("accept", alice, "nowhere.invite")
    with pytest.raises(ConfigError, match=r"'carol\.invite' is neither an invite"):
        peer("accept", alice, tmp_path / "bob.invite", "carol.invite")


def test_an_invite_from_before_a_rotation_is_reported(alice: Path, bob: Path) -> None:
    old = peer("invite", bob)
    peer("accept", alice, old)
    peer("confirm", alice, "bob")
    peer("rotate", bob)
    peer("accept", alice, peer("invite", bob))
    with pytest.raises(
        InviteError, match=r"bob has replaced its key since .* Nothing needs to be done"
    ) as caught:
        peer("accept", alice, old)
    assert "revoke" not in str(caught.value)


def test_a_site_without_members_only_trains_with_alone(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(small_table(8))
    data = ("model=mlp", f"data.path={tmp_path / 'table.csv'}", "data.label=y", "rounds=1")
    peer(
        "init",
        tmp_path / "alice",
        "--name",
        "alice",
        "--listen",
        f"127.0.0.1:{free_ports(1)[0]}",
        *data,
    )
    with pytest.raises(
        RunError,
        match=(
            r"alice has accepted no other site and would train alone: exchange .*, or pass --alone"
        ),
    ):
        peer("run", tmp_path / "alice")
    assert not (tmp_path / "alice" / "run").exists()
    peer("run", tmp_path / "alice", "--alone")
    assert status(tmp_path / "alice")["node"]["state"] == "finished"


def test_overrides_take_precedence_over_the_config_file(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(
        'rounds = 7\nsmallest_density = 0.1\n[method]\nname = "dispfl"\ndensity = 0.4\n'
    )
    words = ("--name", "alice", "--listen", "a:1", "-c", config, "method.density=0.2", "seed=3")
    peer("init", tmp_path / "alice", *words)
    plan = Site.open(tmp_path / "alice").config()
    assert (plan.rounds, plan.seed, plan.density, plan.least_density) == (7, 3, 0.2, 0.1)


def test_deadlines_and_limits_are_set_in_the_config_file_and_by_overrides(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text("[deadlines]\nmin = 60\nfactor = 2\n[limits]\nstall_timeout = 5\n")
    peer(
        "init",
        tmp_path / "alice",
        "--name",
        "alice",
        "--listen",
        "a:1",
        "-c",
        config,
        "deadlines.factor=4",
        "rounds=3",
    )
    plan = Site.open(tmp_path / "alice").config()
    assert (plan.deadlines.min, plan.deadlines.factor, plan.limits.stall_timeout, plan.rounds) == (
        60,
        4,
        5,
        3,
    )


def test_a_site_trains_on_one_thread_by_default(tmp_path: Path) -> None:
    for name, words in {"alice": [], "bob": ["threads=3"]}.items():
        peer("init", tmp_path / name, "--name", name, "--listen", "a:1", *words)
    assert [Site.open(tmp_path / name).config().threads for name in ("alice", "bob")] == [1, 3]


def test_data_paths_are_relative_to_the_site_next_to_it_and_absolute_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site is in a folder behind a link, which `..` does not lead back through."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "home")
    places = {
        "alice": ("link/samples.csv", "../samples.csv"),
        "bob": ("link/bob/samples.csv", "samples.csv"),
        "carol": ("samples.csv", str(tmp_path / "home" / "samples.csv")),
    }
    for name, (path, written) in places.items():
        peer("init", f"link/{name}", "--name", name, "--listen", "a:1", f"data.path={path}")
        settings = tomllib.loads(Path("link", name, "site.toml").read_text())
        assert settings["data"]["path"] == written


def test_a_folder_of_a_hub_data_set_is_found_from_the_site_and_a_name_on_the_hub_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("patients").mkdir()
    for name, given in {"alice": "patients", "bob": "org/patients"}.items():
        peer("init", name, "--name", name, "--listen", "a:1", f"data.hub={given}")
    hubs = [
        tomllib.loads(Path(name, "site.toml").read_text())["data"]["hub"]
        for name in ("alice", "bob")
    ]
    assert hubs == ["../patients", "org/patients"]


def test_data_paths_stay_relative_to_the_folder_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("data.dir=store", "data.path=a.csv", "data.test_path=b.csv")
    peer("init", "alice", "--name", "alice", "--listen", "a:1", *given)
    data = tomllib.loads(Path("alice/site.toml").read_text())["data"]
    assert [data[key] for key in ("dir", "path", "test_path")] == [
        "../store",
        "a.csv",
        "b.csv",
    ]


def test_a_random_topology_may_be_configured_before_there_are_members(tmp_path: Path) -> None:
    words = ("--name", "alice", "--listen", "a:1", "topology=random", "topology.degree=20")
    peer("init", tmp_path / "alice", *words)
    content = tomllib.loads((tmp_path / "alice" / "site.toml").read_text())
    assert (content["topology"]["name"], content["topology"]["degree"]) == ("random", 20)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["peers=8"], "peers is for simulated runs: a site is one peer with its own data"),
        (
            ["unseen_peers=2"],
            "unseen_peers is for simulated runs: a site is one peer with its own data",
        ),
        (["partition.alpha=0.3"], "partition is for simulated runs"),
        (["average_buffers=true"], "average_buffers is for simulated runs"),
        (
            ["allow_networks=10.0.0.0/8"],
            r"allow_networks is not a training setting: add it to site\.toml of the new site",
        ),
        (["listen=a:2"], "listen is not a training setting: pass --listen"),
        (["method=ditto"], "method ditto needs a server"),
        (["method.densty=0.3"], r"Unknown key method\.densty\. Did you mean method\.density\?"),
        (
            ["--smallest-density", "0.9"],
            r"method\.density is 0\.5, below smallest_density \(0\.9\)",
        ),
        (["deadlines.min=0"], r"deadlines\.min must be above 0, got 0"),
        (
            ["deadlines=3"],
            r"deadlines must be a table, got 3\.",
        ),
        (["deadlines.min=soon"], r"deadlines\.min must be a number above 0, got 'soon'"),
        (["limits.flor=1"], r"Unknown key limits\.flor"),
        (["-c", "nowhere.toml"], r"nowhere\.toml does not exist"),
        (["--listen", "0.0.0.0:7600"], "--advertise HOST:PORT"),
    ],
)
def test_invalid_settings_are_refused_and_no_folder_is_left(
    tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        peer("init", tmp_path / "alice", "--name", "alice", "--listen", "a:1", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_site_is_not_created_twice(alice: Path) -> None:
    with pytest.raises(RunError, match="exists and is not empty"):
        peer("init", alice, "--name", "alice", "--listen", "a:1")


def test_a_damaged_invite_is_refused(alice: Path, bob: Path) -> None:
    invite = peer("invite", bob)
    damaged = invite[:60] + ("A" if invite[60] != "A" else "B") + invite[61:]
    with pytest.raises(
        InviteError,
        match=r"The invite is damaged: its checksum is wrong\. Copy the complete output",
    ):
        peer("accept", alice, damaged)


def test_a_revoked_member_is_shown_as_such_until_it_is_accepted_again(
    alice: Path, bob: Path
) -> None:
    invite = peer("invite", bob)
    peer("accept", alice, invite)
    assert "Revoked bob" in peer("revoke", alice, "bob")
    assert [member["state"] for member in status(alice)["members"]] == ["revoked"]
    peer("accept", alice, invite)
    peer("confirm", alice, "bob")
    assert [member["state"] for member in status(alice)["members"]] == ["accepted"]


def test_a_rotated_site_prints_its_new_fingerprint(alice: Path) -> None:
    old = Site.open(alice).identity.fingerprint
    output = peer("rotate", alice)
    new = Site.open(alice).identity.fingerprint
    assert new != old
    assert readable_fingerprint(new)[1] in output


def test_the_audit_log_says_who_did_what_when_with_which_fingerprint(
    alice: Path, bob: Path
) -> None:
    prints = [Site.open(bob).identity.fingerprint]
    peer("accept", alice, peer("invite", bob))
    peer("confirm", alice, "bob")
    peer("rotate", bob)
    prints.append(Site.open(bob).identity.fingerprint)
    peer("accept", alice, peer("invite", bob))
    peer("revoke", alice, "bob")
    entries = [json.loads(line) for line in peer("log", alice, "--json").splitlines()]
    assert [(entry["event"], entry["fingerprint"]) for entry in entries] == [
        ("pending", prints[0]),
        ("confirmed", prints[0]),
        ("rotated", prints[1]),
        ("revoked", prints[1]),
    ]
    assert {entry["by"] for entry in entries} == {f"user {getpass.getuser()}"}
    assert all(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", entry["time"]) for entry in entries
    )
    assert [json.loads(line)["event"] for line in peer("log", bob, "--json").splitlines()] == [
        "rotated"
    ]
    lines = peer("log", alice).splitlines()
    assert len(lines) == 4
    assert prints[1][:16] in lines[2]


# status


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(peer("status", folder, "--json"))
    return found


def test_the_status_of_a_new_site_names_the_next_steps(alice: Path) -> None:
    output = peer("status", alice)
    assert output.startswith("alice of the federation hospitals, reached at 127.0.0.1:7600\n")
    assert f"The node has not run yet: dispfl peer run {alice}\n" in output
    assert f"No other site is accepted yet: dispfl peer accept {alice} INVITE\n" in output


def test_the_status_shows_members_and_members_of_other_sites(alice: Path, bob: Path) -> None:
    peer("accept", alice, peer("invite", bob))
    carol = Identity.make("carol")
    known = {"name": "carol", "address": "carol.example.org:7602", "fingerprint": carol.fingerprint}
    (alice / "run").mkdir()
    (alice / "run" / "status.json").write_text(json.dumps({"known": [known]}))
    found = status(alice)
    assert [(member["name"], member["address"]) for member in found["members"]] == [
        ("bob", "[fd00::1]:7601")
    ]
    assert [(known["name"], known["fingerprint"]) for known in found["known"]] == [
        ("carol", carol.fingerprint)
    ]
    output = peer("status", alice)
    assert "[fd00::1]:7601" in output
    assert readable_fingerprint(Site.open(bob).identity.fingerprint)[0] in output
    assert "Members of other sites, not accepted here" in output
    assert readable_fingerprint(carol.fingerprint)[1] in output


def test_the_status_shows_the_state_of_the_node(alice: Path, bob: Path) -> None:
    peer("accept", alice, peer("invite", bob))
    now = time.time()
    received = {"round": 5, "last_seen": now - 575, "received_bytes": 1_234_000, "sent_bytes": 0}
    node = {
        "round": 5,
        "rounds": 16,
        "state": "fetching",
        "updated": now - 7200,
        "deadline_seconds": 30.0,
        "peers": {"bob": {**received, "answered": 4, "missed": 1}, "carol": {"round": -1}},
        "refused": {"unknown": {"not-a-member": 3}, "bob": {"stale": 2}},
    }
    (alice / "run").mkdir()
    (alice / "run" / "status.json").write_text(json.dumps(node))
    with contextlib.closing(RunDirectory(alice / "run")):  # locked, as by a running node
        assert (status(alice)["node"], status(alice)["running"]) == (node, True)
        lines = [" ".join(line.split()) for line in peer("status", alice).splitlines()]
    assert "Round 5 of 16, fetching; deadline 30 s. Updated 2 hours ago." in lines
    assert "bob 5 10 min ago 1.23 MB 0.00 MB 4 1 -" in lines
    assert "carol - - 0.00 MB 0.00 MB 0 0 -" in lines
    assert "bob stale 2" in lines
    assert "unknown not-a-member 3" in lines


def test_the_status_shows_how_members_and_this_site_are_reached(alice: Path, bob: Path) -> None:
    peer("accept", alice, peer("invite", bob))
    relay = "wss://relay.example.org:443"
    node = {
        "peers": {"bob": {"route": relay}, "carol": {"route": "direct"}, "dave": {"route": None}},
        "relays": {relay: None, "wss://lost.example.org:443": "no answer in time"},
    }
    (alice / "run").mkdir()
    (alice / "run" / "status.json").write_text(json.dumps(node))
    with contextlib.closing(RunDirectory(alice / "run")):
        lines = [" ".join(line.split()) for line in peer("status", alice).splitlines()]
    assert f"Relay {relay}: others reach this site by it." in lines
    assert "Relay wss://lost.example.org:443: no answer in time." in lines
    assert f"bob - - 0.00 MB 0.00 MB 0 0 - by {relay}" in lines
    assert "carol - - 0.00 MB 0.00 MB 0 0 - direct" in lines
    assert "dave - - 0.00 MB 0.00 MB 0 0 - -" in lines


@pytest.mark.parametrize(("state", "shown"), [("training", "not running"), ("stopped", "stopped")])
def test_the_status_shows_that_a_node_is_not_running(alice: Path, state: str, shown: str) -> None:
    """The lock is free, whatever state the status file has."""
    (alice / "run").mkdir()
    (alice / "run" / ".lock").touch()
    node = {
        "round": 5,
        "rounds": 16,
        "state": state,
        "updated": time.time(),
        "deadline_seconds": 30.0,
    }
    (alice / "run" / "status.json").write_text(json.dumps(node))
    output = peer("status", alice)
    assert (
        f"Round 5 of 16, {shown}. Updated 0 s ago. Resume with: dispfl peer run {alice}\n" in output
    )


def test_site_commands_do_not_import_torch(alice: Path) -> None:
    code = (
        "import sys\n"
        "from dispfl.cli.peer import app\n"
        "for command in ('invite', 'status', 'rotate'):\n"
        "    app([command, sys.argv[1]], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(alice)]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert printed.splitlines()[-1] == "False"
