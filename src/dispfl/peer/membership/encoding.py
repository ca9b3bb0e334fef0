"""How signed documents are written: canonical JSON, and bytes as base64."""

import base64
import binascii
import json

from dispfl.peer.transport.base import JSON


def canonical(content: JSON) -> str:
    """Return the one text of some JSON that signatures and digests cover."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def to_text(raw: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(raw).decode()


def from_text(text: JSON) -> bytes:
    """Return the bytes of a base64 text; raise ValueError if it is none."""
    if not isinstance(text, str):
        raise ValueError(f"{str(text)[:40]!r} is not base64.")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as problem:
        raise ValueError(f"{text[:40]!r} is not base64 ({problem}).") from None
    if to_text(raw) != text:  # the last letter may have bits that are not used
        raise ValueError(f"{text[:40]!r} is not base64 (another text for the same bytes).")
    return raw


def whole_number(name: str, value: JSON, least: int, most: int) -> int:
    """Return an integer in a range; raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(
            f"its {name} must be a whole number from {least} to {most}, got {str(value)[:40]!r}."
        )
    return value
