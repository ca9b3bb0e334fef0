"""How the C library deals with memory that was let go: what steps take again and again stays, the rest goes back."""

import ctypes
from collections.abc import Callable

KEPT = 256 << 20
"""Bytes at the heap's end that stay when they are free."""
HEAPED = 32 << 20
"""Pieces of up to so many bytes are taken from the heap; the C library allows no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc calls them (malloc.h)."""


def _find(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)  # glibc has them, others do without
    except (OSError, AttributeError, TypeError):
        return None
    return found


_mallopt, _malloc_trim = _find("mallopt"), _find("malloc_trim")


def keep_heap() -> None:
    """Let the next batch have the memory of the last one. Otherwise the activations of a small network go back to the
    system and are mapped and zeroed anew, page by page, in every batch (benchmarks/kept_heap.py).
    """
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, HEAPED)
        _mallopt(_TRIM_THRESHOLD, KEPT)


def trim_heap() -> None:
    """Give back what is free. After large temporary vectors that is much, and scattered, so it would stay otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)
