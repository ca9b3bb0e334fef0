"""A site from Python: two sites over real sockets, and a node in a process of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_program import ForkedProgram
from messages import refused
from tables import small_table

from dispfl import Peer
from dispfl.errors import ConfigError, RunError
from dispfl.export.formats import load_model
from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.invite import InviteError

PATIENCE = 120.0
"""Seconds after which a wait fails; generous for a loaded machine."""
MakePeer = Callable[..., Peer]


@pytest.fixture
def make_peer(tmp_path: Path) -> MakePeer:
    """`make_peer("alice", rounds=2)`: create a site with its own table."""

    def make(name: str, **settings: Any) -> Peer:
        (tmp_path / f"{name}.csv").write_text(small_table(8))
        data = {"name": "custom", "path": str(tmp_path / f"{name}.csv"), "label": "y"}
        config = {"rounds": 2, "model": "mlp", "data": data, **settings}
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        return Peer.create(tmp_path / name, name=name, listen=listen, config=config)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ForkedProgram]]:
    """`start(peer)`: run a site's node in a process of its own."""
    started: list[ForkedProgram] = []

    def start(peer: Peer, *options: str) -> ForkedProgram:
        words = ["peer", "run", str(peer.folder), *options]
        process = ForkedProgram(words, tmp_path, tmp_path / "log.txt")
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_sites_train_together_and_one_exports_its_model(
    make_peer: MakePeer, start: Callable[..., ForkedProgram], tmp_path: Path
) -> None:
    alice, bob = make_peer("alice"), make_peer("bob")
    assert alice.accept(bob.invite()).state == "pending"
    assert alice.confirm("bob").state == "accepted"
    assert bob.accept(alice.invite(), alice.fingerprint).state == "accepted"
    assert (alice.status().state, alice.status().running) == ("not started", False)

    process = start(bob)
    runs = []
    node = threading.Thread(target=lambda: runs.append(alice.run()))  # not the main thread
    node.start()
    node.join(PATIENCE)
    process.wait(PATIENCE)
    [run] = runs

    assert len(run.metrics) == 2
    status = alice.status()
    assert (status.state, status.round) == ("finished", 2)
    assert status.score == run.accuracy[0]
    assert [member.name for member in status.members] == ["bob"]
    assert status.node is not None
    assert status.node["peers"]["bob"]["answered"] == 2

    saved = alice.export(tmp_path / "model.safetensors")
    assert saved.size == (tmp_path / "model.safetensors").stat().st_size
    assert load_model(tmp_path / "model.safetensors").card.peer == "alice"


def test_stop_ends_a_node_in_another_process_and_it_resumes(
    make_peer: MakePeer, start: Callable[..., ForkedProgram]
) -> None:
    alice = make_peer("alice", rounds=100_000)
    process = start(alice, "--alone")
    wait_until(lambda: alice.status().round >= 2)
    assert alice.status().running

    assert alice.stop(timeout=PATIENCE)

    assert process.wait(PATIENCE) == 0
    stopped = alice.status()
    assert (stopped.state, stopped.running) == ("stopped", False)
    assert not alice.stop()  # it does not run

    start(alice, "--alone")
    wait_until(lambda: alice.status().running and alice.status().round > stopped.round)
    assert alice.stop(timeout=PATIENCE)


def test_a_request_to_an_earlier_process_does_not_stop_the_next_one(make_peer: MakePeer) -> None:
    alice = make_peer("alice", rounds=3)
    alice.site.run_folder.mkdir()
    alice.site.request_stop()
    assert len(alice.run(alone=True).metrics) == 3
    assert not alice.site.is_stop_requested()


def test_stop_gives_up_after_its_timeout(
    make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = make_peer("alice")
    alice.site.run_folder.mkdir()
    monkeypatch.setattr(type(alice.site), "is_running", lambda site: True)
    with refused(RunError):
        alice.stop(timeout=0.2)


def test_a_site_without_members_does_not_start_unless_it_may_train_alone(
    make_peer: MakePeer,
) -> None:
    with refused(RunError):
        make_peer("alice").run()


def test_a_site_whose_members_are_all_pending_names_them_when_it_does_not_start(
    make_peer: MakePeer,
) -> None:
    alice = make_peer("alice")
    alice.accept(make_peer("bob").invite())
    with refused(RunError):
        alice.run()


def test_settings_come_from_a_file_and_overrides_take_precedence(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text("rounds = 7\nseed = 3\n")
    listen = "a.example.org:7600"
    alice = Peer.create(
        tmp_path / "alice", name="alice", listen=listen, config=file, overrides=["seed=4"]
    )
    settings = Peer.open(str(tmp_path / "alice")).site.config()
    assert (settings.rounds, settings.seed) == (7, 4)
    assert "Peer('alice', federation='dispfl', in " in repr(alice)
    with refused(ConfigError, key="peers"):
        Peer.create(tmp_path / "bob", name="bob", listen=listen, config={"peers": 8})
    with refused(RunError):
        Peer.open(tmp_path / "carol")


def test_an_invite_from_outside_the_allowed_networks_is_refused(
    make_peer: MakePeer,
) -> None:
    alice, bob = make_peer("alice"), make_peer("bob")
    site_toml = alice.folder / "site.toml"
    text = site_toml.read_text()
    site_toml.write_text(text.replace("allow_networks = []", 'allow_networks = ["10.0.0.0/8"]'))
    with refused(InviteError):
        Peer.open(alice.folder).accept(bob.invite())
