"""The small part of a message, as one line of JSON: what an HTTP header can carry, and the same in every transport."""

import json
import re
from collections.abc import Mapping
from typing import Any

from dispfl.peer.transport import JSON, Ask, Refused, Reply

VERSION = 1
"""Of the protocol between peers; it stands in the path and in the head of every message."""
LIMIT = 64 * 1024
"""Bytes of a head as JSON."""
_WHAT = re.compile(r"[a-z][a-z0-9-]{0,31}")


def pack(fields: Mapping[str, JSON]) -> str:
    """One line of ASCII; refused if it is too long, a ValueError or TypeError for what is not JSON."""
    line = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    if len(line) > LIMIT:
        sentence = f"A head has at most {LIMIT} bytes as JSON, this one {len(line)}; put the rest in the body."
        raise Refused("too-long", sentence)
    return line


def unpack(line: str) -> dict[str, Any]:
    """The fields of a line that came from outside; refused if it is not an object, or too long."""
    try:
        if len(line) > LIMIT:
            raise ValueError(f"it has {len(line)} bytes, at most {LIMIT} are allowed")
        fields = json.loads(line, parse_constant=_no_number)
        if not isinstance(fields, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as problem:
        raise Refused("malformed", f"The message's head cannot be read ({problem}).") from None
    return fields


def as_carried(message: Ask | Reply) -> dict[str, Any]:
    """The head as the other side will see it: a copy, which shares nothing."""
    return unpack(pack(message.head))


def check_what(what: str) -> None:
    """Refuse a question whose name is not a short lower-case word."""
    if not _WHAT.fullmatch(what):
        raise Refused("malformed", f"A question is named by a short lower-case word, not {what[:64]!r}.")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")
