"""The settings of a relay, and whom it admits."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from messages import refused

from dispfl.errors import ConfigError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.roster import Roster, RosterError
from dispfl.peer.run_relay import RelaySettings, read_members

BOB, CAROL = Identity.make("bob"), Identity.make("carol")


def invite(identity: Identity) -> Invite:
    return Invite("hearts", identity.name, Address("127.0.0.1", 7600), identity.certificate)


def test_members_come_from_invites_fingerprints_and_folders(tmp_path: Path) -> None:
    (tmp_path / "bob.invite").write_text(f"{invite(BOB)}\n")
    (tmp_path / "list.txt").write_text(f"\n{CAROL.fingerprint.upper()} carol\n{'0' * 64}\n")
    assert read_members([tmp_path]) == {
        BOB.fingerprint: "bob",
        CAROL.fingerprint: "carol",
        "0" * 64: "member",
    }
    (tmp_path / "empty").mkdir()
    assert read_members([tmp_path / "empty"]) == {}
    assert read_members([tmp_path / "bob.invite"]) == {BOB.fingerprint: "bob"}


def test_a_roster_admits_its_members_once_it_is_signed(tmp_path: Path) -> None:
    ann = Ed25519PrivateKey.generate()
    admins = {"ann": ann.public_key().public_bytes_raw()}
    roster = Roster("hearts", 1, 1, admins).with_members([invite(BOB), invite(CAROL)])
    file = tmp_path / "hearts.roster"
    file.write_text(roster.text)
    with pytest.raises(RosterError, match="is signed by 0 of the 1"):
        read_members([file])
    file.write_text(roster.signed_by(ann).text)
    assert read_members([file]) == {BOB.fingerprint: "bob", CAROL.fingerprint: "carol"}


def test_a_file_that_names_no_member_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "members.txt"
    file.write_text("bob\n")
    with refused(ConfigError, key="members"):
        read_members([file])
    file.write_text("\n")
    with refused(ConfigError, key="members"):
        read_members([file])
    with refused(ConfigError, key="members"):
        read_members([tmp_path / "nowhere"])


def test_the_address_of_a_relay_pins_the_certificate_that_it_made(tmp_path: Path) -> None:
    settings = RelaySettings("127.0.0.1:7443", [], identity=tmp_path / "identity")
    address = settings.address()
    assert address.fingerprint == Identity.load(tmp_path / "identity").fingerprint
    assert settings.address() == address  # also after a restart
    settings.context()


def test_a_relay_without_a_name_or_with_half_a_certificate_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="advertise"):
        RelaySettings("0.0.0.0:443", [], identity=tmp_path).address()
    with refused(ConfigError, key="cert"):
        RelaySettings("127.0.0.1:443", [], cert=tmp_path / "cert.pem").address()
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nothing")
    with refused(ConfigError, key="cert"):
        RelaySettings(
            "127.0.0.1:443", [], cert=tmp_path / "cert.pem", key=tmp_path / "key.pem"
        ).context()
