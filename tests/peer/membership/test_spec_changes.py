"""Changes of the spec: who has to sign them, and what a site does with those of others."""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dispfl.errors import MessageError, RunError
from dispfl.peer.membership.audit_log import read_audit
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.spec_change import SpecChange, SpecChangeError
from dispfl.peer.membership.spec_changes import MAX_PROPOSALS
from dispfl.peer.site import Site, SiteInfo


def make_sites(folder: Path, *names: str) -> dict[str, Site]:
    """Sites that have accepted each other by hand."""
    sites = {}
    for number, name in enumerate(names):
        info = SiteInfo(name=name, listen=f"10.0.0.{number + 1}:7600", federation="hearts")
        sites[name] = Site.create(folder / name, info, {})
    for site in sites.values():
        site.members.accept_all([peer.invite() for peer in sites.values() if peer is not site])
    return sites


def proposed_by(site: Site, rounds: int = 40, time: int = 1) -> SpecChange:
    """A proposal, signed by its site."""
    change = site.spec_changes.next_change({"rounds": rounds}, 20, time)
    return change.signed_by_site(site.identity)


def pass_on(sender: Site, receiver: Site) -> None:
    """What a sync does with the changes that the receiver lacks."""
    version = receiver.spec_changes.current().version
    receiver.spec_changes.merge(sender.spec_changes.current().documents(version))


def test_a_change_is_in_force_once_every_member_has_signed_it(tmp_path: Path) -> None:
    sites = make_sites(tmp_path, "alice", "bob", "carol")
    alice, bob, carol = sites.values()
    alice.spec_changes.confirm(alice.spec_changes.next_change({"rounds": 40}, 20, 1))
    assert alice.spec_changes.current().version == 1
    pass_on(alice, bob)
    bob.spec_changes.confirm(bob.spec_changes.current().proposed[0])
    [proposal] = bob.spec_changes.current().proposed
    assert bob.spec_changes.signatories().missing(proposal) == "carol"

    pass_on(bob, carol)
    carol.spec_changes.confirm(carol.spec_changes.current().proposed[0])
    assert carol.spec_changes.current().version == 2
    pass_on(carol, alice)
    pass_on(alice, bob)
    for site in sites.values():
        [change] = Site.open(site.folder).spec_changes.current().in_force
        assert change.settings == {"rounds": 40}
        assert site.spec_changes.current().proposed == ()
    events = [entry["event"] for entry in read_audit(carol.folder)]
    assert events[-1] == "spec changed"


def test_a_change_stays_in_force_when_a_site_joins_that_has_not_signed_it(tmp_path: Path) -> None:
    sites = make_sites(tmp_path, "alice", "bob")
    alice, bob = sites.values()
    alice.spec_changes.confirm(proposed_by(bob))
    assert alice.spec_changes.current().version == 2
    info = SiteInfo(name="carol", listen="10.0.0.9:7600", federation="hearts")
    carol = Site.create(tmp_path / "carol", info, {})
    alice.members.accept(carol.invite())
    assert Site.open(alice.folder).spec_changes.current().version == 2


@pytest.mark.parametrize("forged", ["of a stranger", "of another change", "of another member"])
def test_a_signature_that_is_not_valid_counts_for_nobody(tmp_path: Path, forged: str) -> None:
    sites = make_sites(tmp_path, "alice", "bob", "carol")
    alice, bob, carol = sites.values()
    document = proposed_by(bob).to_json()
    signatures = document["members"]
    assert isinstance(signatures, dict)
    if forged == "of a stranger":
        mallory = make_sites(tmp_path / "elsewhere", "mallory")["mallory"]
        signatures |= dict(proposed_by(mallory).to_json()["members"])  # type: ignore[arg-type]
    elif forged == "of another change":
        signatures |= dict(proposed_by(carol, rounds=99).to_json()["members"])  # type: ignore[arg-type]
    else:
        signatures["carol"] = signatures["bob"]
    alice.spec_changes.merge([document])
    alice.spec_changes.confirm(proposed_by(bob))
    [proposal] = alice.spec_changes.current().proposed
    assert sorted(proposal.members) == ["alice", "bob"]


def test_with_a_roster_its_administrators_decide_and_members_do_not(tmp_path: Path) -> None:
    keys = {name: Ed25519PrivateKey.generate() for name in ("ann", "ben", "cat")}
    admins = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    sites = make_sites(tmp_path, "alice", "bob")
    alice, bob = sites.values()
    roster = Roster("hearts", 1, 2, admins).with_members([alice.invite(), bob.invite()])
    roster = roster.signed_by(keys["ann"]).signed_by(keys["cat"])
    for site in sites.values():
        site.members.accept_roster(roster, roster.fingerprint)

    change = alice.spec_changes.next_change({"rounds": 40}, 20, 1)
    with pytest.raises(SpecChangeError, match="no valid signature of the administrators"):
        alice.spec_changes.confirm(change)
    half_signed = change.signed_by_administrator(keys["ann"], roster)
    alice.spec_changes.add(half_signed)
    assert alice.spec_changes.current().version == 1
    signatories = alice.spec_changes.signatories()
    assert signatories.missing(half_signed) == "1 of the administrators ben, cat"
    bob.spec_changes.merge([half_signed.signed_by_administrator(keys["ben"], roster).to_json()])
    assert bob.spec_changes.current().version == 2
    pass_on(bob, alice)
    assert alice.spec_changes.current().version == 2

    contradiction = replace(change, time=7).signed_by_administrator(keys["cat"], roster)
    contradiction = contradiction.signed_by_administrator(keys["ann"], roster)
    with pytest.raises(MessageError, match="two contents"):
        alice.spec_changes.merge([contradiction.to_json()])


def test_one_member_that_proposes_without_end_fills_nothing(tmp_path: Path) -> None:
    sites = make_sites(tmp_path, "alice", "bob", "carol")
    alice, bob, _ = sites.values()
    for time in range(3 * MAX_PROPOSALS):
        alice.spec_changes.merge([proposed_by(bob, rounds=50 + time, time=time).to_json()])
    [proposal] = alice.spec_changes.current().proposed
    assert proposal.settings == {"rounds": 49 + 3 * MAX_PROPOSALS}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"change": {}, "administrators": {}, "members": {}},
        {"change": None, "administrators": {}, "members": {}},
    ],
)
def test_what_is_no_change_is_refused_by_name(tmp_path: Path, document: object) -> None:
    alice = make_sites(tmp_path, "alice", "bob")["alice"]
    with pytest.raises(MessageError, match="A change of the spec is invalid"):
        alice.spec_changes.merge([document])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("version", 2**53),
        ("version", True),
        ("from_round", -1),
        ("settings", {}),
        ("settings", {"a": "x" * 5000}),
        ("settings", {"\x1b[2J": 1}),
        ("follows", 3),
        ("federation", "../x"),
        ("time", 1.5),
    ],
)
def test_a_field_out_of_range_is_refused(tmp_path: Path, field: str, value: object) -> None:
    alice, bob = make_sites(tmp_path, "alice", "bob").values()
    document = proposed_by(bob).to_json()
    document["change"][field] = value  # type: ignore[index, call-overload, assignment]
    with pytest.raises(MessageError, match="A change of the spec is invalid"):
        alice.spec_changes.merge([document])


def test_a_damaged_file_is_reported_with_the_way_out(tmp_path: Path) -> None:
    alice = make_sites(tmp_path, "alice", "bob")["alice"]
    alice.spec_changes.path.write_text("{")
    with pytest.raises(RunError, match="Restore it, or delete it"):
        alice.spec_changes.current()
