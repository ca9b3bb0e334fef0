"""The audit log of a site: changes of members, keys, addresses and rosters, and who made them.

One JSON object per line in the site's folder. Lines are only appended. An entry is first written
into the members file, together with the change itself, and then appended to the log: the log has
what happened and nothing else, whenever a disk is full or a process is killed.
"""

import datetime
import getpass
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dispfl.errors import RunError
from dispfl.files import append_durably, open_regular, read_regular
from dispfl.peer.membership.address import reach_text
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.roster import Roster

AUDIT = "audit.jsonl"
MAX_ADDRESS_CHANGES = 20
"""Changes of one member's address that a process logs; a member may announce any number."""
RECENT_BYTES = 100_000
"""The end of the log in which entries are looked for."""


@dataclass(frozen=True)
class Change:
    """A change of the member list."""

    event: str
    member: str
    """The member's name; empty for a change of the roster."""
    fingerprint: str
    detail: Mapping[str, str | int] = field(default_factory=dict)


def changes(before: MemberList, after: MemberList) -> Iterator[Change]:
    """The changes between two lists."""
    if before is after:
        return
    for name, member in after.members.items():
        member_before = before.members.get(name)
        if member_before is not member:
            yield from _member_changes(member_before, member)
    if after.roster is not None:
        yield from _roster_changes(before, after, after.roster)


def _roster_changes(before: MemberList, after: MemberList, roster: Roster) -> Iterator[Change]:
    detail: dict[str, str | int] = {"version": roster.version}
    if before.roster is None or roster.digest != before.roster.digest:
        signers = ",".join(sorted(roster.signatures))
        yield Change("roster", "", roster.fingerprint, {**detail, "signed_by": signers})
    for fork in after.forks:
        if fork not in before.forks:
            detail = {"version": fork.version, "other": fork.digest[:16]}
            yield Change("roster fork", "", roster.fingerprint, detail)


def _member_changes(before: Member | None, after: Member) -> Iterator[Change]:
    address = {"address": _place(after)}
    if before is None:
        yield Change(after.state, after.name, after.fingerprint, address)
        return
    if after.state != before.state:
        is_confirmed = before.state == "pending" and after.state == "accepted"
        event = "confirmed" if is_confirmed else after.state
        yield Change(event, after.name, after.fingerprint)
    elif after.fingerprint != before.fingerprint:
        yield Change("rotated", after.name, after.fingerprint, {"before": before.fingerprint})
    if _place(after) != _place(before):
        addresses = {**address, "before": _place(before)}
        yield Change("address changed", after.name, after.fingerprint, addresses)


def _place(member: Member) -> str:
    return reach_text(member.address, member.relays, member.outbox) or "None"


def limited(changes: Iterable[Change], address_changes: Counter[str]) -> Iterator[Change]:
    """Yield the changes, without those of addresses that changed too often.

    `address_changes` counts them by member, and is kept by the caller.
    """
    for change in changes:
        if change.event == "address changed":
            address_changes[change.member] += 1
            count = address_changes[change.member]
            if count > MAX_ADDRESS_CHANGES:
                continue
            if count == MAX_ADDRESS_CHANGES:
                note = {"note": "further changes are not logged"}
                change = replace(change, detail={**change.detail, **note})
        yield change


def audit_lines(changes: Iterable[Change], by: str | None = None) -> tuple[str, ...]:
    """The entries of changes; `by` is who made them, by default the member itself."""
    timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = []
    for change in changes:
        entry = {
            "time": timestamp,
            "event": change.event,
            "member": change.member,
            "fingerprint": change.fingerprint,
            "by": by or change.member,
            **change.detail,
        }
        lines.append(json.dumps(entry))
    return tuple(lines)


def append_audit(folder: Path, lines: Sequence[str]) -> None:
    """Append entries to a site's audit log."""
    if lines:
        append_durably(folder / AUDIT, _block(lines))


def missing_in_audit(folder: Path, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries, which were appended together, or nothing if the log has them."""
    block = _block(lines)
    try:
        with open_regular(folder / AUDIT) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(block) - RECENT_BYTES))
            is_logged = block in file.read()
    except OSError:
        is_logged = False
    return () if is_logged else lines


def _block(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def read_audit(folder: Path, unlogged: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the entries of a site's audit log, oldest first, and those that it still lacks."""
    lines: list[bytes] = []
    try:
        lines += read_regular(folder / AUDIT).splitlines()
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise RunError(f"{folder / AUDIT} cannot be read: {problem.strerror}.") from None
    lines += [entry.encode() for entry in unlogged]
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            entry = {"event": "damaged line", "line": line.decode("latin-1")}
        entries.append(entry)
    return entries


def operator() -> str:
    """The user who runs this process."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name
        return f"user {os.getuid()}"
