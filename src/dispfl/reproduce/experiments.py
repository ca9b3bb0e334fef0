"""The paper's tables and figures as experiments: a TOML file each, at two scales.

    the tables of `dispfl run`   what all runs of the experiment share
    [reproduce]                  what of the paper it is, and its runs: every part with every row

Parts and rows are settings over the file's own, written as there: `{ topology = "ring", method = "local" }`. `beside`,
for all or for a part, says where in the paper it stands if its own data or model are others; `targets` of a part are
the accuracies to which rounds are counted.

Runs lie in `OUT/runs`, under a digest of their settings, so what several tables share is run once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from dispfl import paper
from dispfl.config import TABLES, Experiment, compose, read_toml
from dispfl.errors import ConfigError
from dispfl.grid import Cell
from dispfl.reproduce.placing import PlacedRun, as_text, named, place_of, run_path
from dispfl.settings import Settings, did_you_mean

Scale = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "paper")
Overlay = dict[str, Any]
"""Settings as a config file has them, to be laid over it."""
TELL_RUNS_APART = {"data", "partition", "model", "topology", "topology.drop", "method", "method.density"}


class Reproduce(Settings):
    """The table `[reproduce]` of an experiment's file."""

    table: ClassVar[str] = "reproduce"
    shows: str
    """What it is in the paper: `Table 1`."""
    title: str
    """What it compares, in a sentence."""
    label: str | None = None
    """The LaTeX label of the paper's table whose numbers stand beside ours."""
    figure: Literal["curves", "drop", "groups", "masks", "sparsity"] | None = None
    """The picture to draw."""
    seeds: int = Field(default=1, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    """About how long all runs take on two cores, at the laptop's scale."""
    flops: float | None = Field(default=None, gt=0)
    """About how many operations all runs are, dense, at the paper's scale."""
    beside: dict[str, str] = Field(default_factory=dict)
    parts: tuple[Overlay, ...] = ({},)
    rows: tuple[Overlay, ...] = ({},)


@dataclass(frozen=True)
class PaperExperiment:
    """One of the paper's tables or figures, at one scale."""

    name: str
    about: Reproduce
    config: Mapping[str, Any]
    """Its file without the table `[reproduce]`."""

    @property
    def title(self) -> str:
        """`Table 1: All nine methods ...`"""
        return f"{self.about.shows}: {self.about.title}"

    @property
    def table(self) -> paper.Table | None:
        """The paper's table, where there is one."""
        found, label = {table.label: table for table in paper.tables()}, self.about.label
        if label is not None and label not in found:
            raise ConfigError(f"reproduce.label {label!r} does not exist. {did_you_mean(label, found)}")
        return found[label] if label else None

    def runs(self, out: Path, seeds: int | None = None, words: Sequence[str] = ()) -> list[PlacedRun]:
        """All runs: every row of every part at the first seed, then at the next. `words` are for all that have them."""
        self._refuse_varied(words)
        placed = []
        for number in range(seeds or self.about.seeds):
            for part, first in self._experiments(words):
                experiment = first.model_copy(update={"seed": first.seed + number})
                place = place_of(experiment) | self.about.beside | part.get("beside", {})
                cell = Cell({}, experiment, run_path(out / "runs", experiment))
                targets = tuple(part.get("targets", ()))
                placed.append(PlacedRun(cell, as_text(place, experiment), self._printed(place), targets))
        return named(placed)

    def _experiments(self, words: Sequence[str]) -> Iterator[tuple[Overlay, Experiment]]:
        """Every row of every part, under the words that its components know; one that none knows is refused."""
        said: list[tuple[Overlay, list[str]]] = []
        for part in self.about.parts:
            settings = {key: value for key, value in part.items() if key not in ("beside", "targets")}
            said += [(part, [*_words(settings), *_words(row)]) for row in self.about.rows]
        plain = [compose(self.config, own) for _, own in said]
        known = {word for word in words if any(_has(experiment, word) for experiment in plain)}
        for (part, own), experiment in zip(said, plain, strict=True):
            asked = [word for word in words if word not in known or _has(experiment, word)]
            yield part, compose(self.config, [*own, *asked]) if asked else experiment

    def _refuse_varied(self, words: Sequence[str]) -> None:
        """Words may change all runs, but not make them the same."""
        overlays = (*self.about.parts, *self.about.rows)
        varied = {word.partition("=")[0] for overlay in overlays for word in _words(overlay)}
        for word in words:
            key = word.partition("=")[0].strip().removesuffix(".name")
            if key in varied & TELL_RUNS_APART:
                raise ConfigError(f"{self.name} varies {key} itself, got {word}; choose among its runs with --only.")

    def _printed(self, place: Mapping[str, Any]) -> paper.Row | None:
        rows = self.table.rows if self.table else ()
        return next((row for row in rows if all(getattr(row, key) == value for key, value in place.items())), None)


def folder() -> Path:
    """Where the experiments lie: inside an installed package, beside the sources of an editable one."""
    package = Path(__file__).parents[1]
    found = [place for place in (package / "experiments", package.parents[1] / "experiments") if place.is_dir()]
    if not found:
        raise ConfigError(f"{package} came without its experiments; install dispfl again, or name a file of your own.")
    return found[0]


def names(scale: Scale) -> list[str]:
    """The experiments of a scale."""
    return sorted(path.stem for path in (folder() / scale).glob("*.toml"))


def find(name: str, scale: Scale) -> PaperExperiment:
    """An experiment by its name (`topologies-cifar10`), by what it shows (`table-2`), or from a file of one's own."""
    if name.endswith(".toml"):
        return read(Path(name))
    known = names(scale)
    if name in known:
        return read(folder() / scale / f"{name}.toml")
    shown = {_letters(found.about.shows): found for found in (read(folder() / scale / f"{n}.toml") for n in known)}
    if _letters(name) not in shown:
        raise ConfigError(f"There is no experiment {name!r}. {did_you_mean(name, known)}")
    return shown[_letters(name)]


def read(path: Path) -> PaperExperiment:
    """An experiment from its file."""
    config = read_toml(path)
    if "reproduce" not in config:
        raise ConfigError(f"{path} has no table [reproduce]; a config without it is for dispfl run.")
    return PaperExperiment(path.stem, Reproduce(**config.pop("reproduce")), config)


def _words(overlay: Overlay) -> Iterator[str]:
    """Settings as `key=value`, a table's name before its other keys."""
    for key, value in overlay.items():
        table = value if isinstance(value, Mapping) else {"name": value} if key in TABLES else None
        if table is None:
            yield f"{key}={json.dumps(value)}"
            continue
        if "name" in table:
            yield f"{key}={json.dumps(table['name'])}"
        yield from (f"{key}.{field}={json.dumps(setting)}" for field, setting in table.items() if field != "name")


def _has(experiment: Experiment, word: str) -> bool:
    """Whether an experiment's components know the key of a word: a ring has no `topology.degree`."""
    table, dot, field = word.partition("=")[0].strip().partition(".")
    owner = getattr(experiment, table, None)
    return not dot or (isinstance(owner, Settings) and field in type(owner).model_fields)


def _letters(text: str) -> str:
    """`table 1`, `Table-1` and `table1` are the same."""
    return "".join(letter for letter in text.lower() if letter.isalnum())
