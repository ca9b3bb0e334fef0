"""How long random tests search: a fixed number of seeds in `make test`, a number of seconds in
`make fuzz`."""

import os
import time
from collections.abc import Iterator

SECONDS = float(os.environ.get("DISPFL_FUZZ_SECONDS", "0"))
"""Seconds that each campaign of `make fuzz` has; 0 otherwise."""


def seeds(least: int, share: float = 1.0) -> Iterator[int]:
    """Yield `least` seeds, the same ones every time; with a budget, others until this share of it
    is used up."""
    yield from range(least)
    first = last = 1000 * int(time.time())
    until = time.monotonic() + share * SECONDS
    while time.monotonic() < until:
        yield last
        last += 1
    if SECONDS:
        print(f"seeds tried: 0 to {least - 1}, and {last - first} from {first} on")
