"""An invite: all that another site needs to accept this one, in one string that survives mail and chat.

    dispfl1-BASE64URL        of: federation, name, address, certificate (DER), each after its length (2 bytes), checksum

The checksum (8 bytes of BLAKE2b) finds slips of the hand, not fraud: people compare fingerprints for that.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

from cryptography import x509

from dispfl.errors import ConfigError, DispflError
from dispfl.peer.address import Address, check_name
from dispfl.peer.certificates import IdentityError, der, fingerprint, name_in, read_certificate

PREFIX = "dispfl1-"
_CHECKSUM = 8
_LONGEST = 16_384  # characters; ours have about 650
_AGAIN = "Copy it again, whole, from what `dispfl peer invite` printed."


class InviteError(DispflError):
    """An invite that is damaged, or that this site cannot accept."""


@dataclass(frozen=True)
class Invite:
    """What a site says of itself to be accepted."""

    federation: str
    name: str
    address: Address
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> str:
        """Of the certificate."""
        return fingerprint(der(self.certificate))

    def __str__(self) -> str:
        fields = (self.federation.encode(), self.name.encode(), str(self.address).encode(), der(self.certificate))
        content = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
        return PREFIX + _to_text(content + _checksum(content))

    @classmethod
    def read(cls, text: str) -> "Invite":
        """The invite in a string; spaces and line breaks are forgiven, anything else that is wrong is not."""
        content = _content("".join(text.split()))
        fields = _fields(content)
        if len(fields) != 4:
            raise InviteError(f"The invite has {len(fields)} fields instead of 4. {_AGAIN}")
        try:
            federation, name, address = (field.decode("ascii") for field in fields[:3])
            certificate = read_certificate(fields[3])
            check_name("The name of a federation", federation)
            invite = cls(federation, name, Address.parse(address), certificate)
        except (UnicodeDecodeError, ConfigError, IdentityError) as problem:
            raise InviteError(f"The invite holds something else than it should: {problem}") from None
        if name_in(certificate) != name:
            raise InviteError(f"The invite is {name}'s, but its certificate names {name_in(certificate)}.")
        if invite.address.is_everywhere:
            raise InviteError(f"Nobody can reach {invite.address}; {name} must `dispfl peer init` with --advertise.")
        return invite


def _content(text: str) -> bytes:
    """The bytes that a string stands for, checksum verified and removed."""
    if not text.startswith(PREFIX):
        if re.match(r"dispfl\d+-", text):
            raise InviteError(f"The invite is of another version ({text.partition('-')[0]}); update both programs.")
        raise InviteError(f"An invite begins with {PREFIX}, got {text[:12]!r}. {_AGAIN}")
    if len(text) > _LONGEST:
        raise InviteError(f"An invite has at most {_LONGEST} characters, got {len(text)}. {_AGAIN}")
    body = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InviteError(f"The invite is damaged: it has characters missing or foreign ones. {_AGAIN}") from None
    content, checksum = raw[:-_CHECKSUM], raw[-_CHECKSUM:]
    if _to_text(raw) != body or _checksum(content) != checksum:  # base64 may have bits to spare in its last letter
        raise InviteError(f"The invite is damaged: its checksum is wrong. {_AGAIN}")
    return content


def _fields(content: bytes) -> list[bytes]:
    fields = []
    while content:
        length = int.from_bytes(content[:2], "big")
        if len(content) < 2 + length:
            raise InviteError(f"The invite ends too early. {_AGAIN}")
        fields.append(content[2 : 2 + length])
        content = content[2 + length :]
    return fields


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM, person=b"dispfl-invite").digest()
