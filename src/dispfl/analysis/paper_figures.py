"""The paper's figures from our runs. Each says in small print in what its runs are not the paper's."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.analysis.comparison import Budget
from dispfl.analysis.curves import curve
from dispfl.analysis.paper_columns import Entry
from dispfl.runs.directory import read_config, read_summary
from dispfl.runs.files import write_atomically

PERCENT = 100


def draw_curves(entries: Sequence[Entry], caveat: str, to: Path) -> None:
    """Accuracy against rounds: a panel for each data set and partition, a line for each method."""
    data, partitions = (list(dict.fromkeys(entry[key] for entry in entries)) for key in ("data", "partition"))
    figure = Figure(figsize=(1.6 + 3.4 * len(data), 0.6 + 2.7 * len(partitions)), layout="constrained")
    panels = figure.subplots(len(partitions), len(data), squeeze=False, sharex="col")
    methods = list(dict.fromkeys(entry["method"] for entry in entries))
    for entry in entries:
        axes = panels[partitions.index(entry["partition"])][data.index(entry["data"])]
        _line(axes, entry, entry["method"], f"C{methods.index(entry['method']) % 10}")
        axes.set_title(_setting(entry), fontsize="medium")
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_drop(entries: Sequence[Entry], caveat: str, to: Path) -> None:
    """Accuracy against rounds: a line for each probability of dropping out, and one of each other method."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 1, squeeze=False)
    shades = colormaps["viridis"]
    for entry in entries:
        drop, method = entry["drop"], entry["method"]
        if drop == "–":
            _line(panels[0][0], entry, method, "0.3", dashed=True)
        else:
            _line(panels[0][0], entry, f"{method}, {PERCENT * float(drop):g} % offline", shades(0.95 * float(drop)))
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_sparsity(entries: Sequence[Entry], caveat: str, to: Path) -> None:
    """Accuracy against sparsity, ours and the paper's."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    known = sorted(entries, key=lambda entry: -float(entry["density"]))
    sparsity = [round(1 - float(entry["density"]), 3) for entry in known]
    axes.plot(sparsity, [_percent(entry.row.accuracy) for entry in known], "o-", color="C0", label="ours")
    axes.plot(sparsity, [_percent(entry.printed_accuracy) for entry in known], "s--", color="C7", label="paper")
    axes.set(xlabel="sparsity (1 − density)", ylabel="accuracy, mean over peers, %", xticks=sparsity)
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, caveat, to)


def group_accuracies(entries: Sequence[Entry]) -> dict[tuple[str, str], dict[float, float]]:
    """The accuracy of each group of peers of one density, mean over seeds, by partition and model."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for entry in entries:
        scores: dict[float, list[float]] = {}
        for run in entry.row.runs:
            for group in (read_summary(run.path) or {"groups": []})["groups"]:
                scores.setdefault(group["density"], []).append(group["mean"])
        means = {density: statistics.fmean(values) for density, values in scores.items()}
        found[entry["partition"], read_config(entry.row.runs[0].path)["model"]["name"]] = means
    return found


def draw_groups(entries: Sequence[Entry], caveat: str, to: Path) -> None:
    """Bars: the accuracy of each group of peers, a panel for each partition, a colour for each model."""
    groups = group_accuracies(entries)
    partitions, models = (list(dict.fromkeys(key[i] for key in groups)) for i in (0, 1))
    figure = Figure(figsize=(1 + 3.6 * len(partitions), 3.8), layout="constrained")
    panels = figure.subplots(1, len(partitions), squeeze=False, sharey=True)[0]
    for axes, partition in zip(panels, partitions, strict=True):
        for number, model in enumerate(models):
            _bars(axes, groups.get((partition, model), {}), number, len(models), model)
        axes.set_title(partition, fontsize="medium")
        axes.set(xlabel="density of the peers' models", ylim=(0, 109))
    panels[0].set_ylabel("accuracy, mean over the group, %")
    if len(models) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    _write(figure, caveat, to)


def _setting(entry: Entry) -> str:
    """`cifar10, dirichlet`, or `fashion-sample for cifar10, dirichlet`."""
    data, papers = read_config(entry.row.runs[0].path)["data"]["name"], entry["data"]
    return f"{data if data == papers else f'{data} for {papers}'}, {entry['partition']}"


def _bars(axes: Any, groups: Mapping[float, float], number: int, models: int, label: str) -> None:
    width = 0.8 / models
    places = [place - 0.4 + width * (number + 0.5) for place in range(len(groups))]
    bars = axes.bar(
        places, [PERCENT * value for value in groups.values()], 0.92 * width, color=f"C{number}", label=label
    )
    axes.bar_label(bars, fmt="%.0f", fontsize="small", padding=1)
    axes.set_xticks(range(len(groups)), [f"{density:g}" for density in groups])


def _line(axes: Any, entry: Entry, label: str, colour: Any, dashed: bool = False) -> None:
    """Mean over seeds, with a band of one standard deviation over them."""
    rounds, mean, spread = curve(entry.row, Budget.ROUNDS)
    percent = [PERCENT * value for value in mean]
    width = 2.0 if entry["method"] == "dispfl" else 1.2
    axes.plot(rounds, percent, "--" if dashed else "-", label=label, color=colour, linewidth=width)
    low, high = ([m + sign * PERCENT * s for m, s in zip(percent, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)


def _finish_curves(figure: Figure, panels: Any) -> None:
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes in panels[-1]:
        axes.set_xlabel("communication round")
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy, mean over peers, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")


def _percent(share: float | None) -> float:
    return float("nan") if share is None else PERCENT * share


def _write(figure: Figure, caveat: str, to: Path) -> None:
    """With what the figure is not in small print below; a picture travels without the page that it was made for."""
    if caveat:
        width = int(figure.get_figwidth() * 15)
        figure.supxlabel(textwrap.fill(caveat, width), fontsize=7, color="0.35", x=0.01, ha="left")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(to, picture.getvalue())
