"""The format of the members file: a header with a digest, then one line of JSON for each entry.

    {"format":"dispfl members","version":2,"digest":"..."}       SHA-256 of all following lines
    {"own":{...}}                                                this site's record
    {"member":{"name":"bob","state":"accepted",...}}
    {"roster":{...},"forks":[]}

The digest detects damage. It does not protect against people who can write the file: they are the
site's operators. So records in it, which were verified when they were received, are not verified
again. An entry that is the same line as before is not parsed again: after a change, reading a list
of a thousand members takes milliseconds.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dispfl.errors import DispflError, RunError
from dispfl.peer.membership.address import Address, check_name
from dispfl.peer.membership.identity import common_name, der, read_certificate
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster

VERSION = 2
_FORMAT = "dispfl members"


def to_bytes(members: MemberList) -> bytes:
    """Serialize a list."""
    lines = [_line({"own": members.own.to_json()})] if members.own else []
    lines += [member_line(member) for _, member in sorted(members.members.items())]
    if members.roster:
        lines.append(_roster_line(members.roster, members.forks))
    body = b"".join(line + b"\n" for line in (*lines, *members.unreadable))
    header = {"format": _FORMAT, "version": VERSION, "digest": hashlib.sha256(body).hexdigest()}
    return _line(header) + b"\n" + body


def from_bytes(content: bytes, before: MemberList | None = None) -> tuple[MemberList, list[str]]:
    """Parse a file; return the list, and a sentence for each entry that cannot be used any more.

    Entries that are in the list `before` are taken from it. Damage raises ValueError, another
    version `RunError`.
    """
    body, before = _check_header(content), before or MemberList()
    known = {member_line(member): member for member in before.members.values()}
    same_roster = _roster_line(before.roster, before.forks) if before.roster else b""
    own, members, roster, unreadable, problems = None, {}, None, [], list[str]()
    forks: tuple[str, ...] = ()
    for line in body.splitlines():
        if (member := known.get(line)) is not None:
            members[member.name] = member
            continue
        if line == same_roster:
            roster, forks = before.roster, before.forks
            continue
        try:
            entry = json.loads(line)
            if "member" in entry:
                member = _member(entry["member"], problems)
                member.__dict__["line"] = line
                members[member.name] = member
            elif "roster" in entry:
                roster, forks = Roster.from_json(entry["roster"]), tuple(map(str, entry["forks"]))
            else:
                own = MemberRecord.parse(entry["own"])
        except (
            DispflError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as problem:
            unreadable.append(line)
            problems.append(
                f"An entry cannot be read ({_short(problem)}):"
                f" {line[:60].decode(errors='replace')!r}..."
            )
    return MemberList(own, members, roster, forks, tuple(unreadable)), problems


def member_line(member: Member) -> bytes:
    """The line of a member, which is computed once."""
    line: bytes | None = member.__dict__.get("line")
    if line is None:
        line = member.__dict__["line"] = _line({"member": _entry(member)})
    return line


def _roster_line(roster: Roster, forks: tuple[str, ...]) -> bytes:
    return f'{{"roster":{roster.text},"forks":{json.dumps(forks)}}}'.encode()


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
        "certificate": base64.b64encode(der(member.certificate)).decode(),
        "retired": list(member.retired),
        "rotated": member.rotated,
        "replaces": member.replaces,
        "record": member.record.to_json() if member.record else None,
    }


def _member(entry: Mapping[str, Any], problems: list[str]) -> Member:
    """Parse an entry. Without a usable address or record it is kept: a revocation must not be lost
    with an address."""
    certificate = read_certificate(base64.b64decode(entry["certificate"], validate=True))
    name, state, by = check_name("A member's name", entry["name"]), entry["state"], entry["by"]
    if state not in ("pending", "accepted", "revoked") or by not in ("hand", "roster"):
        raise ValueError(f"the entry of {name} is inconsistent")
    if common_name(certificate) != name:
        raise ValueError(f"the entry of {name} has the certificate of {common_name(certificate)}")
    address = record = None
    try:
        address = Address.parse(entry["address"]) if entry["address"] else None
    except DispflError as problem:
        problems.append(f"The address of {name} is not used: {_short(problem)}")
    try:
        record = MemberRecord.parse(entry["record"]) if entry["record"] else None
    except DispflError as problem:
        problems.append(f"The record of {name} is not used: {_short(problem)}")
    retired = tuple(map(str, entry["retired"]))
    rotated, replaces = float(entry["rotated"]), str(entry["replaces"])
    return Member(name, address, certificate, state, record, by, retired, rotated, replaces)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _short(problem: Exception) -> str:
    text = str(problem) or type(problem).__name__
    return text if len(text) <= 200 else text[:200] + "..."
