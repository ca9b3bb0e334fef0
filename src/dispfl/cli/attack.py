"""`dispfl attack`: the accuracy of honest peers, by robust rule, attack and Byzantine share."""

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dispfl.cli.completion import complete_settings
from dispfl.cli.grid import (
    ConfigOption,
    DataDirOption,
    JobsOption,
    OutOption,
    SeedsOption,
    run_grid,
    split_commas,
)
from dispfl.errors import ConfigError
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from dispfl.methods.base import Method
    from dispfl.report.tables import Table
    from dispfl.runs.grid import GridRun

ACCEPTABLE = 0.95
"""Share of the accuracy without Byzantine peers and without a rule that should be retained."""


class AttackResult(NamedTuple):
    """What the runs of one rule under one attack leave honest peers with, as means over seeds."""

    rule: str
    attack: str
    byzantine: float
    seeds: int
    mean: float
    """Mean accuracy of the honest peers."""
    worst: float
    """Accuracy of the honest peer that is worst off."""
    retained: float | None = None
    """Share of the accuracy that the same peers have without Byzantine peers and without a rule;
    None if that was not run."""
    backdoor: float | None = None
    """Share of inputs with the backdoor's trigger that they classify as its target."""


def attack(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides for all runs.",
            autocompletion=complete_settings,
        ),
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
    """Attack a method under each robust rule, and print the accuracy of the honest peers.

    Runs are written to OUT/<rule>@<attack>-<share>/seed-<n>. Finished runs
    are skipped and interrupted ones are resumed. Without Byzantine peers the attack
    makes no difference, so there is one such run for each rule and seed.
    The table is also written as Markdown and CSV.

    Example: dispfl attack --rules none,clip --attacks sign-flip,alie peers=20 topology.degree=10
    """

    from dispfl.cli.run import data_dir_override, output_folder
    from dispfl.config import read_toml
    from dispfl.files import write_atomically
    from dispfl.report.tables import csv_text
    from dispfl.runs.grid import check_grid

    overrides = [*(arguments or []), *data_dir_override(data_dir)]
    content = read_toml(config) if config else {}
    shares = _parse_shares(byzantine)
    console = SafeConsole()
    with output_folder(out, Path("runs") / "attack") as folder:
        cells = attack_grid(
            overrides, content, split_commas(rules), split_commas(attacks), shares, seeds, folder
        )
        check_grid(cells)
        resume_options = [] if out else ["--out", str(folder)]
        run_grid(cells, console, None, resume_options, jobs)

        results = measure(cells)
        markdown = attack_table(results).markdown()
        print_text(console, markdown)
        write_atomically(folder / "attack.md", markdown.encode())
        lines = [result._asdict() for result in results]
        write_atomically(folder / "attack.csv", csv_text(lines).encode())
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

    _check_choices(overrides, rules, attacks, shares)
    plain = compose(config, overrides)
    _check_robust(plain.method)

    names = list(attacks or ATTACKS)
    all_seeds = range(plain.seed, plain.seed + seeds)
    cells = []
    for seed, rule, share in itertools.product(all_seeds, rules, shares):
        for attack in names if share else ["none"]:
            varied = [
                f"method.robust={rule}",
                f"attack={attack}",
                f"byzantine={share}",
                f"seed={seed}",
            ]
            folder = f"{rule}@{attack}-{share:g}" if share else f"{rule}@none"
            row = {"rule": rule, "attack": attack, "byzantine": f"{share:g}"}
            experiment = compose(config, [*overrides, *varied])
            cells.append(GridRun(row, experiment, out / folder / f"seed-{seed}"))
    return cells


def _check_choices(
    overrides: Sequence[str],
    rules: Sequence[str],
    attacks: Sequence[str],
    shares: Sequence[float],
) -> None:
    """Refuse empty options, unknown attacks, and overrides of what the command varies."""
    from dispfl.robust.attacks import ATTACKS
    from dispfl.settings import did_you_mean

    for option, values in (("--rules", rules), ("--byzantine", shares)):
        if not values:
            raise ConfigError(
                f"{option} is empty; omit it for its default, or give values separated by commas.",
                key=option,
            )
    for attack in attacks:
        if attack not in ATTACKS:
            suggestion = did_you_mean(attack, ATTACKS)
            raise ConfigError(f"attack {attack!r} does not exist. {suggestion}", key="--attacks")
    for override in overrides:
        if override.partition("=")[0] in ("attack", "byzantine", "method.robust"):
            raise ConfigError(
                f"{override} is what this command varies; use --attacks, --byzantine and --rules."
            )


class _Outcome(NamedTuple):
    """The last evaluation of a run."""

    scores: Sequence[float | None]
    """By peer; None for a Byzantine peer."""
    backdoor: float | None

    def honest(self) -> dict[int, float]:
        """Return the scores of honest peers, by number."""
        return {peer: score for peer, score in enumerate(self.scores) if score is not None}

    def mean(self) -> float:
        """Return the mean score of honest peers."""
        return statistics.fmean(self.honest().values())

    def mean_of(self, peers: Collection[int]) -> float:
        """Return the mean score of these peers, as far as they are honest."""
        honest = self.honest()
        return statistics.fmean(honest[peer] for peer in peers if peer in honest)


def measure(cells: "Sequence[GridRun]") -> list[AttackResult]:
    """Return the results of each rule, attack and share, in the order of the runs."""
    by_row: dict[tuple[str, str, float], list[_Outcome]] = {}
    for cell in cells:
        row = (cell.row["rule"], cell.row["attack"], float(cell.row["byzantine"]))
        by_row.setdefault(row, []).append(_read_outcome(cell.path))

    undisturbed = by_row.get(("none", "none", 0.0))
    results = []
    for (rule, attack, share), outcomes in by_row.items():
        result = AttackResult(
            rule,
            attack,
            share,
            seeds=len(outcomes),
            mean=statistics.fmean(outcome.mean() for outcome in outcomes),
            worst=statistics.fmean(min(outcome.honest().values()) for outcome in outcomes),
            retained=_retained(outcomes, undisturbed),
            backdoor=_mean_backdoor(outcomes),
        )
        results.append(result)
    return results


def _read_outcome(run: Path) -> _Outcome:
    from dispfl.runs.directory import read_metrics
    from dispfl.runs.metrics import last_scores

    records = read_metrics(run)
    scores = last_scores(records)
    assert scores is not None  # after the last round models are always evaluated
    backdoor = records[-1].get("backdoor")
    return _Outcome(scores["per_peer"], backdoor["mean"] if backdoor else None)


def _retained(outcomes: Sequence[_Outcome], undisturbed: Sequence[_Outcome] | None) -> float | None:
    """Divide the accuracy of honest peers by that of the same peers in undisturbed runs."""
    if undisturbed is None:
        return None
    attacked_means = []
    undisturbed_means = []
    for attacked, reference in zip(outcomes, undisturbed, strict=True):
        attacked_means.append(attacked.mean())
        undisturbed_means.append(reference.mean_of(attacked.honest()))
    return statistics.fmean(attacked_means) / statistics.fmean(undisturbed_means)


def _mean_backdoor(outcomes: Sequence[_Outcome]) -> float | None:
    rates = [outcome.backdoor for outcome in outcomes if outcome.backdoor is not None]
    return statistics.fmean(rates) if rates else None


def attack_table(results: Sequence[AttackResult]) -> "Table":
    """Return mean and worst honest accuracy in %.

    An attack by a share of Byzantine peers is a row, a rule is a column.
    """
    from dispfl.report.tables import Table, TableColumn

    by_row: dict[tuple[str, float], dict[str, AttackResult]] = {}
    for result in results:
        by_row.setdefault((result.attack, result.byzantine), {})[result.rule] = result
    # Rows without Byzantine peers come first.
    rows = sorted(by_row, key=lambda row: (row[1] > 0, row))

    columns = [
        TableColumn(("attack", ""), [attack for attack, _ in rows], text=True),
        TableColumn(("Byzantine", "peers"), [f"{share:.0%}" for _, share in rows]),
    ]
    for rule in dict.fromkeys(result.rule for result in results):
        cells = [_accuracies(by_row[row][rule]) for row in rows]
        columns.append(TableColumn((rule, ""), cells))
    return Table(columns, _notes(results))


def _accuracies(result: AttackResult) -> str:
    """`75.0 (60)`, with the success of a backdoor and a mark: `75.0 (60), 12% *`."""
    text = f"{100 * result.mean:.1f} ({100 * result.worst:.0f})"
    if result.backdoor is not None:
        text += f", {result.backdoor:.0%}"
    if result.retained is not None and result.retained < ACCEPTABLE:
        text += " *"
    return text


def _notes(results: Sequence[AttackResult]) -> list[str]:
    from dispfl.report.wording import plural

    seeds = plural(results[0].seeds, "seed")
    notes = [f"Mean (worst) accuracy of the honest peers in %; {seeds}."]
    if any(result.retained is not None for result in results):
        notes.append(
            f"* marks less than {ACCEPTABLE:.0%} of what the same peers reach by the plain average"
            " without Byzantine peers."
        )
    if any(result.backdoor is not None for result in results):
        notes.append(
            "After a backdoor's accuracies: the share of inputs with its trigger that are"
            " classified as its target."
        )
    return notes


def _check_robust(method: "Method") -> None:
    """Refuse a method that has no robust rules."""
    from dispfl.registry import METHODS
    from dispfl.robust.averages import Robust

    if not isinstance(method, Robust):
        robust = [name for name in METHODS if issubclass(METHODS[name], Robust)]
        raise ConfigError(
            f"method={METHODS.name_of(method)} has no method.robust; choose one of"
            f" {', '.join(robust)}.",
            key="method",
        )


def _parse_shares(text: str) -> list[float]:
    shares = []
    for item in split_commas(text):
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
