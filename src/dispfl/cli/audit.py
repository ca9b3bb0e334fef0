"""`dispfl audit`: what attackers learn about the samples of a run, measured by attacking it."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.errors import ConfigError
from dispfl.terminal import print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.privacy.audit.membership_inference import Interval
    from dispfl.privacy.audit.run_audit import AuditResult


def audit(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a finished run.")
    ],
    shadows: Annotated[
        int,
        typer.Option(
            min=0, help="Shadow federations to train, an even number; 0: attack without any."
        ),
    ] = 8,
    canaries: Annotated[
        int | None,
        typer.Option(
            min=0, help="Canaries of each peer; default: a quarter of its samples; 0: none."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder with the data set's files.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a finished run, and print what its models and masks tell about the peers' samples.

    Membership inference against each personal model and against what a
    neighbour received, by likelihood ratios; a lower bound of epsilon from
    canaries, beside the accounted upper bound; and how well a peer's label
    histogram is guessed from its mask.
    It trains the run again for each shadow, and once with canaries, in
    RUN/audit, which is resumed if interrupted; this takes as long as so many
    runs. With --shadows 0 --canaries 0 nothing is trained. The result is
    also written to RUN/audit.json.

    Example: dispfl audit runs/dispfl-fashion-sample --shadows 4
    """
    from rich.console import Console

    from dispfl.cli.grid import run_grid
    from dispfl.cli.run import data_dir_override
    from dispfl.privacy.audit.run_audit import Audit

    if not directory.is_dir():
        raise ConfigError(f"{directory} does not exist; name the directory of a finished run.")
    work = Audit(directory, shadows, canaries, data_dir_override(data_dir))
    runs = work.runs
    if runs:
        work.make_folder()
        run_grid(runs, Console(stderr=as_json))
    result = work.result()
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        print_audit(result, Console())
    file = work.write(result)  # after it is printed: a disk may refuse
    if not as_json:
        print_text(Console(), f"Written: {file}")


def print_audit(result: "AuditResult", console: "Console") -> None:
    """Print the result for a reader who answers for data."""
    say = partial(print_text, console)
    say("\nCan an attacker tell whether a record was in a peer's training data?", "bold")
    console.print(_membership_table(result))
    how = (
        f"likelihood ratios with {result.shadows} shadow federations"
        if result.shadows
        else "the confidence alone"
    )
    say(
        f"By {how}; {result.pairs:,} records of the peers and as many others, [95 % interval]. A"
        " blind guess has AUC 0.5, and finds as large a share as it raises false alarms.",
        "dim",
    )
    say("\nHow much can a model depend on one record (epsilon)?", "bold")
    say(f"at least  {_at_least(result)}")
    say(f"at most   {_at_most(result)}")
    if result.labels:
        say("\nDo masks tell which classes a peer has?", "bold")
        console.print(_label_table(result))
        say(
            "Distance of the guessed class histogram from the true one (0: equal, 1: disjoint),"
            " mean over peers; main class: how often it is guessed. By chance: how often guesses"
            " are as close if masks tell nothing.",
            "dim",
        )


def _at_least(result: "AuditResult") -> str:
    found = result.canaries
    if found is None:
        return "not measured: no canaries"
    right = f"{found.correct} of {found.guesses} guesses about {found.canaries} canaries are right"
    return (
        f"{found.epsilon:.2f}   ({result.confidence:.0%} confidence: {right}; so many canaries show"
        f" at most {found.largest:.1f})"
    )


def _at_most(result: "AuditResult") -> str:
    if result.accounted_epsilon is None:
        return "no bound: this run is not private"
    return f"{result.accounted_epsilon:.2f}   (accounted, with delta {result.delta:g})"


def _membership_table(result: "AuditResult") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for one in result.membership:
        table.add_column(one.view, justify="right", no_wrap=True)
    worst = [max(one.per_peer, key=lambda peer: one.per_peer[peer]) for one in result.membership]
    table.add_row("AUC", *(_interval(one.auc) for one in result.membership))
    table.add_row(
        "worst peer",
        *(f"{one.per_peer[k]:.2f} ({k})" for one, k in zip(result.membership, worst, strict=True)),
    )
    for rate in result.membership[0].tpr:
        shares = (_interval(one.tpr[rate], percent=True) for one in result.membership)
        table.add_row(f"found at {100 * float(rate):g} % false alarms", *shares)
    return table


def _interval(found: "Interval | None", percent: bool = False) -> str:
    if found is None:
        return "too few records"
    numbers = (found.value, found.low, found.high)
    value, low, high = (f"{100 * number:.1f}" if percent else f"{number:.3f}" for number in numbers)
    return f"{value}{' %' * percent} [{low}, {high}]"


def _label_table(result: "AuditResult") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "guessed from",
        "distance",
        "(no masks)",
        "main class",
        "(no masks)",
        "by chance",
    ):
        table.add_column(column, justify="left" if column == "guessed from" else "right")
    for one in result.labels:
        table.add_row(
            one.how,
            f"{one.distance:.3f}",
            f"{one.baseline:.3f}",
            f"{one.hits:.0%}",
            f"{one.baseline_hits:.0%}",
            f"{one.p_value:.3f}",
        )
    return table
