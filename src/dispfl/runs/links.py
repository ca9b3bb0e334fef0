"""Who received whose model in a round, as one short text.

    "1-3 5;0 2;;-"

has an entry for each node, in the order of the roster and the server last: the positions of the
nodes that it received from, with `1-3` for 1, 2 and 3. An empty entry received nothing; `-` took no
part in the exchange. So a thousand peers that all receive from all others take a few kilobytes.

    "93 -20 x;8 41;;"

has numbers of the same links, in the same order, in hundredths; `x` if there is none.
"""

import re
from collections.abc import Mapping, Sequence

from dispfl.errors import RunError

Senders = Mapping[str, Sequence[str] | None]
"""By node: whom it received from; None if it took no part in the exchange."""

LinkNumbers = Mapping[str, Mapping[str, float]]
"""By node: a number for some of those that it received from."""

ABSENT = "-"
UNKNOWN_NUMBER = "x"
_NUMBER = re.compile(r"-?\d{1,9}")
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


def encode_numbers(numbers: LinkNumbers, senders: Senders, nodes: Sequence[str]) -> str:
    """Return the text of numbers of these links; `nodes` are all of the round, in order."""
    positions = {node: position for position, node in enumerate(nodes)}
    entries = []
    for node in nodes:
        of_node = numbers.get(node, {})
        texts = []
        for sender in sorted(senders.get(node) or (), key=positions.__getitem__):
            text = UNKNOWN_NUMBER
            if sender in of_node:
                text = str(round(100 * of_node[sender]))
            texts.append(text)
        entries.append(" ".join(texts))
    return ";".join(entries)


def decode_numbers(text: str, senders: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Return the numbers of links that `decode_links` returned; refuse a text of other links."""
    numbers: dict[str, dict[str, float]] = {}
    entries = [entry for entry in text.split(";") if entry]
    receivers = [node for node in senders if senders[node]]
    if len(entries) != len(receivers):
        raise RunError(f"The numbers are those of {len(entries)} nodes, not of {len(receivers)}.")
    for node, entry in zip(receivers, entries, strict=True):
        texts = entry.split(" ")
        if len(texts) != len(senders[node]):
            raise RunError(f"{entry[:40]!r} has no number for each of {len(senders[node])} links.")
        numbers[node] = {}
        for sender, number in zip(senders[node], texts, strict=True):
            if number == UNKNOWN_NUMBER:
                continue
            if not _NUMBER.fullmatch(number):
                raise RunError(f"{number[:40]!r} is no number of a link.")
            numbers[node][sender] = int(number) / 100
    return numbers


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
