"""Certificates of an authority that no system knows, as of a proxy that inspects TLS."""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOCAL = "127.0.0.1"
DAY = datetime.timedelta(days=1)


def authority_and_certificate(folder: Path) -> Path:
    """Write the certificate of an authority, and one of 127.0.0.1 that it signed.

    `relay.pem` has that with its key; return the file of the authority.
    """
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, issuer: str, signer: Any, key: Any, *, ca: bool) -> Any:
        subject, issuer_name = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer)
        )
        builder = x509.CertificateBuilder(
            issuer_name,
            subject,
            key.public_key(),
            x509.random_serial_number(),
            now - DAY,
            now + DAY,
        ).add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            place = x509.IPAddress(ipaddress.ip_address(LOCAL))
            builder = builder.add_extension(x509.SubjectAlternativeName([place]), critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (folder / "authority.pem").write_bytes(
        certificate("inspection", "inspection", authority_key, authority_key, ca=True)
    )
    (folder / "relay.pem").write_bytes(
        certificate("relay", "inspection", authority_key, key, ca=False)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "authority.pem"
