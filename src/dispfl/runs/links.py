"""Who received whose model in a round, as one short text.

    "1-3 5;0 2;;-"

has an entry for each node, in the order of the roster and the server last: the positions of the
nodes that it received from, with `1-3` for 1, 2 and 3. An empty entry received nothing; `-` took no
part in the exchange. So a thousand peers that all receive from all others take a few kilobytes.
"""

import re
from collections.abc import Mapping, Sequence

from dispfl.errors import RunError

Senders = Mapping[str, Sequence[str] | None]
"""By node: whom it received from; None if it took no part in the exchange."""

ABSENT = "-"
_ENTRY = re.compile(r"(\d{1,9}(-\d{1,9})?( \d{1,9}(-\d{1,9})?)*)?")


def encode_links(senders: Senders, nodes: Sequence[str]) -> str:
    """Return the text of these links; `nodes` are all of the round, in order."""
    positions = {node: position for position, node in enumerate(nodes)}
    entries = []
    for node in nodes:
        of_node = senders.get(node)
        if of_node is None:
            entries.append(ABSENT)
        else:
            entries.append(_ranges(sorted(positions[sender] for sender in of_node)))
    return ";".join(entries)


def decode_links(text: str, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return whom each node that took part received from; refuse a text of another round."""
    entries = text.split(";")
    if len(entries) != len(nodes):
        raise RunError(f"The links are those of {len(entries)} nodes, not of {len(nodes)}.")
    senders = {}
    for node, entry in zip(nodes, entries, strict=True):
        if entry != ABSENT:
            senders[node] = [nodes[position] for position in _positions(entry, len(nodes))]
    return senders


def _ranges(positions: Sequence[int]) -> str:
    """Return sorted positions as text: `1-3 5`."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position - 1:
            ranges[-1] = (ranges[-1][0], position)
        else:
            ranges.append((position, position))
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _positions(entry: str, nodes: int) -> list[int]:
    """Return the positions in an entry; they are increasing and below the number of nodes."""
    if not _ENTRY.fullmatch(entry):
        raise RunError(f"{entry[:40]!r} is not a list of positions.")
    positions: list[int] = []
    for part in entry.split():
        low, _, high = part.partition("-")
        first = int(low)
        last = int(high or low)
        if last >= nodes or first > last or (positions and first <= positions[-1]):
            raise RunError(f"{part} is not a range of the positions 0 to {nodes - 1}, in order.")
        positions.extend(range(first, last + 1))
    return positions
