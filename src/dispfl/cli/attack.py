"""`dispfl attack`: how well averages withstand Byzantine peers, as a table of rules, attacks and
shares of Byzantine peers."""

import csv
import io
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dispfl.cli.grid import (
    ConfigOption,
    DataDirOption,
    JobsOption,
    OutOption,
    SeedsOption,
    run_grid,
)
from dispfl.errors import ConfigError
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from dispfl.methods.base import Method
    from dispfl.runs.grid import GridRun

KEPT = 0.95
"""Share that shall be left of the accuracy without Byzantine peers and without a rule."""


class Cell(NamedTuple):
    """The honest peers of the runs of one rule under one attack, mean over seeds."""

    rule: str
    attack: str
    byzantine: float
    seeds: int
    mean: float
    """Mean accuracy of the honest peers."""
    worst: float
    """Accuracy of the honest peer that is worst off."""
    kept: float | None = None
    """What is left of the accuracy of the same peers without Byzantine peers and without a rule;
    None if that was not run."""
    backdoor: float | None = None
    """Share of inputs with the backdoor's trigger that they take for its target."""


def attack(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides for all runs.")
    ] = None,
    rules: Annotated[
        str, typer.Option(help="Rules to compare, values of method.robust.")
    ] = "none,clip,trim,nnm",
    attacks: Annotated[
        str, typer.Option(help="Attacks, separated by commas; default: all of them.")
    ] = "",
    byzantine: Annotated[str, typer.Option(help="Shares of Byzantine peers.")] = "0,0.1,0.2,0.3",
    config: ConfigOption = None,
    seeds: SeedsOption = 1,
    out: OutOption = None,
    data_dir: DataDirOption = None,
    jobs: JobsOption = 1,
) -> None:
    """Attack a method with Byzantine peers, under each robust rule, and print the accuracy that
    honest peers are left with.

    Runs are written to OUT/<rule>@<attack>-<share>/seed-<n>. Finished runs
    are skipped and interrupted ones are resumed. Without Byzantine peers the attack
    makes no difference, so there is one such run for each rule and seed.
    The table is also written as Markdown and CSV.

    Example: dispfl attack --rules none,clip --attacks sign-flip,alie peers=20 topology.degree=10
    """
    from rich.console import Console

    from dispfl.cli.run import data_dir_override, output_folder
    from dispfl.config import read_toml
    from dispfl.files import write_atomically
    from dispfl.runs.grid import check_grid

    with output_folder(out, Path("runs") / "attack") as folder:
        overrides = [*(arguments or []), *data_dir_override(data_dir)]
        content = read_toml(config) if config else {}
        cells = attack_grid(
            overrides, content, _split(rules), _split(attacks), _shares(byzantine), seeds, folder
        )
        check_grid(cells)
        console = Console()
        run_grid(cells, console, None, [] if out else ["--out", str(folder)], jobs)
        found = measured(cells)
        text = markdown(found)
        print_text(console, text)
        write_atomically(folder / "attack.md", text.encode())
        write_atomically(folder / "attack.csv", csv_rows(found).encode())
        print_text(console, f"Written: {folder / 'attack.md'}, .csv")


def attack_grid(
    overrides: Sequence[str],
    config: Mapping[str, Any],
    rules: Sequence[str],
    attacks: Sequence[str],
    shares: Sequence[float],
    seeds: int,
    out: Path,
) -> "list[GridRun]":
    """Return the runs: each rule without Byzantine peers, and under each attack with each share of
    them."""
    from dispfl.config import compose
    from dispfl.robust.attacks import ATTACKS
    from dispfl.runs.grid import GridRun
    from dispfl.settings import did_you_mean

    for option, given in (("--rules", rules), ("--byzantine", shares)):
        if not given:
            raise ConfigError(
                f"{option} is empty; omit it for its default, or give values separated by commas.",
                key=option,
            )
    chosen = list(attacks) or list(ATTACKS)
    for name in chosen:
        if name not in ATTACKS:
            raise ConfigError(
                f"attack {name!r} does not exist. {did_you_mean(name, ATTACKS)}", key="--attacks"
            )
    for override in overrides:
        if override.partition("=")[0] in ("attack", "byzantine", "method.robust"):
            raise ConfigError(
                f"{override} is what this command varies; use --attacks, --byzantine and --rules."
            )
    plain = compose(config, overrides)
    _check_robust(plain.method)
    first = plain.seed
    found = []
    for seed in range(first, first + seeds):
        for rule in rules:
            for share in shares:
                for name in chosen if share else ["none"]:
                    own = [
                        f"method.robust={rule}",
                        f"attack={name}",
                        f"byzantine={share}",
                        f"seed={seed}",
                    ]
                    path = out / f"{rule}@{name}{f'-{share:g}' if share else ''}" / f"seed-{seed}"
                    row = {"rule": rule, "attack": name, "byzantine": f"{share:g}"}
                    found.append(GridRun(row, compose(config, [*overrides, *own]), path))
    return found


def measured(cells: "Sequence[GridRun]") -> list[Cell]:
    """Return what the runs of each row left to honest peers, in the order of the rows."""
    from dispfl.runs.directory import read_metrics
    from dispfl.runs.metrics import last_scores

    rows: dict[tuple[str, str, float], list[_Outcome]] = {}
    for cell in cells:
        records = read_metrics(cell.path)
        scores = last_scores(records)
        assert scores is not None  # after the last round models are always evaluated
        tricked = records[-1].get("backdoor")
        outcome = _Outcome(scores["per_peer"], tricked["mean"] if tricked else None)
        rows.setdefault(
            (cell.row["rule"], cell.row["attack"], float(cell.row["byzantine"])), []
        ).append(outcome)
    clean, found = rows.get(("none", "none", 0.0)), []
    for (rule, name, share), outcomes in rows.items():
        mean = statistics.fmean(outcome.mean() for outcome in outcomes)
        worst = statistics.fmean(min(outcome.honest().values()) for outcome in outcomes)
        kept = None
        if clean:
            kept = mean / statistics.fmean(
                c.mean(o.honest()) for c, o in zip(clean, outcomes, strict=True)
            )
        tricks = [outcome.tricked for outcome in outcomes if outcome.tricked is not None]
        success = statistics.fmean(tricks) if tricks else None
        found.append(Cell(rule, name, share, len(outcomes), mean, worst, kept, success))
    return found


class _Outcome(NamedTuple):
    """The last evaluation of a run."""

    scores: Sequence[float | None]
    """By peer; None for a Byzantine peer."""
    tricked: float | None

    def honest(self) -> dict[int, float]:
        """Return the scores of honest peers, by number."""
        return {peer: score for peer, score in enumerate(self.scores) if score is not None}

    def mean(self, peers: Collection[int] | None = None) -> float:
        """Return the mean score of honest peers, or of some of them."""
        return statistics.fmean(
            score for peer, score in self.honest().items() if peers is None or peer in peers
        )


def markdown(cells: Sequence[Cell]) -> str:
    """Return the table: an attack and a share of Byzantine peers a row, a rule a column; mean and
    worst honest accuracy in %."""
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    by_row: dict[tuple[str, float], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.attack, cell.byzantine), {})[cell.rule] = cell
    lines = [
        "| attack | Byzantine peers | " + " | ".join(rules) + " |",
        "| --- | --- |" + " --- |" * len(rules),
    ]
    for (name, share), row in sorted(by_row.items(), key=lambda item: (item[0][1] > 0, item[0])):
        texts = [_cell(row[rule]) if rule in row else "" for rule in rules]
        lines.append(f"| {name} | {share:.0%} | " + " | ".join(texts) + " |")
    note = (
        f"Mean (worst) accuracy of the honest peers in %; {cells[0].seeds}"
        f" seed{'s' if cells[0].seeds > 1 else ''}."
    )
    if any(cell.kept is not None for cell in cells):
        note += (
            f" * marks less than {KEPT:.0%} of what the same peers reach by the plain average"
            " without Byzantine peers."
        )
    if any(cell.backdoor is not None for cell in cells):
        note += (
            " After a backdoor's accuracies: the share of inputs with its trigger that are taken"
            " for its target."
        )
    return "\n".join([*lines, "", note, ""])


def _cell(cell: Cell) -> str:
    text = f"{100 * cell.mean:.1f} ({100 * cell.worst:.0f})"
    if cell.backdoor is not None:
        text += f", {cell.backdoor:.0%}"
    return text + (" *" if cell.kept is not None and cell.kept < KEPT else "")


def csv_rows(cells: Sequence[Cell]) -> str:
    """Return all numbers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Cell._fields)
    writer.writerows(cells)
    return text.getvalue()


def _check_robust(method: "Method") -> None:
    """Refuse a method that averages nobody's models, or by none of the rules."""
    from dispfl.registry import METHODS
    from dispfl.robust.averages import Robust

    if not isinstance(method, Robust):
        able = ", ".join(name for name, known in METHODS.items() if issubclass(known, Robust))
        raise ConfigError(
            f"method={METHODS.name_of(method)} has no method.robust; choose one of {able}.",
            key="method",
        )


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


def _shares(text: str) -> list[float]:
    found = []
    for item in _split(text):
        try:
            share = float(item)
        except ValueError:
            raise ConfigError(
                f"--byzantine must be shares separated by commas, such as 0,0.1,0.2; got {item!r}.",
                key="--byzantine",
            ) from None
        if not 0 <= share < 1:
            hint = f" For {share:g}% write {share / 100:g}." if 1 <= share < 100 else ""
            raise ConfigError(
                f"--byzantine must be in [0, 1), got {item}.{hint}", key="--byzantine"
            )
        found.append(share)
    return found
