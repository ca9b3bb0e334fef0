"""HTML and SVG as text. Whatever is not Markup already is escaped on its way in, so a file's words cannot be tags."""

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Attribute = str | float | None


def element(tag: str, *inside: str, **attributes: Attribute) -> Markup:
    """`element("td", "a<b", class_="number")` is `<td class="number">a&lt;b</td>`; attributes of None are left out."""
    said = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    return Markup(f"<{tag}{said}>{joined(inside)}</{tag}>")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after another, those that are plain text escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def compact(number: float) -> str:
    """A coordinate with one decimal at most: a tenth of a pixel is finer than anyone sees."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else compact(value)
