"""A node's view of the membership, and its sync.

The body of a sync message lists the records that its sender has, and contains those to transfer:

    {"known": ["0f3a...", ...], "records": [...]}

Most syncs transfer nothing, so records are identified by a digest of their signature (8 bytes) and sent only once. The
first request contains no records; the response contains those that the request does not list. If the client has
records that the response does not list, it sends a second request with them. A member that lost its list, or restored
an old one, receives the missing records again.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dispfl.core.layout import Layout
from dispfl.errors import ConfigError, MessageError
from dispfl.methods.base import Method
from dispfl.peer.site import Site
from dispfl.peer.transport.base import JSON, Refused
from dispfl.wire.refusals import Refusal

MAX_BODY_BYTES = 4_000_000
"""Maximum size of a sync body: about 3,000 members."""


@dataclass(frozen=True)
class SyncMessage:
    """The content of a sync message."""

    known: frozenset[str]
    """Digests of all records that the sender has."""
    records: list[JSON]
    """The transferred records, not yet verified."""

    @classmethod
    def read(cls, body: bytes) -> "SyncMessage":
        """Parse an untrusted body. The records in it are not verified."""
        if not body:
            return cls(frozenset(), [])
        try:
            found = json.loads(body)
            known, records = found["known"], found["records"]
            if not isinstance(known, list) or not isinstance(records, list):
                raise TypeError("known and records must be lists")
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise MessageError(Refusal.MALFORMED, f"The body of a sync message cannot be read ({problem}).") from None
        return cls(frozenset(name for name in known if isinstance(name, str)), records)

    def missing_from(self, records: Iterable[JSON]) -> list[JSON]:
        """Return those of our records that the sender does not have."""
        return [record for record in records if record_digest(record) not in self.known]


def sync_body(records: Collection[JSON], transferred: Collection[JSON]) -> bytes:
    """Encode a sync message of a member that has `records` and transfers some of them."""
    content = {"known": [record_digest(record) for record in records], "records": list(transferred)}
    return json.dumps(content, separators=(",", ":")).encode()


def record_digest(record: JSON) -> str:
    """Return the digest that identifies a version of a record."""
    signature = record.get("signature") if isinstance(record, dict) else None
    return hashlib.blake2b(str(signature).encode(), digest_size=8).hexdigest()


class SiteMembership:
    """Implementation of `dispfl.peer.context.Membership` for a site."""

    def __init__(self, site: Site, method: Method, layout: Layout, density: float) -> None:
        self._site = site
        self._density = density

        @lru_cache(maxsize=64)
        def kept_counts(density: float) -> Sequence[int]:
            try:
                return method.kept_counts(layout, density)
            except ConfigError:  # announced by a member, but the network cannot have it: no mask keeps these counts
                return ()

        self._kept = kept_counts

    def roster(self, t: int) -> list[str]:
        """Names of the participants in round t, including this site, sorted."""
        return self._site.members.roster(t)

    def kept(self, name: str) -> Sequence[int] | None:
        """Number of weights per layer that a member's masks keep; None if its density is not known yet."""
        member = self._site.members.get(name)
        return None if member is None or member.density is None else self._kept(member.density)

    def join(self, t: int) -> None:
        """Announce that this site takes part from round t."""
        self._site.members.announce(self._site.identity, self._site.info.address, self._density, t)

    def records(self) -> list[JSON]:
        """Signed records of this site and the accepted members."""
        return self._site.members.records()

    def merge(self, records: JSON) -> Collection[str]:
        """Merge received records; return the refusal reasons that count as offences of the sender."""
        return self._site.members.merge(records).forged

    def identify(self, certificate: bytes, issuers: Sequence[bytes]) -> str | None:
        """Return the name of the member with this certificate, None if there is none; refuse a revoked member."""
        member = self._site.members.find_by_certificate(certificate, issuers)
        if member is not None and member.state == "revoked":
            raise Refused(Refusal.REVOKED, f"{member.name} was revoked by {self._site.name}.")
        return member.name if member else None

    def address(self, name: str) -> tuple[str, int]:
        """Return the address of an accepted member."""
        member = self._site.members.get(name)
        if member is None or member.state != "accepted":
            raise Refused(Refusal.NOT_A_MEMBER, f"{name} is not accepted by {self._site.name}.")
        return member.address
