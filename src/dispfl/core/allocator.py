"""Tuning of the C library's allocator: memory that every step needs is kept, the rest is returned
to the system."""

import ctypes
from collections.abc import Callable

KEPT_BYTES = 256 << 20
"""Free bytes at the end of the heap that are kept."""
MAX_HEAP_ALLOCATION = 32 << 20
"""Allocations up to this size come from the heap; the C library allows no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in glibc (malloc.h)."""


def _find(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)  # glibc only
    except (OSError, AttributeError, TypeError):
        return None
    return found


_mallopt, _malloc_trim = _find("mallopt"), _find("malloc_trim")


def keep_heap() -> None:
    """Keep the memory of one batch for the next. Otherwise the activations of a small network are
    returned to the system, and mapped and zeroed again page by page in every batch
    (benchmarks/kept_heap.py).
    """
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, MAX_HEAP_ALLOCATION)
        _mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def trim_heap() -> None:
    """Return free memory to the system. After large temporary vectors it is scattered, and would be
    kept otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)
