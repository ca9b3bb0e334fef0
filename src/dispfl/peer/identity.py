"""Who a site is: a P-256 key and a certificate, which others pin by its fingerprint. No authority is asked.

A new certificate (`rotate`) is issued by the old key, so whoever has the old one pinned can check the new one alone:

    first certificate    signed by its own key; accepted by people, who compare fingerprints
    second certificate   signed by the first key, same name; accepted by whoever has the first one pinned
"""

import os
import secrets
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dispfl.peer.address import check_name
from dispfl.peer.certificates import IdentityError, der, fingerprint, issue, name_in, read_certificate
from dispfl.runs.files import plain_disk_errors, sync_folder, write_atomically

__all__ = ["Identity", "IdentityError", "client_context", "fingerprint", "pin", "server_context"]

KEY, CERTIFICATE = "key.pem", "cert.pem"
MOST_ISSUERS = 4
"""How many earlier certificates a site shows: a member that missed more rotations needs a new invite."""


@dataclass(frozen=True)
class Identity:
    """A site's key and certificate, and the certificates before it, newest first."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    issuers: tuple[x509.Certificate, ...] = ()

    @classmethod
    def make(cls, name: str) -> "Identity":
        """A new key with a certificate that it signs itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(check_name("The site's name", name), key, issue(name, key.public_key(), key))

    def rotate(self) -> "Identity":
        """A new key, with a certificate that the present key signs."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = issue(self.name, key.public_key(), self.key)
        return Identity(self.name, key, certificate, (self.certificate, *self.issuers)[:MOST_ISSUERS])

    @property
    def chain(self) -> tuple[x509.Certificate, ...]:
        """The certificate and those before it."""
        return (self.certificate, *self.issuers)

    @property
    def fingerprint(self) -> str:
        """Of the certificate."""
        return fingerprint(der(self.certificate))

    def sign(self, content: bytes) -> bytes:
        """A signature of the key (ECDSA, SHA-256)."""
        return self.key.sign(content, ec.ECDSA(hashes.SHA256()))

    def save(self, folder: Path) -> None:
        """Write both files, readable by nobody else.

        The certificates go first: a crash before the new key is written leaves the old key, whose certificate is
        still among them.
        """
        with plain_disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / CERTIFICATE, b"".join(map(_pem, self.chain)))
        _write_privately(folder / KEY, _key_pem(self.key, serialization.NoEncryption()))

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """Read them again; refuse a key that others can read, and files that do not belong together."""
        key = _read_key(folder / KEY)
        try:
            chain = x509.load_pem_x509_certificates((folder / CERTIFICATE).read_bytes())
        except (OSError, ValueError) as problem:
            raise IdentityError(f"{folder / CERTIFICATE} cannot be read ({problem}); restore it.") from None
        chain = [read_certificate(der(certificate)) for certificate in chain]
        for place, certificate in enumerate(chain):
            if certificate.public_key() == key.public_key():
                issuers = tuple(chain[place + 1 :][:MOST_ISSUERS])
                return cls(name_in(certificate), key, certificate, issuers)
        raise IdentityError(f"{folder / KEY} and {folder / CERTIFICATE} do not belong together; restore both.")


# TLS


def server_context(identity: Identity, pinned: Iterable[x509.Certificate]) -> ssl.SSLContext:
    """TLS 1.3 for listening, open to holders of pinned certificates and of those that follow them."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, pinned)
    context.num_tickets = 0  # a resumed session would skip the certificates
    return context


def client_context(identity: Identity, pinned: Iterable[x509.Certificate]) -> ssl.SSLContext:
    """TLS 1.3 for calling; who answers must show such a certificate too. Host names do not matter."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, pinned)


def pin(context: ssl.SSLContext, certificate: x509.Certificate) -> None:
    """Let a living context trust one more certificate, from the next handshake on.

    A context cannot forget one: who is revoked is refused by looking up the certificate on every request.
    """
    context.load_verify_locations(cadata=der(certificate))


def _context(protocol: int, identity: Identity, pinned: Iterable[x509.Certificate]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # The pinned certificate itself is the anchor, also one that has an issuer.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
    for certificate in pinned:
        pin(context, certificate)
    # Python reads keys from files only: this one is encrypted for the moment it exists.
    secret = secrets.token_bytes(32).hex().encode()
    with tempfile.NamedTemporaryFile() as file:
        file.write(_key_pem(identity.key, serialization.BestAvailableEncryption(secret)))
        file.write(b"".join(map(_pem, identity.chain)))
        file.flush()
        context.load_cert_chain(file.name, password=secret)
    return context


# files


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        with path.open("rb") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            content = file.read()
    except OSError as problem:
        raise IdentityError(f"The key {path} cannot be read: {problem.strerror}. Restore it from a backup.") from None
    if others:
        raise IdentityError(f"The key {path} is open to other users of this machine; close it: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(f"{path} does not hold a private key; restore it from a backup.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError(f"{path} holds another kind of key than P-256; restore it from a backup.")
    return key


def _write_privately(path: Path, content: bytes) -> None:
    """Like `write_atomically`, but nobody else can read the file at any moment."""
    temporary = path.with_name(f".{path.name}.partial")
    with plain_disk_errors(path):
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def _key_pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
