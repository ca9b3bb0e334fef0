"""`dispfl costs --paper`: every cost figure of the paper beside ours."""

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from dispfl.cli.costs import table_of
from dispfl.costs.against_paper import Figure, Section, Verdict, sections


def compare_with_the_paper(console: Console, as_json: bool) -> None:
    """Print all figures; exit with 1 if one of them is off."""
    found = sections()
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        for section in found:
            _print_section(console, section)
        for sentence in _summary(found):
            console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    if _counts(found)[Verdict.OFF]:
        raise typer.Exit(1)


def _counts(found: Sequence[Section]) -> dict[Verdict, int]:
    verdicts = [figure.verdict for section in found for figure in section.figures]
    return {verdict: verdicts.count(verdict) for verdict in Verdict}


def _as_json(found: Sequence[Section]) -> dict[str, Any]:
    return {
        "figures": [
            {
                "table": section.table.number,
                "label": section.table.label,
                "data": section.data,
                "model": section.model,
                "topology": figure.row.topology,
                "method": figure.row.method,
                "density": figure.row.density,
                "figure": f"{section.table.comm}_mb" if figure.column == "comm" else "flops_per_peer_round",
                "paper": figure.printed and figure.printed.value,
                "ours": figure.ours,
                "deviation": figure.deviation,
                "verdict": figure.verdict.value,
            }
            for section in found
            for figure in section.figures
        ],
        "errata": _errata(found),
        "verdicts": {verdict.value: count for verdict, count in _counts(found).items()},
    }


def _print_section(console: Console, section: Section) -> None:
    flops = f"1e{section.table.flops_unit.adjusted()}"
    names = ("paper", "ours", "off by")
    columns = [f"{unit}\n{name}" for unit in ("MB", flops) for name in names]
    table = table_of("\nmethod", "\ndensity", "\ntopology", *columns)
    lines: dict[tuple[str, str, str], dict[str, Figure]] = {}
    for figure in section.figures:
        row = figure.row
        lines.setdefault((row.method, _density(row.density), row.topology or "–"), {})[figure.column] = figure
    for name, figures in lines.items():
        table.add_row(*name, *(cell for column in ("comm", "flops") for cell in _cells(figures.get(column))))
    whose = "the busiest node" if section.table.comm == "busiest" else "a node on average"
    title = f"Table {section.table.number}: {section.model} on {section.data}; MB of {whose}, FLOPs in {flops}"
    console.print(title, style="bold", highlight=False)
    console.print(table, "", sep="\n")


def _density(density: float | tuple[float, ...] | None) -> str:
    if density is None:
        return "?"
    return f"{min(density):g}–{max(density):g}" if isinstance(density, tuple) else f"{density:g}"


def _cells(figure: Figure | None) -> tuple[str, str, str]:
    """The paper's number, ours with a digit more, and the deviation or what else there is to say."""
    if figure is None:
        return "–", "–", ""
    printed = figure.printed
    unit = float(printed.unit) if printed else 1e12
    decimals = 1 - int(printed.digits.as_tuple().exponent) if printed else 2
    ours = f"{figure.ours / unit:.{decimals}f}"
    match figure.verdict:
        case Verdict.TRAINED:
            return str(printed), "–", "trained"
        case Verdict.MISPRINT:
            return str(printed or "blank"), ours, "misprint"
        case Verdict.OFF:
            return str(printed), ours, f"{figure.deviation:+.2%} !"
    return str(printed), ours, f"{figure.deviation:+.2%}"


def _summary(found: Sequence[Section]) -> list[str]:
    counts, errata = _counts(found), _errata(found)
    agree, off = counts[Verdict.AGREES], counts[Verdict.OFF]
    marked = f"; {off} do not, marked with !" if off else ""
    return [
        f"{agree} of {agree + off} figures agree within 0.5 % or one last digit (the paper cuts digits off){marked}.",
        f"trained: {counts[Verdict.TRAINED]} figures of subfedavg depend on what was pruned while training.",
        f"misprint: {len(errata)} figures cannot be meant as printed:",
        *(f"  {sentence}" for sentence in errata),
    ]


def _errata(found: Sequence[Section]) -> list[str]:
    return [
        f"Table {section.table.number}: {figure.erratum.sentence}"
        for section in found
        for figure in section.figures
        if figure.erratum
    ]
