"""Costs of a member: bytes of its record, and microseconds to verify it and to read it.

Federations of 100 and of 1,000 members. The ratios compare a member of the large federation with
one of the small, where costs that grow with the number of members would show, and reading the list
after one change with reading it.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
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
from dispfl.peer.transport.base import JSON
from measure import best_times, report

FEDERATION = "hearts"
ADDRESS = Address("alice.example.org", 7600)
MEMBERS = 1000
LIMIT = 2.0
READ_AGAIN_LIMIT = 0.2


def fresh(work: Callable[[], object]) -> Callable[[], object]:
    """Return the work as a new process does it: no certificate was parsed before."""

    def run() -> object:
        read_certificate.cache_clear()
        return work()

    return run


def signed_roster(identities: Sequence[Identity]) -> Roster:
    """Return a roster of all members, signed by an administrator."""
    admin = Ed25519PrivateKey.generate()
    empty = Roster(FEDERATION, 1, 1, {"ann": admin.public_key().public_bytes_raw()})
    invites = []
    for identity in identities:
        invites.append(Invite(FEDERATION, identity.name, ADDRESS, identity.certificate))
    return empty.with_members(invites).signed_by(admin)


def merge(members: MemberList, records: JSON) -> object:
    """Merge the records into a file that has the members without their records."""
    without_records = {}
    for member in members.members.values():
        without_records[member.name] = replace(member, record=None)
    with tempfile.TemporaryDirectory() as folder:
        file = MembersFile.create(Path(folder) / "members.json", "observer", FEDERATION)
        file.path.write_bytes(to_bytes(MemberList(members=without_records)))
        return file.merge(records)


def measure(identities: Sequence[Identity]) -> dict[str, float]:
    """Return microseconds and bytes per member, and bytes per message."""
    count = len(identities)
    first = identities[0]
    certificates = [identity.certificate for identity in identities]
    signed = [
        MemberRecord.sign(identity, FEDERATION, ADDRESS, 0.5, 0, 1) for identity in identities
    ]
    members = {}
    for identity, record in zip(identities, signed, strict=True):
        members[identity.name] = Member(identity.name, ADDRESS, identity.certificate, record=record)
    member_list = MemberList(signed[0], members)
    revoked = replace(members[first.name], state="revoked")

    records: list[JSON] = [record.to_json() for record in signed]
    content = to_bytes(member_list)
    changed_content = to_bytes(member_list.with_member(revoked))
    offer = Offer(records)
    page = offer.answer(SyncMessage.read(Offer([]).request_after("")))
    roster = signed_roster(identities)

    def verify_records() -> object:
        return [MemberRecord.read(record) for record in records]

    def apply_roster() -> object:
        received = Roster.read(roster.text)
        received.verify()
        return MemberList().with_roster(received, first.name)

    works = {
        "verify": fresh(verify_records),
        "merge": fresh(lambda: merge(member_list, records)),
        "load": fresh(lambda: from_bytes(content)),
        "load_again": lambda: from_bytes(changed_content, member_list),
        "write": lambda: to_bytes(member_list),
        "roster": fresh(apply_roster),
        "offer": lambda: Offer([*records[1:], records[0]], before=offer),
        "tls_context": lambda: server_context(first, certificates),
    }
    times = best_times(*works.values(), repeats=3, clock=time.process_time, warm_up=False)
    costs = {name: 1e6 * seconds / count for name, seconds in zip(works, times, strict=True)}

    record_bytes = sum(len(json.dumps(record, separators=(",", ":"))) for record in records)
    return costs | {
        "record_bytes": record_bytes / count,
        "file_bytes": len(content) / count,
        "roster_bytes": len(roster.text) / count,
        "greeting_message_bytes": float(len(offer.greeting())),
        "page_message_bytes": float(len(page)),
    }


def main() -> None:
    """Both sizes, and the ratios."""
    identities = [Identity.make(f"site-{k:04d}") for k in range(MEMBERS)]
    small = measure(identities[: MEMBERS // 10])
    large = measure(identities)
    for name, cost in large.items():
        report(
            "membership",
            cost / small[name],
            None if name == "page_message_bytes" else LIMIT,
            what=name if name.endswith("bytes") else f"{name}, microseconds per member",
            of_100=round(small[name], 1),
            of_1000=round(cost, 1),
        )
    report(
        "membership",
        large["load_again"] / large["load"],
        READ_AGAIN_LIMIT,
        what="reading the list again after one change",
    )


if __name__ == "__main__":
    main()
