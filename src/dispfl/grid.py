"""Grids of runs that differ in one thing only: which runs there are, which are done, cut or missing; and running them.

    DIR/<method>/seed-0, seed-1, ...             of a comparison of methods
    DIR/<key>=<value>[,...]/seed-0, seed-1, ...  of a sweep over settings

Runs with the same seed and data settings have the same split, the same initial weights and the same test data, because
each of these comes from a random stream of its own that no method draws from.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dispfl.config import Experiment, compose
from dispfl.data.fetch import Progress as Decoding
from dispfl.errors import ConfigError
from dispfl.launch import Launch, refuse_another_experiment
from dispfl.methods.registry import METHODS
from dispfl.runs.directory import read_summary
from dispfl.runs.loop import Progress
from dispfl.runs.tracking import tracking
from dispfl.settings import did_you_mean


class State(StrEnum):
    """How far a run of a grid is."""

    DONE = "done"
    CUT = "cut"
    MISSING = "missing"


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    row: Mapping[str, str]
    """What makes it differ from the other runs of its seed: `{"method": "ditto"}`, `{"method.density": "0.2"}`."""
    experiment: Experiment
    path: Path

    @property
    def title(self) -> str:
        """`ditto seed 1`, or `method.density=0.2 seed 1`."""
        return f"{self.path.parent.name} seed {self.experiment.seed}"

    @property
    def steps(self) -> int:
        """How many peer steps it takes, as far as can be known before it begins."""
        return self.experiment.rounds * self.experiment.peers

    @property
    def state(self) -> State:
        """What its run directory says."""
        if not (self.path / "config.toml").exists():
            return State.MISSING
        return State.CUT if read_summary(self.path) is None else State.DONE


def methods_grid(words: Sequence[str], config: Mapping[str, Any], seeds: int, out: Path) -> list[Cell]:
    """The runs of a comparison: words without `=` are methods, the others settings for all that have them."""
    methods = list(dict.fromkeys(word for word in words if "=" not in word))
    settings = [word for word in words if "=" in word]
    if not methods:
        raise ConfigError(f"Name the methods to compare. There are: {', '.join(METHODS)}.")
    for name in methods:
        if name not in METHODS:
            fix = "Give a config file with -c." if name.endswith(".toml") else did_you_mean(name, METHODS)
            raise ConfigError(f"method {name!r} does not exist. {fix}")
    for word in settings:
        key = _key(word)
        if key in ("method", "method.name"):
            raise ConfigError(f"Write the methods to compare as plain words, not as {word!r}.")
        if key.startswith("method.") and not any(_has(name, key) for name in methods):
            known = {f"method.{field}" for name in methods for field in METHODS[name].model_fields} - {"method.name"}
            fix = did_you_mean(key, known) if known else "They have no settings of their own."
            raise ConfigError(f"None of these methods ({', '.join(methods)}) has the key {key}. {fix}")
    compose(config)  # a config whose method is not among these is to be right all the same
    rows = {}
    for name in methods:
        own = [word for word in settings if not _key(word).startswith("method.") or _has(name, _key(word))]
        rows[name] = ({"method": name}, [*own, f"method={name}"])
    return _grid(rows, config, seeds, out)


def sweep_grid(words: Sequence[str], config: Mapping[str, Any], seeds: int, out: Path) -> list[Cell]:
    """The runs of a sweep: the product of the values of every word that has several, `method.density=0.2,0.4`."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"Expected key=value, got {word!r}. To compare methods use dispfl compare.")
    fixed = [word for word in words if len(_values(word)) == 1]
    swept = {_key(word): list(dict.fromkeys(_values(word))) for word in words if word not in fixed}
    if not swept:
        raise ConfigError("Nothing to sweep: give a key several values, such as method.density=0.2,0.5.")
    if "seed" in swept:
        raise ConfigError("Several seeds are --seeds 3, which takes the config's seed and the next two.")
    rows = {}
    for values in itertools.product(*swept.values()):
        row = dict(zip(swept, values, strict=True))
        chosen = [f"{key}={value}" for key, value in row.items()]
        folder = ",".join(chosen).replace("/", "_")
        if folder in rows:
            raise ConfigError(f"Two runs of the sweep would share the folder {folder}; give values without slashes.")
        rows[folder] = (row, [*fixed, *chosen])
    return _grid(rows, config, seeds, out)


def check(cells: Iterable[Cell]) -> None:
    """Refuse run directories that hold other experiments, before anything runs."""
    for cell in cells:
        if cell.state is not State.MISSING:
            fix = "Give the settings that it was run with, or another --out."
            refuse_another_experiment(cell.path, cell.experiment, fix)


def run_missing(
    cells: Iterable[Cell],
    watch: Callable[[Cell], Progress],
    decoding: Decoding | None = None,
    track: str | None = None,
) -> None:
    """Go on with the runs that were cut and begin those that are missing; `watch` gives each its observer."""
    for cell in cells:
        state = cell.state
        if state is State.DONE:
            continue
        progress = watch(cell)
        launch = Launch.rest_of if state is State.CUT else Launch.begin
        launched = launch(cell.experiment, cell.path, decoding)
        with tracking(track, cell.path, progress) as told:
            launched.run(told)


def _grid(
    rows: Mapping[str, tuple[dict[str, str], list[str]]], config: Mapping[str, Any], seeds: int, out: Path
) -> list[Cell]:
    """All rows at the first seed, then all at the next: a grid that is cut has whole comparisons in it."""
    first = {folder: compose(config, words) for folder, (_, words) in rows.items()}
    return [
        Cell(
            row,
            compose(config, [*words, f"seed={first[folder].seed + number}"]),
            out / folder / f"seed-{first[folder].seed + number}",
        )
        for number in range(seeds)
        for folder, (row, words) in rows.items()
    ]


def _has(method: str, key: str) -> bool:
    return key.removeprefix("method.") in METHODS[method].model_fields


def _key(word: str) -> str:
    return word.partition("=")[0].strip()


def _values(word: str) -> list[str]:
    """The values of a word: its text, divided at the commas that stand in no brackets and no quotes."""
    values, depth, quote = [""], 0, ""
    for letter in word.partition("=")[2]:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth == 0:
                values.append("")
                continue
        values[-1] += letter
    return [value.strip() for value in values]
