"""The body of a greeting: which members' signed records its sender has, and those among them that the other lacks.

    {"knows": ["0f3a...", ...], "records": [...]}

Most greetings bring no news, so records are named by a digest of their signature (8 bytes), and travel once. The first
question has no records; the answer has those that the asker does not name, and if the asker has more than the answer
names, it greets again and brings them. Whoever loses its list, or comes with an old one, is told anew.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dispfl.errors import MessageError
from dispfl.peer.door import Reason
from dispfl.peer.transport import JSON

LIMIT = 4_000_000
"""Bytes of a greeting's body: about 3,000 members."""


@dataclass(frozen=True)
class News:
    """What a greeting says of members."""

    knows: frozenset[str]
    """The digests of all records that its sender has."""
    records: list[JSON]
    """Those that it brings; nothing in them is verified yet."""

    @classmethod
    def read(cls, body: bytes) -> "News":
        """The news in a body that came from outside; nothing in it is believed but its form."""
        if not body:
            return cls(frozenset(), [])
        try:
            found = json.loads(body)
            knows, records = found["knows"], found["records"]
            if not isinstance(knows, list) or not isinstance(records, list):
                raise TypeError("it needs two lists")
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise MessageError(Reason.MALFORMED, f"A greeting's body cannot be read ({problem}).") from None
        return cls(frozenset(name for name in knows if isinstance(name, str)), records)

    def lacks(self, records: Iterable[JSON]) -> list[JSON]:
        """Those of our records that its sender does not have."""
        return [record for record in records if digest_of_record(record) not in self.knows]


def body_of(records: Collection[JSON], brought: Collection[JSON]) -> bytes:
    """The body of a greeting by somebody who has `records` and brings some of them."""
    said = {"knows": [digest_of_record(record) for record in records], "records": list(brought)}
    return json.dumps(said, separators=(",", ":")).encode()


def digest_of_record(record: JSON) -> str:
    """A short name for what a record says; another word of the same member has another one."""
    signature = record.get("signature") if isinstance(record, dict) else None
    return hashlib.blake2b(str(signature).encode(), digest_size=8).hexdigest()
