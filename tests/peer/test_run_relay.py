"""The settings of a relay, and whom it admits."""

import asyncio
import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from messages import refused

from dispfl.errors import ConfigError
from dispfl.peer import run_relay
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import CERTIFICATE, KEY, Identity, der
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.roster import Roster, RosterError
from dispfl.peer.run_relay import MemberFiles, RelaySettings, follow_certificate, follow_members
from dispfl.peer.transport.relay_server import Relay

BOB, CAROL = Identity.make("bob"), Identity.make("carol")


def invite(identity: Identity) -> Invite:
    return Invite("hearts", identity.name, Address("127.0.0.1", 7600), identity.certificate)


def test_members_come_from_invites_fingerprints_and_folders(tmp_path: Path) -> None:
    (tmp_path / "bob.invite").write_text(f"{invite(BOB)}\n")
    (tmp_path / "list.txt").write_text(f"\n{CAROL.fingerprint.upper()} carol\n{'0' * 64}\n")
    assert MemberFiles([tmp_path]).read() == {
        BOB.fingerprint: "bob",
        CAROL.fingerprint: "carol",
        "0" * 64: "member",
    }
    (tmp_path / "empty").mkdir()
    assert MemberFiles([tmp_path / "empty"]).read() == {}
    assert MemberFiles([tmp_path / "bob.invite"]).read() == {BOB.fingerprint: "bob"}


def test_a_roster_admits_its_members_once_it_is_signed(tmp_path: Path) -> None:
    ann = Ed25519PrivateKey.generate()
    admins = {"ann": ann.public_key().public_bytes_raw()}
    roster = Roster("hearts", 1, 1, admins).with_members([invite(BOB), invite(CAROL)])
    file = tmp_path / "hearts.roster"
    file.write_text(roster.text)
    with pytest.raises(RosterError, match="is signed by 0 of the 1"):
        MemberFiles([file]).read()
    file.write_text(roster.signed_by(ann).text)
    assert MemberFiles([file]).read() == {BOB.fingerprint: "bob", CAROL.fingerprint: "carol"}


def test_a_file_that_names_no_member_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "members.txt"
    file.write_text("bob\n")
    with refused(ConfigError, key="members"):
        MemberFiles([file]).read()
    file.write_text("\n")
    with refused(ConfigError, key="members"):
        MemberFiles([file]).read()
    with refused(ConfigError, key="members"):
        MemberFiles([tmp_path / "nowhere"]).read()


def test_hidden_and_bad_files_in_a_folder_do_not_keep_the_others_from_being_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carol's file becomes bad: she stays admitted. Bob's is deleted: he is not."""
    monkeypatch.setattr(run_relay, "FILES_INTERVAL", 0.01)
    folder = tmp_path / "members"
    folder.mkdir()
    (folder / ".DS_Store").write_bytes(b"\xff\x00")
    (folder / "notes.txt").write_text("Ask bob\n")
    (folder / "bob.invite").write_text(f"{invite(BOB)}\n")
    (folder / "carol.invite").write_text(f"{invite(CAROL)}\n")
    events: list[tuple[str, Mapping[str, object]]] = []
    members = MemberFiles([folder])
    settings = RelaySettings("127.0.0.1:7443", [folder], identity=tmp_path / "identity")
    address = settings.address().address

    async def scenario() -> None:
        relay = Relay(address, settings.certificate(), members.read())
        assert set(relay.admitted.values()) == {"bob", "carol"}
        following = follow_members(relay, members, lambda *event: events.append(event))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            task = group.create_task(following)
            (folder / "carol.invite").write_bytes(b"\xff\x00")
            (folder / "bob.invite").unlink()
            while len(events) < 3:
                await asyncio.sleep(0.01)
            assert relay.admitted == {CAROL.fingerprint: "carol"}
            await asyncio.sleep(0.1)
            task.cancel()

    asyncio.run(scenario())
    details = [str(fields["detail"]) for event, fields in events if event == "problem"]
    assert [detail.split()[1].strip(",") for detail in sorted(details)] == [
        str(folder / "carol.invite"),
        str(folder / "notes.txt"),
    ]
    assert [event for event, _ in events].count("members") == 1


def test_the_address_of_a_relay_pins_the_certificate_that_it_made(tmp_path: Path) -> None:
    settings = RelaySettings("127.0.0.1:7443", [], identity=tmp_path / "identity")
    address = settings.address()
    assert address.fingerprint == Identity.load(tmp_path / "identity").fingerprint
    assert settings.address() == address  # also after a restart
    settings.certificate()


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
        ).certificate()


def test_a_renewed_certificate_is_shown_to_new_connections_once_its_key_is_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_relay, "FILES_INTERVAL", 0.01)
    first, renewed = Identity.make("relay"), Identity.make("relay")
    first.save(tmp_path / "used")
    renewed.save(tmp_path / "renewed")
    cert, key = tmp_path / "used" / CERTIFICATE, tmp_path / "used" / KEY
    settings = RelaySettings("127.0.0.1:1", [], cert=cert, key=key)
    events: list[str] = []

    async def scenario() -> None:
        relay = Relay(Address("127.0.0.1", 1), settings.certificate(), {})
        await relay.open(Address("127.0.0.1", 0))

        async def shown() -> bytes:
            place = ("127.0.0.1", relay.port)
            pem = await asyncio.to_thread(ssl.get_server_certificate, place)
            return ssl.PEM_cert_to_DER_cert(pem)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            following = follow_certificate(relay, settings, lambda event, _: events.append(event))
            task = group.create_task(following)
            await asyncio.sleep(0.05)
            shutil.copy(tmp_path / "renewed" / CERTIFICATE, cert)
            while not events:
                await asyncio.sleep(0.01)
            assert await shown() == der(first.certificate)
            shutil.copy(tmp_path / "renewed" / KEY, key)
            while await shown() != der(renewed.certificate):
                await asyncio.sleep(0.01)
            task.cancel()
        assert relay.certificate.ends == renewed.certificate.not_valid_after_utc
        await relay.close()

    asyncio.run(scenario())
    assert events == ["problem", "certificate"]
