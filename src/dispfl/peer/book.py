"""The members' file as a value: who is on it, and what a signed record changes.

What may change whose entry is decided here, without files, locks or clocks.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cryptography import x509

from dispfl.peer.address import Address, check_name
from dispfl.peer.certificates import der, fingerprint, leads_to, name_in, read_certificate
from dispfl.peer.records import Record, refuse
from dispfl.peer.transport import JSON

VERSION = 1
MOST_KNOWN = 100
"""So many members that nobody here has accepted are remembered: others' gossip must not fill the disk."""


@dataclass(frozen=True)
class Member:
    """Another site that was accepted here once."""

    name: str
    address: Address
    certificate: x509.Certificate
    state: Literal["accepted", "revoked"] = "accepted"
    record: Record | None = None
    """What it last said of itself; None if it has said nothing yet."""

    @property
    def fingerprint(self) -> str:
        """Of the pinned certificate."""
        return fingerprint(der(self.certificate))

    @property
    def certificates(self) -> list[x509.Certificate]:
        """The pinned one, and those before it as far as they are known."""
        chain = self.record.chain if self.record else ()
        earlier = chain[chain.index(self.certificate) + 1 :] if self.certificate in chain else chain
        return [self.certificate, *earlier]

    @property
    def density(self) -> float | None:
        """The density that it announced."""
        return self.record.density if self.record else None

    @property
    def first_round(self) -> int:
        """The first round that it takes part in."""
        return self.record.first_round if self.record else 0

    @property
    def serial(self) -> int:
        """The number of its last record."""
        return self.record.serial if self.record else 0


@dataclass(frozen=True)
class Book:
    """Everything that the file says."""

    own: Record | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    known: Mapping[str, Record] = field(default_factory=dict)
    """Members of others that were not accepted here, by fingerprint. Nothing of theirs is trusted."""

    def records(self) -> list[Record]:
        """Every record in it."""
        held = [self.own, *(member.record for member in self.members.values()), *self.known.values()]
        return [record for record in held if record]

    def with_member(self, member: Member) -> "Book":
        """With this member's entry; it is no longer among those that are merely known."""
        known = {key: record for key, record in self.known.items() if record.name != member.name}
        return replace(self, members={**self.members, member.name: member}, known=known)

    def with_certificate(self, name: str, chain: Sequence[x509.Certificate]) -> "Book":
        """With an accepted member's new certificate, if the chain leads from it to the pinned one."""
        member = self.members.get(name)
        if member is None or member.state == "revoked" or not leads_to(chain, member.certificate):
            return self
        return self.with_member(replace(member, certificate=chain[0]))

    def with_record(self, record: Record, name: str, federation: str) -> "Book":
        """With what somebody says of itself, as far as it counts for the site `name`; refused if it is not theirs."""
        if record.federation != federation:
            refuse("federation", f"The record of {record.name} is for the federation {record.federation}.")
        if record.name == name:
            if self.own and not leads_to(self.own.chain, record.chain[0]):
                refuse("certificate", f"Somebody else calls itself {name}, as this site does.")
            return self
        member = self.members.get(record.name)
        if member is None:
            return self._with_known(record)
        is_theirs = leads_to(record.chain, member.certificate)
        if member.state == "revoked":
            return self if is_theirs else self._with_known(record)
        if record.serial <= member.serial:
            return self
        if not is_theirs:
            refuse("certificate", f"The record of {record.name} has another certificate than the accepted one.")
        return self.with_member(replace(member, address=record.address, certificate=record.chain[0], record=record))

    def _with_known(self, record: Record) -> "Book":
        """With a member that was not accepted here; a new certificate of it replaces the old one."""
        if any(record.chain[0] in held.chain and held.serial >= record.serial for held in self.known.values()):
            return self
        known = {key: held for key, held in self.known.items() if held.chain[0] not in record.chain}
        if len(known) >= MOST_KNOWN:
            refuse("too-many", f"{MOST_KNOWN} members of others are known already; {record.name} is one too many.")
        return replace(self, known={**known, record.fingerprint: record})

    def to_bytes(self) -> bytes:
        """As the file."""
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
    def from_bytes(cls, content: bytes) -> "Book":
        """From the file; whatever is wrong with it raises something."""
        found = json.loads(content)
        if found["version"] != VERSION:
            raise ValueError(f"it is of version {found['version']}, this program knows {VERSION}")
        members = [_member(entry) for entry in found["members"]]
        known = [Record.read(entry) for entry in found["known"]]
        return cls(
            own=Record.read(found["own"]) if found["own"] else None,
            members={member.name: member for member in members},
            known={record.fingerprint: record for record in known},
        )


def _member(entry: Mapping[str, JSON]) -> Member:
    certificate = read_certificate(base64.b64decode(str(entry["certificate"]), validate=True))
    name, state = check_name("A member's name", str(entry["name"])), entry["state"]
    if state not in ("accepted", "revoked") or name_in(certificate) != name:
        raise ValueError(f"the entry of {name} does not hold together")
    return Member(
        name=name,
        address=Address.parse(str(entry["address"])),
        certificate=certificate,
        state="accepted" if state == "accepted" else "revoked",
        record=Record.read(entry["record"]) if entry["record"] else None,
    )
