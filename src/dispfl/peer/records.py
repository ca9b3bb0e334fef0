"""What a member says of itself, signed by its own key, so that anyone may pass it on and nobody can change it.

The signature covers the record as canonical JSON (sorted keys, no spaces) after a line that says what it is. With it go
the member's certificate and those before it, so that whoever has an earlier one pinned can follow.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from dispfl.errors import ConfigError, MessageError
from dispfl.peer.address import Address, check_name
from dispfl.peer.certificates import IdentityError, der, fingerprint, follows, name_in, read_certificate
from dispfl.peer.identity import MOST_ISSUERS, Identity
from dispfl.peer.transport import JSON

_PURPOSE = b"dispfl member record 1\n"
_FIELDS = ("federation", "name", "address", "fingerprint", "density", "first_round", "serial")
_LARGEST_NUMBER = 2**53  # beyond it not every JSON reader agrees
_LONGEST_TEXT = 8192


@dataclass(frozen=True)
class Record:
    """One member's own words. A `Record` that was read is verified: it holds together, whoever sent it."""

    federation: str
    name: str
    address: Address
    density: float
    first_round: int
    serial: int
    """The newest one counts."""
    chain: tuple[x509.Certificate, ...]
    """The member's certificate and those before it."""
    signature: bytes = b""

    @property
    def fingerprint(self) -> str:
        """Of the member's certificate."""
        return fingerprint(der(self.chain[0]))

    @property
    def signature_text(self) -> str:
        """The signature as it is in JSON."""
        return _to_text(self.signature)

    @classmethod
    def sign(
        cls, identity: Identity, federation: str, address: Address, density: float, first_round: int, serial: int
    ) -> "Record":
        """A site's own record."""
        said = (federation, identity.name, address, float(density), first_round, serial, identity.chain)
        return cls(*said, identity.sign(cls(*said)._signed()))

    def says_the_same(self, other: "Record | None") -> bool:
        """Whether another record differs in nothing but its serial number."""
        return other is not None and self._said() | {"serial": 0} == other._said() | {"serial": 0}

    def to_json(self) -> JSON:
        """For gossip and for the members' file."""
        return {
            "record": self._said(),
            "chain": [_to_text(der(certificate)) for certificate in self.chain],
            "signature": self.signature_text,
        }

    @classmethod
    def read(cls, found: JSON) -> "Record":
        """A record from arbitrary JSON, verified against its own certificate; refused by name if anything is wrong."""
        record = cls._parse(found)
        key = record.chain[0].public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)  # read_certificate takes no other
        try:
            key.verify(record.signature, record._signed(), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            refuse("signature", f"The record of {record.name} is not signed by its certificate's key.")
        for newer, older in zip(record.chain, record.chain[1:], strict=False):
            if not follows(newer, older):
                refuse("certificate", f"The certificates in the record of {record.name} do not follow each other.")
        return record

    @classmethod
    def _parse(cls, found: JSON) -> "Record":
        try:
            said, chain, signature = _parts(found)
            record = cls(
                federation=check_name("The federation of a record", _text(said["federation"])),
                name=check_name("The name in a record", _text(said["name"])),
                address=Address.parse(_text(said["address"])),
                density=_share(said["density"]),
                first_round=_count(said["first_round"]),
                serial=_count(said["serial"]),
                chain=chain,
                signature=signature,
            )
        except (ConfigError, IdentityError, ValueError) as problem:
            refuse("malformed", f"A member's record is not one: {problem}")
        if record.address.is_everywhere or record._said() != said:  # a fingerprint of something else, for one
            refuse("malformed", f"The record of {record.name} has a field that cannot be.")
        if name_in(chain[0]) != record.name:
            refuse("certificate", f"The record of {record.name} has the certificate of {name_in(chain[0])}.")
        return record

    def _said(self) -> dict[str, JSON]:
        return {
            "federation": self.federation,
            "name": self.name,
            "address": str(self.address),
            "fingerprint": self.fingerprint,
            "density": self.density,
            "first_round": self.first_round,
            "serial": self.serial,
        }

    def _signed(self) -> bytes:
        return _PURPOSE + json.dumps(self._said(), sort_keys=True, separators=(",", ":")).encode()


def refuse(reason: str, sentence: str) -> NoReturn:
    """Raise the refusal of a record."""
    raise MessageError(reason, sentence)


def _parts(found: JSON) -> tuple[Mapping[str, JSON], tuple[x509.Certificate, ...], bytes]:
    if not isinstance(found, dict) or found.keys() != {"record", "chain", "signature"}:
        raise ValueError("it needs a record, a chain and a signature.")
    said, chain = found["record"], found["chain"]
    if not isinstance(said, dict) or said.keys() != set(_FIELDS):
        raise ValueError(f"it needs the fields {', '.join(_FIELDS)}.")
    if not isinstance(chain, list) or not 1 <= len(chain) <= 1 + MOST_ISSUERS:
        raise ValueError(f"it needs 1 to {1 + MOST_ISSUERS} certificates.")
    return said, tuple(read_certificate(_from_text(text)) for text in chain), _from_text(found["signature"])


def _text(value: JSON) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise ValueError(f"it has {str(value)[:40]!r} where a text belongs.")
    return value


def _share(value: JSON) -> float:
    if not isinstance(value, float) or not 0 < value <= 1:
        raise ValueError(f"it has {str(value)[:40]!r} where a share in (0, 1] belongs.")
    return value


def _count(value: JSON) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_NUMBER:
        raise ValueError(f"it has {str(value)[:40]!r} where a whole number from 0 on belongs.")
    return value


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _from_text(value: JSON) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except binascii.Error as problem:
        raise ValueError(f"it has bytes that cannot be read ({problem}).") from None
