"""Tuning of the C library's allocator: memory that every step needs is kept for the next."""

import ctypes
from collections.abc import Callable

KEPT_BYTES = 256 << 20
"""Free bytes at the end of the heap that are kept."""
MAX_HEAP_ALLOCATION = 32 << 20
"""Allocations up to this size come from the heap; the C library allows no more."""
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Parameters of `mallopt` in glibc (malloc.h)."""


def _c_function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)  # glibc only
    except (OSError, AttributeError, TypeError):
        return None
    return function


_mallopt = _c_function("mallopt")
_malloc_trim = _c_function("malloc_trim")


def keep_heap() -> None:
    """Keep the memory of one batch for the next.

    Otherwise the activations of a small network are returned to the system, and mapped and zeroed
    again page by page in every batch (benchmarks/kept_heap.py).
    """
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, MAX_HEAP_ALLOCATION)
        _mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def trim_heap() -> None:
    """Return free memory to the system: after large temporary vectors it is scattered."""
    if _malloc_trim is not None:
        _malloc_trim(0)
