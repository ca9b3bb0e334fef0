"""A site continues from its backup elsewhere, and nothing else comes out of the file."""

import contextlib
import io
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tables import small_table

from dispfl import Peer
from dispfl.errors import RunError
from dispfl.peer.backup import is_backed_up
from dispfl.peer.local_federation import free_ports
from dispfl.peer.state.store import PrivateRounds, rounds_of

PATIENCE = 120.0
MakePeer = Callable[..., Peer]


@pytest.fixture
def make_peer(tmp_path: Path) -> MakePeer:
    """`make_peer("alice", rounds=2)`: create a site with its own table."""

    def make(name: str, **settings: Any) -> Peer:
        (tmp_path / f"{name}.csv").write_text(small_table(8))
        path = str(tmp_path / f"{name}.csv")
        data = {"name": "custom", "path": path, "label": "y", "classes": ["x", "z"]}
        config = {"rounds": 2, "model": "mlp", "data": data, **settings}
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        return Peer.create(tmp_path / name, name=name, listen=listen, config=config)

    return make


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[None]:
    """Run a site's node in a process of its own, and kill it."""
    code = f"from dispfl import Peer; Peer.open({str(peer.folder)!r}).run(alone=True)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def wait_for_rounds(peer: Peer, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(rounds_of(peer.site.run_folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def contents(folder: Path) -> dict[str, bytes]:
    """The files that a backup has, with their content."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and is_backed_up(name):
            files[name] = path.read_bytes()
    return files


def test_a_finished_site_is_restored_with_its_key_members_model_and_metrics(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    alice = make_peer("alice")
    bob = make_peer("bob")
    alice.accept(bob.invite(), bob.fingerprint)
    (alice.folder / "mine.py").write_text("own = True")
    (alice.folder / "patients.csv").write_text("secret")
    (alice.folder / "notes.txt").write_text("secret")
    alice.confirm("bob")
    alice.revoke("bob")
    sealing_key = alice.site.make_sealing_key()
    alice.run(alone=True)
    backup = alice.backup(tmp_path / "alice.backup")
    assert (backup.site, backup.rounds, backup.is_private) == ("alice", 2, False)
    assert stat.S_IMODE((tmp_path / "alice.backup").stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".*"))

    restored = Peer.restore(tmp_path / "alice.backup", tmp_path / "elsewhere")
    assert restored.fingerprint == alice.fingerprint
    assert restored.status().members == alice.status().members
    assert stat.S_IMODE(restored.folder.stat().st_mode) == 0o700
    before, after = contents(alice.folder), contents(restored.folder)
    newest = "run/checkpoints/round-000002/"
    expected = {
        name: content
        for name, content in before.items()
        if not name.startswith("run/checkpoints/") or name.startswith(newest)
    }
    assert after == expected
    assert "mine.py" in after
    assert restored.site.make_sealing_key() == sealing_key  # what is sealed for it stays readable
    names = {path.name for path in restored.folder.rglob("*")}
    assert not names & {"patients.csv", "notes.txt", "status.json", ".lock"}

    run = restored.run(alone=True)  # finished already
    assert len(run.metrics) == 2
    restored.export(tmp_path / "restored.safetensors")


def test_a_backup_of_a_running_node_is_whole_and_the_site_continues_from_it(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    alice = make_peer("alice", rounds=100_000, train={"epochs": 1})
    with running(alice):
        wait_for_rounds(alice, 3)
        for number in range(10):
            rounds = alice.backup(tmp_path / f"{number}.backup").rounds
    for number in range(10):
        Peer.restore(tmp_path / f"{number}.backup", tmp_path / f"restored-{number}")

    restored = Peer.open(tmp_path / "restored-9")
    with running(restored):
        wait_for_rounds(restored, rounds + 2)
    finished = sorted(rounds_of(restored.site.run_folder))
    assert finished == list(range(len(finished)))


def test_nothing_is_overwritten(make_peer: MakePeer, tmp_path: Path) -> None:
    alice = make_peer("alice")
    backup = tmp_path / "alice.backup"
    alice.backup(backup)
    with pytest.raises(RunError, match="exists; choose another file"):
        alice.backup(backup)
    with pytest.raises(RunError, match="exists and is not empty"):
        Peer.restore(backup, alice.folder)
    (tmp_path / "empty").mkdir()
    Peer.restore(backup, tmp_path / "empty")


def test_links_are_not_followed(make_peer: MakePeer, tmp_path: Path) -> None:
    alice = make_peer("alice")
    secret = tmp_path / "secret.py"
    secret.write_text("of another user")
    (alice.folder / "mine.py").symlink_to(secret)
    (alice.folder / "folder").symlink_to(tmp_path)
    alice.backup(tmp_path / "alice.backup")
    assert b"of another user" not in (tmp_path / "alice.backup").read_bytes()

    toml = alice.folder / "site.toml"
    toml.rename(tmp_path / "site.toml")
    toml.symlink_to(tmp_path / "site.toml")
    with pytest.raises(RunError, match=r"site\.toml is missing, or a link"):
        alice.backup(tmp_path / "other.backup")
    assert not (tmp_path / "other.backup").exists()
    assert not list(tmp_path.glob(".*"))


def forged(backup: Path, name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
    """Add an entry to a backup, as if it had been made with it."""
    with tarfile.open(backup) as archive:
        entries = [(entry, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
    *files, (last, manifest) = entries
    extra = tarfile.TarInfo(name)
    extra.type = kind
    extra.linkname = target
    content = b"evil" if kind == tarfile.REGTYPE else b""
    extra.size = len(content)
    listed = json.loads(manifest)
    listed["files"][name] = [4, "0a5b6d5d8e5c7e0b"]
    manifest = json.dumps(listed).encode()
    last.size = len(manifest)
    with tarfile.open(backup, "w") as archive:
        for entry, body in (*files, (extra, content), (last, manifest)):
            archive.addfile(entry, io.BytesIO(body))


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py",
        "/tmp/evil.py",
        "run/../../evil.py",
        "run/checkpoints/../../../evil.py",
        "./evil.py",
        "a//evil.py",
        ".bashrc",
        ".ssh/evil.py",
        "run/.lock",
        "identity/other.pem",
        "patients.csv",
        "site.toml",
        "run/checkpoints/a/b/c",
        "x/../.profile",
    ],
)
def test_a_backup_writes_nothing_outside_and_nothing_that_is_not_a_sites(
    name: str, make_peer: MakePeer, tmp_path: Path
) -> None:
    backup = tmp_path / "alice.backup"
    make_peer("alice").backup(backup)
    before = sorted(tmp_path.rglob("*"))
    forged(backup, name)
    with pytest.raises(RunError, match="does not belong into a backup"):
        Peer.restore(backup, tmp_path / "new" / "site")
    (tmp_path / "new").rmdir()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
)
def test_links_devices_and_folders_in_a_backup_are_refused(
    kind: bytes, make_peer: MakePeer, tmp_path: Path
) -> None:
    backup = tmp_path / "alice.backup"
    make_peer("alice").backup(backup)
    forged(backup, "mine.py", kind, "/etc/passwd")
    with pytest.raises(RunError, match="is not a plain file"):
        Peer.restore(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_or_truncated_backup_restores_nothing(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    alice = make_peer("alice")
    alice.run(alone=True)
    backup = tmp_path / "alice.backup"
    alice.backup(backup)
    intact = backup.read_bytes()
    rng = random.Random(3)
    for _ in range(60):
        content = bytearray(intact)
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del content[place:]
        backup.write_bytes(bytes(content))
        folder = tmp_path / "new"
        try:
            Peer.restore(backup, folder)
        except RunError:
            assert not folder.exists()
        else:  # a bit that no file has: of a header, or of what fills a block
            assert (
                contents(folder)["run/metrics.jsonl"] == contents(alice.folder)["run/metrics.jsonl"]
            )
            shutil.rmtree(folder)
        assert not list(tmp_path.glob(".*"))


def test_a_private_site_does_not_train_on_a_budget_that_it_may_have_spent_since(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    privacy = {"noise_multiplier": 1.0}
    alice = make_peer("alice", privacy=privacy)
    alice.run(alone=True)
    counted = PrivateRounds(alice.site.run_folder).begun
    assert counted.rounds == 2
    assert alice.backup(tmp_path / "alice.backup").is_private

    old = Peer.restore(tmp_path / "alice.backup", tmp_path / "old")
    with pytest.raises(RunError, match="what it has spent since is not known"):
        _ = PrivateRounds(old.site.run_folder).begun
    shutil.copy(alice.site.run_folder / "privacy.json", old.site.run_folder)
    assert PrivateRounds(old.site.run_folder).begun == counted

    moved = Peer.restore(tmp_path / "alice.backup", tmp_path / "moved", newest=True)
    assert PrivateRounds(moved.site.run_folder).begun == counted


def test_a_private_site_without_a_model_is_not_set_back_either(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    """Without a checkpoint no steps of a model show that some of the budget is spent."""
    alice = make_peer("alice", privacy={"noise_multiplier": 1.0}, rounds=3)
    alice.run(alone=True)
    shutil.rmtree(alice.site.run_folder / "checkpoints")
    alice.backup(tmp_path / "alice.backup")
    restored = Peer.restore(tmp_path / "alice.backup", tmp_path / "restored")
    (restored.site.run_folder / "summary.json").unlink(missing_ok=True)
    restored.run(alone=True)
    failures = [
        entry["report"]["failure"] for entry in rounds_of(restored.site.run_folder).values()
    ]
    assert len(failures) == 3
    assert all("what it has spent since is not known" in failure for failure in failures)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_restores_belongs_to_the_owner_of_the_folder_around_it(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    make_peer("alice").backup(tmp_path / "alice.backup")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    Peer.restore(tmp_path / "alice.backup", home / "site")
    assert {path.stat().st_uid for path in home.rglob("*")} == {65534}
