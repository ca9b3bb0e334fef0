"""The `head` of an outbox: the one object that changes, signed by its owner.

    {"version":1,"record":{...},"salt":"...","recipients":[["hint","key"],...],"content":"...",
     "signature":"..."}

`record` is the owner's signed member record, so that a member that is no recipient yet learns the
owner's key, and becomes one. `content` is encrypted with a key of its own, which is wrapped for
each recipient: it has the serial, the owner's round, and name, size, digest and key of each
immutable object. A hint is a salted digest of a recipient's key: who does not know the keys cannot
tell for whom a head is.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from dispfl.peer.membership.encoding import canonical, from_text, to_text, whole_number
from dispfl.peer.membership.identity import Identity
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.outbox.sealing import KEY_BYTES, SealingKey, decrypt, encrypt, new_key, wrap
from dispfl.peer.transport.base import JSON
from dispfl.wire.refusals import Refusal, refuse

HEAD = "head"
MAX_HEAD_BYTES = 16 * 1024 * 1024
"""Enough for about 8,000 recipients."""
MAX_ENTRIES = 64
"""Models in one outbox."""
_VERSION = 1
_FIELDS = {"version", "record", "salt", "recipients", "content", "signature"}
_ABOUT = ("current_round", "privacy", "hours")
_PURPOSE = b"dispfl outbox head 1\n"
_SALT_BYTES = 16
_NAME_BYTES = 16
_MAX_NUMBER = 2**53


@dataclass(frozen=True)
class StoredRef:
    """What a reader needs to fetch, check and decrypt an object."""

    name: str
    size: int
    digest: str
    key: str

    @classmethod
    def seal(cls, content: bytes) -> "tuple[StoredRef, bytes]":
        """Encrypt a new object; return how to read it, and its bytes."""
        key = new_key()
        ciphertext = encrypt(key, content)
        name = secrets.token_hex(_NAME_BYTES)
        return cls(name, len(ciphertext), _digest(ciphertext), to_text(key)), ciphertext

    def open(self, ciphertext: bytes) -> bytes:
        """Check and decrypt the object; refuse another one, or a truncated one."""
        if len(ciphertext) != self.size or _digest(ciphertext) != self.digest:
            refuse(
                Refusal.DAMAGED_OBJECT,
                f"The object {self.name} has {len(ciphertext)} bytes that are not those of the"
                f" {self.size} that its owner has signed.",
            )
        try:
            return decrypt(from_text(self.key), ciphertext)
        except ValueError as problem:
            refuse(Refusal.DAMAGED_OBJECT, f"The object {self.name} cannot be decrypted: {problem}")

    @classmethod
    def parse(cls, untrusted: Any) -> "StoredRef":
        """Parse a reference; raise ValueError."""
        ref = cls(**untrusted)
        is_name = len(ref.name) == 2 * _NAME_BYTES and set(ref.name) <= set("0123456789abcdef")
        if not is_name:  # anything else could be a path
            raise ValueError(f"{str(ref.name)[:40]!r} is not the name of an object.")
        whole_number("size", ref.size, 0, _MAX_NUMBER)
        if len(from_text(ref.key)) != KEY_BYTES:
            raise ValueError("an object has no key.")
        return ref


@dataclass(frozen=True)
class StoredModel:
    """A model in an outbox."""

    round: int
    spec: str
    """Digest of the spec in this round."""
    values: int
    """How many values the model has."""
    object: StoredRef

    @classmethod
    def parse(cls, untrusted: Any) -> "StoredModel":
        """Parse an entry; raise ValueError."""
        fields = dict(untrusted)
        model = cls(**{**fields, "object": StoredRef.parse(fields["object"])})
        whole_number("round", model.round, 0, _MAX_NUMBER)
        whole_number("number of values", model.values, 0, _MAX_NUMBER)
        return model


@dataclass(frozen=True)
class HeadContent:
    """What only recipients read."""

    serial: int
    """Counts the versions of a head, and never goes back."""
    about: dict[str, JSON]
    """What the owner says of itself: its round, its privacy and its hours."""
    wakes_at: int | None
    """If it sleeps outside of its hours: until when, in seconds since 1970."""
    joining: bool
    """Whether it has no model of its current round."""
    sync: StoredRef
    """Its spec and its member list."""
    models: tuple[StoredModel, ...]

    @classmethod
    def parse(cls, text: bytes) -> "HeadContent":
        """Parse the decrypted content; raise ValueError."""
        fields = json.loads(text)
        wakes_at = fields["wakes_at"]
        if wakes_at is not None:
            whole_number("wake-up time", wakes_at, 0, _MAX_NUMBER)
        content = cls(
            serial=whole_number("serial", fields["serial"], 0, _MAX_NUMBER),
            about={name: fields["about"].get(name) for name in _ABOUT},
            wakes_at=wakes_at,
            joining=fields["joining"] is True,
            sync=StoredRef.parse(fields["sync"]),
            models=tuple(map(StoredModel.parse, fields["models"][:MAX_ENTRIES])),
        )
        whole_number("current round", content.about.get("current_round"), 0, _MAX_NUMBER)
        return content

    def asleep_for(self, now: float) -> float:
        """Seconds that the owner still sleeps, by a clock that shows seconds since 1970."""
        return 0.0 if self.wakes_at is None else max(0.0, self.wakes_at - now)


def write_head(
    identity: Identity, record: MemberRecord, recipients: Iterable[str], content: HeadContent
) -> bytes:
    """Encrypt a head for the owners of these sealing keys, and sign it.

    Keys that cannot be used are left out: a member may announce anything.
    """
    key = new_key()
    salt = secrets.token_bytes(_SALT_BYTES)
    wrapped: list[JSON] = []
    for public in recipients:
        try:
            wrapped.append([_hint(salt, public), to_text(wrap(key, public, _purpose(record)))])
        except ValueError:
            continue
    fields: dict[str, JSON] = {
        "version": _VERSION,
        "record": record.to_json(),
        "salt": to_text(salt),
        "recipients": wrapped,
        "content": to_text(encrypt(key, json.dumps(asdict(content)).encode())),
    }
    fields["signature"] = to_text(identity.sign(_signed(fields)))
    return json.dumps(fields, separators=(",", ":")).encode()


class SignedHead:
    """A head whose signatures are verified: that of its owner's record, and its own."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = json.loads(raw)
            if not isinstance(fields, dict) or fields.keys() != _FIELDS:
                raise ValueError(f"it must have the fields {', '.join(sorted(_FIELDS))}.")
            signature = from_text(fields["signature"])
        except (ValueError, RecursionError) as problem:
            refuse(Refusal.MALFORMED, f"The head of an outbox is invalid: {str(problem)[:200]}")
        if fields["version"] != _VERSION:
            refuse(
                Refusal.VERSION,
                f"The head of an outbox has version {str(fields['version'])[:20]}, not {_VERSION}.",
            )
        self.record = MemberRecord.read(fields["record"])
        """The owner's own record."""
        owner_key = self.record.chain[0].public_key()
        assert isinstance(owner_key, ec.EllipticCurvePublicKey)  # checked by read_certificate
        try:
            owner_key.verify(signature, _signed(fields), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            refuse(Refusal.SIGNATURE, f"The head is not signed by the key of {self.record.name}.")
        self._fields = fields

    def open(self, key: SealingKey) -> HeadContent:
        """Decrypt the content; refuse a head that is not for this key."""
        fields = self._fields
        name = self.record.name
        try:
            own_hint = _hint(from_text(fields["salt"]), key.public)
            wrapped = [wrapped for hint, wrapped in fields["recipients"] if hint == own_hint]
            if not wrapped:
                refuse(
                    Refusal.NOT_A_RECIPIENT,
                    f"{name} has not encrypted its outbox for this site: it has not accepted it, or"
                    " has not read its key yet.",
                )
            content_key = key.unwrap(from_text(wrapped[0]), _purpose(self.record))
            return HeadContent.parse(decrypt(content_key, from_text(fields["content"])))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            detail = str(problem)[:200]
            refuse(Refusal.MALFORMED, f"The head of {name}'s outbox cannot be read: {detail}")


def _signed(fields: dict[str, Any]) -> bytes:
    content = {name: value for name, value in fields.items() if name != "signature"}
    return _PURPOSE + canonical(content).encode()


def _purpose(record: MemberRecord) -> bytes:
    return f"dispfl outbox 1\n{record.federation}\n{record.name}".encode()


def _hint(salt: bytes, public: str) -> str:
    return hashlib.blake2b(public.encode(), key=salt[:64], digest_size=8).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
