"""Invites: what another site needs to accept this one, as one string for mail or chat.

    dispfl1-BASE64URL    federation, name, address and certificate (DER), each after its length (2
                         bytes), and a checksum; for a site with relays or an outbox, these as a
                         fifth and sixth field, and an empty address if it has none

The checksum (8 bytes of BLAKE2b) detects copying errors, not forgery: people compare fingerprints
for that.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

from cryptography import x509

from dispfl.core.names import check_name
from dispfl.errors import ConfigError, DispflError
from dispfl.peer.membership.address import (
    Address,
    RelayAddress,
    parse_outbox,
    parse_relays,
    reach_text,
    relays_text,
)
from dispfl.peer.membership.identity import (
    IdentityError,
    common_name,
    der,
    fingerprint,
    read_certificate,
)

PREFIX = "dispfl1-"
_CHECKSUM_BYTES = 8
_MAX_CHARS = 16_384  # typical length: 650
_COPY_AGAIN = "Copy the complete output of `dispfl peer invite` again."


class InviteError(DispflError):
    """An invite that is damaged or that this site cannot accept."""


@dataclass(frozen=True)
class Invite:
    """Federation, name, address and certificate of a site, for others to accept it."""

    federation: str
    name: str
    address: Address | None
    """None if it is reached by relays or its outbox alone."""
    certificate: x509.Certificate
    relays: tuple[RelayAddress, ...] = ()
    outbox: str | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the certificate."""
        return fingerprint(der(self.certificate))

    @property
    def reach(self) -> str:
        """Its address, its relays and its outbox, for people."""
        return reach_text(self.address, self.relays, self.outbox)

    def __str__(self) -> str:
        fields = [
            self.federation.encode(),
            self.name.encode(),
            str(self.address or "").encode(),
            der(self.certificate),
        ]
        if self.relays or self.outbox:
            fields.append(relays_text(self.relays).encode())
        if self.outbox:
            fields.append(self.outbox.encode())
        content = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
        return PREFIX + _to_text(content + _checksum(content))

    @classmethod
    def read(cls, text: str) -> "Invite":
        """Parse an invite, ignoring whitespace; raise `InviteError` if it is invalid."""
        content = _content("".join(text.split()))
        fields = _fields(content)
        if len(fields) not in (4, 5, 6):
            raise InviteError(f"The invite has {len(fields)} fields instead of 4. {_COPY_AGAIN}")
        try:
            federation, name, address = (field.decode("ascii") for field in fields[:3])
            relays = parse_relays(fields[4].decode("ascii")) if len(fields) > 4 else ()
            outbox = parse_outbox(fields[5].decode("ascii")) if len(fields) > 5 else None
            certificate = read_certificate(fields[3])
            check_name("The name of a federation", federation)
            check_name("The name in an invite", name)
            place = None
            if address or not (relays or outbox):
                place = Address.parse(address)
            invite = cls(federation, name, place, certificate, relays, outbox)
        except (UnicodeDecodeError, ConfigError, IdentityError) as problem:
            raise InviteError(f"The invite is invalid: {problem}") from None
        if common_name(certificate) != name:
            raise InviteError(
                f"The invite is for {name}, but its certificate names {common_name(certificate)}."
            )
        if invite.address is not None and invite.address.is_unspecified:
            raise InviteError(
                f"The address {invite.address} is not reachable from other machines; run `dispfl"
                f" peer init` at {name} with --advertise."
            )
        return invite


def _content(text: str) -> bytes:
    """Decode an invite, verify its checksum and remove it."""
    if not text.startswith(PREFIX):
        if re.match(r"dispfl\d+-", text):
            raise InviteError(
                f"The invite has another version ({text.partition('-')[0]}); install the same"
                " dispfl on both sites."
            )
        raise InviteError(f"An invite begins with {PREFIX}, got {text[:12]!r}. {_COPY_AGAIN}")
    if len(text) > _MAX_CHARS:
        raise InviteError(
            f"An invite has at most {_MAX_CHARS} characters, got {len(text)}. {_COPY_AGAIN}"
        )
    body = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InviteError(
            f"The invite is damaged: characters are missing or invalid. {_COPY_AGAIN}"
        ) from None
    content = raw[:-_CHECKSUM_BYTES]
    checksum = raw[-_CHECKSUM_BYTES:]
    is_canonical = _to_text(raw) == body  # the last base64 character may have unused bits
    if not is_canonical or _checksum(content) != checksum:
        raise InviteError(f"The invite is damaged: its checksum is wrong. {_COPY_AGAIN}")
    return content


def _fields(content: bytes) -> list[bytes]:
    fields = []
    while content:
        length = int.from_bytes(content[:2], "big")
        if len(content) < 2 + length:
            raise InviteError(f"The invite is incomplete. {_COPY_AGAIN}")
        fields.append(content[2 : 2 + length])
        content = content[2 + length :]
    return fields


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES, person=b"dispfl-invite").digest()
