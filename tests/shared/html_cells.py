"""Reading the tables of an HTML report."""

import re


def cells(html: str) -> list[list[str]]:
    """The text of a table's body, row by row."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html.split("<tbody", 1)[1], re.DOTALL)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in found]
