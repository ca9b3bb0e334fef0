"""The audit log of a site: who was accepted, confirmed or revoked, which keys and addresses
changed, and by whom.

One JSON object per line in the site's folder. Lines are only ever appended, before the change takes
effect.
"""

import datetime
import getpass
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispfl.errors import RunError
from dispfl.files import append_durably
from dispfl.peer.membership.member_list import Member, MemberList

AUDIT = "audit.jsonl"
MAX_ADDRESS_CHANGES = 20
"""Changes of one member's address that a process logs: a member may announce as many as it
likes."""


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
        old = before.members.get(name)
        if old is not member:
            yield from _member_changes(old, member)
    roster, old_roster = after.roster, before.roster
    if roster is not None and (old_roster is None or roster.digest != old_roster.digest):
        who = ",".join(sorted(roster.signatures))
        yield Change(
            "roster", "", roster.fingerprint, {"version": roster.version, "signed_by": who}
        )
    for digest in after.forks:
        if digest not in before.forks and roster is not None:
            yield Change(
                "roster fork",
                "",
                roster.fingerprint,
                {"version": roster.version, "other": digest[:16]},
            )


def _member_changes(old: Member | None, new: Member) -> Iterator[Change]:
    address = {"address": str(new.address)}
    if old is None:
        yield Change(new.state, new.name, new.fingerprint, address)
        return
    if new.state != old.state:
        event = "confirmed" if (old.state, new.state) == ("pending", "accepted") else new.state
        yield Change(event, new.name, new.fingerprint)
    elif new.fingerprint != old.fingerprint:
        yield Change("rotated", new.name, new.fingerprint, {"before": old.fingerprint})
    if new.address != old.address:
        yield Change(
            "address changed", new.name, new.fingerprint, address | {"before": str(old.address)}
        )


def limited(found: Iterable[Change], counted: Counter[str]) -> Iterator[Change]:
    """The changes, without further changes of addresses that changed too often; `counted` is kept
    by the caller."""
    for change in found:
        if change.event == "address changed":
            counted[change.member] += 1
            if counted[change.member] > MAX_ADDRESS_CHANGES:
                continue
            if counted[change.member] == MAX_ADDRESS_CHANGES:
                last = {**change.detail, "note": "further changes are not logged"}
                change = Change(change.event, change.member, change.fingerprint, last)
        yield change


def append_changes(folder: Path, found: Iterable[Change], by: str | None = None) -> None:
    """Append changes to a site's audit log; `by` is who made them, by default the member itself."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [
        json.dumps(
            {
                "time": now,
                "event": change.event,
                "member": change.member,
                "fingerprint": change.fingerprint,
                "by": by or change.member,
                **change.detail,
            }
        )
        for change in found
    ]
    if lines:
        append_durably(folder / AUDIT, "".join(line + "\n" for line in lines).encode())


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a site's audit log, oldest first."""
    try:
        lines = (folder / AUDIT).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise RunError(f"{folder / AUDIT} cannot be read: {problem.strerror}.") from None
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        entries.append(
            entry
            if isinstance(entry, dict)
            else {"event": "damaged line", "line": line.decode("latin-1")}
        )
    return entries


def operator() -> str:
    """The user who runs this process."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name
        return f"user {os.getuid()}"
