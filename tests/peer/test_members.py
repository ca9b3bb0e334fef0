"""The allow-list: who is recognised, what several processes make of one file, and what gossip may change."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispfl.errors import ConfigError, RunError
from dispfl.peer.address import Address
from dispfl.peer.book import Book
from dispfl.peer.certificates import der, issue
from dispfl.peer.identity import Identity
from dispfl.peer.invite import Invite, InviteError
from dispfl.peer.members import Members
from dispfl.peer.records import Record

ALICE, BOB, CAROL = (Identity.make(name) for name in ("alice", "bob", "carol"))
AT_BOB, ELSEWHERE = Address("bob.example.org", 7601), Address("192.0.2.7", 7601)


def invite_of(identity: Identity, address: Address = AT_BOB, federation: str = "hospitals") -> Invite:
    return Invite(federation, identity.name, address, identity.certificate)


def record_of(identity: Identity, serial: int = 1, **changes: Any) -> Record:
    said = {"federation": "hospitals", "address": AT_BOB, "density": 0.5, "first_round": 0, "serial": serial}
    return Record.sign(identity, **{**said, **changes})


@pytest.fixture
def members(tmp_path: Path) -> Members:
    """Alice's list, with nobody on it."""
    return Members.create(tmp_path / "members.json", "alice", "hospitals")


def again(members: Members) -> Members:
    """The same list, as another process sees it."""
    return Members(members.path, members.name, members.federation)


# who is who


def test_an_accepted_member_is_known_by_its_certificate(members: Members) -> None:
    assert members.who(der(BOB.certificate)) is None
    members.accept(invite_of(BOB))
    bob = members.who(der(BOB.certificate))
    assert bob is not None
    assert (bob.name, bob.address, bob.state, bob.fingerprint) == ("bob", AT_BOB, "accepted", BOB.fingerprint)
    assert (bob.density, bob.first_round, bob.serial) == (None, 0, 0)
    assert members.who(der(CAROL.certificate)) is None
    assert members.who(der(Identity.make("bob").certificate)) is None
    assert members.who(b"no certificate") is None
    assert again(members).who(der(BOB.certificate)) == bob


def test_a_revoked_member_is_nobody_but_still_recognised(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    new = BOB.rotate()
    for identity in (BOB, new):
        assert members.who(der(identity.certificate)) is None
        recognised = members.recognise(der(identity.certificate))
        assert recognised is not None
        assert (recognised.name, recognised.state, recognised.fingerprint) == ("bob", "revoked", BOB.fingerprint)
    assert members.names() == []
    assert members.pinned() == []


def test_a_rotated_certificate_is_pinned_in_place_of_the_old_one(members: Members) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    bob = members.who(der(new.certificate))
    assert bob is not None
    assert bob.fingerprint == new.fingerprint
    assert again(members).pinned() == [new.certificate]
    assert members.who(der(BOB.certificate)) is None


def test_a_member_that_was_revoked_a_moment_ago_gets_no_new_certificate(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    book = Book.from_bytes(members.path.read_bytes())
    assert book.with_certificate("bob", BOB.rotate().chain) is book
    assert book.with_certificate("carol", CAROL.chain) is book


def test_two_rotations_need_the_certificate_between(members: Members) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    newest = new.rotate()
    assert members.who(der(newest.certificate)) is None
    bob = members.who(der(newest.certificate), [der(new.certificate)])
    assert bob is not None
    assert bob.fingerprint == newest.fingerprint


def test_a_member_cannot_issue_a_certificate_for_another(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.accept(invite_of(CAROL))
    forged = issue("carol", BOB.key.public_key(), BOB.key)
    assert members.who(der(forged)) is None
    assert members.who(der(forged), [der(BOB.certificate)]) is None


def test_what_another_process_changes_is_noticed_at_the_next_lookup(members: Members) -> None:
    other = again(members)
    before = members.generation
    other.accept(invite_of(BOB))
    assert members.who(der(BOB.certificate)) is not None
    assert members.generation == before + 1
    other.revoke("bob")
    assert members.who(der(BOB.certificate)) is None
    assert members.generation == members.generation == before + 2


ACCEPT_ALL = """
import sys
from pathlib import Path
from dispfl.peer.invite import Invite
from dispfl.peer.members import Members
members = Members(Path(sys.argv[1]), "alice", "hospitals")
for line in sys.stdin:
    members.accept(Invite.read(line))
"""


def test_two_processes_that_accept_at_the_same_time_lose_nobody(members: Members) -> None:
    names = [f"site-{k:02d}" for k in range(12)]
    invites = [str(invite_of(Identity.make(name))) for name in names]
    command = [sys.executable, "-c", ACCEPT_ALL, str(members.path)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(2)]
    for process, share in zip(both, (invites[:6], invites[6:]), strict=True):
        assert process.stdin is not None
        process.stdin.write("\n".join(share))
        process.stdin.close()
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert members.names() == names
    assert members.roster(0) == ["alice", *names]


# accept and revoke


def test_an_invite_of_our_own_name_is_refused(members: Members) -> None:
    with pytest.raises(InviteError, match="a site called alice, as this one is"):
        members.accept(invite_of(ALICE))


def test_an_invite_of_another_federation_is_refused(members: Members) -> None:
    with pytest.raises(InviteError, match="bob belongs to the federation banks, this site to hospitals"):
        members.accept(invite_of(BOB, federation="banks"))


def test_another_key_under_an_accepted_name_is_refused_until_the_old_one_is_revoked(members: Members) -> None:
    members.accept(invite_of(BOB))
    other = Identity.make("bob")
    with pytest.raises(InviteError, match=r"bob is on the list already.*dispfl peer revoke .* bob"):
        members.accept(invite_of(other))
    members.revoke("bob")
    assert members.accept(invite_of(other)).fingerprint == other.fingerprint
    assert members.who(der(BOB.certificate)) is None


def test_accepting_again_changes_the_address_and_takes_back_a_revocation(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.merge([record_of(BOB, serial=3).to_json()])
    members.revoke("bob")
    bob = members.accept(invite_of(BOB, ELSEWHERE))
    assert (bob.state, bob.address, bob.serial) == ("accepted", ELSEWHERE, 3)


def test_an_invite_with_a_rotated_certificate_is_accepted(members: Members) -> None:
    members.accept(invite_of(BOB))
    new = BOB.rotate()
    assert members.accept(invite_of(new)).fingerprint == new.fingerprint
    with pytest.raises(InviteError, match="changed its key since"):
        members.accept(invite_of(BOB))


def test_revoking_nobody_says_who_was_meant(members: Members) -> None:
    with pytest.raises(ConfigError, match=r"There is no member 'bob'. Nobody was accepted yet\."):
        members.revoke("bob")
    members.accept(invite_of(BOB))
    with pytest.raises(ConfigError, match=r"There is no member 'bbo'. Did you mean bob\?"):
        members.revoke("bbo")


def test_the_roster_of_a_round_leaves_out_who_joins_later(members: Members) -> None:
    for identity, first_round in ((BOB, 0), (CAROL, 3)):
        members.accept(invite_of(identity))
        members.merge([record_of(identity, first_round=first_round).to_json()])
    assert members.roster(2) == ["alice", "bob"]
    assert members.roster(3) == ["alice", "bob", "carol"]


# the file


def edited(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """A damage of the file: its JSON after a change."""

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
def test_a_damaged_file_lets_nobody_in(members: Members, damage: Callable[[bytes], bytes]) -> None:
    members.accept(invite_of(BOB))
    members.merge([record_of(BOB).to_json()])
    members.path.write_bytes(damage(members.path.read_bytes()))
    with pytest.raises(RunError, match=r"members.json is damaged .* Restore it from a backup"):
        members.who(der(BOB.certificate))


def test_a_missing_file_lets_nobody_in(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.path.unlink()
    with pytest.raises(RunError, match=r"members\.json cannot be read"):
        members.who(der(BOB.certificate))
