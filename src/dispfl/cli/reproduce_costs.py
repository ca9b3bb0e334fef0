"""What `dispfl reproduce` will cost: the list of experiments, and the hours of one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dispfl.cli.costs import table_of
from dispfl.grid import Cell
from dispfl.reproduce.experiments import SCALES, PaperExperiment, find, names
from dispfl.reproduce.work import hours_left

LEGEND = (
    "Runs that several of them share are run once. min: about, on two cores. FLOPs: of all runs, by dense kernels;",
    "1e18 take a day at 1e13 a second (a GPU), and four months at 1e11 (two cores).",
    "Run one: dispfl reproduce NAME. With --scale paper it first measures how many hours that takes here.",
)


def print_list(as_json: bool) -> None:
    """Print the experiments, with a sentence each and what they cost at both scales."""
    listed = sorted((_listed(name) for name in names("laptop")), key=lambda one: _place_in_paper(one["shows"]))
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    console = Console()
    for one in listed:
        costs = f"laptop {_cost(one['laptop'])} · paper {_cost(one['paper'])}"
        console.print(f"[bold]{one['name']:<26}[/]{one['shows']:<10}[dim]{costs}[/]", highlight=False, soft_wrap=True)
        console.print(f"    {one['title']}", highlight=False, soft_wrap=True, markup=False)
    console.print()
    for sentence in LEGEND:
        console.print(sentence, style="dim", soft_wrap=True, highlight=False)


def print_hours(cells: Sequence[Cell], console: Console, as_json: bool) -> None:
    """Measure a training batch of each kind and print the hours that runs take, by method."""
    with console.status("Measuring a training batch ..."):
        found = hours_left(cells)
    total = sum(line.hours for line in found)
    if as_json:
        by_method = [{"method": line.method, "runs": line.runs, "hours": line.hours} for line in found]
        typer.echo(json.dumps({"hours": total, "methods": by_method}, indent=2))
        return
    table = table_of("method", "runs", "hours a run", "hours")
    for line in found:
        table.add_row(line.method, str(line.runs), *(_number(hours) for hours in (line.hours / line.runs, line.hours)))
    table.add_section()
    table.add_row("all", str(len(cells)), "", _number(total))
    console.print("", table, "", sep="\n")
    experiment = cells[0].experiment
    where = f"{experiment.threads} threads" if experiment.device == "cpu" else f"device {experiment.device}"
    time = f"{_number(total)} hours, or {_number(total / 24)} days,"
    said = f"About {time} on this machine ({where}), from a measured training batch."
    console.print(said, soft_wrap=True, highlight=False)


def _listed(name: str) -> dict[str, Any]:
    both = {scale: find(name, scale) for scale in SCALES}
    about = both["laptop"].about
    costs = {scale: _costs(experiment) for scale, experiment in both.items()}
    return {"name": name, "shows": about.shows, "title": about.title} | costs


def _costs(experiment: PaperExperiment) -> dict[str, Any]:
    about = experiment.about
    different = {run.cell.path for run in experiment.runs(Path(), seeds=1)}
    return {"runs": about.seeds * len(different), "minutes": about.minutes, "flops": about.flops}


def _cost(costs: dict[str, Any]) -> str:
    """`45 runs, 11 min`, or FLOPs where minutes would be the wrong unit."""
    runs, minutes, flops = costs["runs"], costs["minutes"], costs["flops"]
    size = f"{minutes:g} min" if minutes else f"{flops:.0e} FLOPs".replace("e+", "e")
    return f"{runs} run{'s' if runs > 1 else ''}, {size}"


def _place_in_paper(shows: str) -> tuple[bool, int]:
    """Tables by their number, then figures."""
    kind, _, number = shows.partition(" ")
    return kind != "Table", int(number)


def _number(value: float) -> str:
    """Two digits or so: more would pretend to know."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
