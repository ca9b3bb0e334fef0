"""The wording of messages is held in one file, tests/messages.json.

A test names the error and the setting that it is about.

`with refused(ConfigError, key="method.density"):` passes if the block raises that error about that
setting, with the message that the file has for this test. `make messages` writes the file anew: its
difference shows every changed sentence.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

FILE = Path(__file__).parent.parent / "messages.json"
REPOSITORY = FILE.parent.parent
PARTS = "DISPFL_MESSAGES"
"""Environment: the folder into which messages are written instead of being compared."""

Error = TypeVar("Error", bound=BaseException)
_seen: Counter[str] = Counter()


@contextmanager
def refused(
    error: type[Error] | tuple[type[Error], ...], *, key: str | None = None
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error about a setting, worded as in the file of messages."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    error_key = getattr(caught.value, "key", None)
    del caught  # it refers to this frame, and would keep what the error holds open
    if key is not None:
        assert error_key == key
    check_wording(message)


def check_wording(message: str) -> None:
    """Compare a message with that in the file: the next one of the current test."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    place = f"{test} #{_seen[test]}"
    _seen[test] += 1
    wording = portable(message)
    if PARTS in os.environ:
        _write(place, wording)
    else:
        assert wording == _messages().get(place), f"The message of {place} changed: make messages"


def portable(message: str) -> str:
    """Return a message with what differs between machines and runs replaced by words."""
    message = re.sub(r"(/[\w.-]+)*/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/[\w-]+", "TMP", message)
    message = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", message)
    message = re.sub(r"\((test_\w+\.py), line \d+\)", r"(\1, line N)", message)
    return message.replace(str(REPOSITORY), "REPOSITORY")


@cache
def _messages() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def _write(place: str, wording: str) -> None:
    parts = Path(os.environ[PARTS])
    parts.mkdir(parents=True, exist_ok=True)
    with (parts / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([place, wording]) + "\n")


def collect(parts: Path) -> None:
    """Write the file from what the test processes have written."""
    messages = {}
    for part in parts.glob("*.jsonl"):
        for line in part.read_text().splitlines():
            place, wording = json.loads(line)
            messages[place] = wording
    FILE.write_text(json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    collect(Path(os.environ[PARTS]))
