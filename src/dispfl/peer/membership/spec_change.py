"""A change of a federation's spec: settings that all sites change from a named round on.

The settings that a federation begins with are version 1 of its spec. A change leads from one
version to the next. It counts once it is signed: by `threshold` administrators where the sites
have accepted a roster, and by every member where they have accepted each other by hand.

    {"change":{"federation":"hearts","version":2,"follows":"","from_round":20,"time":1763430000,
               "settings":{"rounds":40}},
     "administrators":{},"members":{"alice":"..."}}

`follows` is the digest of the change before it, `time` orders the proposals of one signer.
Signatures cover the change as canonical JSON, after a line that states the purpose.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dispfl.core.names import check_name
from dispfl.errors import DispflError
from dispfl.peer.membership.encoding import canonical, from_text, to_text, whole_number
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.roster import Roster
from dispfl.peer.transport.base import JSON

MAX_CHANGE_BYTES = 100_000
"""Size of a change with its signatures: a few hundred members."""
MAX_SETTINGS_BYTES = 4_000
MAX_VERSION = 10_000
_MAX_ROUND = 2**31
_MAX_TIME = 2**53
_MAX_SIGNATURE_BYTES = 80
_FIELDS = {"federation", "version", "follows", "from_round", "time", "settings"}
_PURPOSE = b"dispfl spec change 1\n"
FIRST_VERSION = 1
"""The version of the settings that a federation begins with."""


class SpecChangeError(DispflError):
    """A change of the spec that is damaged, or that this site cannot take part in."""


@dataclass(frozen=True)
class Signatories:
    """Who decides about changes of the spec: a roster's administrators, or all members."""

    members: Mapping[str, tuple[x509.Certificate, ...]]
    """By name, this site included: their certificate and, of this site, its earlier ones."""
    roster: Roster | None = None

    def valid(self, change: "SpecChange") -> list[str]:
        """Return the names of those who have signed a change."""
        if self.roster is not None:
            keys = self.roster.admins
            signatures = change.administrators
            names = [name for name in signatures if name in keys]
            return sorted(
                name for name in names if change.is_signed_by_key(keys[name], signatures[name])
            )
        signers = []
        for name, signature in change.members.items():
            certificates = self.members.get(name, ())
            if any(change.is_signed_by(certificate, signature) for certificate in certificates):
                signers.append(name)
        return sorted(signers)

    def missing(self, change: "SpecChange") -> str:
        """Return whose signatures a change still needs, as text; empty if it is complete."""
        signers = self.valid(change)
        if self.roster is not None:
            count = self.roster.threshold - len(signers)
            if count <= 0:
                return ""
            absent = sorted(self.roster.admins.keys() - set(signers))
            return f"{count} of the administrators {', '.join(absent)}"
        return ", ".join(sorted(self.members.keys() - set(signers)))


@dataclass(frozen=True)
class SpecChange:
    """One change of the spec, with the signatures that it has so far."""

    federation: str
    version: int
    """The version that it leads to."""
    from_round: int
    """The first round in which it is in force."""
    settings: Mapping[str, JSON]
    """The changed settings, by dotted key."""
    follows: str = ""
    """The digest of the change that leads to the version before; empty for version 2."""
    time: int = 0
    """When it was proposed, in seconds."""
    administrators: Mapping[str, bytes] = field(default_factory=dict)
    """Signatures of a roster's administrators, by name."""
    members: Mapping[str, bytes] = field(default_factory=dict)
    """Signatures of members, by name."""

    # reading and writing

    @classmethod
    def read(cls, text: str) -> "SpecChange":
        """Parse a change from untrusted text; raise `SpecChangeError` if it is none."""
        if len(text) > MAX_CHANGE_BYTES:
            raise SpecChangeError(
                f"A change of the spec has at most {MAX_CHANGE_BYTES} bytes, got {len(text)}."
            )
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, RecursionError) as problem:
            raise SpecChangeError(
                f"This is not a change of the spec: {str(problem)[:200]}"
            ) from None

    @classmethod
    def from_json(cls, untrusted: JSON) -> "SpecChange":
        """Parse JSON; raise ValueError if it is no change of the spec."""
        document = {"change", "administrators", "members"}
        if not isinstance(untrusted, dict) or untrusted.keys() != document:
            raise ValueError(f"it must have the fields {', '.join(sorted(document))}.")
        content = untrusted["change"]
        if not isinstance(content, dict) or content.keys() != _FIELDS:
            raise ValueError(f"a change must have the fields {', '.join(sorted(_FIELDS))}.")
        follows = content["follows"]
        if not isinstance(follows, str) or len(follows) not in (0, 64):
            raise ValueError("its field follows must be a digest.")
        return cls(
            federation=check_name("The federation of a change", str(content["federation"])),
            version=whole_number("version", content["version"], FIRST_VERSION + 1, MAX_VERSION),
            from_round=whole_number("from_round", content["from_round"], 0, _MAX_ROUND),
            settings=_settings(content["settings"]),
            follows=follows,
            time=whole_number("time", content["time"], 0, _MAX_TIME),
            administrators=_signatures(untrusted["administrators"]),
            members=_signatures(untrusted["members"]),
        )

    def to_json(self) -> dict[str, JSON]:
        """Convert to JSON."""
        return {
            "change": self._content(),
            "administrators": {name: to_text(raw) for name, raw in self.administrators.items()},
            "members": {name: to_text(raw) for name, raw in self.members.items()},
        }

    def _content(self) -> dict[str, JSON]:
        return {
            "federation": self.federation,
            "version": self.version,
            "follows": self.follows,
            "from_round": self.from_round,
            "time": self.time,
            "settings": dict(self.settings),
        }

    @cached_property
    def digest(self) -> str:
        """Digest of the change, without signatures."""
        return hashlib.sha256(self._signed()).hexdigest()

    @property
    def summary(self) -> str:
        """`version 2 from round 20: rounds=40`"""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in self.settings.items())
        return f"version {self.version} from round {self.from_round}: {settings}"

    # signatures

    def _signed(self) -> bytes:
        return _PURPOSE + canonical(self._content()).encode()

    def signed_by_site(self, identity: Identity) -> "SpecChange":
        """Add the signature of a site, for its operator."""
        signature = identity.sign(self._signed())
        return replace(self, members={**self.members, identity.name: signature})

    def signed_by_administrator(self, key: Ed25519PrivateKey, roster: Roster) -> "SpecChange":
        """Add the signature of one of a roster's administrators."""
        public_key = key.public_key().public_bytes_raw()
        for name, admin_key in roster.admins.items():
            if admin_key == public_key:
                signature = key.sign(self._signed())
                return replace(self, administrators={**self.administrators, name: signature})
        raise SpecChangeError(
            f"This key belongs to none of the roster's administrators ({', '.join(roster.admins)})."
        )

    def is_signed_by(self, certificate: x509.Certificate, signature: bytes) -> bool:
        """Whether a signature was made with a certificate's key."""
        public_key = certificate.public_key()
        assert isinstance(public_key, ec.EllipticCurvePublicKey)  # checked by read_certificate
        try:
            public_key.verify(signature, self._signed(), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def is_signed_by_key(self, public_key: bytes, signature: bytes) -> bool:
        """Whether a signature was made with an administrator's key."""
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, self._signed())
        except (InvalidSignature, ValueError):
            return False
        return True

    def with_valid_signatures(self, signatories: Signatories) -> "SpecChange":
        """Return the change without signatures that are not valid, or of nobody who decides."""
        signers = signatories.valid(self)
        administrators = {}
        members = {}
        for name in signers:
            if signatories.roster is not None:
                administrators[name] = self.administrators[name]
            else:
                members[name] = self.members[name]
        return replace(self, administrators=administrators, members=members)

    def with_signatures_of(self, other: "SpecChange") -> "SpecChange":
        """Return the change with the signatures of another copy of it too; ours come first.

        ECDSA gives a member any number of signatures of one change: the first one stays.
        """
        administrators = {**other.administrators, **self.administrators}
        members = {**other.members, **self.members}
        if administrators.keys() == self.administrators.keys() and (
            members.keys() == self.members.keys()
        ):
            return self
        return replace(self, administrators=administrators, members=members)


def _settings(untrusted: JSON) -> dict[str, JSON]:
    if not isinstance(untrusted, dict) or not untrusted:
        raise ValueError("its settings must be a table with at least one key.")
    if len(canonical(untrusted)) > MAX_SETTINGS_BYTES:
        raise ValueError(f"its settings have more than {MAX_SETTINGS_BYTES} bytes.")
    for key in untrusted:
        if not key.isprintable():
            raise ValueError(f"its key {key!r} cannot be printed.")
    return untrusted


def _signatures(untrusted: JSON) -> dict[str, bytes]:
    if not isinstance(untrusted, dict):
        raise ValueError("its signatures must be a table.")
    signatures = {}
    for name, text in untrusted.items():
        signature = from_text(text)
        if len(signature) > _MAX_SIGNATURE_BYTES:
            raise ValueError(f"a signature has at most {_MAX_SIGNATURE_BYTES} bytes.")
        signatures[check_name("The name of a signer", name)] = signature
    return signatures
