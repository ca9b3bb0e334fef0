"""Numbers and lists as a reader wants them in a sentence or a cell."""

import os
from collections.abc import Sequence
from pathlib import Path

UNKNOWN = "–"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 peer`, `2 peers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def capital(word: str) -> str:
    """The word with a capital at its start and the rest as it is: `F1`, `MIoU`."""
    return word[:1].upper() + word[1:]


def score(value: float | None) -> str:
    """Three decimals, as everywhere."""
    return UNKNOWN if value is None else f"{value:.3f}"


def size(value: float) -> str:
    """Megabytes or FLOPs: two decimals, fewer where it is large, two digits where it is small."""
    if 0 < value < 0.1:
        return f"{value:.2g}"
    decimals = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def flops_unit(values: Sequence[float]) -> tuple[float, str]:
    """The scale and the unit in which the largest of some FLOPs reads well."""
    largest = max(values, default=0.0)
    scale, letter = next((unit for unit in UNITS if largest >= 0.1 * unit[0]), UNITS[-1])
    return scale, f"{letter}FLOPs"


def seen_from(out: Path, path: Path) -> str:
    """A run directory as seen from the page's folder: both may be moved together, and no home is told to others."""
    seen = os.path.relpath(path.resolve(), out.resolve().parent)
    return path.resolve().name if seen == "." else seen


def share_of(value: float, other: float, whose: str) -> str:
    """`51 % of D-PSGD's`, `as much as D-PSGD's` or `2.1 times D-PSGD's`."""
    ratio = value / other
    if abs(ratio - 1) < 0.005:
        return f"as much as {whose}’s"
    return f"{100 * ratio:.0f} % of {whose}’s" if ratio < 1 else f"{ratio:.1f} times {whose}’s"
