"""Member records: relaying, verification, and the changes that they may not make."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispfl.errors import MessageError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity, der
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.members import MAX_STRANGERS, MembersFile
from dispfl.peer.membership.records import MemberRecord, record_digest
from dispfl.peer.membership.sync import Offer
from dispfl.peer.transport.base import JSON

ALICE, BOB, CAROL = (Identity.make(name) for name in ("alice", "bob", "carol"))
AT_BOB, ELSEWHERE = Address("bob.example.org", 7601), Address("192.0.2.7", 7601)


def invite_of(identity: Identity) -> Invite:
    return Invite("hospitals", identity.name, AT_BOB, identity.certificate)


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


def test_a_record_is_relayed_by_other_members(members: MembersFile, tmp_path: Path) -> None:
    bobs = MembersFile.create(tmp_path / "bobs.json", "bob", "hospitals")
    bobs.announce(BOB, ELSEWHERE, 0.2, 4)
    carols = MembersFile.create(tmp_path / "carols.json", "carol", "hospitals")
    for list_ in (members, carols):
        list_.accept(invite_of(BOB))
    assert carols.merge(json.loads(json.dumps(bobs.records()))).learned == ("bob",)
    assert members.merge(json.loads(json.dumps(carols.records()))).learned == ("bob",)
    bob = members.get("bob")
    assert bob is not None
    assert (bob.address, bob.density, bob.first_round) == (ELSEWHERE, 0.2, 4)
    assert members.merge(carols.records()) == members.merge([])  # nothing new, nothing refused


def test_the_record_with_the_highest_serial_is_kept(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    for serial, density in ((5, 0.5), (4, 0.4), (6, 0.6), (5, 0.5)):
        members.merge([record_of(BOB, serial, density=density).to_json()])
    bob = members.get("bob")
    assert bob is not None
    assert (bob.serial, bob.density) == (6, 0.6)


def test_a_member_that_signs_one_record_many_times_has_announced_one(
    members: MembersFile, tmp_path: Path
) -> None:
    """ECDSA gives another signature every time: two sites with two of them must not exchange lists
    for ever."""
    carols = MembersFile.create(tmp_path / "carols.json", "carol", "hospitals")
    for list_ in (members, carols):
        list_.accept(invite_of(BOB))
        list_.merge([record_of(BOB, 3).to_json()])
    assert members.records() != carols.records()
    assert Offer(members.records()).state == Offer(carols.records()).state
    carols.merge([record_of(BOB, 4).to_json()])
    assert Offer(members.records()).state != Offer(carols.records()).state


def test_of_two_records_with_one_serial_all_sites_keep_the_same(
    members: MembersFile, tmp_path: Path
) -> None:
    """A member that tells every site something else would otherwise split the federation."""
    carols = MembersFile.create(tmp_path / "carols.json", "carol", "hospitals")
    one, two = (record_of(BOB, 3, first_round=first_round).to_json() for first_round in (0, 100))
    for list_, own in ((members, one), (carols, two)):
        list_.accept(invite_of(BOB))
        list_.merge([own])
    assert Offer(members.records()).state != Offer(carols.records()).state
    before = members.records()
    members.merge(carols.records())
    carols.merge(before)
    assert members.records() == carols.records()


def test_who_relays_a_record_cannot_cut_its_certificates(members: MembersFile) -> None:
    """Alice has pinned Bob's first certificate: without the second, she cannot know that the third
    is his."""
    members.accept(invite_of(BOB))
    record: Any = record_of(BOB.rotate().rotate()).to_json()
    cut = {**record, "chain": record["chain"][:1]}
    assert members.merge([cut]).forged == {"signature"}
    assert members.merge([record]).learned == ("bob",)


def test_another_text_for_the_same_bytes_is_refused(members: MembersFile) -> None:
    """The last letter before the padding has bits that decoding ignores: a relay could vary them
    without end."""
    records: list[Any] = [record_of(BOB).to_json() for _ in range(50)]  # 70 to 72 bytes long
    record = next(one for one in records if one["signature"].endswith("="))
    text = record["signature"].rstrip("=")
    varied = text[:-1] + chr(ord(text[-1]) + 1) + "=" * (len(record["signature"]) - len(text))
    assert members.merge([{**record, "signature": varied}]).refused == {"malformed": 1}


def test_a_record_that_came_too_soon_after_a_rotation_is_accepted_later(
    members: MembersFile,
) -> None:
    now = 1_000_000.0
    members = MembersFile(members.path, "alice", "hospitals", lambda: now)
    members.accept(invite_of(BOB))
    second = BOB.rotate()
    third = second.rotate()
    assert members.merge([record_of(second, 2).to_json()]).learned == ("bob",)
    now += 600
    assert members.merge([record_of(third, 3).to_json()]).refused == {"rotation": 1}
    now += 7200
    assert members.merge([record_of(third, 3).to_json()]).learned == ("bob",)


def test_a_record_of_another_federation_does_not_stand_for_ours(members: MembersFile) -> None:
    """A site in two federations may announce itself to both in the same second: with the same key
    and serial."""
    members.accept(invite_of(BOB))
    members.merge([record_of(BOB, 3, federation="factories").to_json()])
    assert members.merge([record_of(BOB, 3).to_json()]).learned == ("bob",)


def test_an_announcement_is_signed_again_only_if_its_content_changes(members: MembersFile) -> None:
    first = members.announce(ALICE, AT_BOB, 0.5, 0)
    assert members.announce(ALICE, AT_BOB, 0.5, 0) == first
    second = members.announce(ALICE, ELSEWHERE, 0.5, 0)
    third = members.announce(ALICE.rotate(), ELSEWHERE, 0.5, 0)
    assert first.serial < second.serial < third.serial


def test_a_site_that_was_set_back_to_an_old_backup_is_found_again(
    members: MembersFile, tmp_path: Path
) -> None:
    """It has the address from before its last move again, and no other site knows that."""
    now, file = 1_000_000.0, tmp_path / "bobs.json"
    MembersFile.create(file, "bob", "hospitals")
    members.accept(invite_of(BOB))

    def start(address: Address) -> Address | None:
        """Bob's node starts at an address, and greets alice; where does she look for it?"""
        nonlocal now
        now += 60
        bobs = MembersFile(file, "bob", "hospitals", lambda: now)
        bobs.announce(BOB, address, 0.5, 0, again=True)
        members.merge(bobs.records())
        bob = members.get("bob")
        return bob.address if bob else None

    assert start(AT_BOB) == AT_BOB
    backup = file.read_bytes()
    assert start(ELSEWHERE) == ELSEWHERE
    file.write_bytes(backup)
    assert start(AT_BOB) == AT_BOB


def test_a_modified_record_is_refused(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    changed: Any = record_of(BOB).to_json()
    changed["record"]["address"] = "mallory.example.org:1"
    assert members.merge([changed]).refused == {"signature": 1}


def test_a_record_of_an_accepted_name_with_another_key_is_refused(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    assert members.merge([record_of(Identity.make("bob")).to_json()]).refused == {"certificate": 1}
    assert members.pinned() == [BOB.certificate]


def test_a_record_of_another_federation_is_refused(members: MembersFile) -> None:
    assert members.merge([record_of(BOB, federation="banks").to_json()]).refused == {
        "federation": 1
    }


def test_another_site_with_our_name_is_refused_and_our_own_record_is_not(
    members: MembersFile,
) -> None:
    members.announce(ALICE.rotate(), AT_BOB, 0.5, 0)
    assert (
        members.merge([record_of(ALICE).to_json()]).refused == {}
    )  # our own, from before the rotation
    assert members.merge([record_of(Identity.make("alice")).to_json()]).refused == {
        "certificate": 1
    }


def test_a_record_with_a_certificate_rotated_twice_is_accepted(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    newest = BOB.rotate().rotate()
    assert members.merge([record_of(newest).to_json()]).learned == ("bob",)
    assert members.pinned() == [newest.certificate]


def test_a_chain_with_a_forged_link_is_refused(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    attacker = Identity.make("bob")
    forged = Identity("bob", attacker.key, attacker.certificate, (BOB.certificate,))
    assert members.merge([record_of(forged).to_json()]).refused == {"certificate": 1}
    assert members.pinned() == [BOB.certificate]


def test_a_forged_link_does_not_replace_a_known_member(members: MembersFile) -> None:
    members.merge([record_of(CAROL).to_json()])
    attacker = Identity.make("carol")
    forged = Identity("carol", attacker.key, attacker.certificate, (CAROL.certificate,))
    assert members.merge([record_of(forged, serial=2).to_json()]).refused == {"certificate": 1}
    assert [record.fingerprint for record in members.known()] == [CAROL.fingerprint]


def test_members_that_only_others_accepted_are_known_but_not_trusted(members: MembersFile) -> None:
    assert members.merge([record_of(CAROL).to_json()]).learned == ("carol",)
    assert [record.name for record in members.known()] == ["carol"]
    assert members.find_by_certificate(der(CAROL.certificate)) is None
    assert (members.names(), members.pinned(), members.records()) == ([], [], [])
    members.accept(invite_of(CAROL))
    assert members.known() == []


def test_a_known_member_with_a_rotated_certificate_has_one_entry(members: MembersFile) -> None:
    new = CAROL.rotate()
    members.merge(
        [record_of(CAROL, 1).to_json(), record_of(new, 2).to_json(), record_of(CAROL, 1).to_json()]
    )
    assert [record.fingerprint for record in members.known()] == [new.fingerprint]


def test_a_record_of_a_revoked_member_changes_nothing(members: MembersFile) -> None:
    members.accept(invite_of(BOB))
    members.revoke("bob")
    assert members.merge([record_of(BOB.rotate(), address=ELSEWHERE).to_json()]).learned == ()
    bob = members.get("bob")
    assert bob is not None
    assert (bob.state, bob.address, bob.fingerprint) == ("revoked", AT_BOB, BOB.fingerprint)


def test_names_that_others_invent_are_forgotten(members: MembersFile) -> None:
    names = [f"site-{k:03d}" for k in range(MAX_STRANGERS + 2)]
    members.merge([record_of(Identity.make(name)).to_json() for name in names])
    assert [record.name for record in members.known()] == names[2:]
    again = MembersFile(members.path, "alice", "hospitals")  # nothing is stored of them
    assert again.known() == []
    assert b"site-" not in members.path.read_bytes()


def test_a_record_that_is_not_stored_is_verified_once(
    members: MembersFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, read = [], MemberRecord.read

    def counted(found: JSON) -> MemberRecord:
        verified.append(found)
        return read(found)

    monkeypatch.setattr(MemberRecord, "read", counted)
    carols = record_of(CAROL).to_json()
    for _ in range(3):
        members.merge([carols])
    assert len(verified) == 1
    members.accept(invite_of(CAROL))  # now it is the record of a member
    assert members.merge([carols]).learned == ("carol",)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab=0", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["record", "chain", "a"]), inner)
    ),
    max_leaves=6,
)
VALID: Any = record_of(BOB).to_json()


@settings(max_examples=80)
@given(ANY_JSON)
def test_arbitrary_json_is_refused_as_malformed(found: JSON) -> None:
    with pytest.raises(MessageError) as refused:
        MemberRecord.read(found)
    assert refused.value.refusal == "malformed"


@settings(max_examples=80)
@given(field=st.sampled_from(sorted(VALID["record"])), value=ANY_JSON)
def test_any_change_of_any_field_is_refused(field: str, value: JSON) -> None:
    changed = {**VALID, "record": {**VALID["record"], field: value}}
    if type(value) is type(VALID["record"][field]) and value == VALID["record"][field]:
        return
    with pytest.raises(MessageError) as refused:
        MemberRecord.read(changed)
    assert refused.value.refusal in ("malformed", "signature", "certificate")
    assert record_digest(changed) != record_digest(VALID)
