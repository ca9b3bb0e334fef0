"""The log of a peer: one readable line an event, or one JSON object for machines."""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

_UNPLAIN = re.compile(r'[\s"=\x00-\x1f]')
"""What would blur where a value ends, and what others could forge a line with."""
Tell = Callable[[str, Mapping[str, object]], None]


def teller(name: str, as_json: bool = False, to: TextIO | None = None) -> Tell:
    """A function that writes an event and its facts to stderr, or where it is told to."""

    def tell(event: str, facts: Mapping[str, object]) -> None:
        out = to or sys.stderr
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if as_json:
            print(json.dumps({"time": now, "site": name, "event": event, **facts}, default=str), file=out, flush=True)
        else:
            said = "  ".join(f"{key}={_plain(value)}" for key, value in facts.items() if value not in (None, [], ""))
            print(f"{now[11:19]}  {name}  {event:<12} {said}".rstrip(), file=out, flush=True)

    return tell


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _UNPLAIN.search(text) else text
