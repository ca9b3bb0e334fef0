"""The members file: lookups, changes by several processes, and damaged files."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from small_disk import SmallDisk

from dispfl.errors import ConfigError, MessageError, RunError
from dispfl.peer.membership import list_file
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.audit_log import read_audit
from dispfl.peer.membership.identity import MAX_ISSUERS, Identity, der, issue, readable_fingerprint
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.member_list import Member
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.records import MemberRecord

ALICE, BOB, CAROL = (Identity.make(name) for name in ("alice", "bob", "carol"))
AT_BOB, ELSEWHERE = Address("bob.example.org", 7601), Address("192.0.2.7", 7601)


def invite_of(
    identity: Identity, address: Address = AT_BOB, federation: str = "hospitals"
) -> Invite:
    return Invite(federation, identity.name, address, identity.certificate)


def record_of(identity: Identity, serial: int = 1, **changes: Any) -> MemberRecord:
    content = {
        "federation": "hospitals",
        "address": AT_BOB,
        "density": 0.5,
        "first_round": 0,
        "serial": serial,
    }
    return MemberRecord.sign(identity, **{**content, **changes})


@pytest.fixture
def members(tmp_path: Path) -> MembersFile:
    """Alice's members file, empty."""
    return MembersFile.create(tmp_path / "members.json", "alice", "hospitals")


def reopen(members: MembersFile) -> MembersFile:
    """The same file, as another process opens it."""
    return MembersFile(members.path, members.name, members.federation)


def state_of(members: MembersFile, identity: Identity) -> str | None:
    """What the site with this certificate is."""
    found = members.find_by_certificate(der(identity.certificate))
    return None if found is None else found.state


# lookups


def test_an_accepted_member_is_identified_by_its_certificate(members: MembersFile) -> None:
    assert members.find_by_certificate(der(BOB.certificate)) is None
    members.accept(invite_of(BOB))
    bob = members.find_by_certificate(der(BOB.certificate))
    assert bob is not None
    assert (bob.name, bob.address, bob.state, bob.fingerprint) == (
        "bob",
        AT_BOB,
        "accepted",
        BOB.fingerprint,
    )
    assert (bob.density, bob.first_round, bob.serial) == (None, 0, 0)
    assert members.find_by_certificate(der(CAROL.certificate)) is None
    assert members.find_by_certificate(der(Identity.make("bob").certificate)) is None
    assert members.find_by_certificate(b"no certificate") is None
    assert reopen(members).find_by_certificate(der(BOB.certificate)) == bob


def test_a_revoked_member_is_found_as_revoked(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    new = BOB.rotate()
    for identity in (BOB, new):
        found = members.find_by_certificate(der(identity.certificate))
        assert found is not None
        assert (found.name, found.state, found.fingerprint) == ("bob", "revoked", BOB.fingerprint)
    assert members.names() == []
    assert members.pinned() == []


def test_a_rotated_certificate_replaces_the_pinned_one(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    bob = members.find_by_certificate(der(new.certificate))
    assert bob is not None
    assert bob.fingerprint == new.fingerprint
    members.file.save()
    assert reopen(members).pinned() == [new.certificate]
    assert members.find_by_certificate(der(BOB.certificate)) is None


def test_the_certificate_of_a_revoked_member_is_not_replaced(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    member_list = members.file.current()
    assert member_list.with_certificate("bob", BOB.rotate().chain, 0.0) is member_list
    assert member_list.with_certificate("carol", CAROL.chain, 0.0) is member_list


def test_two_rotations_require_the_intermediate_certificate(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    newest = new.rotate()
    assert members.find_by_certificate(der(newest.certificate)) is None
    bob = members.find_by_certificate(der(newest.certificate), [der(new.certificate)])
    assert bob is not None
    assert bob.fingerprint == newest.fingerprint


def test_a_member_cannot_issue_a_certificate_for_another(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.accept(invite_of(CAROL))
    forged = issue("carol", BOB.key.public_key(), BOB.key)
    assert members.find_by_certificate(der(forged)) is None
    assert members.find_by_certificate(der(forged), [der(BOB.certificate)]) is None


def test_a_change_by_another_process_is_seen_by_the_next_lookup(members: MembersFile) -> None:
    other = reopen(members)
    before = members.generation
    other.accept(invite_of(BOB))
    assert state_of(members, BOB) == "accepted"
    assert members.generation == before + 1
    other.revoke("bob")
    assert state_of(members, BOB) == "revoked"
    assert members.generation == members.generation == before + 2


ACCEPT_ALL = """
import sys
from pathlib import Path
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.member_list import Member
from dispfl.peer.membership.members import MembersFile
members = MembersFile(Path(sys.argv[1]), "alice", "hospitals")
for line in sys.stdin:
    members.accept(Invite.read(line))
"""


def test_two_processes_that_accept_concurrently_lose_no_member(members: MembersFile) -> None:
    names = [f"site-{k:02d}" for k in range(12)]
    invites = [str(invite_of(Identity.make(name))) for name in names]
    command = [sys.executable, "-c", ACCEPT_ALL, str(members.path)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(2)]
    for process, part in zip(both, (invites[:6], invites[6:]), strict=True):
        assert process.stdin is not None
        process.stdin.write("\n".join(part))
        process.stdin.close()
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert members.names() == names
    assert members.participants(0) == ["alice", *names]


# accept and revoke


def test_an_invite_with_the_name_of_this_site_is_refused(members: MembersFile) -> None:
    with pytest.raises(InviteError, match="The invite has the name of this site, alice"):
        members.accept(invite_of(ALICE))


def test_an_invite_of_another_federation_is_refused(members: MembersFile) -> None:
    with pytest.raises(
        InviteError, match="bob belongs to the federation banks, this site to hospitals"
    ):
        members.accept(invite_of(BOB, federation="banks"))


def test_another_key_for_an_accepted_name_is_refused_until_the_old_one_is_revoked(
    members: MembersFile,
) -> None:
    members.accept(invite_of(BOB))
    other = Identity.make("bob")
    with pytest.raises(
        InviteError, match=r"bob is already accepted with another.*dispfl peer revoke .* bob"
    ):
        members.accept(invite_of(other))
    members.revoke("bob")
    assert members.accept(invite_of(other)).fingerprint == other.fingerprint
    assert members.find_by_certificate(der(BOB.certificate)) is None


def test_accepting_again_updates_the_address_and_undoes_a_revocation(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.merge([record_of(BOB, serial=3).to_json()])
    members.revoke("bob")
    bob = members.accept(invite_of(BOB, ELSEWHERE))
    assert (bob.state, bob.address, bob.serial) == ("accepted", ELSEWHERE, 3)


def test_an_invite_with_a_rotated_certificate_is_accepted(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    assert members.accept(invite_of(new)).fingerprint == new.fingerprint
    with pytest.raises(
        InviteError, match=r"has replaced its key since this invite was created\. Nothing needs"
    ):
        members.accept(invite_of(BOB))


def test_revoking_an_unknown_name_suggests_a_member(members: MembersFile) -> None:
    with pytest.raises(
        ConfigError, match=r"There is no member 'bob'. No member was accepted yet\."
    ):
        members.revoke("bob")
    members.accept(invite_of(BOB))
    with pytest.raises(ConfigError, match=r"There is no member 'bbo'. Did you mean bob\?"):
        members.revoke("bbo")


def test_the_roster_of_a_round_excludes_members_that_join_later(members: MembersFile) -> None:
    for identity, first_round in ((BOB, 0), (CAROL, 3)):
        members.accept(invite_of(identity))
        members.merge([record_of(identity, first_round=first_round).to_json()])
    assert members.participants(2) == ["alice", "bob"]
    assert members.participants(3) == ["alice", "bob", "carol"]


@pytest.mark.parametrize("rotations", [1, 2])
def test_a_key_that_was_rotated_out_stays_refused_after_a_revocation(
    members: MembersFile, rotations: int
) -> None:
    members.accept(invite_of(BOB))
    new = BOB
    for _ in range(rotations):
        new = new.rotate()
    assert (
        members.find_by_certificate(der(new.certificate), [der(each) for each in new.issuers])
        is not None
    )
    members.revoke("bob")
    for old in (
        invite_of(BOB),
        invite_of(Identity("bob", BOB.key, issue("bob", BOB.key.public_key(), BOB.key))),
    ):
        with pytest.raises(
            InviteError, match=r"bob has replaced its key since .* Ask it for a new invite"
        ):
            reopen(members).accept(old)
    assert members.names() == []
    assert members.accept(invite_of(new)).state == "accepted"


def test_a_key_that_was_replaced_after_a_revocation_stays_refused(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    other = Identity.make("bob")
    members.accept(invite_of(other))
    members.revoke("bob")
    with pytest.raises(InviteError, match="bob has replaced its key"):
        members.accept(invite_of(BOB))


def test_a_member_cannot_rotate_back_to_a_former_key(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    members.find_by_certificate(der(new.certificate))
    back = Identity("bob", BOB.key, issue("bob", BOB.key.public_key(), new.key), (new.certificate,))
    with pytest.raises(MessageError, match="a key that it had replaced before"):
        members.find_by_certificate(der(back.certificate), [der(new.certificate)])
    assert members.merge([record_of(back, serial=9).to_json()]).refused == {"certificate": 1}
    assert members.pinned() == [new.certificate]


def test_a_member_rotates_at_most_once_an_hour(tmp_path: Path) -> None:
    clock = [1_000_000.0]
    members = MembersFile.create(tmp_path / "members.json", "alice", "hospitals")
    members = MembersFile(members.path, "alice", "hospitals", lambda: clock[0])
    members.accept(invite_of(BOB))
    second = BOB.rotate()
    third = second.rotate()
    assert members.find_by_certificate(der(second.certificate)) is not None
    clock[0] += 3599
    with pytest.raises(
        MessageError, match="bob replaced its key 60 minutes ago; one rotation an hour"
    ) as caught:
        members.find_by_certificate(der(third.certificate))
    assert caught.value.refusal == "rotation"
    assert members.merge([record_of(third).to_json()]).refused == {"rotation": 1}
    assert members.pinned() == [second.certificate]
    clock[0] += 1
    assert members.find_by_certificate(der(third.certificate)) is not None


def test_a_chain_in_tls_is_as_short_as_one_in_a_record(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    chain = [BOB]
    for _ in range(MAX_ISSUERS + 1):
        chain.insert(0, chain[0].rotate())
    issuers = [der(identity.certificate) for identity in chain[1:]]
    assert len(issuers) == MAX_ISSUERS + 1
    assert members.find_by_certificate(der(chain[0].certificate), issuers) is None
    assert members.find_by_certificate(der(chain[1].certificate), issuers[1:]) is not None


# pending members


def test_a_pending_site_is_no_member_until_it_is_confirmed(members: MembersFile) -> None:
    assert members.accept(invite_of(BOB), confirmed=False).state == "pending"
    assert state_of(members, BOB) == "pending"
    assert (members.names(), members.pinned(), members.participants(9)) == ([], [], ["alice"])
    assert members.confirm("bob").state == "accepted"
    assert state_of(reopen(members), BOB) == "accepted"
    assert members.confirm("bob").state == "accepted"


def test_a_given_fingerprint_accepts_at_once_or_not_at_all(members: MembersFile) -> None:
    typed = " ".join(readable_fingerprint(BOB.fingerprint)).upper()
    assert members.accept(invite_of(BOB), typed, confirmed=False).state == "accepted"
    for wrong in (BOB.fingerprint, CAROL.fingerprint[:16], ""):
        with pytest.raises(
            InviteError,
            match=r"The fingerprint of carol's invite is [0-9a-f]{64}, not .* Nothing was",
        ):
            members.accept(invite_of(CAROL), wrong, confirmed=False)
    assert members.get("carol") is None


def test_a_pending_site_can_be_replaced_or_revoked_but_a_revoked_one_is_not_confirmed(
    members: MembersFile,
) -> None:
    other = Identity.make("bob")
    members.accept(invite_of(BOB), confirmed=False)
    members.accept(invite_of(other), confirmed=False)
    assert members.confirm("bob").fingerprint == other.fingerprint
    members.revoke("bob")
    with pytest.raises(ConfigError, match="bob was revoked; accept its invite again first"):
        members.confirm("bob")
    assert members.accept(invite_of(other), confirmed=False).state == "pending"


def test_a_rotated_key_of_an_accepted_member_needs_no_confirmation(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    assert members.accept(invite_of(BOB.rotate()), confirmed=False).state == "accepted"


def test_a_key_that_was_only_proposed_does_not_replace_the_last_one(members: MembersFile) -> None:
    """Somebody sends a forged invite of a site that was revoked; the right one can still be
    accepted."""
    members.accept(invite_of(BOB))
    members.revoke("bob")
    members.accept(invite_of(Identity.make("bob")), confirmed=False)
    members.accept(invite_of(Identity.make("bob")), confirmed=False)
    members = reopen(members)
    members.accept(invite_of(BOB), confirmed=False)
    bob = members.confirm("bob")
    assert (bob.fingerprint, bob.retired) == (BOB.fingerprint, ())
    members.revoke("bob")
    other = Identity.make("bob")
    members.accept(invite_of(other), confirmed=False)
    members.confirm("bob")
    members.revoke("bob")
    with pytest.raises(InviteError, match="bob has replaced its key"):
        members.accept(invite_of(BOB), confirmed=False)


# the file


def with_digest(lines: list[Any]) -> bytes:
    """A members file with these lines and the digest that belongs to them."""
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines[1:])
    return (
        json.dumps({**lines[0], "digest": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body
    )


def edited(members: MembersFile, change: Callable[[list[Any]], object]) -> None:
    """Change the lines of the file, as another version could have written them."""
    lines = [json.loads(line) for line in members.path.read_bytes().splitlines()]
    change(lines)
    members.path.write_bytes(with_digest(lines))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: b"[]",
        lambda content: b"\xff\xfe",
        lambda content: content.replace(b"accepted", b"revoked", 1),
        lambda content: content.replace(b'"digest":"', b'"digest":"0', 1),
        lambda content: content + b"{}\n",
    ],
)
def test_no_member_is_identified_with_a_damaged_file_which_is_kept(
    members: MembersFile, damage: Callable[[bytes], bytes]
) -> None:
    members.accept(invite_of(BOB))
    damaged = damage(members.path.read_bytes())
    members.path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(
            RunError, match=r"members.json is damaged .* Restore it .* kept as members.json.damaged"
        ):
            members.find_by_certificate(der(BOB.certificate))
        with pytest.raises(RunError, match="is damaged"):
            members.accept(invite_of(CAROL))
    assert [path.name for path in members.path.parent.glob("*.damaged")] == ["members.json.damaged"]
    assert (
        (members.path.parent / "members.json.damaged").read_bytes()
        == members.path.read_bytes()
        == damaged
    )
    members.path.write_bytes(b"damaged again")
    with pytest.raises(RunError, match=r"kept as members\.json\.2\.damaged"):
        members.names()
    assert (members.path.parent / "members.json.damaged").read_bytes() == damaged


def test_a_file_of_another_version_is_refused_by_name_and_not_as_damaged(
    members: MembersFile,
) -> None:
    edited(members, lambda lines: lines[0].update(version=3))
    with pytest.raises(
        RunError, match=r"cannot be used: it has format 3, and this dispfl reads format 2; install"
    ):
        members.names()
    members.path.write_text('{\n "version": 1,\n "own": null,\n "members": [],\n "known": []\n}\n')
    with pytest.raises(RunError, match="it was written by an older dispfl, in format 1"):
        members.names()
    assert not list(members.path.parent.glob("*.damaged"))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_an_error_of_the_system_is_not_damage(
    members: MembersFile, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    members.accept(invite_of(BOB))
    changed = reopen(members)
    changed.revoke("bob")
    changed.accept(invite_of(BOB))
    with monkeypatch.context() as broken:

        def fail(path: Path) -> bytes:
            raise OSError(code, os.strerror(code))

        broken.setattr(list_file, "read_regular", fail)
        with pytest.raises(
            RunError, match=rf"cannot be read: {os.strerror(code)}\. Nothing was changed"
        ):
            members.find_by_certificate(der(BOB.certificate))
        assert members.participants(0) == ["alice", "bob"]  # a running node goes on
    assert not list(members.path.parent.glob("*.damaged"))
    assert members.find_by_certificate(der(BOB.certificate)) is not None


def test_a_record_and_an_address_that_no_longer_parse_are_skipped_and_named(
    members: MembersFile,
) -> None:
    """As if an earlier version had stored an address that cannot become a URL."""
    for identity in (BOB, CAROL):
        members.accept(invite_of(identity))
        members.merge([record_of(identity).to_json()])
    members.file.save()
    members.revoke("bob")

    def spoil(lines: list[Any]) -> None:
        [bob] = [
            line["member"] for line in lines[1:] if line.get("member", {}).get("name") == "bob"
        ]
        bob["address"] = bob["record"]["record"]["address"] = "[fe80::1%\n]:7600"

    edited(members, spoil)
    again = reopen(members)
    bob, carol = again.all()
    assert (bob.state, bob.address, bob.record) == ("revoked", None, None)
    assert (carol.address, carol.density) == (AT_BOB, 0.5)
    assert [problem[:21] for problem in again.file.problems] == [
        "The address of bob is",
        "The record of bob is ",
    ]
    assert again.accept(invite_of(BOB, ELSEWHERE)).address == ELSEWHERE


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(state="friend"),
        lambda entry: entry.update(name="carol"),
        lambda entry: entry.update(certificate="AAAA"),
        lambda entry: entry.pop("by"),
        lambda entry: entry.update(rotated="soon"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named_and_kept_in_the_file(
    members: MembersFile, change: Callable[[Any], object]
) -> None:
    members.accept(invite_of(BOB))
    edited(members, lambda lines: change(lines[1]["member"]))
    line = members.path.read_bytes().splitlines()[1]
    again = reopen(members)
    assert again.all() == []
    assert len(again.file.problems) == 1
    again.accept(invite_of(CAROL))
    assert again.names() == ["carol"]
    assert line in members.path.read_bytes().splitlines()


def test_no_member_is_identified_with_a_missing_file(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.path.unlink()
    with pytest.raises(
        RunError, match=r"members\.json cannot be read: No such file .* Restore it from a backup"
    ):
        members.find_by_certificate(der(BOB.certificate))


def test_announcements_are_saved_together_and_an_operators_change_keeps_them(
    members: MembersFile,
) -> None:
    other = reopen(members)
    for identity in (BOB, CAROL):
        other.accept(invite_of(identity))
    members.merge([record_of(BOB).to_json()])  # saved at once
    before = members.path.read_bytes()
    members.merge([record_of(CAROL).to_json()])  # within a second: later
    assert members.path.read_bytes() == before
    assert [member.density for member in members.all()] == [0.5, 0.5]
    other.revoke("bob")
    assert [(member.state, member.density) for member in members.all()] == [
        ("revoked", 0.5),
        ("accepted", 0.5),
    ]
    members.file.save()
    assert [(member.state, member.density) for member in reopen(members).all()] == [
        ("revoked", 0.5),
        ("accepted", 0.5),
    ]


def test_reading_the_file_after_a_change_parses_the_changed_entries_only(
    members: MembersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Identity.make(f"site-{k}") for k in range(5)]
    members.accept_all([invite_of(each) for each in others])
    reopen(members).accept(invite_of(BOB))
    parsed, parse = [], list_file._member

    def counted(entry: Any, problems: list[str]) -> Member:
        parsed.append(entry["name"])
        return parse(entry, problems)

    monkeypatch.setattr(list_file, "_member", counted)
    assert len(members.names()) == 6
    assert parsed == ["bob"]


# a full disk


def test_announcements_on_a_full_disk_are_kept_once_and_noted_once(
    small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = MembersFile.create(small_disk.path / "members.json", "alice", "hospitals")
    members.accept(invite_of(BOB))
    small_disk.fill()
    monkeypatch.setattr(list_file, "SAVE_INTERVAL", inf)  # only where the test says so
    new = BOB.rotate()
    for serial in range(1, 21):
        record = record_of(new, serial, address=Address("bob.example.org", 7600 + serial))
        members.merge([record.to_json()])
    for _ in range(5):
        with pytest.raises(RunError, match="The disk is full"):
            members.file.save()
    bob = members.get("bob")
    assert bob is not None
    assert (bob.fingerprint, bob.serial, bob.address) == (
        new.fingerprint,
        20,
        Address("bob.example.org", 7620),
    )
    assert len(members.file._unsaved) == 1
    small_disk.free()
    members.file.save()
    assert reopen(members).get("bob") == bob
    noted = [entry["event"] for entry in read_audit(small_disk.path)]
    assert noted.count("rotated") == 1
    assert noted.count("address changed") <= 20
