"""Decisions on a full disk: they take effect, and the audit log has what happened, nothing else."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from small_disk import SmallDisk

from dispfl.errors import RunError
from dispfl.files import append_durably
from dispfl.peer.membership import list_file
from dispfl.peer.membership.audit_log import AUDIT, read_audit
from dispfl.peer.membership.roster import Roster
from dispfl.peer.site import Site, SiteInfo

NAMES = [f"site-{number:02}" for number in range(12)]


@pytest.fixture
def site(small_disk: SmallDisk, tmp_path: Path) -> Site:
    """A site with twelve members, on a disk that is then filled to the last byte."""
    site = create(small_disk.path / "alice", "alice")
    invites = [create(tmp_path / name, name).invite() for name in NAMES]
    site.members.accept_all(invites)
    small_disk.fill()
    return site


def create(folder: Path, name: str) -> Site:
    return Site.create(folder, SiteInfo(name=name, listen="192.0.2.7:7600"), {})


def revoked(entries: list[dict[str, object]]) -> list[object]:
    """The members whose revocation is logged, in order."""
    return [entry["member"] for entry in entries if entry["event"] == "revoked"]


def test_members_are_revoked_on_a_full_disk_one_after_another_and_logged_once(
    site: Site, small_disk: SmallDisk
) -> None:
    for name in NAMES[:10]:
        Site.open(site.folder).members.revoke(name)  # each in a process of its own
    assert site.members.names() == NAMES[10:]
    assert revoked(site.members.file.audit_log()) == NAMES[:10]

    small_disk.free()
    site.members.revoke(NAMES[10])
    assert revoked(read_audit(site.folder)) == NAMES[:11]
    assert revoked(Site.open(site.folder).members.file.audit_log()) == NAMES[:11]
    assert all("damaged" not in str(entry["event"]) for entry in read_audit(site.folder))


def test_the_log_has_no_revocation_that_failed(site: Site, small_disk: SmallDisk) -> None:
    reserve = site.folder / ".members.json.reserve"
    reserve.unlink()
    small_disk.fill()
    with pytest.raises(RunError, match="The disk is full"):
        site.members.revoke(NAMES[0])
    assert site.members.names() == NAMES
    assert revoked(site.members.file.audit_log()) == []

    small_disk.free()
    site.members.revoke(NAMES[0])
    assert revoked(read_audit(site.folder)) == [NAMES[0]]
    assert reserve.stat().st_size > site.members.path.stat().st_size


def test_the_log_has_no_rotation_that_failed(site: Site, small_disk: SmallDisk) -> None:
    with pytest.raises(RunError, match="The disk is full"):
        site.rotate()
    assert "rotated" not in [entry["event"] for entry in site.members.file.audit_log()]
    small_disk.free()
    successor = site.rotate()
    last_entry = read_audit(site.folder)[-1]
    assert (last_entry["event"], last_entry["fingerprint"]) == ("rotated", successor.fingerprint)


def test_administrators_remove_a_member_whose_site_has_a_full_disk(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    ann = Ed25519PrivateKey.generate()
    sites = [create(tmp_path / name, name) for name in ("bob", "carol")]
    empty = Roster("dispfl", 1, 1, {"ann": ann.public_key().public_bytes_raw()})
    first = empty.with_members([site.invite() for site in sites]).signed_by(ann)
    alice = create(small_disk.path / "alice", "alice")
    alice.members.accept_roster(first, first.fingerprint)
    small_disk.fill()

    assert alice.members.merge_roster(first.without_members(["carol"]).signed_by(ann).text)
    assert Site.open(alice.folder).members.names() == ["bob"]
    assert revoked(alice.members.file.audit_log()) == ["carol"]


def test_a_process_that_is_killed_before_it_logs_a_change_has_logged_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = create(tmp_path / "alice", "alice")
    site.members.accept(create(tmp_path / "bob", "bob").invite())
    with monkeypatch.context() as killed:
        killed.setattr(list_file, "append_audit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            site.members.revoke("bob")
    assert revoked(read_audit(site.folder)) == []
    again = Site.open(site.folder)
    assert again.members.names() == []
    assert revoked(again.members.file.audit_log()) == ["bob"]
    again.members.accept(create(tmp_path / "carol", "carol").invite())
    assert revoked(read_audit(site.folder)) == ["bob"]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_a_full_disk_takes_of_a_line_is_removed_again(small_disk: SmallDisk) -> None:
    log = small_disk.path / AUDIT
    append_durably(log, b"one\n")
    small_disk.fill()
    for _ in range(3):
        with pytest.raises(RunError, match="The disk is full"):
            append_durably(log, b"x" * 100_000 + b"\n")
    assert log.read_bytes() == b"one\n"
    small_disk.free()
    append_durably(log, b"two\n")
    assert log.read_bytes() == b"one\ntwo\n"
