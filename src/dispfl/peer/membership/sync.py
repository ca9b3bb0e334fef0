"""Membership sync: a node's view of the membership, and how nodes exchange records and rosters.

A sync begins with a greeting, which has the sender's own record and says what else it has:

    {"state":"0f3a...","roster":[3,"9c1e...","b020..."],"spec":"77d1...","records":[...]}
                                                        answered by the same

`state` is a digest over all records that the sender passes on; `roster` is the version of its
roster, a digest of it and the fingerprint of its administrators; `spec` is a digest of the changes
of the spec that it knows, and of their signatures. Where they are equal, which is the
rule, nothing else is sent. A client that lacks something fetches it in pages, so that no message
grows with the number of members:

    {"after":"","until":"~","known":["0f3a...",...]}    digests of the client's records in a range
    {"records":[...],"next":"7b20..."}                  those that it lacks, and the next page

    {"roster_from":200000}                              the first character
    {"part":"...","size":650123}                        a part of the roster's text

    {"changes_after":1}                                 a version of the spec
    {"changes":[...]}                                   the signed changes that follow it

A record is identified by a digest of what is signed (16 bytes). A member that lost its list, or
restored an old one, receives the missing records again.
"""

import bisect
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dispfl.core.layout import Layout
from dispfl.errors import ConfigError, MessageError, RunError
from dispfl.methods.base import Method
from dispfl.peer.membership.address import RelayAddress
from dispfl.peer.membership.member_list import Member
from dispfl.peer.membership.records import record_digest
from dispfl.peer.membership.roster import MAX_ROSTER_BYTES, Roster
from dispfl.peer.membership.spec_changes import SpecChanges
from dispfl.peer.transport.base import JSON, Refused
from dispfl.wire.refusals import Refusal

if TYPE_CHECKING:
    from dispfl.peer.site import Site

PAGE_BYTES = 200_000
"""Size of a page of records or of a roster: about 200 records."""
PAGE_DIGESTS = 5_000
"""Digests in a request for records."""
MAX_BODY_BYTES = 2 * PAGE_BYTES + 1000
"""Maximum size of a sync body, whatever the number of members."""
END = "~"
"""Sorts after every digest."""


@dataclass(frozen=True)
class SyncMessage:
    """A parsed sync message. Its records are not verified."""

    records: list[JSON] = field(default_factory=list)
    state: str | None = None
    """In a greeting: a digest over the records that the sender passes on."""
    roster: tuple[int, str, str] | None = None
    """In a greeting: the version and digest of the sender's roster, and the fingerprint of its
    administrators."""
    spec: str | None = None
    """In a greeting: a digest of the changes of the spec that the sender knows."""
    changes_after: int | None = None
    """In a request for changes of the spec: the version that they follow."""
    changes: list[JSON] = field(default_factory=list)
    """In a response: changes of the spec, not verified."""
    requested: tuple[str, str, frozenset[str]] | None = None
    """In a request for records: the range of digests, and those in it that the client has."""
    roster_from: int | None = None
    """In a request for the roster: the first character."""
    next: str | None = None
    """In a page of records: where the next one begins."""
    part: str = ""
    """In a response: a part of the roster."""
    size: int = 0
    """The length of the whole roster."""

    @classmethod
    def read(cls, body: bytes) -> "SyncMessage":
        """Parse an untrusted body."""
        try:
            fields = json.loads(body) if body else {}
            if not isinstance(fields, dict):
                raise TypeError("it must be an object")
            return cls(
                records=_field(fields, "records", list) or [],
                state=_field(fields, "state", str),
                roster=_roster(fields),
                spec=_field(fields, "spec", str),
                changes_after=_optional_number(fields, "changes_after"),
                changes=_field(fields, "changes", list) or [],
                requested=_requested(fields),
                roster_from=_optional_number(fields, "roster_from"),
                next=_field(fields, "next", str),
                part=_field(fields, "part", str) or "",
                size=_number(fields.get("size", 0)),
            )
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
            detail = str(problem)[:200]
            raise MessageError(
                Refusal.MALFORMED, f"The body of a sync message cannot be read ({detail})."
            ) from None


def _roster(fields: dict[str, Any]) -> tuple[int, str, str] | None:
    roster = _field(fields, "roster", list)
    if not roster:
        return None
    version, digest, administrators = roster[:3]
    return _number(version), str(digest), str(administrators)


def _requested(fields: dict[str, Any]) -> tuple[str, str, frozenset[str]] | None:
    digests = _field(fields, "known", list)
    if digests is None:
        return None
    known_digests = frozenset(digest for digest in digests if isinstance(digest, str))
    return str(fields["after"]), str(fields["until"]), known_digests


def _field(fields: dict[str, Any], name: str, type_: type) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, type_):
        raise TypeError(f"{name} must be a {type_.__name__}")
    return value


def _optional_number(fields: dict[str, Any], name: str) -> int | None:
    return _number(fields[name]) if name in fields else None


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise TypeError("a number must be a non-negative integer")
    return value


class Offer:
    """What a site passes on to others, until its list changes."""

    def __init__(
        self,
        records: Sequence[JSON],
        roster: Roster | None = None,
        before: "Offer | None" = None,
        changes: SpecChanges | None = None,
    ) -> None:
        self.records = records
        self.roster = roster
        self.changes = changes or SpecChanges()
        self._encoded: dict[int, tuple[str, str]] = {}
        """Digest and text of every record, by its id."""
        # The offer before keeps its records, so their ids are not reused: encode only new ones.
        encoded_before = before._encoded if before else {}
        for record in records:
            key = id(record)
            self._encoded[key] = encoded_before.get(key) or _encode(record)
        self._texts = dict(self._encoded.values())
        self.digests = sorted(self._texts)
        self.state = hashlib.blake2b("".join(self.digests).encode(), digest_size=16).hexdigest()
        self._own_record = ""
        if records:
            _, self._own_record = self._encoded[id(records[0])]

    def greeting(self) -> bytes:
        """The first message of a sync, and the response to it."""
        roster = None
        if self.roster:
            roster = [self.roster.version, self.roster.digest, self.roster.fingerprint]
        records = f"[{self._own_record}]"
        states = f'"state":"{self.state}","spec":"{self.changes.state}"'
        return f'{{{states},"roster":{json.dumps(roster)},"records":{records}}}'.encode()

    def answer(self, request: SyncMessage) -> bytes:
        """The response to a request."""
        if request.roster_from is not None:
            text = self.roster.text if self.roster else ""
            roster_part = text[request.roster_from : request.roster_from + PAGE_BYTES]
            return json.dumps({"part": roster_part, "size": len(text)}).encode()
        if request.changes_after is not None:
            documents = self.changes.documents(request.changes_after)
            return json.dumps({"changes": documents}).encode()
        if request.requested is None:
            return self.greeting()
        page, next_page = self._page(*request.requested)
        return f'{{"records":[{",".join(page)}],"next":{json.dumps(next_page)}}}'.encode()

    def _page(
        self, after: str, until: str, known_digests: Collection[str]
    ) -> tuple[list[str], str | None]:
        """Return a page of the records with digests in `(after, until]` that the client lacks, and
        where the next page begins."""
        page: list[str] = []
        room = PAGE_BYTES
        for digest in self.digests[bisect.bisect_right(self.digests, after) :]:
            if digest > until:
                break
            if digest not in known_digests:
                text = self._texts[digest]
                if page and len(text) > room:
                    return page, after
                page.append(text)
                room -= len(text) + 1
            after = digest
        is_last = until >= END
        return page, None if is_last else until

    def request_after(self, after: str) -> bytes:
        """The request for the records that we lack, with digests above `after`."""
        start = bisect.bisect_right(self.digests, after)
        digests = self.digests[start : start + PAGE_DIGESTS]
        is_last = start + PAGE_DIGESTS >= len(self.digests)
        until = END if is_last else digests[-1]
        request = {"after": after, "until": until, "known": digests}
        return json.dumps(request, separators=(",", ":")).encode()


def request_roster(parts: Sequence[str]) -> bytes:
    """The request for the part of a roster that follows these parts."""
    return json.dumps({"roster_from": sum(map(len, parts))}).encode()


def request_changes(version: int) -> bytes:
    """The request for the changes of the spec that follow a version."""
    return json.dumps({"changes_after": version}).encode()


def check_progress(response: SyncMessage, after: str) -> None:
    """Refuse a page of records whose next page does not come after it."""
    if response.next is not None and not after < response.next < END:
        raise MessageError(
            Refusal.MALFORMED, "A page of records does not say where the next one begins."
        )


def check_part(response: SyncMessage, parts: Sequence[str]) -> None:
    """Refuse a part of a roster that is empty or too long."""
    received = sum(map(len, parts)) + len(response.part)
    if not response.part or received > response.size or response.size > MAX_ROSTER_BYTES:
        raise MessageError(
            Refusal.ROSTER, f"A roster of {response.size} bytes came in {received} bytes."
        )


def _encode(record: JSON) -> tuple[str, str]:
    return record_digest(record), json.dumps(record, separators=(",", ":"))


class SiteMembership:
    """Implementation of `dispfl.peer.node_context.Membership` for a site."""

    def __init__(self, site: "Site", method: Method, layout: Layout, density: float) -> None:
        self._site = site
        self._density = density
        self._records: list[JSON] = []
        self._records_generation = -1

        @lru_cache(maxsize=64)
        def kept_counts(density: float) -> Sequence[int]:
            try:
                return method.sent_counts(layout, density)
            except ConfigError:  # announced, but not possible for this network: no mask matches
                return ()

        self._kept_counts = kept_counts

    def participants(self, t: int) -> list[str]:
        """Names of the participants in round t, including this site, sorted."""
        return self._site.members.participants(t)

    def kept_counts(self, name: str) -> Sequence[int] | None:
        """Number of weights per layer that a member sends; None before its first record."""
        member = self._site.members.file.latest().members.get(name)
        if member is None or member.density is None:
            return None
        return self._kept_counts(member.density)

    def join(self, t: int) -> None:
        """Announce that this site takes part from round t."""
        self._site.announce(self._density, t)

    def records(self) -> list[JSON]:
        """Signed records of this site, first, and its members; the same object until they
        change."""
        generation = self._site.members.generation
        if self._records_generation != generation:
            self._records = self._site.members.records()
            self._records_generation = generation
        return self._records

    def roster(self) -> Roster | None:
        """The roster that this site has accepted."""
        return self._site.members.file.latest().roster

    def merge(self, records: JSON) -> Collection[str]:
        """Merge received records; return the reasons for refused ones that count as offences."""
        return self._site.members.merge(records).forged

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Whether a roster of the same administrators is newer than ours, or contradicts it."""
        return self._site.members.file.latest().lacks_roster(version, digest, administrators)

    def merge_roster(self, text: str) -> bool:
        """Merge a received roster; return whether it changes anything."""
        return self._site.members.merge_roster(text)

    def identify(self, certificate: bytes, issuers: Sequence[bytes]) -> str | None:
        """Return the name of the member with this certificate, or None; refuse a revoked one."""
        try:
            member = self._site.members.find_by_certificate(certificate, issuers)
        except MessageError as problem:
            raise Refused(problem.refusal, str(problem)) from None
        except RunError:  # logged by the node as a problem of its own
            raise Refused(
                Refusal.INTERNAL_ERROR, f"{self._site.name} cannot read its members."
            ) from None
        if member is None or member.state == "pending":
            return None
        if member.state == "revoked":
            raise Refused(Refusal.REVOKED, self._revocation(member))
        return member.name

    def _revocation(self, member: Member) -> str:
        """Tell a revoked member who has revoked it."""
        roster = self.roster()
        if member.by == "roster" and roster is not None:
            return f"Version {roster.version} of the roster does not list {member.name} any more."
        return f"{member.name} was revoked by {self._site.name}."

    def address(self, name: str) -> tuple[str, int] | None:
        """Return the address of an accepted member; None if it is reached in another way alone."""
        member = self._accepted(name)
        if member.address is None and not member.relays and self.outbox(name) is None:
            raise Refused(
                Refusal.NOT_A_MEMBER, f"{name} has no usable address; accept its invite again."
            )
        return member.address

    def relays(self, name: str) -> tuple[RelayAddress, ...]:
        """Return the relays of an accepted member."""
        return self._accepted(name).relays

    def outbox(self, name: str) -> str | None:
        """Return where this site reads the outbox of an accepted member; None if it has none."""
        return self._site.info.outboxes.get(name) or self._accepted(name).outbox

    def fingerprint(self, name: str) -> str:
        """Return the fingerprint of an accepted member's certificate."""
        return self._accepted(name).fingerprint

    def _accepted(self, name: str) -> Member:
        member = self._site.members.get(name)
        if member is None or member.state != "accepted":
            raise Refused(Refusal.NOT_A_MEMBER, f"{name} is not accepted by {self._site.name}.")
        return member
