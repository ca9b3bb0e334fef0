"""The allow-list: whom this site has accepted, in a file that several processes may change at any time.

A running node looks somebody up on every request, while `dispfl peer accept` and `revoke` are other processes. So a
lookup first sees whether the file has changed (one `stat`), and a change is made under a lock, on what the file says
at that moment, and replaces the file in one go. Greetings are taken in on another thread than the one that looks
members up, so what was read of the file has a lock, too.
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
from dispfl.peer.address import Address
from dispfl.peer.book import Book, Member
from dispfl.peer.certificates import IdentityError, fingerprint, is_current, leads_to, name_in, read_certificate
from dispfl.peer.identity import Identity
from dispfl.peer.invite import Invite, InviteError
from dispfl.peer.records import Record
from dispfl.peer.transport import JSON
from dispfl.runs.files import plain_disk_errors, write_atomically
from dispfl.settings import did_you_mean

__all__ = ["Member", "Members", "Merged", "locked"]


@dataclass(frozen=True)
class Merged:
    """What came of others' records."""

    learned: tuple[str, ...]
    """About whom there was something new."""
    refused: Mapping[str, int]
    """How many records were refused, by reason."""
    forged: frozenset[str] = frozenset()
    """The reasons among them for which every honest site would have refused the record, and not passed it on."""


class Members:
    """The members of a federation as one site, `name`, sees them."""

    def __init__(self, path: Path, name: str, federation: str) -> None:
        self.name = name
        self.federation = federation
        self.path = path
        self._stamp: tuple[int, ...] = ()
        self._book = Book()
        self._prints: dict[str, str] = {}
        self._generation = 0
        self._reading = threading.RLock()
        """Always taken before the file's own lock."""
        self._fresh()

    @classmethod
    def create(cls, path: Path, name: str, federation: str) -> "Members":
        """An empty list."""
        write_atomically(path, Book().to_bytes())
        return cls(path, name, federation)

    # who is who

    def who(self, cert_der: bytes, issuers: Sequence[bytes] = ()) -> Member | None:
        """The accepted member whose certificate this is; None for anybody else."""
        member = self.recognise(cert_der, issuers)
        return member if member and member.state == "accepted" else None

    def recognise(self, cert_der: bytes, issuers: Sequence[bytes] = ()) -> Member | None:
        """The member, accepted or revoked, whose certificate this is, or whose new certificate.

        An accepted member's new certificate, issued by the pinned one (or by `issuers` that go back to it), is pinned
        in its place.
        """
        shown = fingerprint(cert_der)
        if (member := self._pinned_as(shown)) is not None:
            return member
        try:
            chain = [read_certificate(each) for each in (cert_der, *issuers)]
        except IdentityError:
            return None
        member = self.get(name_in(chain[0]))
        if member is None or not leads_to(chain, member.certificate):
            return None
        if member.state == "revoked":
            return member
        name = member.name
        self._change(lambda latest: latest.with_certificate(name, chain))
        return self._pinned_as(shown)  # nobody, if another process was quicker

    def _pinned_as(self, shown: str) -> Member | None:
        """The member whose pinned certificate has this fingerprint."""
        with self._reading:
            book, name = self._fresh(), self._prints.get(shown)
            return book.members[name] if name else None

    def get(self, name: str) -> Member | None:
        """The member of that name, accepted or revoked."""
        return self._fresh().members.get(name)

    def all(self) -> list[Member]:
        """Everyone who was ever accepted, by name."""
        return [member for _, member in sorted(self._fresh().members.items())]

    def accepted(self) -> list[Member]:
        """Everyone who is accepted now, by name."""
        return [member for member in self.all() if member.state == "accepted"]

    def names(self) -> list[str]:
        """The accepted members' names, sorted."""
        return [member.name for member in self.accepted()]

    def roster(self, t: int) -> list[str]:
        """Who takes part in round t: this site and those accepted members that have joined by then, sorted."""
        return sorted([self.name, *(member.name for member in self.accepted() if member.first_round <= t)])

    def pinned(self) -> list[x509.Certificate]:
        """The certificates to trust."""
        return [member.certificate for member in self.accepted()]

    def known(self) -> list[Record]:
        """Members of others that were not accepted here."""
        return sorted(self._fresh().known.values(), key=lambda record: (record.name, record.fingerprint))

    @property
    def generation(self) -> int:
        """A number that grows whenever the list has changed, here or in another process."""
        self._fresh()
        return self._generation

    # changes by people

    def accept(self, invite: Invite) -> Member:
        """Put a site on the list, or back on it."""
        [member] = self.accept_all([invite])
        return member

    def accept_all(self, invites: Sequence[Invite]) -> list[Member]:
        """Put several sites on the list at once, all or none."""

        def accepted(book: Book) -> Book:
            for invite in invites:
                book = self._with_accepted(book, invite)
            return book

        for invite in invites:
            self._check(invite)
        book = self._change(accepted)
        return [book.members[invite.name] for invite in invites]

    def _with_accepted(self, book: Book, invite: Invite) -> Book:
        old = book.members.get(invite.name)
        is_same = old is not None and leads_to([invite.certificate], old.certificate)
        if old is not None and old.state == "accepted" and not is_same:
            if leads_to(old.certificates, invite.certificate):
                raise InviteError(
                    f"{invite.name} is accepted already, and has changed its key since it wrote this invite. There is "
                    "nothing to do."
                )
            raise InviteError(
                f"{invite.name} is on the list already, with another certificate ({old.fingerprint[:16]}...). If "
                f"it has a new key, first revoke the old one: dispfl peer revoke {self.path.parent} {invite.name}"
            )
        record = old.record if old and is_same else None
        return book.with_member(Member(invite.name, invite.address, invite.certificate, record=record))

    def _check(self, invite: Invite) -> None:
        if invite.name == self.name:
            raise InviteError(
                f"The invite is of a site called {self.name}, as this one is. Accept the invites that other sites "
                "print; the sites of a federation need different names."
            )
        if invite.federation != self.federation:
            raise InviteError(
                f"{invite.name} belongs to the federation {invite.federation}, this site to {self.federation}; "
                "both must be made with the same --federation."
            )
        if not is_current(invite.certificate):
            raise InviteError(
                f"The certificate of {invite.name} is valid from {invite.certificate.not_valid_before_utc:%Y-%m-%d} "
                f"to {invite.certificate.not_valid_after_utc:%Y-%m-%d}, not now. Set this machine's clock, or have the "
                "site made anew."
            )

    def revoke(self, name: str) -> Member:
        """Refuse a member from now on, also on connections that are open."""

        def revoked(book: Book) -> Book:
            if name not in book.members:
                hint = did_you_mean(name, book.members) if book.members else "Nobody was accepted yet."
                raise ConfigError(f"There is no member {name!r}. {hint}")
            return book.with_member(replace(book.members[name], state="revoked"))

        return self._change(revoked).members[name]

    # gossip

    def announce(self, identity: Identity, address: Address, density: float, first_round: int) -> Record:
        """This site's own record, signed anew if it says something new."""

        def announced(book: Book) -> Book:
            # The clock keeps serials growing where an old backup was restored.
            serial = max(book.own.serial + 1 if book.own else 1, int(time.time()))
            new = Record.sign(identity, self.federation, address, density, first_round, serial)
            return book if new.says_the_same(book.own) else replace(book, own=new)

        own = self._change(announced).own
        assert own is not None
        return own

    @property
    def own_first_round(self) -> int:
        """The round that this site announced to take part from; 0 before it announced anything."""
        own = self._fresh().own
        return own.first_round if own else 0

    def records(self) -> list[JSON]:
        """What this site passes on: its own record and those of the members that it has accepted."""
        records = [self._fresh().own, *(member.record for member in self.accepted())]
        return [record.to_json() for record in records if record]

    def merge(self, records: JSON) -> Merged:
        """Take in what others pass on; of each member the newest record counts."""
        held = {record.signature_text for record in self._fresh().records()}
        offered = records if isinstance(records, list) else [records]
        # Most gossip is old: no signature is checked twice, and no lock taken for nothing.
        news = [each for each in offered if not isinstance(each, dict) or str(each.get("signature")) not in held]
        learned: list[str] = []
        refused: Counter[str] = Counter()
        verified: list[Record] = []
        for each in news:  # before the list is locked: this takes long, and others look members up meanwhile
            try:
                verified.append(Record.read(each))
            except MessageError as problem:
                refused[problem.refusal] += 1
        forged = frozenset(refused)

        def merged(book: Book) -> Book:
            for record in verified:
                try:
                    after = book.with_record(record, self.name, self.federation)
                except MessageError as problem:
                    refused[problem.refusal] += 1
                    continue
                if after is not book:
                    learned.append(record.name)
                    book = after
            return book

        if verified:
            self._change(merged)
        return Merged(tuple(learned), dict(refused), forged)

    # the file

    def _fresh(self) -> Book:
        """What the file says now, read again only if it has changed."""
        try:
            with self._reading:
                stamp = self._stamp_now()
                if stamp != self._stamp:
                    self._take(Book.from_bytes(self.path.read_bytes()), stamp)
                return self._book
        except OSError as problem:
            raise RunError(f"{self.path} cannot be read: {problem.strerror}. Restore it from a backup.") from None
        except (ValueError, KeyError, TypeError, AttributeError, DispflError) as problem:
            raise RunError(f"{self.path} is damaged ({problem}). Restore it from a backup.") from None

    def _stamp_now(self) -> tuple[int, ...]:
        """What tells one version of the file from another."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _take(self, book: Book, stamp: tuple[int, ...]) -> None:
        self._book, self._stamp = book, stamp
        self._prints = {member.fingerprint: member.name for member in book.members.values()}
        self._generation += 1

    def _change(self, edit: Callable[[Book], Book]) -> Book:
        """Make a change on what the file says now, with no other process in between."""
        with self._reading, locked(self.path.with_name(f".{self.path.name}.lock")):
            before = self._fresh()
            after = edit(before)
            if after is not before:
                write_atomically(self.path, after.to_bytes())
                self._take(after, self._stamp_now())  # reading it again would verify every signature again
            return self._book


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process is within; the lock goes with the process, however it ends."""
    with plain_disk_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
