"""Keys, certificates and real TLS handshakes over loopback."""

import errno
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refused

from dispfl.errors import ConfigError, RunError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import (
    MAX_ISSUERS,
    Identity,
    IdentityError,
    client_context,
    common_name,
    der,
    descends_from,
    fingerprint,
    is_current,
    is_successor,
    issue,
    pin,
    read_certificate,
    readable_fingerprint,
    server_context,
    write_privately,
)
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.members import MembersFile

ALICE, BOB, MALLORY = (Identity.make(name) for name in ("alice", "bob", "mallory"))


def connect(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str | None, str | None]:
    """The fingerprints that client and server see of each other after exchanging a byte; None if
    refused."""
    seen: list[str | None] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            raw, _ = listener.accept()
            raw.settimeout(10)
            try:
                with server.wrap_socket(raw, server_side=True) as connection:
                    if connection.recv(1) == b"?":
                        connection.sendall(b"!")
                        seen[1] = fingerprint(connection.getpeercert(binary_form=True) or b"")
            except OSError:
                raw.close()

        thread = threading.Thread(target=serve)
        thread.start()
        raw = socket.create_connection(listener.getsockname(), timeout=10)
        try:
            with client.wrap_socket(raw) as connection:
                connection.sendall(b"?")
                if connection.recv(1) == b"!":
                    seen[0] = fingerprint(connection.getpeercert(binary_form=True) or b"")
        except OSError:
            raw.close()
        thread.join()
    return seen[0], seen[1]


def tls_server(identity: Identity, *pinned: Identity) -> ssl.SSLContext:
    return server_context(identity, [each.certificate for each in pinned])


def tls_client(identity: Identity, *pinned: Identity) -> ssl.SSLContext:
    return client_context(identity, [each.certificate for each in pinned])


def test_two_sites_that_accepted_each_other_see_each_others_certificate() -> None:
    assert connect(tls_server(ALICE, BOB), tls_client(BOB, ALICE)) == (
        ALICE.fingerprint,
        BOB.fingerprint,
    )


def test_a_client_that_was_not_accepted_is_refused() -> None:
    assert connect(tls_server(ALICE, BOB), tls_client(MALLORY, ALICE)) == (None, None)


def test_a_client_refuses_a_server_that_it_has_not_accepted() -> None:
    assert connect(tls_server(MALLORY, BOB), tls_client(BOB, ALICE)) == (None, None)


def test_a_client_without_a_certificate_is_refused() -> None:
    no_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    no_certificate.check_hostname = False
    no_certificate.verify_mode = ssl.CERT_NONE
    assert connect(tls_server(ALICE, BOB), no_certificate) == (None, None)


def test_the_right_name_with_another_key_is_refused() -> None:
    impostor = Identity.make("bob")
    assert connect(tls_server(ALICE, BOB), tls_client(impostor, ALICE)) == (None, None)


def test_an_older_tls_is_refused() -> None:
    older = tls_client(BOB, ALICE)
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert connect(tls_server(ALICE, BOB), older) == (None, None)


def test_a_rotated_certificate_is_accepted_by_a_site_that_pinned_the_old_one() -> None:
    new = BOB.rotate()
    assert connect(tls_server(ALICE, BOB), tls_client(new, ALICE)) == (
        ALICE.fingerprint,
        new.fingerprint,
    )
    assert connect(tls_server(new, ALICE), tls_client(ALICE, BOB)) == (
        new.fingerprint,
        ALICE.fingerprint,
    )


def test_a_rotated_certificate_can_replace_the_pinned_one() -> None:
    new = BOB.rotate()
    assert connect(tls_server(ALICE, new), tls_client(new, ALICE)) == (
        ALICE.fingerprint,
        new.fingerprint,
    )
    assert connect(tls_server(ALICE, new), tls_client(BOB, ALICE)) == (None, None)


def test_a_certificate_can_be_added_to_a_context_in_use() -> None:
    server = tls_server(ALICE)
    assert connect(server, tls_client(BOB, ALICE)) == (None, None)
    pin(server, BOB.certificate)
    assert connect(server, tls_client(BOB, ALICE)) == (ALICE.fingerprint, BOB.fingerprint)


def test_a_revoked_member_is_refused_by_lookup_immediately_and_by_tls_in_the_next_context(
    tmp_path: Path,
) -> None:
    members = MembersFile.create(tmp_path / "members.json", "alice", "hospitals")
    members.accept(Invite("hospitals", "bob", Address("bob", 7601), BOB.certificate))
    server, bob = server_context(ALICE, members.pinned()), tls_client(BOB, ALICE)
    assert connect(server, bob) == (ALICE.fingerprint, BOB.fingerprint)
    members.revoke("bob")
    assert connect(server, bob) == (
        ALICE.fingerprint,
        BOB.fingerprint,
    )  # certificates cannot be removed from a context
    found = members.find_by_certificate(der(BOB.certificate))
    assert found is not None
    assert found.state == "revoked"
    assert connect(server_context(ALICE, members.pinned()), bob) == (None, None)


def test_creating_a_context_leaves_no_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tls_server(ALICE, BOB)
    assert list(tmp_path.iterdir()) == []


# certificates


def issued_by_bob_for(name: str) -> x509.Certificate:
    """A certificate for `name` issued by bob and signed by his key."""
    template = BOB.certificate
    builder = x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        issuer_name=template.subject,
        public_key=MALLORY.key.public_key(),
        serial_number=1,
        not_valid_before=template.not_valid_before_utc,
        not_valid_after=template.not_valid_after_utc,
    )
    return builder.sign(BOB.key, hashes.SHA256())


def test_a_successor_is_signed_by_the_earlier_key_and_has_the_same_name() -> None:
    new = BOB.rotate()
    newest = new.rotate()
    assert is_successor(new.certificate, BOB.certificate)
    assert not is_successor(BOB.certificate, new.certificate)
    assert not is_successor(newest.certificate, BOB.certificate)
    assert not is_successor(Identity.make("bob").certificate, BOB.certificate)
    assert is_successor(issued_by_bob_for("bob"), BOB.certificate)
    assert not is_successor(issued_by_bob_for("alice"), BOB.certificate)


def test_a_chain_descends_from_a_pinned_certificate_through_every_intermediate_one() -> None:
    new = BOB.rotate()
    newest = new.rotate()
    assert descends_from([BOB.certificate], BOB.certificate)
    assert descends_from([new.certificate], BOB.certificate)
    assert descends_from(newest.chain, BOB.certificate)
    assert not descends_from([newest.certificate], BOB.certificate)
    assert not descends_from([newest.certificate, BOB.certificate], BOB.certificate)
    assert not descends_from([BOB.certificate], newest.certificate)


def test_a_fingerprint_is_the_sha256_in_sixteen_groups_on_two_lines() -> None:
    assert fingerprint(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert readable_fingerprint(fingerprint(b"abc")) == [
        "ba78 16bf 8f01 cfea 4141 40de 5dae 2223",
        "b003 61a3 9617 7a9c b410 ff61 f200 15ad",
    ]


def test_a_new_certificate_is_valid_and_names_its_site() -> None:
    assert is_current(ALICE.certificate)
    assert common_name(read_certificate(der(ALICE.certificate))) == "alice"


def test_a_certificate_with_another_kind_of_key_is_refused() -> None:
    key = rsa.generate_private_key(65537, 2048)
    certificate = issue("alice", key.public_key(), ALICE.key)  # type: ignore[arg-type]
    with refused(IdentityError):
        read_certificate(der(certificate))


def test_an_invalid_site_name_is_refused() -> None:
    certificate = issue("../alice", ALICE.key.public_key(), ALICE.key)
    with refused(IdentityError):
        read_certificate(der(certificate))
    with refused(ConfigError):
        Identity.make("not a name")


def test_a_certificate_in_other_bytes_is_not_its_own_successor() -> None:
    """The last bit of a signature may be declared as unused where it is 0: half of them."""
    identities = (Identity.make("alice") for _ in range(100))
    even = next(alice for alice in identities if der(alice.certificate)[-1] % 2 == 0)
    content = bytearray(der(even.certificate))
    signature = even.certificate.signature
    content[-len(signature) - 1] = 1  # the number of unused bits
    copy = x509.load_der_x509_certificate(bytes(content))
    assert copy != even.certificate
    assert not is_successor(copy, even.certificate)


@settings(max_examples=150)
@given(st.data())
def test_damaged_certificates_are_refused_with_the_same_error(data: st.DataObject) -> None:
    content = bytearray(der(ALICE.certificate))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        certificate = read_certificate(bytes(content))
    except IdentityError:
        return
    assert der(certificate) == bytes(content)
    assert certificate == ALICE.certificate or not is_successor(certificate, ALICE.certificate)


# files


def test_a_saved_identity_is_loaded_again(tmp_path: Path) -> None:
    BOB.rotate().save(tmp_path / "identity")
    loaded = Identity.load(tmp_path / "identity")
    assert (loaded.name, len(loaded.chain)) == ("bob", 2)
    assert loaded.issuers == (BOB.certificate,)
    assert connect(tls_server(ALICE, BOB), tls_client(loaded, ALICE)) == (
        ALICE.fingerprint,
        loaded.fingerprint,
    )


def test_only_the_owner_can_read_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    ALICE.save(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "key.pem")] == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_other_users_can_read_is_refused_with_the_command_that_fixes_it(
    tmp_path: Path, mode: int
) -> None:
    ALICE.save(tmp_path)
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(
        IdentityError, match=f"readable by other users.*chmod 600 {tmp_path}/key.pem"
    ):
        Identity.load(tmp_path)


def test_the_mode_of_a_key_is_that_of_the_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path may lead to another file between a look at it and its reading."""
    ALICE.save(tmp_path)
    opens = os.open

    def replaced_just_before(path: Path, *flags: Any) -> int:
        if path == tmp_path / "key.pem":
            path.chmod(0o644)
        return opens(path, *flags)

    monkeypatch.setattr(os, "open", replaced_just_before)
    with refused(IdentityError):
        Identity.load(tmp_path)


def test_a_key_that_could_not_be_written_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ALICE.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(RunError):
        write_privately(tmp_path / "key.pem", b"another key")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_crash_between_the_two_files_of_a_rotation_leaves_the_old_identity(
    tmp_path: Path,
) -> None:
    ALICE.save(tmp_path)
    old_key = (tmp_path / "key.pem").read_bytes()
    ALICE.rotate().save(tmp_path)
    (tmp_path / "key.pem").write_bytes(old_key)  # the certificates were written, the key was not
    assert Identity.load(tmp_path).fingerprint == ALICE.fingerprint


def test_the_key_of_another_site_is_refused(tmp_path: Path) -> None:
    ALICE.save(tmp_path)
    BOB.save(tmp_path / "other")
    (tmp_path / "other" / "key.pem").replace(tmp_path / "key.pem")
    with refused(IdentityError):
        Identity.load(tmp_path)


@pytest.mark.parametrize("file", ["key.pem", "cert.pem"])
@pytest.mark.parametrize("content", [None, b"", b"not a PEM file"])
def test_missing_and_damaged_files_are_named_in_the_error(
    tmp_path: Path, file: str, content: bytes | None
) -> None:
    ALICE.save(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(IdentityError, match=file):
        Identity.load(tmp_path)


def test_another_kind_of_key_in_the_file_is_refused(tmp_path: Path) -> None:
    ALICE.save(tmp_path)
    key = ec.generate_private_key(ec.SECP384R1())
    kind = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*kind))
    with refused(IdentityError):
        Identity.load(tmp_path)


def test_only_the_latest_certificates_are_presented(tmp_path: Path) -> None:
    identity = ALICE
    earlier: list[x509.Certificate] = []
    for _ in range(MAX_ISSUERS + 3):
        earlier.insert(0, identity.certificate)
        identity = identity.rotate()
    assert identity.issuers == tuple(earlier[:MAX_ISSUERS])
