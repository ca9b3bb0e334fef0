"""The contents of the members file as an immutable value.

The rules for updating an entry are here, independent of files, locks and clocks.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cryptography import x509

from dispfl.peer.membership.address import Address, check_name
from dispfl.peer.membership.identity import common_name, der, descends_from, fingerprint, read_certificate
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.transport.base import JSON
from dispfl.wire.refusals import Refusal, refuse

VERSION = 1
MAX_KNOWN = 100
"""Limit of records kept of members that this site has not accepted, so that gossip cannot fill the disk."""


@dataclass(frozen=True)
class Member:
    """Another site that this site has accepted, possibly revoked since."""

    name: str
    address: Address
    certificate: x509.Certificate
    state: Literal["accepted", "revoked"] = "accepted"
    record: MemberRecord | None = None
    """Its latest signed record; None if none was received yet."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the pinned certificate."""
        return fingerprint(der(self.certificate))

    @property
    def certificates(self) -> list[x509.Certificate]:
        """The pinned certificate and the known earlier ones."""
        chain = self.record.chain if self.record else ()
        earlier = chain[chain.index(self.certificate) + 1 :] if self.certificate in chain else chain
        return [self.certificate, *earlier]

    @property
    def density(self) -> float | None:
        """Its announced density."""
        return self.record.density if self.record else None

    @property
    def first_round(self) -> int:
        """The first round it takes part in."""
        return self.record.first_round if self.record else 0

    @property
    def serial(self) -> int:
        """Serial number of its latest record."""
        return self.record.serial if self.record else 0


@dataclass(frozen=True)
class MemberList:
    """Own record, accepted and revoked members, and other known members."""

    own: MemberRecord | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    known: Mapping[str, MemberRecord] = field(default_factory=dict)
    """Records of members that only other sites have accepted, by fingerprint. They are not trusted."""

    def records(self) -> list[MemberRecord]:
        """All records in the list."""
        held = [self.own, *(member.record for member in self.members.values()), *self.known.values()]
        return [record for record in held if record]

    def with_member(self, member: Member) -> "MemberList":
        """Add or replace a member; its record is removed from `known`."""
        known = {key: record for key, record in self.known.items() if record.name != member.name}
        return replace(self, members={**self.members, member.name: member}, known=known)

    def with_certificate(self, name: str, chain: Sequence[x509.Certificate]) -> "MemberList":
        """Pin an accepted member's new certificate if its chain descends from the pinned one."""
        member = self.members.get(name)
        if member is None or member.state == "revoked" or not descends_from(chain, member.certificate):
            return self
        return self.with_member(replace(member, certificate=chain[0]))

    def with_record(self, record: MemberRecord, name: str, federation: str) -> "MemberList":
        """Apply a verified record as the site `name`; refuse it if another key has signed it."""
        if record.federation != federation:
            refuse(
                Refusal.FEDERATION,
                f"The record of {record.name} belongs to the federation {record.federation}, not {federation}.",
            )
        if record.name == name:
            if self.own and not descends_from(self.own.chain, record.chain[0]):
                refuse(Refusal.CERTIFICATE, f"Another site uses the name of this site, {name}.")
            return self
        member = self.members.get(record.name)
        if member is None:
            return self._with_known(record)
        is_authentic = descends_from(record.chain, member.certificate)
        if member.state == "revoked":
            return self if is_authentic else self._with_known(record)
        if record.serial <= member.serial:
            return self
        if not is_authentic:
            refuse(Refusal.CERTIFICATE, f"The record of {record.name} does not have the accepted certificate.")
        return self.with_member(replace(member, address=record.address, certificate=record.chain[0], record=record))

    def _with_known(self, record: MemberRecord) -> "MemberList":
        """Store the record of a member that is not accepted here; a rotated certificate replaces the old one."""
        if any(record.chain[0] in held.chain and held.serial >= record.serial for held in self.known.values()):
            return self
        known = {key: held for key, held in self.known.items() if held.chain[0] not in record.chain}
        if len(known) >= MAX_KNOWN:
            refuse(
                Refusal.TOO_MANY_KNOWN,
                f"The record of {record.name} exceeds the limit of {MAX_KNOWN} members that are not accepted here.",
            )
        return replace(self, known={**known, record.fingerprint: record})

    def to_bytes(self) -> bytes:
        """Serialize to the file format."""
        members: list[JSON] = [
            {
                "name": member.name,
                "state": member.state,
                "address": str(member.address),
                "certificate": base64.b64encode(der(member.certificate)).decode(),
                "record": member.record.to_json() if member.record else None,
            }
            for _, member in sorted(self.members.items())
        ]
        content: JSON = {
            "version": VERSION,
            "own": self.own.to_json() if self.own else None,
            "members": members,
            "known": [record.to_json() for record in self.known.values()],
        }
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> "MemberList":
        """Parse and verify the file; invalid content raises ValueError, KeyError, TypeError or `DispflError`."""
        found = json.loads(content)
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']}, expected {VERSION}")
        members = [_member(entry) for entry in found["members"]]
        known = [MemberRecord.read(entry) for entry in found["known"]]
        return cls(
            own=MemberRecord.read(found["own"]) if found["own"] else None,
            members={member.name: member for member in members},
            known={record.fingerprint: record for record in known},
        )


def _member(entry: Mapping[str, JSON]) -> Member:
    certificate = read_certificate(base64.b64decode(str(entry["certificate"]), validate=True))
    name, state = check_name("A member's name", str(entry["name"])), entry["state"]
    if state not in ("accepted", "revoked") or common_name(certificate) != name:
        raise ValueError(f"the entry of {name} is inconsistent")
    return Member(
        name=name,
        address=Address.parse(str(entry["address"])),
        certificate=certificate,
        state="accepted" if state == "accepted" else "revoked",
        record=MemberRecord.read(entry["record"]) if entry["record"] else None,
    )
