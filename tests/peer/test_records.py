"""What members say of themselves, signed: how it travels, and what it cannot change."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispfl.errors import MessageError
from dispfl.peer.address import Address
from dispfl.peer.book import MOST_KNOWN, Book
from dispfl.peer.certificates import der
from dispfl.peer.identity import Identity
from dispfl.peer.invite import Invite
from dispfl.peer.members import Members
from dispfl.peer.records import Record
from dispfl.peer.transport import JSON

ALICE, BOB, CAROL = (Identity.make(name) for name in ("alice", "bob", "carol"))
AT_BOB, ELSEWHERE = Address("bob.example.org", 7601), Address("192.0.2.7", 7601)


def invite_of(identity: Identity) -> Invite:
    return Invite("hospitals", identity.name, AT_BOB, identity.certificate)


def record_of(identity: Identity, serial: int = 1, **changes: Any) -> Record:
    said = {"federation": "hospitals", "address": AT_BOB, "density": 0.5, "first_round": 0, "serial": serial}
    return Record.sign(identity, **{**said, **changes})


@pytest.fixture
def members(tmp_path: Path) -> Members:
    """Alice's list, with nobody on it."""
    return Members.create(tmp_path / "members.json", "alice", "hospitals")


def test_a_members_record_travels_through_others(members: Members, tmp_path: Path) -> None:
    bobs = Members.create(tmp_path / "bobs.json", "bob", "hospitals")
    bobs.announce(BOB, ELSEWHERE, 0.2, 4)
    carols = Members.create(tmp_path / "carols.json", "carol", "hospitals")
    for list_ in (members, carols):
        list_.accept(invite_of(BOB))
    assert carols.merge(json.loads(json.dumps(bobs.records()))).learned == ("bob",)
    assert members.merge(json.loads(json.dumps(carols.records()))).learned == ("bob",)
    bob = members.get("bob")
    assert bob is not None
    assert (bob.address, bob.density, bob.first_round) == (ELSEWHERE, 0.2, 4)
    assert members.merge(carols.records()) == members.merge([])  # nothing new, nothing refused


def test_the_newest_record_counts(members: Members) -> None:
    members.accept(invite_of(BOB))
    for serial, density in ((5, 0.5), (4, 0.4), (6, 0.6), (5, 0.5)):
        members.merge([record_of(BOB, serial, density=density).to_json()])
    bob = members.get("bob")
    assert bob is not None
    assert (bob.serial, bob.density) == (6, 0.6)


def test_an_announcement_is_signed_anew_only_if_it_says_something_new(members: Members) -> None:
    first = members.announce(ALICE, AT_BOB, 0.5, 0)
    assert members.announce(ALICE, AT_BOB, 0.5, 0) == first
    second = members.announce(ALICE, ELSEWHERE, 0.5, 0)
    third = members.announce(ALICE.rotate(), ELSEWHERE, 0.5, 0)
    assert first.serial < second.serial < third.serial


def test_a_record_that_somebody_changed_is_refused(members: Members) -> None:
    members.accept(invite_of(BOB))
    changed: Any = record_of(BOB).to_json()
    changed["record"]["address"] = "mallory.example.org:1"
    assert members.merge([changed]).refused == {"signature": 1}


def test_a_record_by_another_key_under_an_accepted_name_is_refused(members: Members) -> None:
    members.accept(invite_of(BOB))
    assert members.merge([record_of(Identity.make("bob")).to_json()]).refused == {"certificate": 1}
    assert members.pinned() == [BOB.certificate]


def test_a_record_of_another_federation_is_refused(members: Members) -> None:
    assert members.merge([record_of(BOB, federation="banks").to_json()]).refused == {"federation": 1}


def test_somebody_else_with_our_name_is_refused_and_we_ourselves_are_not(members: Members) -> None:
    members.announce(ALICE.rotate(), AT_BOB, 0.5, 0)
    assert members.merge([record_of(ALICE).to_json()]).refused == {}  # our own, from before the rotation
    assert members.merge([record_of(Identity.make("alice")).to_json()]).refused == {"certificate": 1}


def test_a_record_brings_a_certificate_that_was_rotated_twice(members: Members) -> None:
    members.accept(invite_of(BOB))
    newest = BOB.rotate().rotate()
    assert members.merge([record_of(newest).to_json()]).learned == ("bob",)
    assert members.pinned() == [newest.certificate]


def test_a_chain_with_a_forged_link_is_refused(members: Members) -> None:
    members.accept(invite_of(BOB))
    stranger = Identity.make("bob")
    forged = Identity("bob", stranger.key, stranger.certificate, (BOB.certificate,))
    assert members.merge([record_of(forged).to_json()]).refused == {"certificate": 1}
    assert members.pinned() == [BOB.certificate]


def test_a_forged_link_does_not_drive_out_a_known_member(members: Members) -> None:
    members.merge([record_of(CAROL).to_json()])
    stranger = Identity.make("carol")
    forged = Identity("carol", stranger.key, stranger.certificate, (CAROL.certificate,))
    assert members.merge([record_of(forged, serial=2).to_json()]).refused == {"certificate": 1}
    assert [record.fingerprint for record in members.known()] == [CAROL.fingerprint]


def test_members_of_others_are_known_and_never_trusted(members: Members) -> None:
    assert members.merge([record_of(CAROL).to_json()]).learned == ("carol",)
    assert [record.name for record in members.known()] == ["carol"]
    assert members.who(der(CAROL.certificate)) is None
    assert (members.names(), members.pinned(), members.records()) == ([], [], [])
    members.accept(invite_of(CAROL))
    assert members.known() == []


def test_a_known_member_that_rotated_is_known_once(members: Members) -> None:
    new = CAROL.rotate()
    members.merge([record_of(CAROL, 1).to_json(), record_of(new, 2).to_json(), record_of(CAROL, 1).to_json()])
    assert [record.fingerprint for record in members.known()] == [new.fingerprint]


def test_gossip_about_a_revoked_member_changes_nothing(members: Members) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    assert members.merge([record_of(BOB.rotate(), address=ELSEWHERE).to_json()]).learned == ()
    bob = members.get("bob")
    assert bob is not None
    assert (bob.state, bob.address, bob.fingerprint) == ("revoked", AT_BOB, BOB.fingerprint)


def test_gossip_cannot_fill_the_list() -> None:
    book = Book()
    for k in range(MOST_KNOWN):
        book = book.with_record(record_of(Identity.make(f"site-{k}")), "alice", "hospitals")
    with pytest.raises(MessageError, match="100 members of others are known already; one-more is one too many") as one:
        book.with_record(record_of(Identity.make("one-more")), "alice", "hospitals")
    assert one.value.refusal == "too-many"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab=0", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["record", "chain", "a"]), inner),
    max_leaves=6,
)
WHOLE: Any = record_of(BOB).to_json()


@settings(max_examples=80)
@given(ANY_JSON)
def test_any_json_is_refused_as_a_record_by_name(found: JSON) -> None:
    with pytest.raises(MessageError) as refused:
        Record.read(found)
    assert refused.value.refusal == "malformed"


@settings(max_examples=80)
@given(field=st.sampled_from(sorted(WHOLE["record"])), value=ANY_JSON)
def test_any_change_of_any_field_is_refused_by_name(field: str, value: JSON) -> None:
    changed = {**WHOLE, "record": {**WHOLE["record"], field: value}}
    if type(value) is type(WHOLE["record"][field]) and value == WHOLE["record"][field]:
        return
    with pytest.raises(MessageError) as refused:
        Record.read(changed)
    assert refused.value.refusal in ("malformed", "signature", "certificate")
