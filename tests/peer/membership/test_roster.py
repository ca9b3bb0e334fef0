"""Rosters: signed by enough administrators, accepted once, newer ones follow, forks are refused and
shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dispfl.errors import ConfigError, MessageError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.audit_log import read_audit
from dispfl.peer.membership.identity import Identity, der
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.member_list import Fork, MemberList
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster, RosterError

ANN, BEN, CAT, MALLORY = (Ed25519PrivateKey.generate() for _ in range(4))
ADMINS = {
    name: key.public_key().public_bytes_raw()
    for name, key in (("ann", ANN), ("ben", BEN), ("cat", CAT))
}
ALICE, BOB, CAROL, DAVE = (Identity.make(name) for name in ("alice", "bob", "carol", "dave"))
WHERE = Address("192.0.2.7", 7601)


def invite_of(identity: Identity, federation: str = "hospitals") -> Invite:
    return Invite(federation, identity.name, WHERE, identity.certificate)


EMPTY = Roster("hospitals", 1, 2, ADMINS)
FIRST = EMPTY.with_members(map(invite_of, (ALICE, BOB, CAROL))).signed_by(ANN).signed_by(BEN)


@pytest.fixture
def members(tmp_path: Path) -> MembersFile:
    """Alice's members, who has accepted the first roster."""
    members = MembersFile.create(tmp_path / "members.json", "alice", "hospitals")
    members.accept_roster(FIRST, FIRST.fingerprint)
    return members


def states(members: MembersFile) -> dict[str, str]:
    return {member.name: f"{member.state} by {member.by}" for member in members.all()}


# signatures and versions


def test_a_roster_needs_as_many_administrators_as_its_threshold() -> None:
    draft = EMPTY.with_members([invite_of(BOB)])
    for signed, signers in (
        (draft, []),
        (draft.signed_by(CAT), ["cat"]),
        (draft.signed_by(CAT).signed_by(CAT), ["cat"]),
    ):
        assert signed.signers() == signers
        with pytest.raises(
            RosterError, match=f"is signed by {len(signers)} of the 2 administrators that it needs"
        ):
            signed.verify()
    FIRST.verify()
    with pytest.raises(
        RosterError, match=r"belongs to none of the roster's administrators \(ann, ben, cat\)"
    ):
        draft.signed_by(MALLORY)


def test_a_signature_does_not_count_for_another_content_name_or_key() -> None:
    added = replace(FIRST, invites=(*FIRST.invites, str(invite_of(DAVE))))
    swapped = replace(
        FIRST, signatures={"ann": FIRST.signatures["ben"], "ben": FIRST.signatures["ann"]}
    )
    invented = replace(
        FIRST, signatures={"mallory": MALLORY.sign(FIRST._signed()), "ann": FIRST.signatures["ann"]}
    )
    lowered = replace(FIRST, threshold=1, signatures={"mallory": MALLORY.sign(FIRST._signed())})
    for forged in (added, swapped, invented, lowered):
        with pytest.raises(RosterError, match="is signed by"):
            forged.verify()


def test_a_change_of_a_signed_roster_has_the_next_version_and_no_signature() -> None:
    assert (EMPTY.version, FIRST.version) == (1, 1)  # a draft keeps its version
    second = FIRST.without_members(["carol"])
    assert (second.version, second.signers(), sorted(second.members())) == (2, [], ["alice", "bob"])
    assert second.with_members([invite_of(DAVE)]).version == 2
    assert FIRST.with_members([invite_of(BOB)]) is FIRST
    with pytest.raises(
        ConfigError, match=r"There is no member 'crol' on the roster\. Did you mean carol"
    ):
        FIRST.without_members(["crol"])
    with pytest.raises(
        RosterError, match=r"bob is on the roster with another certificate .* remove it first"
    ):
        FIRST.with_members([invite_of(Identity.make("bob"))])
    with pytest.raises(RosterError, match="dave belongs to the federation banks"):
        FIRST.with_members([invite_of(DAVE, "banks")])


def test_a_roster_survives_a_round_trip_and_its_fingerprint_is_that_of_the_administrators() -> None:
    again = Roster.read(json.dumps(FIRST.to_json(), indent=1))
    assert again == FIRST == Roster.read(FIRST.text)
    again.verify()
    assert FIRST.without_members(["bob"]).fingerprint == FIRST.fingerprint
    assert replace(FIRST, threshold=1).fingerprint != FIRST.fingerprint
    assert (
        replace(
            FIRST, admins={**ADMINS, "cat": MALLORY.public_key().public_bytes_raw()}
        ).fingerprint
        != FIRST.fingerprint
    )


# at a site


def test_a_site_accepts_everyone_on_a_roster_and_not_itself(members: MembersFile) -> None:
    assert states(members) == {"bob": "accepted by roster", "carol": "accepted by roster"}
    assert members.find_by_certificate(der(BOB.certificate)) is not None
    again = MembersFile(members.path, "alice", "hospitals")
    assert states(again) == states(members)
    assert again.file.current().roster == FIRST


def test_signatures_that_do_not_count_are_neither_stored_nor_passed_on_nor_named(
    members: MembersFile,
) -> None:
    """Signatures are not signed themselves: whoever passes a roster on could add any number of
    them."""
    second = FIRST.without_members(["carol"]).signed_by(ANN).signed_by(BEN)
    invalid = {"cat": bytes(64), **{f"\x1b[2J{number}": bytes(64) for number in range(1000)}}
    assert members.merge_roster(replace(second, signatures={**second.signatures, **invalid}).text)
    stored = members.file.current().roster
    assert stored == second
    assert members.path.stat().st_size < 3 * len(second.text)
    assert read_audit(members.path.parent)[-1]["signed_by"] == "ann,ben"
    other = MembersFile.create(members.path.with_name("other.json"), "bob", "hospitals")
    other.accept_roster(
        replace(FIRST, signatures={**FIRST.signatures, **invalid}), FIRST.fingerprint
    )
    assert other.file.current().roster == FIRST


def test_a_roster_is_accepted_with_the_right_fingerprint_only(tmp_path: Path) -> None:
    members = MembersFile.create(tmp_path / "members.json", "alice", "hospitals")
    with pytest.raises(RosterError, match=rf"administrators is {FIRST.fingerprint}\. Compare it"):
        members.accept_roster(FIRST)
    with pytest.raises(
        RosterError, match=rf"administrators is {FIRST.fingerprint}, not 12\. Nothing was accepted"
    ):
        members.accept_roster(FIRST, "12")
    with pytest.raises(RosterError, match="is signed by 1 of the 2"):
        members.accept_roster(
            replace(FIRST, signatures={"ann": FIRST.signatures["ann"]}), FIRST.fingerprint
        )
    with pytest.raises(
        RosterError, match="The roster is of the federation banks, this site of hospitals"
    ):
        members.accept_roster(Roster("banks", 1, 1, ADMINS).signed_by(ANN), "")
    assert (states(members), members.file.current().roster) == ({}, None)


def test_who_is_removed_from_the_roster_is_revoked_and_may_come_back(members: MembersFile) -> None:
    second = (
        FIRST.without_members(["carol"])
        .with_members([invite_of(DAVE)])
        .signed_by(BEN)
        .signed_by(CAT)
    )
    assert members.merge_roster(second.text)
    assert states(members) == {
        "bob": "accepted by roster",
        "carol": "revoked by roster",
        "dave": "accepted by roster",
    }
    assert members.pinned() == [BOB.certificate, DAVE.certificate]
    assert not members.merge_roster(FIRST.text)  # an old roster does not bring her back
    third = second.with_members([invite_of(CAROL)]).signed_by(ANN).signed_by(CAT)
    assert members.merge_roster(third.text)
    assert states(members)["carol"] == "accepted by roster"


def test_the_operator_decides_over_the_roster_and_the_roster_over_hand_accepted_sites_it_lists(
    members: MembersFile,
) -> None:
    members.revoke("bob")
    members.accept(invite_of(DAVE))
    second = FIRST.with_members([invite_of(DAVE)]).signed_by(ANN).signed_by(BEN)
    members.merge_roster(second.text)
    assert states(members) == {
        "bob": "revoked by hand",
        "carol": "accepted by roster",
        "dave": "accepted by roster",
    }
    third = second.without_members(["dave", "carol"]).signed_by(ANN).signed_by(BEN)
    members.merge_roster(third.text)
    assert states(members) == {
        "bob": "revoked by hand",
        "carol": "revoked by roster",
        "dave": "revoked by roster",
    }


def test_a_site_that_the_operator_has_revoked_stays_so_when_the_roster_gives_it_another_key(
    members: MembersFile,
) -> None:
    members.revoke("bob")
    other = invite_of(Identity.make("bob"))
    assert members.merge_roster(
        FIRST.without_members(["bob"]).with_members([other]).signed_by(ANN).signed_by(BEN).text
    )
    assert states(members) == {"bob": "revoked by hand", "carol": "accepted by roster"}
    members.accept(other)  # only the operator takes that back
    assert states(members)["bob"] == "accepted by hand"


def test_a_site_accepted_by_hand_stays_without_the_roster(members: MembersFile) -> None:
    members.accept(invite_of(DAVE))
    members.merge_roster(FIRST.without_members(["carol"]).signed_by(ANN).signed_by(BEN).text)
    assert states(members)["dave"] == "accepted by hand"


def test_a_member_that_has_rotated_keeps_its_new_key_and_a_replaced_one_loses_its_old_key(
    members: MembersFile,
) -> None:
    rotated = BOB.rotate()
    assert members.find_by_certificate(der(rotated.certificate)) is not None
    other = Identity.make("carol")
    second = (
        FIRST.without_members(["carol"])
        .with_members([invite_of(other)])
        .signed_by(ANN)
        .signed_by(BEN)
    )
    assert members.merge_roster(second.text)
    assert members.pinned() == [rotated.certificate, other.certificate]
    assert members.find_by_certificate(der(CAROL.certificate)) is None


def test_two_rosters_with_one_version_are_a_fork_which_is_refused_and_shown_until_a_newer_one(
    members: MembersFile,
) -> None:
    one = FIRST.without_members(["carol"]).signed_by(ANN).signed_by(BEN)
    other = FIRST.without_members(["bob"]).signed_by(BEN).signed_by(CAT)
    assert members.merge_roster(one.text)
    before = states(members)
    for _ in range(2):
        members.merge_roster(other.text)
    assert (states(members), members.file.current().forks) == (before, (Fork(2, other.digest),))
    assert not members.merge_roster(
        replace(one, signatures={**one.signatures, **one.signed_by(CAT).signatures}).text
    )
    [fork] = [entry for entry in read_audit(members.path.parent) if entry["event"] == "roster fork"]
    assert (fork["version"], fork["other"]) == (2, other.digest[:16])
    third = one.with_members([invite_of(DAVE)]).signed_by(ANN).signed_by(BEN)
    members.merge_roster(third.text)
    assert members.file.current().forks == ()


def at_version(version: int) -> Roster:
    """The roster without carol, signed with any version by two administrators."""
    draft = replace(FIRST.without_members(["carol"]), version=version)
    signatures = {"ann": ANN.sign(draft._signed()), "ben": BEN.sign(draft._signed())}
    return replace(draft, signatures=signatures)


@pytest.mark.parametrize("version", [1002, 10**6, 2**53])
def test_a_roster_that_jumps_too_far_is_refused_and_shown_and_the_next_one_follows(
    members: MembersFile, version: int
) -> None:
    """After the largest version there is no other: whoever smuggles it in would freeze the list."""
    jumped = at_version(version)
    assert members.merge_roster(jumped.text)
    for _ in range(2):
        assert not members.merge_roster(jumped.text)
        assert members.accept_roster(jumped).is_fork(jumped)
    member_list = members.file.current()
    assert (member_list.roster, member_list.forks) == (FIRST, (Fork(version, jumped.digest),))
    assert not member_list.lacks_roster(version, jumped.digest, jumped.fingerprint)
    assert reopened(members).forks == member_list.forks
    assert read_audit(members.path.parent)[-1]["version"] == version

    assert members.merge_roster(at_version(2).text)
    assert members.file.current().forks == ()
    assert states(members)["carol"] == "revoked by roster"


def test_a_site_follows_after_many_missed_versions_and_after_more_with_the_fingerprint(
    members: MembersFile,
) -> None:
    assert members.merge_roster(at_version(1001).text)
    far = at_version(500_000)
    assert members.merge_roster(far.text)
    assert members.accept_roster(far).is_fork(far)
    assert members.accept_roster(far, FIRST.fingerprint).roster == far
    assert members.accept_roster(FIRST, FIRST.fingerprint).roster == far  # never back


def test_no_site_begins_with_a_version_that_few_can_succeed_and_nobody_signs_it(
    tmp_path: Path,
) -> None:
    members = MembersFile.create(tmp_path / "members.json", "bob", "hospitals")
    with pytest.raises(RosterError, match="and no site accepts one above 1000000"):
        members.accept_roster(at_version(2**53), FIRST.fingerprint)
    with pytest.raises(RosterError, match="Somebody has edited it"):
        replace(FIRST, version=2**53, signatures={}).signed_by(ANN)
    assert members.accept_roster(at_version(10**6), FIRST.fingerprint).roster


def reopened(members: MembersFile) -> MemberList:
    """The list in the file."""
    return MembersFile(members.path, members.name, members.federation).file.current()


@pytest.mark.parametrize(
    "forge",
    [
        lambda roster: replace(roster, signatures={"ann": roster.signatures["ann"]}),
        lambda roster: replace(roster, version=9),
        lambda roster: replace(
            roster, admins={"mallory": MALLORY.public_key().public_bytes_raw()}, threshold=1
        ).signed_by(MALLORY),
    ],
)
def test_a_forged_roster_of_another_member_is_refused(
    members: MembersFile, forge: Callable[[Any], Any]
) -> None:
    second = FIRST.without_members(["carol"]).signed_by(ANN).signed_by(BEN)
    with pytest.raises(MessageError) as refused:
        members.merge_roster(forge(second).text)
    assert refused.value.refusal == "roster"
    assert states(members)["carol"] == "accepted by roster"


def test_a_site_without_a_roster_ignores_those_of_others(tmp_path: Path) -> None:
    members = MembersFile.create(tmp_path / "members.json", "alice", "hospitals")
    assert not members.merge_roster(FIRST.text)
    assert states(members) == {}


def test_an_invite_that_cannot_be_read_is_left_out_and_named(members: MembersFile) -> None:
    spoiled = replace(
        FIRST,
        version=2,
        invites=(*FIRST.invites, "dispfl2-later", str(invite_of(DAVE, "banks"))),
        signatures={},
    )
    assert members.merge_roster(spoiled.signed_by(ANN).signed_by(BEN).text)
    assert sorted(states(members)) == ["bob", "carol"]
    assert [problem[:26] for problem in spoiled.unusable] == [
        "Invite 4 of the roster can",
        "The roster's invite of dav",
    ]


def test_the_audit_log_names_the_administrators(members: MembersFile) -> None:
    members.merge_roster(FIRST.without_members(["carol"]).signed_by(BEN).signed_by(CAT).text)
    entries = read_audit(members.path.parent)
    assert [entry["event"] for entry in entries] == [
        "accepted",
        "accepted",
        "roster",
        "revoked",
        "roster",
    ]
    assert [entry["by"] for entry in entries[3:]] == ["administrators ben, cat"] * 2
    assert entries[3]["fingerprint"] == CAROL.fingerprint
    assert (entries[4]["version"], entries[4]["fingerprint"]) == (2, FIRST.fingerprint)


def test_a_change_of_an_address_is_in_the_audit_log_a_limited_number_of_times(
    members: MembersFile,
) -> None:
    for serial in range(1, 40):
        where = Address(f"10.0.0.{serial}", 7600)
        members.merge([MemberRecord.sign(BOB, "hospitals", where, 0.5, 0, serial).to_json()])
        members.file.save()
    found = [
        entry for entry in read_audit(members.path.parent) if entry["event"] == "address changed"
    ]
    assert (found[0]["before"], found[0]["address"], found[0]["by"]) == (
        "192.0.2.7:7601",
        "10.0.0.1:7600",
        "bob",
    )
    assert len(found) == 20
    assert found[-1]["note"] == "further changes are not logged"
