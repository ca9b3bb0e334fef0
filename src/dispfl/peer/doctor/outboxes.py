"""Checks of a site's own outbox: an object is stored, read back and deleted."""

import secrets
from collections.abc import Iterator, Sequence

from dispfl.errors import DispflError
from dispfl.peer.doctor.findings import Finding, failure, ok, warning
from dispfl.peer.membership.member_list import Member
from dispfl.peer.outbox.sealing import require_sealing
from dispfl.peer.outbox.storage import StorageAccess, StorageError, open_storage

_TEST_BYTES = 1000


async def check_outbox(place: str, access: StorageAccess) -> Finding:
    """Store an object in the outbox, read it and delete it, as the node does."""
    name = secrets.token_hex(16)
    content = secrets.token_bytes(_TEST_BYTES)
    step = "nothing can be stored"
    try:
        require_sealing()
        storage = open_storage(place, access)
        await storage.write(name, content)
        step = "what was stored cannot be read"
        stored = await storage.read(name, _TEST_BYTES)
        if stored is None or stored.content != content:
            text = f"{place} returns other bytes than those that were stored"
            return failure("outbox", text, "Tell its owner, and use another place.")
        step = "what was stored cannot be deleted, so old models would stay"
        await storage.delete(name)
    except StorageError as problem:
        return failure("outbox", f"{place}: {step}: {problem}", problem.advice)
    except DispflError as problem:
        return failure("outbox", f"{place}: {problem}", "Install it, or omit outbox in site.toml.")
    return ok("outbox", f"{place} stores, returns and deletes what this site writes")


def check_readers(members: Sequence[Member]) -> Iterator[Finding]:
    """Say for whom the outbox cannot be encrypted yet."""
    for member in members:
        if member.record is None or member.record.sealing_key is None:
            text = f"{member.name} has announced no key yet, so it cannot read this site's outbox"
            advice = (
                f"Normal until {member.name} has run once and was reached; it needs cryptography 47"
                " or later."
            )
            yield warning("outbox", text, advice)
