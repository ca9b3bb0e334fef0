"""The members file: the sites that this site has accepted, shared by several processes.

A running node looks up a member on every request, while `dispfl peer accept` and `revoke` run in other processes. A
lookup therefore first checks whether the file has changed (one `stat`). An update reads the current file under a lock
and replaces it atomically. Records are merged on another thread than lookups, so the cached list has a lock as well.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509

from dispfl.errors import ConfigError, DispflError, MessageError, RunError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import (
    Identity,
    IdentityError,
    common_name,
    descends_from,
    fingerprint,
    is_current,
    read_certificate,
)
from dispfl.peer.membership.invite import Invite, InviteError
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.transport.base import JSON
from dispfl.runs.files import plain_disk_errors, write_atomically
from dispfl.settings import did_you_mean


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

    def __init__(self, path: Path, name: str, federation: str) -> None:
        self.name = name
        self.federation = federation
        self.path = path
        self._stamp: tuple[int, ...] = ()
        self._list = MemberList()
        self._by_fingerprint: dict[str, str] = {}
        self._generation = 0
        self._lock = threading.RLock()
        """Always acquired before the file lock."""
        self._current()

    @classmethod
    def create(cls, path: Path, name: str, federation: str) -> "MembersFile":
        """Create a file with no members."""
        write_atomically(path, MemberList().to_bytes())
        return cls(path, name, federation)

    # lookups

    def identify(self, cert_der: bytes, issuers: Sequence[bytes] = ()) -> Member | None:
        """Return the accepted member with this certificate, or None."""
        member = self.find_by_certificate(cert_der, issuers)
        return member if member and member.state == "accepted" else None

    def find_by_certificate(self, cert_der: bytes, issuers: Sequence[bytes] = ()) -> Member | None:
        """Return the member, accepted or revoked, with this certificate or with an earlier one that issued it.

        An accepted member's new certificate, issued by the pinned one (directly or through `issuers`), replaces the
        pinned one.
        """
        print_ = fingerprint(cert_der)
        if (member := self._find_pinned(print_)) is not None:
            return member
        try:
            chain = [read_certificate(each) for each in (cert_der, *issuers)]
        except IdentityError:
            return None
        member = self.get(common_name(chain[0]))
        if member is None or not descends_from(chain, member.certificate):
            return None
        if member.state == "revoked":
            return member
        name = member.name
        self._update(lambda latest: latest.with_certificate(name, chain))
        return self._find_pinned(print_)  # None if another process has changed the entry meanwhile

    def _find_pinned(self, print_: str) -> Member | None:
        """Return the member whose pinned certificate has this fingerprint."""
        with self._lock:
            member_list, name = self._current(), self._by_fingerprint.get(print_)
            return member_list.members[name] if name else None

    def get(self, name: str) -> Member | None:
        """Return the member with this name, accepted or revoked, or None."""
        return self._current().members.get(name)

    def all(self) -> list[Member]:
        """All members, accepted or revoked, sorted by name."""
        return [member for _, member in sorted(self._current().members.items())]

    def accepted(self) -> list[Member]:
        """The accepted members, sorted by name."""
        return [member for member in self.all() if member.state == "accepted"]

    def names(self) -> list[str]:
        """Names of the accepted members, sorted."""
        return [member.name for member in self.accepted()]

    def roster(self, t: int) -> list[str]:
        """Names of the participants in round t: this site and the accepted members that have joined by then, sorted."""
        return sorted([self.name, *(member.name for member in self.accepted() if member.first_round <= t)])

    def pinned(self) -> list[x509.Certificate]:
        """The certificates of accepted members."""
        return [member.certificate for member in self.accepted()]

    def known(self) -> list[MemberRecord]:
        """Records of members that only other sites have accepted."""
        return sorted(self._current().known.values(), key=lambda record: (record.name, record.fingerprint))

    @property
    def generation(self) -> int:
        """A counter that increases whenever the list changes, in this process or another."""
        self._current()
        return self._generation

    # changes by the operator

    def accept(self, invite: Invite) -> Member:
        """Accept a site, also one that was revoked."""
        [member] = self.accept_all([invite])
        return member

    def accept_all(self, invites: Sequence[Invite]) -> list[Member]:
        """Accept several sites, all or none."""

        def accepted(member_list: MemberList) -> MemberList:
            for invite in invites:
                member_list = self._with_accepted(member_list, invite)
            return member_list

        for invite in invites:
            self._check(invite)
        member_list = self._update(accepted)
        return [member_list.members[invite.name] for invite in invites]

    def _with_accepted(self, member_list: MemberList, invite: Invite) -> MemberList:
        old = member_list.members.get(invite.name)
        is_same = old is not None and descends_from([invite.certificate], old.certificate)
        if old is not None and old.state == "accepted" and not is_same:
            if descends_from(old.certificates, invite.certificate):
                raise InviteError(
                    f"{invite.name} is already accepted and has rotated its key since this invite was created. Nothing "
                    "needs to be done."
                )
            raise InviteError(
                f"{invite.name} is already accepted with another certificate ({old.fingerprint[:16]}...). If it has a "
                f"new key, revoke the old one first: dispfl peer revoke {self.path.parent} {invite.name}"
            )
        record = old.record if old and is_same else None
        return member_list.with_member(Member(invite.name, invite.address, invite.certificate, record=record))

    def _check(self, invite: Invite) -> None:
        if invite.name == self.name:
            raise InviteError(
                f"The invite has the name of this site, {self.name}. Accept invites of other sites; site names must be "
                "unique in a federation."
            )
        if invite.federation != self.federation:
            raise InviteError(
                f"{invite.name} belongs to the federation {invite.federation}, this site to {self.federation}; "
                "create both with the same --federation."
            )
        if not is_current(invite.certificate):
            raise InviteError(
                f"The certificate of {invite.name} is valid from {invite.certificate.not_valid_before_utc:%Y-%m-%d} "
                f"to {invite.certificate.not_valid_after_utc:%Y-%m-%d}, not now. Check this machine's clock, or "
                "create the site again."
            )

    def revoke(self, name: str) -> Member:
        """Refuse a member from now on, also on open connections."""

        def revoked(member_list: MemberList) -> MemberList:
            if name not in member_list.members:
                hint = did_you_mean(name, member_list.members) if member_list.members else "No member was accepted yet."
                raise ConfigError(f"There is no member {name!r}. {hint}")
            return member_list.with_member(replace(member_list.members[name], state="revoked"))

        return self._update(revoked).members[name]

    # records

    def announce(self, identity: Identity, address: Address, density: float, first_round: int) -> MemberRecord:
        """Return this site's record, signed again only if its content has changed."""

        def announced(member_list: MemberList) -> MemberList:
            # The clock makes serials increase even after an old backup was restored.
            serial = max(member_list.own.serial + 1 if member_list.own else 1, int(time.time()))
            new = MemberRecord.sign(identity, self.federation, address, density, first_round, serial)
            return member_list if new.same_content(member_list.own) else replace(member_list, own=new)

        own = self._update(announced).own
        assert own is not None
        return own

    @property
    def own_first_round(self) -> int:
        """The first round in this site's record; 0 if it has none yet."""
        own = self._current().own
        return own.first_round if own else 0

    def records(self) -> list[JSON]:
        """The records that this site sends to others: its own and those of accepted members."""
        records = [self._current().own, *(member.record for member in self.accepted())]
        return [record.to_json() for record in records if record]

    def merge(self, records: JSON) -> MergeResult:
        """Merge records received from another member; the newest valid record of each member is kept."""
        held = {record.signature_text for record in self._current().records()}
        offered = records if isinstance(records, list) else [records]
        # Most records are already known: skip them without verifying a signature or taking the lock.
        new = [each for each in offered if not isinstance(each, dict) or str(each.get("signature")) not in held]
        learned: list[str] = []
        refused: Counter[str] = Counter()
        verified: list[MemberRecord] = []
        for each in new:  # outside the lock: verification is slow and must not block lookups
            try:
                verified.append(MemberRecord.read(each))
            except MessageError as problem:
                refused[problem.refusal] += 1
        forged = frozenset(refused)

        def merged(member_list: MemberList) -> MemberList:
            for record in verified:
                try:
                    after = member_list.with_record(record, self.name, self.federation)
                except MessageError as problem:
                    refused[problem.refusal] += 1
                    continue
                if after is not member_list:
                    learned.append(record.name)
                    member_list = after
            return member_list

        if verified:
            self._update(merged)
        return MergeResult(tuple(learned), dict(refused), forged)

    # the file

    def _current(self) -> MemberList:
        """Return the current list; the file is read only if it has changed."""
        try:
            with self._lock:
                stamp = self._stamp_now()
                if stamp != self._stamp:
                    self._set(MemberList.from_bytes(self.path.read_bytes()), stamp)
                return self._list
        except OSError as problem:
            raise RunError(f"{self.path} cannot be read: {problem.strerror}. Restore it from a backup.") from None
        except (ValueError, KeyError, TypeError, AttributeError, DispflError) as problem:
            raise RunError(f"{self.path} is damaged ({problem}). Restore it from a backup.") from None

    def _stamp_now(self) -> tuple[int, ...]:
        """Return what identifies a version of the file."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _set(self, member_list: MemberList, stamp: tuple[int, ...]) -> None:
        self._list, self._stamp = member_list, stamp
        self._by_fingerprint = {member.fingerprint: member.name for member in member_list.members.values()}
        self._generation += 1

    def _update(self, edit: Callable[[MemberList], MemberList]) -> MemberList:
        """Apply a change to the current list, excluding other processes."""
        with self._lock, file_lock(self.path.with_name(f".{self.path.name}.lock")):
            before = self._current()
            after = edit(before)
            if after is not before:
                write_atomically(self.path, after.to_bytes())
                self._set(after, self._stamp_now())  # reading the file would verify all signatures again
            return self._list


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock across processes; it is released when the process ends for any reason."""
    with plain_disk_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
