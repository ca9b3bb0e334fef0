"""Who received whose model in a round, as one short text.

    "1-3 5;0 2;;-"

has an entry for each node, in the order of the roster and the server last: the positions of the
nodes that it received from, with `1-3` for 1, 2 and 3. An empty entry received nothing; `-` took no
part in the exchange. So a thousand peers that all receive from all others take a few kilobytes.

    "93 -20 x;8 41;;"

has numbers of the same links, in the same order, in hundredths; `x` if there is none.

    "1-3:400,5:380?20;0:390;;-"

has the sizes of the models that each node received, in bytes: 400 from 1, 2 and 3, 380 from 5; each
request for one took 20.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dispfl.errors import RunError
from dispfl.round.ledger import MessageCost

Senders = Mapping[str, Sequence[str] | None]
"""By node: whom it received from; None if it took no part in the exchange."""

LinkNumbers = Mapping[str, Mapping[str, float]]
"""By node: a number for some of those that it received from."""

ABSENT = "-"
UNKNOWN_NUMBER = "x"
_SIZE = re.compile(r"\d{1,15}")
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


MAX_SIZES = 100_000
"""The most messages of a round whose sizes are recorded without a clock, which needs them."""


def encode_sizes(messages: Sequence[MessageCost], nodes: Sequence[str]) -> str:
    """Return the text of the bytes that these messages have on the wire."""
    positions = {node: position for position, node in enumerate(nodes)}
    sizes: dict[str, Counter[int]] = {node: Counter() for node in nodes}
    requests: dict[str, int] = {}
    for message in messages:
        if message.is_request:
            requests[message.sender] = message.wire
        else:
            sizes[message.receiver][positions[message.sender]] += message.wire

    entries = []
    for node in nodes:
        senders: dict[int, list[int]] = {}
        for position, size in sizes[node].items():
            senders.setdefault(size, []).append(position)
        groups = [f"{_ranges(sorted(of_size))}:{size}" for size, of_size in senders.items()]
        request = f"?{requests[node]}" if node in requests else ""
        entries.append(",".join(groups) + request)
    return ";".join(entries)


class ReceivedModel(NamedTuple):
    """The sizes of a model that was received."""

    sender: str
    receiver: str
    size: int
    """In bytes."""
    request: int
    """The bytes of the request for it; 0: it was sent unasked."""


def decode_sizes(text: str, nodes: Sequence[str]) -> list[ReceivedModel]:
    """Return the models of a round with their sizes; refuse a text of another round."""
    entries = text.split(";")
    if len(entries) != len(nodes):
        raise RunError(f"The sizes are those of {len(entries)} nodes, not of {len(nodes)}.")
    models = []
    for node, entry in zip(nodes, entries, strict=True):
        groups, _, request = entry.partition("?")
        request_size = _size(request) if request else 0
        for group in filter(None, groups.split(",")):
            senders, _, size = group.partition(":")
            for position in _positions(senders, len(nodes)):
                if nodes[position] == node:
                    raise RunError(f"{node} does not receive its own model.")
                models.append(ReceivedModel(nodes[position], node, _size(size), request_size))
    return models


def _size(text: str) -> int:
    if not _SIZE.fullmatch(text):
        raise RunError(f"{text[:40]!r} is no size of a message in bytes.")
    return int(text)


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
