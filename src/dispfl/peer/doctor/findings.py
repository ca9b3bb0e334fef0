"""The results of checks, and how quantities are written in them."""

import datetime
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509

from dispfl.peer.membership.identity import is_current

SOON_DAYS = 90
"""A certificate that ends within so many days should be replaced."""


class Level(StrEnum):
    """How good or bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    topic: str
    """What was checked: `key`, `disk`, or a member's name."""
    level: Level
    text: str
    advice: str = ""
    """What to do about it."""


def ok(topic: str, text: str) -> Finding:
    """A check that found no problem."""
    return Finding(topic, Level.OK, text)


def warning(topic: str, text: str, advice: str = "") -> Finding:
    """A problem that may be normal, or become one."""
    return Finding(topic, Level.WARNING, text, advice)


def failure(topic: str, text: str, advice: str = "") -> Finding:
    """A problem that keeps the site from taking part."""
    return Finding(topic, Level.FAILURE, text, advice)


def check_certificate(topic: str, certificate: x509.Certificate, renew: str) -> Finding:
    """Check the dates of a certificate, a member's or our own."""
    begin = certificate.not_valid_before_utc
    end = certificate.not_valid_after_utc
    text = f"valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    if not is_current(certificate):
        advice = (
            f"Check the clock of this machine, which shows {now():%Y-%m-%d}; if it is right:"
            f" {renew}"
        )
        return failure(topic, f"{text}, not now", advice)
    if end - now() < datetime.timedelta(days=SOON_DAYS):
        return warning(topic, text, f"Before it ends: {renew}")
    return ok(topic, text)


def size(count: float) -> str:
    """`1.2 GB`, or `35 MB`."""
    for unit, length in (("GB", 1e9), ("MB", 1e6)):
        if count >= 100 * length:
            return f"{count / length:.0f} {unit}"
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """`3 min`, or `0.2 s`."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s"


def now() -> datetime.datetime:
    """This machine's time."""
    return datetime.datetime.now(datetime.UTC)
