"""Mutations of files, the same for the same seed: of bytes, and of the values in JSON and TOML."""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "000", "\x1b[31mred\x07\x9b2J", "../../elsewhere", ".99999999f", "a:b", [], {}, [[]],
    [1, "x"], {"mean": 1.0}, {"x": None},
)  # fmt: skip
"""Values in place of others: of another type, out of range, or meant to do harm."""


def mutate(file: Path, rng: random.Random) -> str:
    """Change a file and return what was changed."""
    if file.suffix in (".json", ".jsonl", ".toml") and rng.random() < 0.7:
        return _mutate_values(file, rng)
    return _mutate_bytes(file, rng)


def _mutate_bytes(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    position = rng.randrange(len(content))
    if rng.random() < 0.5:  # headers decide more than what they describe
        position = rng.randrange(min(64, len(content)))
    kind = rng.choice(["flip", "truncate", "insert", "zeros"])
    if kind == "flip":
        content[position] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del content[position:]
    elif kind == "insert":
        content[position:position] = rng.randbytes(rng.randrange(1, 9))
    else:
        content[position : position + 8] = bytes(8)
    file.write_bytes(content)
    return f"{kind} at byte {position} of {file.name}"


def _mutate_values(file: Path, rng: random.Random) -> str:
    text = file.read_text()
    if file.suffix == ".toml":
        values = tomllib.loads(text)
        change = _change(values, rng)
        file.write_text(tomli_w.dumps(_without_none(values)))
    elif file.suffix == ".json":
        values = json.loads(text)
        change = _change(values, rng)
        file.write_text(json.dumps(values))
    else:
        lines = [json.loads(line) for line in text.splitlines()]
        change = _change(rng.choice(lines), rng)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return f"{change} in {file.name}"


def _change(values: Any, rng: random.Random) -> str:
    """Replace or delete one of the values, at any depth."""
    places = list(_places(values))
    place, container, key = rng.choice(places)
    if rng.random() < 0.2:
        del container[key]
        return f"without {place}"
    container[key] = rng.choice(HOSTILE)
    return f"{place} = {container[key]!r}"


def _places(values: Any, prefix: str = "") -> Any:
    """Yield the name, the container and the key of every value."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(items):
        place = f"{prefix}{key}"
        yield place, values, key
        if isinstance(value, dict | list):
            yield from _places(value, f"{place}.")


def _without_none(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value
