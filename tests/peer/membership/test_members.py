"""The members file: lookups, changes by several processes, and damaged files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.errors import ConfigError, RunError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity, der, issue
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.member_list import MemberList
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.records import MemberRecord

ALICE, BOB, CAROL = (Identity.make(name) for name in ("alice", "bob", "carol"))
AT_BOB, ELSEWHERE = Address("bob.example.org", 7601), Address("192.0.2.7", 7601)


def invite_of(identity: Identity, address: Address = AT_BOB, federation: str = "hospitals") -> Invite:
    return Invite(federation, identity.name, address, identity.certificate)


def record_of(identity: Identity, serial: int = 1, **changes: Any) -> MemberRecord:
    content = {"federation": "hospitals", "address": AT_BOB, "density": 0.5, "first_round": 0, "serial": serial}
    return MemberRecord.sign(identity, **{**content, **changes})


@pytest.fixture
def members(tmp_path: Path) -> MembersFile:
    """Alice's members file, empty."""
    return MembersFile.create(tmp_path / "members.json", "alice", "hospitals")


def reopen(members: MembersFile) -> MembersFile:
    """The same file, as another process opens it."""
    return MembersFile(members.path, members.name, members.federation)


# lookups


def test_an_accepted_member_is_identified_by_its_certificate(members: MembersFile) -> None:
    assert members.identify(der(BOB.certificate)) is None
    members.accept(invite_of(BOB))
    bob = members.identify(der(BOB.certificate))
    assert bob is not None
    assert (bob.name, bob.address, bob.state, bob.fingerprint) == ("bob", AT_BOB, "accepted", BOB.fingerprint)
    assert (bob.density, bob.first_round, bob.serial) == (None, 0, 0)
    assert members.identify(der(CAROL.certificate)) is None
    assert members.identify(der(Identity.make("bob").certificate)) is None
    assert members.identify(b"no certificate") is None
    assert reopen(members).identify(der(BOB.certificate)) == bob


def test_a_revoked_member_is_found_but_not_identified(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    new = BOB.rotate()
    for identity in (BOB, new):
        assert members.identify(der(identity.certificate)) is None
        found = members.find_by_certificate(der(identity.certificate))
        assert found is not None
        assert (found.name, found.state, found.fingerprint) == ("bob", "revoked", BOB.fingerprint)
    assert members.names() == []
    assert members.pinned() == []


def test_a_rotated_certificate_replaces_the_pinned_one(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    bob = members.identify(der(new.certificate))
    assert bob is not None
    assert bob.fingerprint == new.fingerprint
    assert reopen(members).pinned() == [new.certificate]
    assert members.identify(der(BOB.certificate)) is None


def test_the_certificate_of_a_revoked_member_is_not_replaced(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    member_list = MemberList.from_bytes(members.path.read_bytes())
    assert member_list.with_certificate("bob", BOB.rotate().chain) is member_list
    assert member_list.with_certificate("carol", CAROL.chain) is member_list


def test_two_rotations_require_the_intermediate_certificate(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    newest = new.rotate()
    assert members.identify(der(newest.certificate)) is None
    bob = members.identify(der(newest.certificate), [der(new.certificate)])
    assert bob is not None
    assert bob.fingerprint == newest.fingerprint


def test_a_member_cannot_issue_a_certificate_for_another(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.accept(invite_of(CAROL))
    forged = issue("carol", BOB.key.public_key(), BOB.key)
    assert members.identify(der(forged)) is None
    assert members.identify(der(forged), [der(BOB.certificate)]) is None


def test_a_change_by_another_process_is_seen_by_the_next_lookup(members: MembersFile) -> None:
    other = reopen(members)
    before = members.generation
    other.accept(invite_of(BOB))
    assert members.identify(der(BOB.certificate)) is not None
    assert members.generation == before + 1
    other.revoke("bob")
    assert members.identify(der(BOB.certificate)) is None
    assert members.generation == members.generation == before + 2


ACCEPT_ALL = """
import sys
from pathlib import Path
from dispfl.peer.membership.invite import Invite
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
    assert members.roster(0) == ["alice", *names]


# accept and revoke


def test_an_invite_with_the_name_of_this_site_is_refused(members: MembersFile) -> None:
    with pytest.raises(InviteError, match="The invite has the name of this site, alice"):
        members.accept(invite_of(ALICE))


def test_an_invite_of_another_federation_is_refused(members: MembersFile) -> None:
    with pytest.raises(InviteError, match="bob belongs to the federation banks, this site to hospitals"):
        members.accept(invite_of(BOB, federation="banks"))


def test_another_key_for_an_accepted_name_is_refused_until_the_old_one_is_revoked(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    other = Identity.make("bob")
    with pytest.raises(InviteError, match=r"bob is already accepted with another.*dispfl peer revoke .* bob"):
        members.accept(invite_of(other))
    members.revoke("bob")
    assert members.accept(invite_of(other)).fingerprint == other.fingerprint
    assert members.identify(der(BOB.certificate)) is None


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
    with pytest.raises(InviteError, match="has rotated its key since"):
        members.accept(invite_of(BOB))


def test_revoking_an_unknown_name_suggests_a_member(members: MembersFile) -> None:
    with pytest.raises(ConfigError, match=r"There is no member 'bob'. No member was accepted yet\."):
        members.revoke("bob")
    members.accept(invite_of(BOB))
    with pytest.raises(ConfigError, match=r"There is no member 'bbo'. Did you mean bob\?"):
        members.revoke("bbo")


def test_the_roster_of_a_round_excludes_members_that_join_later(members: MembersFile) -> None:
    for identity, first_round in ((BOB, 0), (CAROL, 3)):
        members.accept(invite_of(identity))
        members.merge([record_of(identity, first_round=first_round).to_json()])
    assert members.roster(2) == ["alice", "bob"]
    assert members.roster(3) == ["alice", "bob", "carol"]


# the file


def edited(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Damage the file by changing its JSON."""

    def damage(content: bytes) -> bytes:
        found = json.loads(content)
        return json.dumps(change(found) or found).encode()

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: b"[]",
        lambda content: b"\xff\xfe",
        edited(lambda found: found.update(version=2)),
        edited(lambda found: found.pop("members")),
        edited(lambda found: found["members"][0].update(state="friend")),
        edited(lambda found: found["members"][0].update(name="carol")),
        edited(lambda found: found["members"][0].update(certificate="AAAA")),
        edited(lambda found: found["members"][0].update(address="nowhere")),
        edited(lambda found: found["members"][0]["record"].update(signature="AAAA")),
    ],
)
def test_no_member_is_identified_with_a_damaged_file(members: MembersFile, damage: Callable[[bytes], bytes]) -> None:
    members.accept(invite_of(BOB))
    members.merge([record_of(BOB).to_json()])
    members.path.write_bytes(damage(members.path.read_bytes()))
    with pytest.raises(RunError, match=r"members.json is damaged .* Restore it from a backup"):
        members.identify(der(BOB.certificate))


def test_no_member_is_identified_with_a_missing_file(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.path.unlink()
    with pytest.raises(RunError, match=r"members\.json cannot be read"):
        members.identify(der(BOB.certificate))
