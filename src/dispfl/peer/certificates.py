"""Certificates of sites: what one looks like, how it is issued, and whether one follows another."""

import datetime
import hashlib
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dispfl.errors import ConfigError, DispflError
from dispfl.peer.address import check_name

_LARGEST = 4096  # bytes; ours have about 400
_YEARS = 10
_SKEW = datetime.timedelta(days=1)  # a clock that is a little behind must not refuse a new certificate


class IdentityError(DispflError):
    """A key or a certificate that is missing, open to others or not what it says."""


def issue(name: str, key: ec.EllipticCurvePublicKey, issuer: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """A certificate for a site's key, signed by the same key or by the one before it."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
            ),
            critical=True,
        )
        # Subject and issuer have the same name: the keys' identifiers tell them apart.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
        .sign(issuer, hashes.SHA256())
    )


def der(certificate: x509.Certificate) -> bytes:
    """A certificate as the bytes that are sent and fingerprinted."""
    return certificate.public_bytes(serialization.Encoding.DER)


def fingerprint(cert_der: bytes) -> str:
    """The SHA-256 of a certificate's DER form, in hexadecimal."""
    return hashlib.sha256(cert_der).hexdigest()


def readable(print_: str) -> list[str]:
    """A fingerprint in groups of four digits, on two lines, for two people on the phone."""
    groups = [print_[i : i + 4] for i in range(0, len(print_), 4)]
    return [" ".join(groups[:8]), " ".join(groups[8:])]


def read_certificate(cert_der: bytes) -> x509.Certificate:
    """A certificate as sites have them, from arbitrary bytes; anything else is refused."""
    if len(cert_der) > _LARGEST:
        raise IdentityError(f"A certificate of a site has at most {_LARGEST} bytes, got {len(cert_der)}.")
    try:
        certificate = x509.load_der_x509_certificate(cert_der)
        key = certificate.public_key()
        signs = certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        check_name("The name in a certificate", name_in(certificate))
    except Exception as problem:  # a stranger chose the bytes, and the parser has many ways to say no
        raise IdentityError(f"This is not a certificate of a site: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("The key of a site's certificate must be a P-256 key.")
    if certificate.serial_number <= 0:
        raise IdentityError("The serial number of a site's certificate must be positive.")
    if not (ca and signs):
        raise IdentityError("A site's certificate must allow to issue the next one (CA, keyCertSign).")
    return certificate


def name_in(certificate: x509.Certificate) -> str:
    """The site that a certificate names: its only common name."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(certificate.subject) != 1 or len(names) != 1:
        raise ConfigError("The subject of a site's certificate is one common name, the site's.")
    return str(names[0].value)


def follows(certificate: x509.Certificate, earlier: x509.Certificate) -> bool:
    """Whether a certificate was issued by an earlier one of the same site."""
    if certificate == earlier or certificate.subject != earlier.subject:
        return False
    try:
        certificate.verify_directly_issued_by(earlier)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def leads_to(chain: Sequence[x509.Certificate], pinned: x509.Certificate) -> bool:
    """Whether the first certificate is the pinned one, or goes back to it step by step through the others."""
    earlier = iter(chain)
    newest = next(earlier)
    while newest != pinned:
        if follows(newest, pinned):
            return True
        before = next(earlier, None)
        if before is None or not follows(newest, before):
            return False
        newest = before
    return True


def is_current(certificate: x509.Certificate) -> bool:
    """Whether it is valid today."""
    now = datetime.datetime.now(datetime.UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
