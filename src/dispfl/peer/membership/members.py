"""The members of a federation: lookups, changes by the operator, and announcements."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509

from dispfl.errors import ConfigError, MessageError
from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.audit_log import operator
from dispfl.peer.membership.identity import (
    MAX_ISSUERS,
    Identity,
    IdentityError,
    common_name,
    descends_from,
    fingerprint,
    is_current,
    read_certificate,
    same_fingerprint,
)
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.list_file import ListFile
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.records import MemberRecord, record_digest
from dispfl.peer.membership.roster import Roster, RosterError
from dispfl.peer.transport.base import JSON
from dispfl.settings import did_you_mean
from dispfl.wire.refusals import Refusal, refuse

MAX_STRANGERS = 100
"""Members of other sites that are shown; the least recently received are dropped."""
MAX_IGNORED = 20_000
"""Records that were verified and not stored; not verified again until the list changes."""


@dataclass(frozen=True)
class MergeResult:
    """The result of merging records received from another member."""

    learned: tuple[str, ...]
    """Names of members with a new record."""
    refused: Mapping[str, int]
    """Number of refused records, by reason."""
    forged: frozenset[str] = frozenset()
    """Those reasons that any honest member would have detected before it passed the record on."""


class MembersFile:
    """The members of a federation from the point of view of the site `name`."""

    def __init__(
        self, path: Path, name: str, federation: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = name
        self.federation = federation
        self.path = path
        self.file = ListFile(path)
        self._clock = clock
        self._index: dict[str, Member] = {}
        """The members by fingerprint."""
        self._index_generation = -1
        self._strangers: OrderedDict[str, MemberRecord] = OrderedDict()
        """By fingerprint: records of members that only other sites have accepted."""
        self._ignored: OrderedDict[str, None] = OrderedDict()
        """Digests of the records that were verified and not stored."""
        self._ignored_since = 0
        """The number of decisions after which they were verified."""

    @classmethod
    def create(cls, path: Path, name: str, federation: str) -> "MembersFile":
        """Create a file with no members."""
        ListFile.create(path)
        return cls(path, name, federation)

    # lookups

    def find_by_certificate(self, cert_der: bytes, issuers: Sequence[bytes] = ()) -> Member | None:
        """Return the member, in any state, with this certificate or an earlier one of its chain.

        An accepted member's new certificate, issued by the pinned one (directly or through
        `issuers`), replaces the pinned one; a rotation too soon after the last raises
        `MessageError`.
        """
        certificate_fingerprint = fingerprint(cert_der)
        member = self._find_pinned(certificate_fingerprint)
        if member is not None:
            return member
        if len(issuers) > MAX_ISSUERS:
            return None
        try:
            chain = [read_certificate(content) for content in (cert_der, *issuers)]
        except IdentityError:
            return None
        member = self.get(common_name(chain[0]))
        if member is None or not descends_from(chain, member.certificate):
            return None
        if member.state != "accepted":
            return member

        name = member.name
        now = self._clock()
        self.file.apply(
            lambda latest: latest.with_certificate(name, chain, now), f"certificate of {name}"
        )
        # None if another process has changed the entry meanwhile.
        return self._find_pinned(certificate_fingerprint)

    def _find_pinned(self, certificate_fingerprint: str) -> Member | None:
        """Return the member whose pinned certificate has this fingerprint."""
        with self.file.lock:
            member_list = self.file.current()
            if self._index_generation != self.file.generation:
                members = member_list.members.values()
                self._index = {member.fingerprint: member for member in members}
                self._index_generation = self.file.generation
            return self._index.get(certificate_fingerprint)

    def get(self, name: str) -> Member | None:
        """Return the member with this name, in any state, or None."""
        return self.file.current().members.get(name)

    def all(self) -> list[Member]:
        """All members, in any state, sorted by name."""
        return [member for _, member in sorted(self.file.current().members.items())]

    def accepted(self) -> list[Member]:
        """The accepted members, sorted by name."""
        return [member for member in self.all() if member.state == "accepted"]

    def pending(self) -> list[str]:
        """Names of the sites whose fingerprint was not confirmed yet, sorted."""
        return [member.name for member in self.all() if member.state == "pending"]

    def names(self) -> list[str]:
        """Names of the accepted members, sorted."""
        return [member.name for member in self.accepted()]

    def participants(self, t: int) -> list[str]:
        """Names of this site and the accepted members that have joined by round t, sorted.

        A running node continues with the last list that it could read.
        """
        names = [self.name]
        for member in self.file.latest().members.values():
            if member.state == "accepted" and member.first_round <= t:
                names.append(member.name)
        return sorted(names)

    def pinned(self) -> list[x509.Certificate]:
        """The certificates of accepted members."""
        return [member.certificate for member in self.accepted()]

    def known(self) -> list[MemberRecord]:
        """Records of members that only other sites have accepted, received by this process."""
        with self.file.lock:
            records = [
                record for record in self._strangers.values() if not self._is_decided(record)
            ]
        return sorted(records, key=lambda record: (record.name, record.fingerprint))

    @property
    def generation(self) -> int:
        """A counter that increases whenever the list changes, in this process or another."""
        self.file.current()
        return self.file.generation

    # changes by the operator

    def accept(
        self, invite: Invite, told_fingerprint: str | None = None, *, confirmed: bool = True
    ) -> Member:
        """Accept a site, also one that was revoked; refuse an invite with another fingerprint than
        the operator was told.

        Without `confirmed`, it becomes a member by `confirm`.
        """
        told_fingerprints = [] if told_fingerprint is None else [told_fingerprint]
        [member] = self.accept_all([invite], told_fingerprints, confirmed=confirmed)
        return member

    def accept_all(
        self,
        invites: Sequence[Invite],
        told_fingerprints: Sequence[str] = (),
        *,
        confirmed: bool = True,
    ) -> list[Member]:
        """Accept several sites, all or none; those with a fingerprint that the operator was told
        are confirmed in any case."""
        compared = {match_fingerprint(typed, invites) for typed in told_fingerprints}

        def accepted(member_list: MemberList) -> MemberList:
            for invite in invites:
                is_confirmed = confirmed or invite.fingerprint in compared
                member_list = member_list.with_invite(invite, confirmed=is_confirmed)
            return member_list

        for invite in invites:
            self._check(invite)
        member_list = self.file.update(accepted, operator())
        return [member_list.members[invite.name] for invite in invites]

    def _check(self, invite: Invite) -> None:
        if invite.name == self.name:
            raise InviteError(
                f"The invite has the name of this site, {self.name}. Accept invites of other sites;"
                " site names must be unique in a federation."
            )
        if invite.federation != self.federation:
            raise InviteError(
                f"{invite.name} belongs to the federation {invite.federation}, this site to"
                f" {self.federation}; create both with the same --federation."
            )
        if not is_current(invite.certificate):
            raise InviteError(
                f"The certificate of {invite.name} is valid from"
                f" {invite.certificate.not_valid_before_utc:%Y-%m-%d} to"
                f" {invite.certificate.not_valid_after_utc:%Y-%m-%d}, not now. Check this machine's"
                " clock, or create the site again."
            )

    def confirm(self, name: str) -> Member:
        """Make a pending site a member: its fingerprint was compared."""

        def confirmed(member_list: MemberList) -> MemberList:
            member = self._named(member_list, name)
            if member.state == "revoked":
                raise ConfigError(f"{name} was revoked; accept its invite again first.")
            if member.state == "accepted":
                return member_list
            return member_list.with_member(member.confirmed())

        return self.file.update(confirmed, operator()).members[name]

    def revoke(self, name: str) -> Member:
        """Refuse a member from now on, also on open connections."""

        def revoked(member_list: MemberList) -> MemberList:
            member = self._named(member_list, name)
            return member_list.with_member(replace(member, state="revoked", by="hand"))

        return self.file.update(revoked, operator()).members[name]

    def _named(self, member_list: MemberList, name: str) -> Member:
        if name not in member_list.members:
            hint = "No member was accepted yet."
            if member_list.members:
                hint = did_you_mean(name, member_list.members)
            raise ConfigError(f"There is no member {name!r}. {hint}")
        return member_list.members[name]

    def follows(self, roster: Roster) -> bool:
        """Whether this site has accepted the administrators of a roster."""
        current = self.file.current().roster
        return current is not None and current.fingerprint == roster.fingerprint

    def accept_roster(self, roster: Roster, told_fingerprint: str | None = None) -> MemberList:
        """Accept the administrators of a roster, and everyone on it."""
        if roster.federation != self.federation:
            raise RosterError(
                f"The roster is of the federation {roster.federation}, this site of"
                f" {self.federation}."
            )
        if not roster.is_founding:
            roster = roster.verify()
        if told_fingerprint is not None:
            roster.check_fingerprint(told_fingerprint)
            roster.check_first()

        def accepted(member_list: MemberList) -> MemberList:
            current = member_list.roster
            if current is not None and current.fingerprint == roster.fingerprint:
                was_compared = told_fingerprint is not None
                return member_list.with_newer_roster(roster, self.name, any_step=was_compared)
            roster.check_fingerprint(told_fingerprint)
            return member_list.with_roster(roster, self.name)

        return self.file.update(accepted, operator())

    # what other members announce

    def announce(
        self,
        identity: Identity,
        address: Address | None,
        density: float,
        first_round: int,
        *,
        relays: tuple[RelayAddress, ...] = (),
        outbox: str | None = None,
        sealing_key: str | None = None,
        again: bool = False,
    ) -> MemberRecord:
        """Return this site's record, signed again if its content has changed, or if `again`.

        A site that starts announces itself again: after an old backup was restored, others may have
        a record of what the site was meanwhile, which only a newer one replaces.
        """

        def announced(member_list: MemberList) -> MemberList:
            next_serial = member_list.own.serial + 1 if member_list.own else 1
            # The clock makes serials increase even after an old backup was restored.
            serial = max(next_serial, int(self._clock()))
            record = MemberRecord.sign(
                identity,
                self.federation,
                address,
                density,
                first_round,
                serial,
                relays,
                outbox,
                sealing_key,
            )
            if record.same_content(member_list.own) and not again:
                return member_list
            return replace(member_list, own=record)

        record = self.file.update(announced, self.name).own
        assert record is not None
        return record

    @property
    def own_first_round(self) -> int:
        """The first round in this site's record; 0 if it has none yet."""
        record = self.file.current().own
        return record.first_round if record else 0

    def records(self) -> list[JSON]:
        """The records that this site sends to others: its own first, and those of accepted
        members."""
        return [record.to_json() for record in self._records()]

    def _records(self) -> list[MemberRecord]:
        records = [self.file.latest().own, *(member.record for member in self.accepted())]
        return [record for record in records if record]

    def _verified_digests(self) -> set[str]:
        """Digests of the records that were verified, whether they are stored or not."""
        with self.file.lock:
            if self._ignored_since != self.file.decisions:  # one may now be that of a member
                self._ignored.clear()
                self._ignored_since = self.file.decisions
            ignored = set(self._ignored)
        return ignored | {record.digest for record in self._records()}

    def merge(self, records: JSON) -> MergeResult:
        """Merge records received from another member; the newest valid record of each member is
        kept."""
        refused: Counter[str] = Counter()
        verified = self._verify_new(records if isinstance(records, list) else [records], refused)
        forged = frozenset(refused)
        learned = [record.name for record in verified if self._merge_one(record, refused)]
        self.file.save(if_due=True)
        return MergeResult(tuple(learned), dict(refused), forged)

    def _verify_new(self, records: Sequence[JSON], refused: Counter[str]) -> list[MemberRecord]:
        """Return the verified records of those that were not verified before; count the others."""
        verified_before = self._verified_digests()
        verified: list[MemberRecord] = []
        # Outside the lock: verifying signatures is slow and must not block lookups.
        for record in records:
            if record_digest(record) in verified_before:
                continue
            try:
                verified.append(MemberRecord.read(record))
            except MessageError as problem:
                refused[problem.refusal] += 1
        return verified

    def _merge_one(self, record: MemberRecord, refused: Counter[str]) -> bool:
        """Merge a verified record; return whether it brought anything new."""
        now = self._clock()
        with self.file.lock:
            try:
                if self.file.apply(
                    lambda latest: latest.with_record(record, self.name, self.federation, now),
                    f"record of {record.name}",
                ):
                    return True
                is_new = self._note_stranger(record)
            except MessageError as problem:
                refused[problem.refusal] += 1
                if problem.refusal == Refusal.ROTATION:  # too early now, not later
                    return False
                is_new = False
            self._ignored[record.digest] = None
            while len(self._ignored) > MAX_IGNORED:
                self._ignored.popitem(last=False)
            return is_new

    def _note_stranger(self, record: MemberRecord) -> bool:
        """Note the record of a site that is not a member here; it replaces its older records."""
        if self._is_decided(record):
            return False
        earlier_records = list(self._strangers.values())
        for earlier in earlier_records:
            if record.chain[0] in earlier.chain and earlier.serial >= record.serial:
                return False
        for earlier in earlier_records:
            if earlier.chain[0] in record.chain:
                del self._strangers[earlier.fingerprint]
        self._strangers[record.fingerprint] = record
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)
        return True

    def _is_decided(self, record: MemberRecord) -> bool:
        """Whether a record is this site's own, or the operator or the roster decided about it."""
        if record.name == self.name:
            return True
        member = self.file.current().members.get(record.name)
        return member is not None and member.follows(record.chain[0])

    def merge_roster(self, text: str) -> bool:
        """Merge a roster received from another member; return whether it is new.

        Raises `MessageError` to refuse it. A site that has not accepted the administrators ignores
        it.
        """
        current = self.file.current()
        if current.roster is None:
            return False
        try:
            roster = Roster.read(text)
            if roster.fingerprint != current.roster.fingerprint:
                raise RosterError(
                    "The roster has other administrators than those that this site has accepted."
                )
            if not current.lacks_roster(roster.version, roster.digest, roster.fingerprint):
                return False
            roster = roster.verify()
        except RosterError as problem:
            refuse(Refusal.ROSTER, str(problem))
        roster.members()  # parsed before the list is locked
        before = self.file.generation
        by = f"administrators {', '.join(roster.signatures)}"
        self.file.update(lambda member_list: member_list.with_newer_roster(roster, self.name), by)
        return self.file.generation != before


def match_fingerprint(typed: str, invites: Sequence[Invite]) -> str:
    """Return the fingerprint that the operator was told; refuse one that no invite has."""
    for invite in invites:
        if same_fingerprint(typed, invite.fingerprint):
            return invite.fingerprint
    if len(invites) == 1:
        [invite] = invites
        text = f"The fingerprint of {invite.name}'s invite is {invite.fingerprint}, not {typed}."
    else:
        text = f"None of these invites has the fingerprint {typed}."
    raise InviteError(
        f"{text} Nothing was accepted: ask the site for its invite again, over another channel."
    )
