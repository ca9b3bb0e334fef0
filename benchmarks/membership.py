"""Costs of a member: bytes of its record in a sync, and microseconds to verify it, to read it and
to read it again.

Federations of 100 and of 1,000 members. The ratios compare a member of the large federation with
one of the small, where costs that grow with the number of members would show, and reading the list
after one change with reading it.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import Identity, read_certificate, server_context
from dispfl.peer.membership.invite import Invite
from dispfl.peer.membership.list_file import from_bytes, to_bytes
from dispfl.peer.membership.member_list import Member, MemberList
from dispfl.peer.membership.members import MembersFile
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.membership.roster import Roster
from dispfl.peer.membership.sync import Offer, SyncMessage
from measure import best_times, report

WHERE = Address("alice.example.org", 7600)
MOST = 1000


def fresh(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a new process does it: no certificate was parsed before."""

    def run() -> object:
        read_certificate.cache_clear()
        return work()

    return run


def measure(identities: list[Identity]) -> dict[str, float]:
    """Microseconds and bytes per member, and bytes per message."""
    count = len(identities)
    records = [MemberRecord.sign(each, "hearts", WHERE, 0.5, 0, 1) for each in identities]
    members = {
        each.name: Member(each.name, WHERE, each.certificate, record=record)
        for each, record in zip(identities, records, strict=True)
    }
    members_list = MemberList(records[0], members)
    content, found = to_bytes(members_list), [record.to_json() for record in records]
    first = identities[0].name
    changed = to_bytes(members_list.with_member(replace(members[first], state="revoked")))
    offer = Offer(found)
    page = offer.answer(SyncMessage.read(Offer([]).request_after("")))
    admin = Ed25519PrivateKey.generate()
    invites = [Invite("hearts", each.name, WHERE, each.certificate) for each in identities]
    empty = Roster("hearts", 1, 1, {"ann": admin.public_key().public_bytes_raw()})
    roster = empty.with_members(invites).signed_by(admin)

    def apply_roster() -> object:
        read = Roster.read(roster.text)
        read.verify()
        return MemberList().with_roster(read, first)

    def merge() -> object:
        with tempfile.TemporaryDirectory() as folder:
            file = MembersFile.create(Path(folder) / "members.json", "observer", "hearts")
            file.path.write_bytes(
                to_bytes(
                    MemberList(members={m.name: replace(m, record=None) for m in members.values()})
                )
            )
            return file.merge(found)

    certificates = [each.certificate for each in identities]
    works = {
        "verify": fresh(lambda: [MemberRecord.read(each) for each in found]),
        "merge": fresh(merge),
        "load": fresh(lambda: from_bytes(content)),
        "load_again": lambda: from_bytes(changed, members_list),
        "write": lambda: to_bytes(members_list),
        "roster": fresh(apply_roster),
        "offer": lambda: Offer([*found[1:], found[0]], before=offer),
        "tls_context": lambda: server_context(identities[0], certificates),
    }
    times = best_times(*works.values(), repeats=3, clock=time.process_time, warm_up=False)
    costs = {name: 1e6 * seconds / count for name, seconds in zip(works, times, strict=True)}
    return costs | {
        "record_bytes": sum(len(json.dumps(each, separators=(",", ":"))) for each in found) / count,
        "file_bytes": len(content) / count,
        "roster_bytes": len(roster.text) / count,
        "greeting_message_bytes": float(len(offer.greeting())),
        "page_message_bytes": float(len(page)),
    }


def main() -> None:
    """Both sizes, and the ratios."""
    identities = [Identity.make(f"site-{k:04d}") for k in range(MOST)]
    small, large = measure(identities[: MOST // 10]), measure(identities)
    for name, figure in large.items():
        is_message = name.endswith("message_bytes")
        limit = None if name == "page_message_bytes" else 2.0
        what = name if is_message or name.endswith("bytes") else f"{name}, microseconds per member"
        report(
            "membership",
            figure / small[name],
            limit,
            what=what,
            of_100=round(small[name], 1),
            of_1000=round(figure, 1),
        )
    report(
        "membership",
        large["load_again"] / large["load"],
        0.2,
        what="reading the list again after one change",
    )


if __name__ == "__main__":
    main()
