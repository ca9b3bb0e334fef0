"""`dispfl audit`: what attackers learn about the samples of a run, measured by attacking it."""

import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispfl.cli.completion import complete_runs
from dispfl.cli.run import TrustOption
from dispfl.errors import ConfigError, reading
from dispfl.terminal import SafeConsole, print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.privacy.audit.membership_inference import Interval, MembershipResult
    from dispfl.privacy.audit.run_audit import AuditResult


def audit(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The directory of a finished run.",
            autocompletion=complete_runs,
        ),
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
    trust: TrustOption = False,
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

    from dispfl.cli.grid import run_grid
    from dispfl.cli.run import data_dir_override
    from dispfl.privacy.audit.run_audit import Audit

    if not directory.is_dir():
        raise ConfigError(f"{directory} does not exist; name the directory of a finished run.")
    with reading(directory):
        run_audit = Audit(directory, shadows, canaries, data_dir_override(data_dir), trust=trust)
        runs = run_audit.runs
    if runs:
        run_audit.make_folder()
        run_grid(runs, SafeConsole(stderr=as_json))
    with reading(directory):
        result = run_audit.result()
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        print_audit(result, SafeConsole())
    file = run_audit.write(result)  # after it is printed: a disk may refuse
    if not as_json:
        print_text(SafeConsole(), f"Written: {file}")


def print_audit(result: "AuditResult", console: "Console") -> None:
    """Print the result for a reader who answers for data."""
    write = partial(print_text, console)
    write("\nCan an attacker tell whether a record was in a peer's training data?", "bold")
    console.print(_membership_table(result))
    attack = "the confidence alone"
    if result.shadows:
        attack = f"likelihood ratios with {result.shadows} shadow federations"
    write(
        f"By {attack}; {result.pairs:,} records of the peers and as many others, [95 % interval]. A"
        " blind guess has AUC 0.5, and finds as large a share as it raises false alarms.",
        "dim",
    )
    write("\nHow much can a model depend on one record (epsilon)?", "bold")
    write(f"at least  {_at_least(result)}")
    write(f"at most   {_at_most(result)}")
    if result.labels:
        write("\nDo masks tell which classes a peer has?", "bold")
        console.print(_label_table(result))
        write(
            "Distance of the guessed class histogram from the true one (0: equal, 1: disjoint),"
            " mean over peers; main class: how often it is guessed. By chance: how often guesses"
            " are as close if masks tell nothing.",
            "dim",
        )


def _at_least(result: "AuditResult") -> str:
    canaries = result.canaries
    if canaries is None:
        return "not measured: no canaries"
    return (
        f"{canaries.epsilon:.2f}   ({result.confidence:.0%} confidence: {canaries.correct} of"
        f" {canaries.guesses} guesses about {canaries.canaries} canaries are right; so many"
        f" canaries show at most {canaries.largest:.1f})"
    )


def _at_most(result: "AuditResult") -> str:
    if result.accounted_epsilon is None:
        return "no bound: this run is not private"
    return f"{result.accounted_epsilon:.2f}   (accounted, with delta {result.delta:g})"


def _membership_table(result: "AuditResult") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    membership = result.membership
    table.add_column("")
    for attack in membership:
        table.add_column(attack.view, justify="right", no_wrap=True)
    table.add_row("AUC", *(_interval(attack.auc) for attack in membership))
    table.add_row("worst peer", *map(_worst_peer, membership))
    for rate in membership[0].tpr:
        shares = (_percent_interval(attack.tpr[rate]) for attack in membership)
        table.add_row(f"found at {100 * float(rate):g} % false alarms", *shares)
    return table


def _worst_peer(attack: "MembershipResult") -> str:
    """The peer whose members are told best, with its area under the curve."""
    peer, area = max(attack.per_peer.items(), key=itemgetter(1))
    return f"{area:.2f} ({peer})"


def _interval(interval: "Interval") -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _percent_interval(interval: "Interval | None") -> str:
    if interval is None:
        return "too few records"
    low = 100 * interval.low
    high = 100 * interval.high
    return f"{100 * interval.value:.1f} % [{low:.1f}, {high:.1f}]"


def _label_table(result: "AuditResult") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("guessed from")
    for heading in ("distance", "(no masks)", "main class", "(no masks)", "by chance"):
        table.add_column(heading, justify="right")
    for guess in result.labels:
        table.add_row(
            guess.how,
            f"{guess.distance:.3f}",
            f"{guess.baseline:.3f}",
            f"{guess.hits:.0%}",
            f"{guess.baseline_hits:.0%}",
            f"{guess.p_value:.3f}",
        )
    return table
