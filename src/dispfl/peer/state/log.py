"""The log of a node: one line per event, as text or as JSON, including Python's own `logging`."""

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TextIO

from dispfl.wire.refusals import Refusal

_UNPLAIN = re.compile(r'[\s"=]')
"""Characters that would make the end of a value ambiguous, or let another peer forge a line."""
MAX_CHARS = 300
"""Characters of another site's text that are logged or shown."""
LOG_WINDOW = 3600.0
RECENT_LINES = 40
"""Lines of the log that the status file has."""
MAX_LINES = 100
"""Lines about one peer that are logged within `LOG_WINDOW` seconds."""
_REASONS = frozenset(Refusal)

EventLog = Callable[[str, Mapping[str, object]], None]
"""Writes an event and its fields."""


def event_logger(name: str, as_json: bool = False, to: TextIO | None = None) -> EventLog:
    """Return a function that writes events to a file, by default to stderr.

    A line that cannot be written, to a full disk or to a closed pipe, is dropped.
    """

    def log(event: str, fields: Mapping[str, object]) -> None:
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if as_json:
            entry = {"time": timestamp, "site": name, "event": event, **fields}
            line = json.dumps(finite(entry), default=str)
        else:
            time_of_day = timestamp[11:19]
            line = f"{time_of_day}  {name}  {event:<12} {_fields_as_text(fields)}".rstrip()
        with contextlib.suppress(OSError):
            print(line, file=to or sys.stderr, flush=True)

    return log


class RecentEvents:
    """Writes events to a log, and keeps the last ones for the status file."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._lines: deque[str] = deque(maxlen=RECENT_LINES)

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        """Write an event."""
        self._log(event, fields)
        time_of_day = time.strftime("%H:%M:%S")
        line = f"{time_of_day}  {event:<12} {_fields_as_text(fields)}".rstrip()
        self._lines.append(shortened(line))

    @property
    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._lines)


@dataclass
class _LineCount:
    """The lines about one peer since the start of its current hour."""

    start: float
    logged: int = 0
    omitted: int = 0


class PeerLog:
    """Events about other peers, bounded so that no peer can fill the disk with them."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._problems: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
        """By peer: events and reasons of the problems since its last response."""
        self._lines: dict[str, _LineCount] = {}

    def event(self, peer: str, event: str, **fields: object) -> None:
        """Log an event; beyond `MAX_LINES` an hour, only count it."""
        now = asyncio.get_running_loop().time()
        lines = self._lines.setdefault(peer, _LineCount(now))
        if now - lines.start >= LOG_WINDOW:
            lines.start = now
            lines.logged = 0
        if lines.logged >= MAX_LINES:
            lines.omitted += 1
            return

        shown: dict[str, object] = {"peer": peer}
        for key, value in fields.items():
            shown[key] = shortened(value) if isinstance(value, str) else value
        shown["omitted"] = lines.omitted or None
        self._log(event, shown)
        lines.logged += 1
        lines.omitted = 0

    def problem(self, peer: str, event: str, detail: str, reason: str | None = None) -> None:
        """Log a problem once, until the peer responds. A peer may send any text as a reason."""
        if reason is not None and reason not in _REASONS:
            reason = "unknown"
        problems = self._problems[peer]
        is_repeated = (event, reason) in problems
        if reason == Refusal.BANNED:  # follows from earlier refusals
            is_repeated |= any(earlier in ("refused", "spec mismatch") for earlier, _ in problems)
        problems.add((event, reason))
        if not is_repeated:
            self.event(peer, event, reason=reason, detail=detail)

    def responded(self, peer: str) -> None:
        """Log that a peer with problems has responded, and log its next problems again."""
        problems = self._problems.pop(peer, None)
        if problems:
            is_first_contact = all(event == "waiting" for event, _ in problems)
            self.event(peer, "connected" if is_first_contact else "reconnected")


def shortened(text: str, chars: int = MAX_CHARS) -> str:
    """Return another site's text as one short line, without control characters."""
    printable = "".join(char if char.isprintable() else " " for char in text[:chars])
    if len(text) <= chars:
        return printable
    return f"{printable}... ({len(text)} characters)"


def finite(value: Any) -> Any:
    """Return a value for JSON, with null for nan and infinite numbers."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


class _EventHandler(logging.Handler):
    """Writes records of `logging` as events, one line each, with the exception's last line."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        fields: dict[str, object] = {"logger": record.name, "detail": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        self._log(record.levelname.lower(), fields)


@contextlib.contextmanager
def logging_as_events(log: EventLog) -> Iterator[None]:
    """Write warnings and errors of `logging` and `warnings` as events while a node runs."""
    handler = _EventHandler(log)
    root_logger = logging.getLogger()
    root_logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root_logger.removeHandler(handler)


def _fields_as_text(fields: Mapping[str, object]) -> str:
    """`round=3  missed=bob,carol`, without empty fields."""
    texts = []
    for key, value in fields.items():
        if value not in (None, [], ""):
            texts.append(f"{key}={_value_as_text(value)}")
    return "  ".join(texts)


def _value_as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    text = str(value)
    if text.isprintable() and not _UNPLAIN.search(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in quoted)
