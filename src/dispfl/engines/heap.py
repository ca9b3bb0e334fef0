"""Memory that the C library keeps for later goes back to the system."""

import ctypes
from collections.abc import Callable


def _find() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it, others do without
    except (OSError, AttributeError, TypeError):
        return None
    return trim


_malloc_trim = _find()


def trim_heap() -> None:
    """Give back what is free. After large temporary vectors that is much, and scattered, so it would stay otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)
