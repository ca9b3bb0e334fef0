"""Relays in addresses, invites, records, the members file and a site's settings."""

from pathlib import Path

import pytest
from messages import refused

from dispfl.errors import ConfigError, MessageError
from dispfl.peer.membership.address import Address, RelayAddress, parse_relays, reach_text
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.site import Site, SiteInfo

BOB = Identity.make("bob")
PINNED = RelayAddress("relay.example.org", 443, "ab" * 32)
PUBLIC = RelayAddress("192.0.2.7", 8443)
RELAYS = (PINNED, PUBLIC)


def test_the_address_of_a_relay_is_read_as_it_is_written() -> None:
    assert str(PINNED) == f"wss://relay.example.org:443#sha256={'ab' * 32}"
    for relay in (*RELAYS, RelayAddress("2001:db8::7", 443)):
        assert RelayAddress.parse(str(relay)) == relay
    assert RelayAddress.parse("wss://Relay.Example.org/") == RelayAddress("relay.example.org", 443)
    assert RelayAddress.parse("wss://[2001:db8::7]") == RelayAddress("2001:db8::7", 443)
    assert reach_text(Address("bob", 1), RELAYS) == (
        "bob:1, wss://relay.example.org:443, wss://192.0.2.7:8443"
    )


@pytest.mark.parametrize(
    "text",
    [
        "relay.example.org:443",
        "https://relay.example.org",
        "wss://user@relay.example.org",
        "wss://relay.example.org/path",
        "wss://relay.example.org#sha256=ab",
        "wss://relay.example.org:99999",
        "wss://" + "a" * 400,
    ],
)
def test_what_is_no_address_of_a_relay_is_refused(text: str) -> None:
    with refused(ConfigError):
        RelayAddress.parse(text)


def test_a_site_has_at_most_four_relays_and_none_that_is_everywhere() -> None:
    with refused(ConfigError):
        parse_relays(" ".join(f"wss://relay{number}" for number in range(5)))
    with refused(ConfigError):
        parse_relays("wss://0.0.0.0")


@pytest.mark.parametrize("address", [None, Address("192.0.2.9", 7600)])
def test_invites_records_and_the_members_file_keep_relays(
    tmp_path: Path, address: Address | None
) -> None:
    invite = Invite("hearts", "bob", address, BOB.certificate, RELAYS)
    assert Invite.read(str(invite)) == invite
    record = MemberRecord.sign(BOB, "hearts", address, 0.5, 0, 1, RELAYS[:1])
    assert MemberRecord.read(record.to_json()) == record
    other = MemberRecord.sign(BOB, "hearts", address, 0.5, 0, 1, RELAYS[1:])
    assert other.digest != record.digest

    MembersFile.create(tmp_path / "members.json", "alice", "hearts")
    members = MembersFile(tmp_path / "members.json", "alice", "hearts")
    members.accept(invite)
    bob = MembersFile(tmp_path / "members.json", "alice", "hearts").get("bob")
    assert bob is not None
    assert (bob.address, bob.relays) == (address, RELAYS)
    members.merge([record.to_json()])
    bob = members.get("bob")
    assert bob is not None
    assert (bob.address, bob.relays) == (address, RELAYS[:1])
    members.file.save()
    changed = [entry for entry in members.file.audit_log() if entry["event"] == "address changed"]
    assert changed[0]["address"] == reach_text(address, RELAYS[:1])


def test_a_record_without_an_address_needs_a_relay_and_its_relays_are_signed() -> None:
    nowhere = MemberRecord.sign(BOB, "hearts", None, 0.5, 0, 1)
    with pytest.raises(MessageError, match="An address is HOST:PORT"):
        MemberRecord.read(nowhere.to_json())
    content = MemberRecord.sign(BOB, "hearts", None, 0.5, 0, 1, RELAYS).to_json()
    assert isinstance(content, dict)
    assert isinstance(content["record"], dict)
    content["record"]["relays"] = str(PUBLIC)
    with pytest.raises(MessageError, match="not signed by its certificate's key"):
        MemberRecord.read(content)
    content["record"]["relays"] = "ftp://relay"
    with pytest.raises(MessageError, match="A relay is wss"):
        MemberRecord.read(content)


def test_a_site_needs_an_address_or_a_relay(tmp_path: Path) -> None:
    with refused(ConfigError, key="listen"):
        SiteInfo(name="bob")
    with refused(ConfigError, key="relays"):
        SiteInfo(name="bob", relays=("relay.example.org",))
    with refused(ConfigError, key="advertise"):
        SiteInfo(name="bob", relays=(str(PUBLIC),), advertise="bob.example.org:7600")
    with refused(ConfigError, key="ca_bundle"):
        SiteInfo(name="bob", relays=(str(PUBLIC),), ca_bundle=str(tmp_path / "nothing.pem"))
    site = Site.create(tmp_path / "bob", SiteInfo(name="bob", relays=tuple(map(str, RELAYS))), {})
    assert Site.open(site.folder).info.relay_addresses == RELAYS
    assert site.invite().address is None
    assert Invite.read(str(site.invite())).relays == RELAYS
