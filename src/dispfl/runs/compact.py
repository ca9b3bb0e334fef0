"""Lists with a number for each of many peers, as one short text in a line of the metrics.

    "f8 eJz7wQAC..."

is the base64 text of the zlib-compressed numbers, 8 bytes each in little-endian IEEE 754, nan where
a peer has none. The numbers are exactly those of the list, in a third of its space or less.
"""

import base64
import binascii
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dispfl.core.names import MAX_PEERS

MAX_LISTED = 1000
"""Peers up to which their numbers are a list."""
PREFIX = "f8 "


def compact(record: Any) -> Any:
    """Return a line of the metrics with long lists of the peers' numbers as texts."""
    return _converted(record, _encoded)


def expanded(record: Any) -> Any:
    """Return a line of the metrics with lists; a text that is none of these stays as it is."""
    return _converted(record, _decoded)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    converted = {}
    for key, entry in value.items():
        is_numbers = key == "per_peer" and not isinstance(entry, dict)
        converted[key] = convert(entry) if is_numbers else _converted(entry, convert)
    return converted


def _encoded(numbers: Any) -> Any:
    if not isinstance(numbers, list) or len(numbers) <= MAX_LISTED:
        return numbers
    content = np.array(numbers, dtype="<f8").tobytes()  # None becomes nan
    return PREFIX + base64.b64encode(zlib.compress(content)).decode()


def _decoded(text: Any) -> Any:
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return text
    try:
        compressed = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        content = zlib.decompressobj().decompress(compressed, 8 * MAX_PEERS)
        numbers = np.frombuffer(content, "<f8").astype(object)
    except (binascii.Error, ValueError, zlib.error):
        return text
    numbers[numbers != numbers] = None
    return numbers.tolist()
