"""The names of peers: they order the roster and every sum, and name the peers' random streams.

Simulated peers and real sites have the same kind of names, so that a simulation with the names of
the sites gives their models, bit for bit.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dispfl.errors import ConfigError, RunError

MAX_PEERS = 1_000_000
"""More than anyone simulates: a damaged config must not fill the memory with names."""
MAX_LENGTH = 40
RESERVED = {"server", "unknown"}
"""Names that nodes have in records and messages."""
# A leading dash would look like a command-line option.
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9-]{{0,{MAX_LENGTH - 1}}}")
_IN_ASCII = str.maketrans(
    {"ø": "o", "Ø": "O", "æ": "ae", "Æ": "Ae", "ß": "ss", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D"}
)
"""Letters that Unicode does not take apart into a Latin letter and an accent."""


def peer_names(count: int) -> list[str]:
    """Return the names of peers without names of their own: `000`, `001`, ..., in order."""
    if count > MAX_PEERS:
        raise ConfigError(f"peers must be at most {MAX_PEERS:,}, got {count:,}.", key="peers")
    width = max(3, len(str(count - 1)))
    return [f"{k:0{width}d}" for k in range(count)]


def check_name(description: str, name: str) -> str:
    """Return the name if it is valid for a peer, a site or a federation, else refuse it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{description} must be 1 to {MAX_LENGTH} letters (a-z), digits and dashes and not"
            f" start with a dash, got {name!r}."
        )
    if name in RESERVED:
        raise ConfigError(
            f"{description} cannot be {name!r}, which is reserved; choose another name."
        )
    return name


def check_names(names: Iterable[Any], key: str) -> tuple[str, ...]:
    """Return the names of peers in the order of the roster, which is alphabetical.

    `key` is the setting or argument that has them.
    """
    checked: set[str] = set()
    for name in names:
        try:
            check_name("The name of a peer", str(name))
        except ConfigError as problem:
            raise ConfigError(str(problem), key=key) from None
        if str(name) in checked:
            raise ConfigError(
                f"`{key}` has the name {name} twice; every peer needs its own.", key=key
            )
        checked.add(str(name))
    return tuple(sorted(checked))


def names_from(values: Sequence[str]) -> list[str]:
    """Return a valid name for each of some distinct texts: the text, or one that resembles it.

    Whole numbers are padded with zeros, so that they stay in their order. Where several texts
    resemble each other, the later ones get a number.
    """
    if all(value.isascii() and value.isdecimal() for value in values):
        width = max(map(len, values), default=0)
        values = [value.zfill(width) for value in values]
    names: dict[str, None] = {}
    for value in values:
        first_choice = name = _name_like(value)
        number = 1
        while name in names:
            number += 1
            suffix = f"-{number}"
            name = first_choice[: MAX_LENGTH - len(suffix)] + suffix
        names[name] = None
    return list(names)


def _name_like(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text[: 4 * MAX_LENGTH].translate(_IN_ASCII))
    letters = "".join(c for c in decomposed if not unicodedata.combining(c))
    name = re.sub(r"[^A-Za-z0-9]+", "-", letters).strip("-")[:MAX_LENGTH].rstrip("-")
    if not name:
        return "peer"
    return f"peer-{name}" if name in RESERVED else name


def roster_of(config: Mapping[str, Any]) -> list[str]:
    """Return the peers of a simulated run, from its config."""
    peers = config["peers"]
    names = config.get("names")
    if not names:
        return peer_names(peers)
    if not isinstance(names, list) or len(names) != peers:
        raise RunError(
            f"The config of a run has {peers} peers, but its `names` do not name as many. Restore"
            " config.toml."
        )
    return list(check_names(names, "names"))
