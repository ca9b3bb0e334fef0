"""Fingerprints on a terminal, and questions about them."""

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dispfl.peer.membership.roster import Roster


def echo_fingerprint(fingerprint: str, err: bool = False) -> None:
    """Print a fingerprint in two lines of groups, to be compared by phone."""
    from dispfl.peer.membership.identity import readable_fingerprint

    for line in readable_fingerprint(fingerprint):
        typer.echo(f"    {line}", err=err)


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def confirm(question: str) -> bool:
    """Ask the person at the terminal."""
    return typer.confirm(question)


def ask_about_roster(roster: "Roster") -> bool:
    """Ask the operator whether the fingerprint of a roster's administrators is right; nobody at a
    terminal says no."""
    if not at_terminal():
        return False
    typer.echo(
        f"{roster.threshold} of {len(roster.admins)} administrators sign the roster:"
        f" {', '.join(roster.admins)}. Their fingerprint:\n"
    )
    echo_fingerprint(roster.fingerprint)
    return confirm("\nCompare it with theirs by phone. Is it the same?")
