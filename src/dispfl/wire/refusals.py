"""Every reason to refuse a message, by name."""

from enum import StrEnum
from typing import NoReturn

from dispfl.errors import MessageError


class Refusal(StrEnum):
    """Why a message was refused. The value is how counters and logs call it."""

    TOO_SHORT = "too-short"
    """It ends before it says what it is."""
    NOT_OURS = "not-ours"
    """It does not begin like a message of ours."""
    VERSION = "version"
    """It is of another version of the format."""
    KIND = "kind"
    """It is another kind of message than was expected here."""
    FORMAT = "format"
    """Its values or its coding are not those that this federation agreed on."""
    CHECKSUM = "checksum"
    """Bytes were changed on the way."""
    LENGTH = "length"
    """A part of it is longer or shorter than the layout says."""
    PADDING = "padding"
    """The unused bits of a mask's last byte are not zero."""
    COUNT = "count"
    """It has more or fewer values than its mask keeps."""
    COMPRESSION = "compression"
    """A compressed block does not give what the layout says."""
    NOT_FINITE = "not-finite"
    """A value or a scale is not a number, or infinite."""


def refuse(refusal: Refusal, sentence: str) -> NoReturn:
    """Refuse a message."""
    raise MessageError(refusal, sentence)
