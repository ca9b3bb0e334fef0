"""Member records: a member's address, density and first round, signed by its key.

Any member can relay them.
The record includes the member's certificate and the earlier ones, so that a site that pinned an
earlier certificate can verify the current one. The signature covers all of it as canonical JSON
(sorted keys, no spaces), prefixed by a line that states its purpose: who relays a record cannot
change it or cut its certificates.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from dispfl.core.names import check_name
from dispfl.errors import ConfigError
from dispfl.peer.membership.address import (
    Address,
    RelayAddress,
    parse_outbox,
    parse_relays,
    relays_text,
)
from dispfl.peer.membership.encoding import canonical, from_text, to_text, whole_number
from dispfl.peer.membership.identity import (
    MAX_ISSUERS,
    Identity,
    IdentityError,
    common_name,
    der,
    fingerprint,
    is_successor,
    read_certificate,
)
from dispfl.peer.outbox.sealing import check_public
from dispfl.peer.transport.base import JSON
from dispfl.wire.refusals import Refusal, refuse

_PURPOSE = b"dispfl member record 1\n"
_FIELDS = ("federation", "name", "address", "fingerprint", "density", "first_round", "serial")
_RELAYS = "relays"
"""A field that only the record of a site with relays has."""
_OUTBOX = "outbox"
"""A field that only the record of a site with an outbox has."""
_SEALING_KEY = "sealing_key"
"""A field that only records in a federation that may use outboxes have."""
_OPTIONAL = {_RELAYS, _OUTBOX, _SEALING_KEY}
_MAX_NUMBER = 2**53  # larger integers are not portable in JSON
_MAX_TEXT_CHARS = 8192


@dataclass(frozen=True)
class MemberRecord:
    """What a member announces about itself; `read` verifies signature and certificates."""

    federation: str
    name: str
    address: Address | None
    """None if it is reached by relays or its outbox alone."""
    density: float
    first_round: int
    serial: int
    """Counts the versions of a member's record."""
    chain: tuple[x509.Certificate, ...]
    """The member's certificate and the earlier ones."""
    signature: bytes = b""
    relays: tuple[RelayAddress, ...] = ()
    """The relays by which it is reached, if its address does not do."""
    outbox: str | None = None
    """Where it stores its models for members that cannot reach it."""
    sealing_key: str | None = None
    """The key for which others encrypt what they store for it."""

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the member's certificate."""
        return fingerprint(der(self.chain[0]))

    @cached_property
    def digest(self) -> str:
        """What identifies this version of the record in sync messages."""
        return record_digest(self._json)

    @classmethod
    def sign(
        cls,
        identity: Identity,
        federation: str,
        address: Address | None,
        density: float,
        first_round: int,
        serial: int,
        relays: tuple[RelayAddress, ...] = (),
        outbox: str | None = None,
        sealing_key: str | None = None,
    ) -> "MemberRecord":
        """Create and sign the record of a site."""
        unsigned = cls(
            federation,
            identity.name,
            address,
            float(density),
            first_round,
            serial,
            identity.chain,
            relays=relays,
            outbox=outbox,
            sealing_key=sealing_key,
        )
        return replace(unsigned, signature=identity.sign(unsigned._signed()))

    def same_content(self, other: "MemberRecord | None") -> bool:
        """Whether two records are equal except for the serial number."""
        if other is None:
            return False
        return replace(self, serial=0)._content() == replace(other, serial=0)._content()

    def replaces(self, other: "MemberRecord | None") -> bool:
        """Whether this record is newer; of two with one serial, all sites choose the same one."""
        return other is None or (self.serial, self.digest) > (other.serial, other.digest)

    def to_json(self) -> JSON:
        """Convert to JSON, for sync messages and the members file; the same object every time."""
        return self._json

    @cached_property
    def _json(self) -> JSON:
        return {
            "record": self._content(),
            "chain": self._certificates,
            "signature": to_text(self.signature),
        }

    @classmethod
    def read(cls, content: JSON) -> "MemberRecord":
        """Parse and verify a record from untrusted JSON; raise `MessageError` if it is invalid."""
        record = cls.parse(content)
        key = record.chain[0].public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)  # checked by read_certificate
        try:
            key.verify(record.signature, record._signed(), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            refuse(
                Refusal.SIGNATURE,
                f"The record of {record.name} is not signed by its certificate's key.",
            )
        for newer, older in zip(record.chain, record.chain[1:], strict=False):
            if not is_successor(newer, older):
                refuse(
                    Refusal.CERTIFICATE,
                    f"The certificates in the record of {record.name} do not form a chain.",
                )
        return record

    @classmethod
    def parse(cls, untrusted: JSON) -> "MemberRecord":
        """Parse a record without verifying it; raise `MessageError` if a field is invalid."""
        try:
            content, chain, signature = _split(untrusted)
            relays = parse_relays(_text(content.get(_RELAYS, "")))
            outbox = sealing_key = None
            if _OUTBOX in content:
                outbox = parse_outbox(_text(content[_OUTBOX]))
            if _SEALING_KEY in content:
                sealing_key = check_public(_text(content[_SEALING_KEY]))
            record = cls(
                federation=check_name("The federation of a record", _text(content["federation"])),
                name=check_name("The name in a record", _text(content["name"])),
                address=_address(_text(content["address"]), bool(relays or outbox)),
                density=_fraction(content["density"]),
                first_round=whole_number("first_round", content["first_round"], 0, _MAX_NUMBER),
                serial=whole_number("serial", content["serial"], 0, _MAX_NUMBER),
                chain=chain,
                signature=signature,
                relays=relays,
                outbox=outbox,
                sealing_key=sealing_key,
            )
        except (ConfigError, IdentityError, ValueError) as problem:
            refuse(Refusal.MALFORMED, f"A member record is invalid: {problem}")
        is_consistent = record._content() == content  # not with a wrong fingerprint, for example
        is_unspecified = record.address is not None and record.address.is_unspecified
        if is_unspecified or not is_consistent:
            refuse(Refusal.MALFORMED, f"The record of {record.name} has an invalid field.")
        if common_name(chain[0]) != record.name:
            refuse(
                Refusal.CERTIFICATE,
                f"The record of {record.name} has the certificate of {common_name(chain[0])}.",
            )
        return record

    def _content(self) -> dict[str, JSON]:
        content: dict[str, JSON] = {
            "federation": self.federation,
            "name": self.name,
            "address": str(self.address) if self.address else "",
            "fingerprint": self.fingerprint,
            "density": self.density,
            "first_round": self.first_round,
            "serial": self.serial,
        }
        if self.relays:
            content[_RELAYS] = relays_text(self.relays)
        if self.outbox:
            content[_OUTBOX] = self.outbox
        if self.sealing_key:
            content[_SEALING_KEY] = self.sealing_key
        return content

    @cached_property
    def _certificates(self) -> list[JSON]:
        return [to_text(der(certificate)) for certificate in self.chain]

    def _signed(self) -> bytes:
        return _PURPOSE + _signed_text(self._content(), self._certificates)


def record_digest(record: JSON) -> str:
    """Return the digest that identifies a record, which may not be verified.

    It is the digest of what is signed, not of the signature: ECDSA gives a member any number of
    signatures of one record.
    """
    content = chain = None
    if isinstance(record, dict):
        content = record.get("record")
        chain = record.get("chain")
    if not isinstance(content, dict) or not all(map(_is_plain, content.values())):
        content = None
    if not isinstance(chain, list) or not all(isinstance(text, str) for text in chain):
        chain = None
    return hashlib.blake2b(_signed_text(content, chain), digest_size=16).hexdigest()


def _is_plain(value: JSON) -> bool:
    return isinstance(value, str | int | float)


def _signed_text(content: JSON, chain: JSON) -> bytes:
    return canonical({"record": content, "chain": chain}).encode()


def _split(record: JSON) -> tuple[Mapping[str, JSON], tuple[x509.Certificate, ...], bytes]:
    """Return the content, the certificates and the signature of a record."""
    if not isinstance(record, dict) or record.keys() != {"record", "chain", "signature"}:
        raise ValueError("it must have the fields record, chain and signature.")
    content = record["record"]
    chain = record["chain"]
    if not isinstance(content, dict) or content.keys() - _OPTIONAL != set(_FIELDS):
        raise ValueError(f"it must have the fields {', '.join(_FIELDS)}.")
    if not isinstance(chain, list) or not 1 <= len(chain) <= 1 + MAX_ISSUERS:
        raise ValueError(f"it must have 1 to {1 + MAX_ISSUERS} certificates.")
    certificates = tuple(read_certificate(from_text(text)) for text in chain)
    return content, certificates, from_text(record["signature"])


def _address(text: str, has_other_way: bool) -> Address | None:
    """The address in a record, which only a site with relays or an outbox may leave empty."""
    if not text and has_other_way:
        return None
    return Address.parse(text)


def _text(value: JSON) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT_CHARS:
        raise ValueError(f"it has {str(value)[:40]!r} instead of a string.")
    return value


def _fraction(value: JSON) -> float:
    if not isinstance(value, float) or not 0 < value <= 1:
        raise ValueError(f"it has {str(value)[:40]!r} instead of a float in (0, 1].")
    return value
