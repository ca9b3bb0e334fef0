"""Rosters: the members of a federation, signed by its administrators.

A roster lists the invites of all members. It has a version, and counts if `threshold` of its
administrators have signed it. A site that has accepted the administrators accepts everyone on their
newest roster, and refuses whom they remove. The administrators, the threshold and the settings that
new sites begin with never change: others are another roster, to be accepted again. Version 0 has no
members and needs no signature: what it says is in the fingerprint that people compare.

    {"roster":{"federation":"hearts","version":3,"threshold":2,"admins":{"ann":"..."},
               "settings":{"rounds":20,...},"members":["dispfl1-..."]},
     "signatures":{"ann":"..."}}

Keys are Ed25519, as base64. Signatures cover the roster as canonical JSON, after a line that states
the purpose.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dispfl.core.names import check_name
from dispfl.errors import ConfigError, DispflError
from dispfl.files import open_regular, read_regular
from dispfl.peer.membership.encoding import canonical, from_text, to_text, whole_number
from dispfl.peer.membership.identity import check_private, same_fingerprint, write_privately
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.transport.base import JSON
from dispfl.settings import did_you_mean

MAX_ROSTER_BYTES = 8_000_000
"""Maximum size of a roster: about 12,000 members."""
_MAX_ADMINS = 20
_MAX_VERSION = 2**53
MAX_FIRST_VERSION = 1_000_000
"""The newest version that a site may begin with, far below the largest: every roster in force can
be succeeded."""
MAX_VERSION_STEP = 1000
"""Versions that a site may have missed before it follows a newer roster by itself."""
_FIELDS = {"federation", "version", "threshold", "admins", "settings", "members"}


class RosterError(DispflError):
    """A roster that is damaged, not signed by enough administrators, or not for this site."""


@dataclass(frozen=True)
class Roster:
    """The members of a federation at one version. `verify` checks the signatures."""

    federation: str
    version: int
    threshold: int
    """Signatures that a roster needs."""
    admins: Mapping[str, bytes]
    """Public keys of the administrators, by name."""
    invites: tuple[str, ...] = ()
    """The invites of the members, sorted by the members' names."""
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """The shared settings of the federation, as in a config file, for new sites."""
    signatures: Mapping[str, bytes] = field(default_factory=dict)

    # reading

    @classmethod
    def read(cls, text: str) -> "Roster":
        """Parse a roster from untrusted text; raise `RosterError` if it is none."""
        if len(text) > MAX_ROSTER_BYTES:
            raise RosterError(f"A roster has at most {MAX_ROSTER_BYTES} bytes, got {len(text)}.")
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, RecursionError) as problem:
            raise RosterError(f"This is not a roster: {str(problem)[:200]}") from None

    @classmethod
    def load(cls, path: Path) -> "Roster":
        """Read a roster's file; raise `RosterError` if it is none."""
        try:
            return cls.read(read_regular(path).decode())
        except (OSError, UnicodeDecodeError) as problem:
            raise RosterError(f"The roster {path} cannot be read: {problem}.") from None

    @classmethod
    def from_json(cls, untrusted: JSON) -> "Roster":
        """Parse JSON; raise `RosterError` or ValueError if it is no roster."""
        if not isinstance(untrusted, dict) or untrusted.keys() != {"roster", "signatures"}:
            raise RosterError("A roster has the fields roster and signatures.")
        content = untrusted["roster"]
        signatures = untrusted["signatures"]
        is_complete = isinstance(content, dict) and content.keys() == _FIELDS
        if not is_complete or not isinstance(signatures, dict):
            raise RosterError(f"A roster has the fields {', '.join(sorted(_FIELDS))}.")
        assert isinstance(content, dict)
        admins = content["admins"]
        invites = content["members"]
        settings = content["settings"]
        if not isinstance(admins, dict) or not isinstance(invites, list):
            raise RosterError("The admins of a roster are a table, and its members a list.")
        if not isinstance(settings, dict):
            raise RosterError("The settings of a roster are a table.")
        if not all(isinstance(invite, str) for invite in invites):
            raise RosterError("The members of a roster are invites.")
        keys = {}
        for name, key in admins.items():
            keys[check_name("An administrator's name", name)] = _bytes(key, 32)
        roster = cls(
            federation=check_name("The federation of a roster", str(content["federation"])),
            version=whole_number("version", content["version"], 0, _MAX_VERSION),
            threshold=whole_number("threshold", content["threshold"], 1, len(admins)),
            admins=keys,
            invites=tuple(map(str, invites)),
            settings=settings,
            signatures={name: _bytes(signature, 64) for name, signature in signatures.items()},
        )
        if len(admins) > _MAX_ADMINS or len(set(roster.admins.values())) != len(admins):
            raise RosterError(
                f"A roster has at most {_MAX_ADMINS} administrators, each with a key of its own."
            )
        if roster.is_founding and roster.invites:
            raise RosterError("Version 0 of a roster has no members.")
        return roster

    def to_json(self) -> dict[str, JSON]:
        """Convert to JSON."""
        return {
            "roster": self._content(),
            "signatures": {name: to_text(raw) for name, raw in self.signatures.items()},
        }

    @cached_property
    def text(self) -> str:
        """The roster as one line of ASCII, as it is sent to other sites."""
        return canonical(self.to_json())

    def members(self) -> dict[str, Invite]:
        """The members by name. Invites that this site cannot read or use are in `unusable`."""
        return self._parsed[0]

    @property
    def unusable(self) -> list[str]:
        """A sentence for each invite that cannot be used."""
        return self._parsed[1]

    @cached_property
    def _parsed(self) -> tuple[dict[str, Invite], list[str]]:
        members: dict[str, Invite] = {}
        problems: list[str] = []
        for place, text in enumerate(self.invites):
            try:
                invite = Invite.read(text)
            except InviteError as problem:
                problems.append(f"Invite {place + 1} of the roster cannot be used: {problem}")
                continue
            if invite.federation != self.federation or invite.name in members:
                problems.append(
                    f"The roster's invite of {invite.name} is for another federation, or there"
                    " twice."
                )
                continue
            members[invite.name] = invite
        return members, problems

    # trust

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the administrators, their threshold and the settings, the same for all
        versions."""
        content = self._content()
        keys = ("federation", "threshold", "admins", "settings")
        administrators = {key: content[key] for key in keys}
        text = canonical(administrators)
        return hashlib.sha256(b"dispfl administrators 1\n" + text.encode()).hexdigest()

    @property
    def is_founding(self) -> bool:
        """Whether it names the administrators and the settings alone, and no members yet."""
        return self.version == 0

    @cached_property
    def digest(self) -> str:
        """Digest of the content, without signatures."""
        return hashlib.sha256(self._signed()).hexdigest()

    def signers(self) -> list[str]:
        """The administrators with a valid signature."""
        return sorted(name for name in self.signatures if self._has_signed(name))

    def verify(self) -> "Roster":
        """Return the roster with its valid signatures alone: any site may have added others.

        Raises `RosterError` unless enough administrators have signed.
        """
        signers = self.signers()
        if len(signers) < self.threshold:
            raise RosterError(
                f"Version {self.version} of the roster of {self.federation} is signed by"
                f" {len(signers)} of the {self.threshold} administrators that it needs"
                f" ({', '.join(signers) or 'nobody'}); the others sign it with `dispfl peer roster"
                " sign`."
            )
        return replace(self, signatures={name: self.signatures[name] for name in signers})

    def check_fingerprint(self, told_fingerprint: str | None) -> None:
        """Refuse administrators whose fingerprint the operator was not told."""
        if told_fingerprint is None:
            raise RosterError(
                f"The fingerprint of the roster's administrators is {self.fingerprint}. Compare it"
                " with theirs by phone (`dispfl peer roster show` prints it), then repeat the"
                " command with --fingerprint."
            )
        if not same_fingerprint(told_fingerprint, self.fingerprint):
            raise RosterError(
                f"The fingerprint of the roster's administrators is {self.fingerprint}, not"
                f" {told_fingerprint}. Nothing was accepted: ask the administrators for the roster"
                " again, over another channel."
            )

    def check_first(self) -> None:
        """Refuse a version that no site may begin with."""
        if self.version > MAX_FIRST_VERSION:
            raise RosterError(
                f"The roster has version {self.version}, and no site accepts one above"
                f" {MAX_FIRST_VERSION}: versions count the changes. Somebody has edited it: begin"
                " again with the last file that you have signed."
            )

    def _has_signed(self, name: str) -> bool:
        if name not in self.admins:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.admins[name]).verify(
                self.signatures[name], self._signed()
            )
        except (InvalidSignature, ValueError):
            return False
        return True

    def _content(self) -> dict[str, JSON]:
        return {
            "federation": self.federation,
            "version": self.version,
            "threshold": self.threshold,
            "admins": {name: to_text(key) for name, key in self.admins.items()},
            "settings": dict(self.settings),
            "members": list(self.invites),
        }

    def _signed(self) -> bytes:
        return b"dispfl roster 1\n" + canonical(self._content()).encode()

    # changes by administrators

    def with_members(self, invites: Iterable[Invite]) -> "Roster":
        """Add members; a changed roster that was signed already gets the next version."""
        members = dict(self.members())
        for invite in invites:
            if invite.federation != self.federation:
                raise RosterError(
                    f"{invite.name} belongs to the federation {invite.federation}, the roster to"
                    f" {self.federation}."
                )
            listed = members.get(invite.name)
            if listed is not None and listed.certificate != invite.certificate:
                raise RosterError(
                    f"{invite.name} is on the roster with another certificate"
                    f" ({listed.fingerprint[:16]}...). If it has a new key, remove it first: dispfl"
                    f" peer roster remove ROSTER {invite.name}"
                )
            members[invite.name] = invite
        return self._changed(members)

    def without_members(self, names: Iterable[str]) -> "Roster":
        """Remove members, which revokes them at every site."""
        members = dict(self.members())
        for name in names:
            if members.pop(name, None) is None:
                hint = did_you_mean(name, members) if members else "It is empty."
                raise ConfigError(f"There is no member {name!r} on the roster. {hint}")
        return self._changed(members)

    def _changed(self, members: Mapping[str, Invite]) -> "Roster":
        invites = tuple(str(invite) for _, invite in sorted(members.items()))
        if invites == self.invites:
            return self
        version = self.version
        if self.signatures or self.is_founding:
            version += 1
        return replace(self, version=version, invites=invites, signatures={})

    def signed_by(self, key: Ed25519PrivateKey) -> "Roster":
        """Add an administrator's signature."""
        self.check_first()
        if self.is_founding:
            raise RosterError("There is nothing to sign yet: add members with `roster add` first.")
        public = key.public_key().public_bytes_raw()
        for name, admin in self.admins.items():
            if admin == public:
                return replace(self, signatures={**self.signatures, name: key.sign(self._signed())})
        raise RosterError(
            f"This key belongs to none of the roster's administrators ({', '.join(self.admins)})."
        )


def create_admin_key(path: Path, name: str) -> str:
    """Create an administrator's key file; return the public key as text: `ann:BASE64`."""
    check_name("An administrator's name", name)
    if path.exists():
        raise RosterError(f"{path} exists; choose another file for the new key.")
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_privately(path, content)
    return public_key(name, key)


def public_key(name: str, key: Ed25519PrivateKey) -> str:
    """An administrator's public key as text: `ann:BASE64`."""
    return f"{name}:{to_text(key.public_key().public_bytes_raw())}"


def read_admin_key(path: Path) -> Ed25519PrivateKey:
    """Read an administrator's key file."""
    try:
        with open_regular(path) as file:
            key = _admin_key(file.read())
            if key is None:
                raise RosterError(
                    f"{path} does not hold an administrator's key, as `dispfl peer roster key`"
                    " creates it."
                )
            check_private(file)
            return key
    except OSError as problem:
        raise RosterError(f"The key {path} cannot be read: {problem.strerror}.") from None


def _admin_key(content: bytes) -> Ed25519PrivateKey | None:
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, Ed25519PrivateKey) else None


def read_admin(text: str) -> tuple[str, bytes]:
    """Parse an administrator's public key, `ann:BASE64`."""
    name, colon, key = text.strip().partition(":")
    try:
        check_name("An administrator's name", name)
        return name, _bytes(key if colon else None, 32)
    except ValueError as problem:  # includes ConfigError
        raise RosterError(
            "An administrator's public key is NAME:KEY, as `dispfl peer roster key` prints it, got"
            f" {text[:40]!r} ({problem})."
        ) from None


def _bytes(value: JSON, length: int) -> bytes:
    raw = from_text(value)
    if len(raw) != length:
        raise ValueError(f"{str(value)[:20]!r} is not base64 of {length} bytes.")
    return raw
