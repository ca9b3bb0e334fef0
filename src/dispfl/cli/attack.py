"""`dispfl attack`: how well robust rules withstand attacks by shares of Byzantine peers."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
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

TOLERATED = 0.95
"""Share that shall be left of the accuracy without Byzantine peers and without a rule."""
VARIED = ("attack", "byzantine", "method.robust")
"""The keys that this command varies itself."""


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

    @property
    def text(self) -> str:
        """`71.2 (55), 3% *`: mean, worst, success of a backdoor, and a mark where much is lost."""
        text = f"{100 * self.mean:.1f} ({100 * self.worst:.0f})"
        if self.backdoor is not None:
            text += f", {self.backdoor:.0%}"
        if self.kept is not None and self.kept < TOLERATED:
            text += " *"
        return text


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
    """Attack a method under each robust rule, and print the accuracy left to honest peers.

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

    console = Console()
    with output_folder(out, Path("runs") / "attack") as folder:
        runs = attack_grid(
            overrides=[*(arguments or []), *data_dir_override(data_dir)],
            config=read_toml(config) if config else {},
            rules=_split(rules),
            attacks=_split(attacks),
            shares=_shares(byzantine),
            seeds=seeds,
            out=folder,
        )
        check_grid(runs)
        resume_options = [] if out else ["--out", str(folder)]
        run_grid(runs, console, None, resume_options, jobs)

        cells = measured(runs)
        text = markdown(cells)
        print_text(console, text)
        write_atomically(folder / "attack.md", text.encode())
        write_atomically(folder / "attack.csv", csv_rows(cells).encode())
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
    """Return the runs: each rule without Byzantine peers, and under each attack by each share."""
    from dispfl.config import compose
    from dispfl.robust.attacks import ATTACKS
    from dispfl.runs.grid import GridRun

    _check_grid_options(overrides, rules, attacks, shares)
    plain = compose(config, overrides)
    _check_robust(plain.method)
    runs = []
    for number, rule, share in product(range(seeds), rules, shares):
        seed = plain.seed + number
        for name in (attacks or ATTACKS) if share else ["none"]:
            settings = [
                f"method.robust={rule}",
                f"attack={name}",
                f"byzantine={share}",
                f"seed={seed}",
            ]
            experiment = compose(config, [*overrides, *settings])
            folder = f"{rule}@{name}-{share:g}" if share else f"{rule}@{name}"
            row = {"rule": rule, "attack": name, "byzantine": f"{share:g}"}
            runs.append(GridRun(row, experiment, out / folder / f"seed-{seed}"))
    return runs


def _check_grid_options(
    overrides: Sequence[str],
    rules: Sequence[str],
    attacks: Sequence[str],
    shares: Sequence[float],
) -> None:
    from dispfl.robust.attacks import ATTACKS
    from dispfl.settings import did_you_mean

    for option, values in (("--rules", rules), ("--byzantine", shares)):
        if not values:
            raise ConfigError(
                f"{option} is empty; omit it for its default, or give values separated by commas.",
                key=option,
            )
    for name in attacks:
        if name not in ATTACKS:
            raise ConfigError(
                f"attack {name!r} does not exist. {did_you_mean(name, ATTACKS)}", key="--attacks"
            )
    for override in overrides:
        if override.partition("=")[0] in VARIED:
            raise ConfigError(
                f"{override} is what this command varies; use --attacks, --byzantine and --rules."
            )


def measured(runs: "Sequence[GridRun]") -> list[Cell]:
    """Return what the runs of each row left to honest peers, in the order of the rows."""
    rows: dict[tuple[str, str, float], list[_Outcome]] = {}
    for run in runs:
        row = (run.row["rule"], run.row["attack"], float(run.row["byzantine"]))
        rows.setdefault(row, []).append(_Outcome.of(run.path))

    clean = rows.get(("none", "none", 0.0))
    cells = []
    for (rule, name, share), outcomes in rows.items():
        mean = fmean(outcome.mean() for outcome in outcomes)
        worst = fmean(min(outcome.honest().values()) for outcome in outcomes)
        share_kept = None
        if clean:
            same_peers = [
                before.mean(after.honest()) for before, after in zip(clean, outcomes, strict=True)
            ]
            share_kept = mean / fmean(same_peers)
        tricked = [outcome.tricked for outcome in outcomes if outcome.tricked is not None]
        success = fmean(tricked) if tricked else None
        cells.append(Cell(rule, name, share, len(outcomes), mean, worst, share_kept, success))
    return cells


class _Outcome(NamedTuple):
    """The last evaluation of a run."""

    scores: Sequence[float | None]
    """By peer; None for a Byzantine peer."""
    tricked: float | None
    """The success of a backdoor."""

    @classmethod
    def of(cls, path: Path) -> "_Outcome":
        from dispfl.runs.directory import read_metrics
        from dispfl.runs.metrics import last_scores

        records = read_metrics(path)
        scores = last_scores(records)
        assert scores is not None  # after the last round models are always evaluated
        backdoor = records[-1].get("backdoor")
        return cls(scores["per_peer"], backdoor["mean"] if backdoor else None)

    def honest(self) -> dict[int, float]:
        """Return the scores of honest peers, by number."""
        return {peer: score for peer, score in enumerate(self.scores) if score is not None}

    def mean(self, peers: Collection[int] | None = None) -> float:
        """Return the mean score of honest peers, or of some of them."""
        scores = self.honest()
        if peers is not None:
            scores = {peer: score for peer, score in scores.items() if peer in peers}
        return fmean(scores.values())


def markdown(cells: Sequence[Cell]) -> str:
    """Return the table: a row per attack and share, a column per rule."""
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    by_row: dict[tuple[str, float], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.attack, cell.byzantine), {})[cell.rule] = cell

    lines = [
        f"| attack | Byzantine peers | {' | '.join(rules)} |",
        "| --- | --- |" + " --- |" * len(rules),
    ]
    without_attack_first = sorted(by_row, key=lambda row: (row[1] > 0, row))
    for name, share in without_attack_first:
        row = by_row[name, share]
        texts = [row[rule].text if rule in row else "" for rule in rules]
        lines.append(f"| {name} | {share:.0%} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", _legend(cells), ""])


def _legend(cells: Sequence[Cell]) -> str:
    from dispfl.report.wording import plural

    seeds = plural(cells[0].seeds, "seed")
    legend = f"Mean (worst) accuracy of the honest peers in %; {seeds}."
    if any(cell.kept is not None for cell in cells):
        legend += (
            f" * marks less than {TOLERATED:.0%} of what the same peers reach by the plain average"
            " without Byzantine peers."
        )
    if any(cell.backdoor is not None for cell in cells):
        legend += (
            " After a backdoor's accuracies: the share of inputs with its trigger that are taken"
            " for its target."
        )
    return legend


def csv_rows(cells: Sequence[Cell]) -> str:
    """Return all numbers as CSV."""
    from dispfl.report.tables import csv_text

    return csv_text([cell._asdict() for cell in cells])


def _check_robust(method: "Method") -> None:
    """Refuse a method that averages nobody's models, or by none of the rules."""
    from dispfl.registry import METHODS
    from dispfl.robust.averages import Robust

    if not isinstance(method, Robust):
        robust = [
            name for name, method_class in METHODS.items() if issubclass(method_class, Robust)
        ]
        raise ConfigError(
            f"method={METHODS.name_of(method)} has no method.robust; choose one of"
            f" {', '.join(robust)}.",
            key="method",
        )


def _split(text: str) -> list[str]:
    """Return the values of a list, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def _shares(text: str) -> list[float]:
    shares = []
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
        shares.append(share)
    return shares
