"""Numbers and lists as text, for cells and sentences."""

from collections.abc import Iterable, Sequence

UNKNOWN = "–"
"""A cell without a value."""
NARROW_SPACE = "\u202f"


def join_and(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def join_numbers(numbers: Iterable[int]) -> str:
    """`0, 1, 2`."""
    return ", ".join(map(str, numbers))


def plural(number: int, noun: str) -> str:
    """`1 peer`, `2 peers`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def number_range(numbers: Sequence[int], separator: str = " to ") -> str:
    """`4`, or `2 to 4`."""
    return text_range(str(min(numbers)), str(max(numbers)), separator)


def text_range(low: str, high: str, separator: str = " to ") -> str:
    """Return the same for numbers that are text already."""
    if low == high:
        return low
    return f"{low}{separator}{high}"


def capitalized(word: str) -> str:
    """Return the word with its first letter in upper case and the others unchanged: `F1`."""
    return word[:1].upper() + word[1:]


def format_number(value: float | None, decimals: int) -> str:
    """Return a number with a fixed number of decimals, or a dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.{decimals}f}"


def format_short(number: float, decimals: int) -> str:
    """Return a number with some decimals, or with none if it is large, to fit 80 columns."""
    if number >= 1000:
        decimals = 0
    return f"{number:.{decimals}f}"


def format_seconds(value: float | None) -> str:
    """Return seconds with three decimals, or a dash for None.

    Large values have one decimal, small ones two significant digits.
    """
    if value is None:
        return UNKNOWN
    if 0 < value < 0.01:
        return f"{value:.2g}"
    if value < 10:
        return f"{value:.3f}"
    return f"{value:.1f}"


def format_amount(value: float) -> str:
    """Return an amount of some unit with two decimals.

    Large values have fewer decimals, small ones two significant digits.
    """
    if 0 < value < 0.1:
        return f"{value:.2g}"
    if value < 100:
        return f"{value:.2f}"
    if value < 1000:
        return f"{value:.1f}"
    return with_thousands(value, 0)


def with_thousands(value: float, decimals: int) -> str:
    """Return a number whose thousands are separated by narrow spaces."""
    return f"{value:,.{decimals}f}".replace(",", NARROW_SPACE)


def format_ratio(value: float, reference: float, label: str) -> str:
    """`51 % of D-PSGD's`, `as much as D-PSGD's` or `2.1 times D-PSGD's`."""
    ratio = value / reference
    if abs(ratio - 1) < 0.005:
        return f"as much as {label}’s"
    if ratio < 1:
        return f"{100 * ratio:.0f} % of {label}’s"
    return f"{ratio:.1f} times {label}’s"
