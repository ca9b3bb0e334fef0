"""The member list on disk, shared by several processes.

A running node looks up a member on every request, while `dispfl peer accept` and `revoke` run in
other processes. A lookup therefore first checks whether the file has changed (one `stat`). An
update reads the current file under a lock and replaces it atomically. What other members announce
takes effect at once and is saved about once a second, so that a thousand records do not write the
file a thousand times; if a crash loses it, the next sync brings it again.

Decisions, such as a revocation, are possible on a full disk: space for them is reserved. A change
and its entries for the audit log are one write; the log gets them afterwards.

The file has a header with a digest, then one line of JSON for each entry:

    {"format":"dispfl members","version":2,"digest":"..."}       SHA-256 of all following lines
    {"own":{...}}                                                this site's record
    {"member":{"name":"bob","state":"accepted",...}}
    {"roster":{...},"forks":[]}
    {"unlogged":["..."]}                                         the last change's log entries

The digest detects damage. It does not protect against people who can write the file: they are the
site's operators. So records in it, which were verified when they were received, are not verified
again. An entry that is the same line as before is not parsed again: after a change, reading a list
of a thousand members takes milliseconds.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dispfl.core.names import check_name
from dispfl.errors import DispflError, MessageError, RunError
from dispfl.files import (
    is_disk_full,
    open_or_create,
    plain_disk_errors,
    read_regular,
    write_atomically,
)
from dispfl.peer.membership.address import (
    Address,
    RelayAddress,
    parse_outbox,
    parse_relays,
    relays_text,
)
from dispfl.peer.membership.audit_log import (
    Change,
    append_audit,
    audit_lines,
    changes,
    limited,
    missing_in_audit,
    read_audit,
)
from dispfl.peer.membership.identity import common_name, der, read_certificate
from dispfl.peer.membership.member_list import Edit, Fork, Member, MemberList
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.reserve import Reserve
from dispfl.peer.membership.roster import Roster

SAVE_INTERVAL = 1.0
"""Seconds between two writes of what other members announce."""


class ListFile:
    """A file with a `MemberList`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.parent
        self.lock = threading.RLock()
        """Guards this object, for moments."""
        self._writing = threading.Lock()
        """Held while the file is written; always acquired first."""
        self.problems: list[str] = []
        """A sentence for each entry of the file that cannot be used."""
        self.generation = 0
        """Increases whenever the list changes, in this process or another."""
        self.decisions = 0
        """Increases whenever anything but an announcement of a member changes the list."""
        self._stamp: tuple[int, ...] = ()
        self._list = self._saved = MemberList()
        """The list, and as it is in the file."""
        self._reserve = Reserve(path)
        self._unsaved: dict[str, Edit] = {}
        """What members have announced since the file was written, by what it is about: of that only
        the newest."""
        self._saved_at = -SAVE_INTERVAL
        self._address_changes: Counter[str] = Counter()
        self.current()

    @staticmethod
    def create(path: Path) -> None:
        """Create a file with an empty list."""
        content = to_bytes(MemberList())
        write_atomically(path, content)
        Reserve(path).keep(len(content))

    def current(self) -> MemberList:
        """Return the current list; the file is read only if it has changed."""
        with self.lock:
            try:
                stamp = self._stamp_now()
                if stamp != self._stamp:
                    self._reload(read_regular(self.path), stamp)
            except OSError as problem:
                advice = "Nothing was changed; remove the cause and start again."
                if isinstance(problem, FileNotFoundError):
                    advice = "Restore it from a backup."
                raise RunError(
                    f"{self.path} cannot be read: {problem.strerror}. {advice}"
                ) from None
            return self._list

    def latest(self) -> MemberList:
        """Return the current list; the last one read if the file cannot be read at the moment."""
        with contextlib.suppress(RunError):
            return self.current()
        return self._list

    def apply(self, edit: Edit, about: str) -> bool:
        """Apply what a member has announced, to be saved later; return whether it changes anything.

        It replaces what was announced `about` the same and could not be saved yet: the disk may be
        full for long.
        """
        with self.lock:
            before = self.current()
            after = edit(before)
            if after is not before:
                self._unsaved.pop(about, None)
                self._unsaved[about] = edit  # the last one
                self._set(after)
            return after is not before

    def update(self, edit: Edit, by: str, notes: Sequence[Change] = ()) -> MemberList:
        """Apply a change to the current list, excluding other processes, and note it in the audit
        log, with `notes` about changes of other files.

        Lookups continue while the file is written.
        """
        with self._writing, file_lock(self.path.with_name(f".{self.path.name}.lock")):
            with self.lock:
                announced = self.current()
                saved = self._saved
                after = edit(announced)
            if after is saved and not notes:
                return after

            is_decision = after is not announced or bool(notes)
            counted = self._address_changes.copy()
            by_members = limited(changes(saved, announced), counted)
            decided = limited([*changes(announced, after), *notes], counted)
            lines = (
                *missing_in_audit(self._folder, saved.unlogged),
                *audit_lines(by_members),
                *audit_lines(decided, by),
            )
            after = replace(after, unlogged=lines)
            self._write(to_bytes(after), is_decision=is_decision)
            with contextlib.suppress(RunError):  # a full disk: the next change appends them
                append_audit(self._folder, lines)
            with self.lock:
                self._saved = after
                self._address_changes = counted
                self._saved_at = time.monotonic()
                self._stamp = self._stamp_now()
                self.decisions += is_decision
                self._set(self._with_unsaved())  # what was announced meanwhile is still to be saved
                return self._list

    def _write(self, content: bytes, *, is_decision: bool) -> None:
        """Replace the file; for a decision on a full disk, in the space that is reserved."""
        try:
            write_atomically(self.path, content)
        except RunError as problem:
            can_reserve_be_used = is_disk_full(problem) and self._reserve.holds(len(content))
            if not is_decision or not can_reserve_be_used:
                raise
            self._reserve.replace(content)
        self._reserve.keep(len(content))

    def audit_log(self) -> list[dict[str, Any]]:
        """Return the entries of the audit log, oldest first."""
        unlogged = self.current().unlogged
        return read_audit(self._folder, missing_in_audit(self._folder, unlogged))

    def save(self, *, if_due: bool = False) -> None:
        """Write what members have announced; if `if_due`, at most every `SAVE_INTERVAL` seconds."""
        if self._unsaved and (not if_due or time.monotonic() - self._saved_at >= SAVE_INTERVAL):
            self.update(lambda member_list: member_list, "")

    def _reload(self, content: bytes, stamp: tuple[int, ...]) -> None:
        try:
            self._saved, self.problems = from_bytes(content, self._saved)
        except RunError as problem:
            raise RunError(f"{self.path} cannot be used: {problem}.") from None
        except ValueError as problem:
            copy = self._keep_damaged(content)
            raise RunError(
                f"{self.path} is damaged ({problem}). Restore it from a backup; a copy of it is"
                f" kept as {copy.name}."
            ) from None
        self._stamp = stamp
        self.decisions += 1
        self._set(self._with_unsaved())

    def _with_unsaved(self) -> MemberList:
        """The list in the file with what members have announced since, as far as it still
        applies."""
        member_list = self._saved
        edits = self._unsaved
        self._unsaved = {}
        for about, edit in edits.items():
            with contextlib.suppress(MessageError):
                after = edit(member_list)
                if after is not member_list:
                    self._unsaved[about] = edit
                    member_list = after
        return member_list

    def _set(self, member_list: MemberList) -> None:
        self._list = member_list
        self.generation += 1

    def _stamp_now(self) -> tuple[int, ...]:
        """Return what identifies a version of the file."""
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _keep_damaged(self, content: bytes) -> Path:
        """Keep a copy of damaged content, beside earlier ones."""
        copy = self.path.with_name(f"{self.path.name}.damaged")
        number = 1
        while copy.exists():
            if copy.read_bytes() == content:
                return copy
            number += 1
            copy = self.path.with_name(f"{self.path.name}.{number}.damaged")
        write_atomically(copy, content)
        return copy


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock across processes; it ends with the process, however that ends."""
    with plain_disk_errors(path):
        file = open_or_create(path, mode=0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


VERSION = 2
_FORMAT = "dispfl members"
_UNREADABLE = (DispflError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What parsing a line of a damaged or newer file may raise."""


def to_bytes(members: MemberList) -> bytes:
    """Serialize a list."""
    lines = []
    if members.own:
        lines.append(_line({"own": members.own.to_json()}))
    for _, member in sorted(members.members.items()):
        lines.append(member_line(member))
    if members.roster:
        lines.append(_roster_line(members.roster, members.forks))
    lines += members.unreadable
    if members.unlogged:
        lines.append(_line({"unlogged": members.unlogged}))
    body = b"".join(line + b"\n" for line in lines)
    header = {"format": _FORMAT, "version": VERSION, "digest": hashlib.sha256(body).hexdigest()}
    return _line(header) + b"\n" + body


def from_bytes(content: bytes, before: MemberList | None = None) -> tuple[MemberList, list[str]]:
    """Parse a file; return the list, and a sentence for each entry that cannot be used any more.

    Entries that are in the list `before` are taken from it. Damage raises ValueError, another
    version `RunError`.
    """
    reader = _Reader(before or MemberList())
    for line in _check_header(content).splitlines():
        reader.read(line)
    return reader.member_list(), reader.problems


class _Reader:
    """Reads the lines of a members file; those of the list `before` are not parsed again."""

    def __init__(self, before: MemberList) -> None:
        self._before = before
        self._members_before = {member_line(member): member for member in before.members.values()}
        self._roster_before = b""
        if before.roster:
            self._roster_before = _roster_line(before.roster, before.forks)
        self._own: MemberRecord | None = None
        self._members: dict[str, Member] = {}
        self._roster: Roster | None = None
        self._forks: tuple[Fork, ...] = ()
        self._unreadable: list[bytes] = []
        self._unlogged: tuple[str, ...] = ()
        self.problems: list[str] = []

    def read(self, line: bytes) -> None:
        """Read a line; keep one that cannot be read."""
        member = self._members_before.get(line)
        if member is not None:
            self._members[member.name] = member
            return
        if line == self._roster_before:
            self._roster = self._before.roster
            self._forks = self._before.forks
            return
        try:
            self._parse(line)
        except _UNREADABLE as problem:
            self._unreadable.append(line)
            beginning = line[:60].decode(errors="replace")
            self.problems.append(f"An entry cannot be read ({_short(problem)}): {beginning!r}...")

    def _parse(self, line: bytes) -> None:
        entry = json.loads(line)
        if "member" in entry:
            member = _member(entry["member"], self.problems)
            member.__dict__["line"] = line
            self._members[member.name] = member
        elif "unlogged" in entry:
            self._unlogged = tuple(map(str, entry["unlogged"]))
        elif "roster" in entry:
            self._roster = Roster.from_json(entry["roster"])
            self._forks = tuple(Fork(int(version), str(fork)) for version, fork in entry["forks"])
        else:
            self._own = MemberRecord.parse(entry["own"])

    def member_list(self) -> MemberList:
        """The list of all lines that were read."""
        unreadable = tuple(self._unreadable)
        return MemberList(
            self._own, self._members, self._roster, self._forks, unreadable, self._unlogged
        )


def member_line(member: Member) -> bytes:
    """The line of a member, which is computed once."""
    line: bytes | None = member.__dict__.get("line")
    if line is None:
        line = member.__dict__["line"] = _line({"member": _entry(member)})
    return line


def _roster_line(roster: Roster, forks: tuple[Fork, ...]) -> bytes:
    refused = [[fork.version, fork.digest] for fork in forks]
    return f'{{"roster":{roster.text},"forks":{json.dumps(refused)}}}'.encode()


def _check_header(content: bytes) -> bytes:
    """Return the lines after the header."""
    first, _, body = content.partition(b"\n")
    try:
        header = json.loads(first)
        is_ours = header["format"] == _FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        if content.startswith(b'{\n "version": 1,'):
            raise RunError(
                "it was written by an older dispfl, in format 1; accept the members again in a new"
                " site"
            )
        raise ValueError("it does not begin with the header of a members file")
    if header.get("version") != VERSION:
        raise RunError(
            f"it has format {str(header.get('version'))[:20]}, and this dispfl reads format"
            f" {VERSION}; install the dispfl that wrote it"
        )
    if header.get("digest") != hashlib.sha256(body).hexdigest():
        raise ValueError("its digest does not match")
    return body


def _entry(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "state": member.state,
        "by": member.by,
        "address": str(member.address) if member.address else None,
        "relays": relays_text(member.relays),
        "outbox": member.outbox,
        "certificate": base64.b64encode(der(member.certificate)).decode(),
        "retired": list(member.retired),
        "rotated": member.rotated,
        "replaces": member.replaces,
        "record": member.record.to_json() if member.record else None,
    }


def _member(entry: Mapping[str, Any], problems: list[str]) -> Member:
    """Parse an entry; keep it without an address or record that cannot be used any more.

    A revocation must not be lost with an address.
    """
    certificate = read_certificate(base64.b64decode(entry["certificate"], validate=True))
    name = check_name("A member's name", entry["name"])
    state = entry["state"]
    by = entry["by"]
    if state not in ("pending", "accepted", "revoked") or by not in ("hand", "roster"):
        raise ValueError(f"the entry of {name} is inconsistent")
    if common_name(certificate) != name:
        raise ValueError(f"the entry of {name} has the certificate of {common_name(certificate)}")
    address = record = outbox = None
    relays: tuple[RelayAddress, ...] = ()
    try:
        relays = parse_relays(str(entry.get("relays", "")))
        outbox = parse_outbox(str(entry["outbox"])) if entry.get("outbox") else None
        address = Address.parse(entry["address"]) if entry["address"] else None
    except DispflError as problem:
        problems.append(f"The address of {name} is not used: {_short(problem)}")
    try:
        record = MemberRecord.parse(entry["record"]) if entry["record"] else None
    except DispflError as problem:
        problems.append(f"The record of {name} is not used: {_short(problem)}")
    return Member(
        name,
        address,
        certificate,
        state,
        record,
        by,
        retired=tuple(map(str, entry["retired"])),
        rotated=float(entry["rotated"]),
        replaces=str(entry["replaces"]),
        relays=relays,
        outbox=outbox,
    )


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _short(problem: Exception) -> str:
    text = str(problem) or type(problem).__name__
    if len(text) > 200:
        text = text[:200] + "..."
    return text
