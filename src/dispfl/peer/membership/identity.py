"""Keys and certificates of sites, and TLS contexts that pin them."""

import datetime
import hashlib
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dispfl.core.names import check_name
from dispfl.errors import ConfigError, DispflError
from dispfl.files import (
    make_folder,
    new_private_file,
    open_regular,
    plain_disk_errors,
    read_regular,
    write_atomically,
)

_MAX_CERTIFICATE_BYTES = 4096  # typical size: 400
_VALIDITY_YEARS = 10
_SKEW = datetime.timedelta(days=1)
"""New certificates are valid so much earlier, for sites whose clocks are behind."""


class IdentityError(DispflError):
    """A key or certificate that is missing, invalid or readable by other users."""


def issue(
    name: str, key: ec.EllipticCurvePublicKey, issuer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Issue a certificate for a site's key, signed by the same key or by the previous one."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    key_usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=365 * _VALIDITY_YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(key_usage, critical=True)
        # Subject and issuer have the same name; the key identifiers distinguish them.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
        .sign(issuer, hashes.SHA256())
    )


def der(certificate: x509.Certificate) -> bytes:
    """Return the DER encoding of a certificate."""
    return certificate.public_bytes(serialization.Encoding.DER)


def fingerprint(cert_der: bytes) -> str:
    """Return the SHA-256 of a DER-encoded certificate, in hexadecimal."""
    return hashlib.sha256(cert_der).hexdigest()


@lru_cache(maxsize=8192)
def key_digest(certificate: x509.Certificate) -> str:
    """Return a digest of a certificate's public key, the same if the key is certified again."""
    key_bytes = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(key_bytes).hexdigest()[:32]


def same_fingerprint(typed: str, fingerprint: str) -> bool:
    """Whether a fingerprint that a person typed or pasted, in groups or not, is this one."""
    return re.sub(r"[\s:]", "", typed).lower() == fingerprint


def readable_fingerprint(fingerprint: str) -> list[str]:
    """Format a fingerprint as two lines of four-digit groups, to be compared by phone."""
    groups = [fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4)]
    return [" ".join(groups[:8]), " ".join(groups[8:])]


@lru_cache(maxsize=8192)
def read_certificate(cert_der: bytes) -> x509.Certificate:
    """Parse a site's certificate from untrusted bytes; raise `IdentityError` if it is none."""
    if len(cert_der) > _MAX_CERTIFICATE_BYTES:
        raise IdentityError(
            f"A site certificate has at most {_MAX_CERTIFICATE_BYTES} bytes, got {len(cert_der)}."
        )
    try:
        certificate = x509.load_der_x509_certificate(cert_der)
        key = certificate.public_key()
        signs = certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        check_name("The name in a certificate", common_name(certificate))
    except Exception as problem:  # the parser raises many types for untrusted bytes
        raise IdentityError(f"This is not a site certificate: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("The key of a site certificate must be a P-256 key.")
    if certificate.serial_number <= 0:
        raise IdentityError("The serial number of a site certificate must be positive.")
    if not (ca and signs):
        raise IdentityError(
            "A site certificate must be allowed to issue its successor (CA, keyCertSign)."
        )
    return certificate


def common_name(certificate: x509.Certificate) -> str:
    """Return the site name in a certificate: its only common name."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(certificate.subject) != 1 or len(names) != 1:
        raise ConfigError(
            "The subject of a site certificate must be exactly one common name, the site's name."
        )
    return str(names[0].value)


def is_successor(certificate: x509.Certificate, earlier: x509.Certificate) -> bool:
    """Whether a certificate with a new key was issued by an earlier one of the same site.

    With the same key it is no successor: the signature of a certificate that signs itself can be
    written in other bytes.
    """
    if key_digest(certificate) == key_digest(earlier) or certificate.subject != earlier.subject:
        return False
    try:
        certificate.verify_directly_issued_by(earlier)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def descends_from(chain: Sequence[x509.Certificate], pinned: x509.Certificate) -> bool:
    """Whether a chain's first certificate is the pinned one, or descends from it."""
    earlier = iter(chain)
    newest = next(earlier)
    while newest != pinned:
        if is_successor(newest, pinned):
            return True
        before = next(earlier, None)
        if before is None or not is_successor(newest, before):
            return False
        newest = before
    return True


def is_current(certificate: x509.Certificate) -> bool:
    """Whether a certificate is within its validity period."""
    now = datetime.datetime.now(datetime.UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


KEY = "key.pem"
CERTIFICATE = "cert.pem"
MAX_ISSUERS = 4
"""Earlier certificates that a site presents; who missed more rotations needs a new invite."""


@dataclass(frozen=True)
class Identity:
    """A site's key, its certificate and its earlier certificates, newest first."""

    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    issuers: tuple[x509.Certificate, ...] = ()

    @classmethod
    def make(cls, name: str) -> "Identity":
        """Generate a key with a self-signed certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(check_name("The site's name", name), key, issue(name, key.public_key(), key))

    def rotate(self) -> "Identity":
        """Generate a new key with a certificate signed by the current key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = issue(self.name, key.public_key(), self.key)
        return Identity(self.name, key, certificate, self.chain[:MAX_ISSUERS])

    @property
    def chain(self) -> tuple[x509.Certificate, ...]:
        """The certificate and the earlier ones."""
        return (self.certificate, *self.issuers)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the certificate."""
        return fingerprint(der(self.certificate))

    @property
    def age(self) -> float:
        """Seconds since the certificate was created."""
        created = self.certificate.not_valid_before_utc + _SKEW
        return (datetime.datetime.now(datetime.UTC) - created).total_seconds()

    def sign(self, content: bytes) -> bytes:
        """Sign with the key (ECDSA, SHA-256)."""
        return self.key.sign(content, ec.ECDSA(hashes.SHA256()))

    def save(self, folder: Path) -> None:
        """Write both files; only the owner can read the key.

        The certificates are written first: after a crash before the new key is written, the old key
        still has its certificate among them.
        """
        with plain_disk_errors(folder):
            make_folder(folder, 0o700)
        write_atomically(folder / CERTIFICATE, b"".join(map(_pem, self.chain)))
        write_privately(folder / KEY, _key_pem(self.key, serialization.NoEncryption()))

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """Load an identity; raise `IdentityError` if others can read the key, or it does not
        match."""
        key = _read_key(folder / KEY)
        try:
            chain = x509.load_pem_x509_certificates(read_regular(folder / CERTIFICATE))
        except (OSError, ValueError) as problem:
            raise IdentityError(
                f"{folder / CERTIFICATE} cannot be read ({problem}); restore it from a backup."
            ) from None
        chain = [read_certificate(der(certificate)) for certificate in chain]
        for place, certificate in enumerate(chain):
            if certificate.public_key() == key.public_key():
                issuers = tuple(chain[place + 1 :][:MAX_ISSUERS])
                return cls(common_name(certificate), key, certificate, issuers)
        raise IdentityError(
            f"{folder / KEY} and {folder / CERTIFICATE} do not match; restore both from a backup."
        )


# TLS


def server_context(identity: Identity, pinned: Iterable[x509.Certificate]) -> ssl.SSLContext:
    """TLS 1.3 server context that accepts the pinned certificates, and those they issued."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, pinned)
    context.num_tickets = 0  # a resumed session would skip certificate verification
    return context


def client_context(identity: Identity, pinned: Iterable[x509.Certificate]) -> ssl.SSLContext:
    """TLS 1.3 client context that accepts the same certificates; host names are not checked."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, pinned)


def pin(context: ssl.SSLContext, certificate: x509.Certificate) -> None:
    """Add a trusted certificate to a context in use, effective from the next handshake.

    Certificates cannot be removed from a context: after a revocation, the server uses a new one.
    """
    context.load_verify_locations(cadata=der(certificate))


def _context(
    protocol: int, identity: Identity, pinned: Iterable[x509.Certificate]
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # A pinned certificate is a trust anchor even if another certificate issued it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
    for certificate in pinned:
        pin(context, certificate)
    # Python loads keys only from files: the temporary file is encrypted.
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
        with open_regular(path) as file:
            check_private(file)
            content = file.read()
    except OSError as problem:
        raise IdentityError(
            f"The key {path} cannot be read: {problem.strerror}. Restore it from a backup."
        ) from None
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError(
            f"{path} does not contain a private key; restore it from a backup."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError(f"{path} must contain a P-256 key; restore it from a backup.")
    return key


def check_private(file: IO[bytes]) -> None:
    """Refuse an opened key file that other users can read or write."""
    if os.fstat(file.fileno()).st_mode & 0o077:
        raise IdentityError(
            f"The key {file.name} is readable by other users of this machine; run: chmod 600"
            f" {file.name}"
        )


def write_privately(path: Path, content: bytes) -> None:
    """Like `write_atomically`, but the file is never readable by other users."""
    with new_private_file(path, replace=True) as file:
        file.write(content)


def _key_pem(
    key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption
) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
