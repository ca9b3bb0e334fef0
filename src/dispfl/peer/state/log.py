"""The log of a peer: one line per event, as text or as JSON. Messages of Python's `logging` become
events too."""

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, TextIO

_UNPLAIN = re.compile(r'[\s"=]')
"""Characters that would make the end of a value ambiguous, or let another peer forge a line."""
MAX_CHARS = 300
"""Characters of a text of another site that are logged or shown."""
EventLog = Callable[[str, Mapping[str, object]], None]


def event_logger(name: str, as_json: bool = False, to: TextIO | None = None) -> EventLog:
    """Return a function that writes an event and its fields to stderr, or to the given file.

    A line that cannot be written, to a full disk or to a pipe that nobody reads any more, is left
    out.
    """

    def log(event: str, fields: Mapping[str, object]) -> None:
        out = to or sys.stderr
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if as_json:
            line = json.dumps(
                finite({"time": now, "site": name, "event": event, **fields}), default=str
            )
        else:
            text = "  ".join(
                f"{key}={_plain(value)}"
                for key, value in fields.items()
                if value not in (None, [], "")
            )
            line = f"{now[11:19]}  {name}  {event:<12} {text}".rstrip()
        with contextlib.suppress(OSError):
            print(line, file=out, flush=True)

    return log


def shortened(text: str, chars: int = MAX_CHARS) -> str:
    """Return a text of another site as one short line, without characters that control a
    terminal."""
    short = "".join(each if each.isprintable() else " " for each in text[:chars])
    return short if len(text) <= chars else f"{short}... ({len(text)} characters)"


def finite(value: Any) -> Any:
    """Return a value for JSON, with null in the place of nan and infinite numbers, such as a score
    of no samples."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


class _EventHandler(logging.Handler):
    """Writes records of `logging` as events, each on one line, with the last line of an
    exception."""

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
    """Write warnings and errors of `logging` and of `warnings` as events while a node runs."""
    handler, root = _EventHandler(log), logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    text = str(value)
    if text.isprintable() and not _UNPLAIN.search(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in quoted)
