"""The paper's figures from our runs, and the figure of a run's masks.

A caption in small print says how the runs differ from the paper's, because a figure may be shown
without its page.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.paper.beside_paper import ComparedRow, distinct_labels, group_accuracies
from dispfl.paper.mask_similarity import Matrix, RunMasks
from dispfl.report.comparison import mean_curve
from dispfl.report.plots import MARKER_LIMIT, X_LABELS, save_figure
from dispfl.report.runs import Budget
from dispfl.report.wording import UNKNOWN

PERCENT = 100
SIMILARITY_COLOURS = "viridis"
DISTANCE_COLOURS = "viridis_r"
"""Close pairs are bright in both heat maps."""


def draw_curves(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds: a panel per data set and partition, a line per method."""
    data = distinct_labels(rows, "data")
    partitions = distinct_labels(rows, "partition")
    size = (1.6 + 3.4 * len(data), 0.6 + 2.7 * len(partitions))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(partitions), len(data), squeeze=False, sharex="col")
    colours = _method_colours(rows)
    for row in rows:
        axes = panels[partitions.index(row["partition"])][data.index(row["data"])]
        _line(axes, row, _method(row), colours[_method(row)])
        axes.set_title(_data_and_partition(row), fontsize="small")
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_costs(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds, bytes and FLOPs: a line of panels per data set and partition.

    A method that sends nothing is a dashed line over all bytes: the accuracy that it ends with.
    """
    places = _distinct(map(_data_and_partition, rows))
    budgets = (Budget.ROUNDS, Budget.BYTES, Budget.FLOPS)
    figure = Figure(figsize=(12.6, 0.6 + 3.2 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), len(budgets), squeeze=False, sharex="col", sharey="row")
    colours = _method_colours(rows)
    for row in rows:
        line = panels[places.index(_data_and_partition(row))]
        line[0].set_title(_data_and_partition(row), fontsize="medium")
        for axes, budget in zip(line, budgets, strict=True):
            _line(axes, row, _method(row), colours[_method(row)], budget=budget)
    _finish_curves(figure, panels)
    for axes, budget in zip(panels[-1], budgets, strict=True):
        axes.set_xlabel(X_LABELS[budget])
    # A cohort computes a fraction of what all peers do.
    panels[0][budgets.index(Budget.FLOPS)].set_xscale("log")
    _write(figure, caveat, to)


def draw_drop(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds: a line per drop probability.

    Each method without a topology has one line.
    """
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 1, squeeze=False)
    axes = panels[0][0]
    shades = colormaps["viridis"]
    for row in rows:
        if row["drop"] == UNKNOWN:
            _line(axes, row, row["method"], "0.3", style="--")
        else:
            offline_prob = float(row["drop"])
            label = f"{row['method']}, {PERCENT * offline_prob:g} % offline"
            _line(axes, row, label, shades(0.95 * offline_prob))
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_sparsity(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against sparsity, ours and the paper's."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: -float(row["density"]))
    sparsity = []
    our_accuracies = []
    printed_accuracies = []
    for row in ordered:
        sparsity.append(round(1 - float(row["density"]), 3))
        our_accuracies.append(_percent(row.row.score))
        printed = row.printed_accuracy
        printed_accuracies.append(_percent(printed.value if printed else None))
    axes.plot(sparsity, our_accuracies, "o-", color="C0", label="ours")
    axes.plot(sparsity, printed_accuracies, "s--", color="C7", label="paper")
    y_label = "accuracy, mean over peers, %"
    axes.set(xlabel="sparsity (1 − density)", ylabel=y_label, xticks=sparsity)
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, caveat, to)


def draw_groups(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw the accuracy of each group of peers: a panel per partition, a colour per model."""
    groups = group_accuracies(rows)
    partitions = _distinct(partition for partition, _ in groups)
    models = _distinct(model for _, model in groups)

    figure = Figure(figsize=(1 + 3.6 * len(partitions), 3.8), layout="constrained")
    panels = figure.subplots(1, len(partitions), squeeze=False, sharey=True)[0]
    for axes, partition in zip(panels, partitions, strict=True):
        for number, model in enumerate(models):
            _bars(axes, groups.get((partition, model), {}), number, len(models), model)
        axes.set_title(partition, fontsize="medium")
        axes.set(xlabel="density of the peers' models", ylim=(0, 109))
    panels[0].set_ylabel("accuracy, mean over the group, %")
    if len(models) > 1:
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", fontsize="small")
    _write(figure, caveat, to)


def draw_masks(masks: RunMasks, to: Path) -> None:
    """Draw the paper's two heat maps side by side, and the overlap of neighbours below."""
    columns = 1 if masks.similarities is None else 2
    heights = [4.0]
    if masks.overlap:
        heights.append(1.4)
    figure = Figure(figsize=(4.6 * columns, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    title = masks.title
    if masks.similarities is not None:
        title += f"\n{masks.sentence}"
        axes = figure.add_subplot(grid[0, 0])
        axes.set_title("Data: bright where similar", fontsize="medium")
        scale = "cosine similarity of label distributions"
        _heat_map(figure, axes, masks.similarities, masks.groups, SIMILARITY_COLOURS, scale)
    axes = figure.add_subplot(grid[0, columns - 1])
    axes.set_title("Masks: bright where close", fontsize="medium")
    scale = "Hamming distance, fraction of all weights"
    _heat_map(figure, axes, masks.distances, masks.groups, DISTANCE_COLOURS, scale)
    if masks.overlap:
        _overlap(figure.add_subplot(grid[1, :]), masks)
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, to)


def _distinct(values: Iterable[str]) -> list[str]:
    """Return values without repetitions, in order of appearance."""
    return list(dict.fromkeys(values))


def _method_colours(rows: Sequence[ComparedRow]) -> dict[str, str]:
    methods = _distinct(map(_method, rows))
    return {method: f"C{number % 10}" for number, method in enumerate(methods)}


def _method(row: ComparedRow) -> str:
    if row["variant"] == UNKNOWN:
        return row["method"]
    return f"{row['method']} ({row['variant']})"


def _data_and_partition(row: ComparedRow) -> str:
    """Return `cifar10, dirichlet`, or `fashion-sample for cifar10, dirichlet`."""
    data = row.row.runs[0].config["data"]["name"]
    if data != row["data"]:
        data = f"{data} for {row['data']}"
    return f"{data}, {row['partition']}"


def _bars(axes: Any, groups: Mapping[float, float], number: int, models: int, label: str) -> None:
    width = 0.8 / models
    centres = np.arange(len(groups)) - 0.4 + width * (number + 0.5)
    heights = PERCENT * np.array(list(groups.values()))
    bars = axes.bar(centres, heights, 0.92 * width, color=f"C{number}", label=label)
    axes.bar_label(bars, fmt="%.0f", fontsize="small", padding=1)
    axes.set_xticks(range(len(groups)), [f"{density:g}" for density in groups])


def _line(
    axes: Any,
    row: ComparedRow,
    label: str,
    colour: Any,
    style: str = "-",
    budget: Budget = Budget.ROUNDS,
) -> None:
    """Draw the mean over seeds, with a band of one standard deviation."""
    curve = mean_curve(row.row, budget)
    mean = PERCENT * np.array(curve.mean)
    std = PERCENT * np.array(curve.std)
    width = 2.0 if row["method"] == "dispfl" else 1.2
    if not any(curve.x):
        axes.axhline(mean[-1], linestyle="--", label=label, color=colour, linewidth=width)
        return
    axes.plot(curve.x, mean, style, label=label, color=colour, linewidth=width)
    axes.fill_between(curve.x, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)


def _finish_curves(figure: Figure, panels: Any) -> None:
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes in panels[-1]:
        axes.set_xlabel("communication round")
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy, mean over peers, %")
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize="small")


def _heat_map(
    figure: Figure, axes: Any, matrix: Matrix, groups: tuple[int, ...], colours: str, scale: str
) -> None:
    """Draw one cell per pair.

    The diagonal stays empty: zero distances would take up most of the colour scale.
    """
    pairs = np.ma.masked_array(matrix, np.eye(len(matrix), dtype=bool))
    image = axes.imshow(pairs, cmap=colours, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label=scale)
    for end in list(accumulate(groups))[:-1]:
        axes.axhline(end - 0.5, color="white", linewidth=1.5)
        axes.axvline(end - 0.5, color="white", linewidth=1.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="peer", ylabel="peer")


def _overlap(axes: Any, masks: RunMasks) -> None:
    rows = [(entry["round"], entry["mean"], entry["std"]) for entry in masks.overlap]
    rounds, mean, std = np.array(rows).T
    marker = "." if len(rounds) < MARKER_LIMIT else ""
    axes.plot(rounds, mean, color="C0", marker=marker)
    axes.fill_between(rounds, mean - std, mean + std, color="C0", alpha=0.15, linewidth=0)
    axes.set(xlabel="communication round", ylabel="fraction")
    axes.set_title("Kept weights of a peer that a neighbour keeps too", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)


def _percent(fraction: float | None) -> float:
    if fraction is None:
        return math.nan
    return PERCENT * fraction


def _write(figure: Figure, caveat: str, to: Path) -> None:
    """Write a figure with the caveat in small print below."""
    if caveat:
        width = int(figure.get_figwidth() * 15)
        figure.supxlabel(textwrap.fill(caveat, width), fontsize=7, color="0.35", x=0.01, ha="left")
    save_figure(figure, to)
