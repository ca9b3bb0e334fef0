"""`dispfl peer doctor`: prints what the checks of a site find."""

import json
import shutil
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dispfl.peer.doctor.findings import Finding

LEVEL_WIDTH, TOPIC_WIDTH, MAX_WIDTH = 9, 13, 100
COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failure": typer.colors.RED}


def print_findings(folder: Path, as_json: bool) -> bool:
    """Print every finding as it is made, or all as JSON; return whether nothing has failed."""
    from dispfl.peer.doctor.examine import examine

    findings = []
    for finding in examine(folder):
        findings.append(finding)
        if not as_json:
            _print(finding)
    levels = Counter(str(finding.level) for finding in findings)
    counts = {"failures": levels["failure"], "warnings": levels["warning"]}
    if as_json:
        typer.echo(
            json.dumps({**counts, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        typer.echo(
            "\n"
            + ", ".join(
                f"{count or 'no'} {what.removesuffix('s') if count == 1 else what}"
                for what, count in counts.items()
            )
            + "."
        )
    return not counts["failures"]


def _print(finding: "Finding") -> None:
    """`ok  key  readable by its owner alone`, and below it what to do, as wide as the terminal."""
    topic = (
        f"{finding.topic} "
        if len(finding.topic) >= TOPIC_WIDTH
        else f"{finding.topic:<{TOPIC_WIDTH}}"
    )
    text = _wrapped(" " * LEVEL_WIDTH + topic, finding.text)[LEVEL_WIDTH:]
    typer.echo(typer.style(f"{finding.level:<{LEVEL_WIDTH}}", fg=COLOURS[finding.level]) + text)
    if finding.advice:
        typer.echo(_wrapped(" " * (LEVEL_WIDTH + TOPIC_WIDTH) + "-> ", finding.advice, indent=3))


def _wrapped(beginning: str, text: str, indent: int = 0) -> str:
    width = min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    below = " " * (LEVEL_WIDTH + TOPIC_WIDTH + indent)
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=beginning,
        subsequent_indent=below,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapper.fill(text)
