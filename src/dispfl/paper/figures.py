"""The paper's figures from our runs, and the figure of a run's masks.

A caption in small print says how the runs differ from the paper's, because a figure may be shown
without its page.
"""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.paper.comparison import ComparedRow, group_accuracies
from dispfl.paper.mask_similarity import RunMasks
from dispfl.paper.similarity import Matrix
from dispfl.report.comparison import mean_curve
from dispfl.report.plots import X_LABELS, save_figure
from dispfl.report.runs import Budget
from dispfl.report.wording import UNKNOWN
from dispfl.runs.directory import read_config

PERCENT = 100
SIMILARITY_COLOURS, DISTANCE_COLOURS = (
    "viridis",
    "viridis_r",
)  # close pairs are bright in both heat maps


def draw_curves(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds: a panel per data set and partition, a line per method."""
    data, partitions = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "partition")
    )
    figure = Figure(
        figsize=(1.6 + 3.4 * len(data), 0.6 + 2.7 * len(partitions)), layout="constrained"
    )
    panels = figure.subplots(len(partitions), len(data), squeeze=False, sharex="col")
    methods = list(dict.fromkeys(map(_method, rows)))
    for row in rows:
        axes = panels[partitions.index(row["partition"])][data.index(row["data"])]
        _line(axes, row, _method(row), f"C{methods.index(_method(row)) % 10}")
        axes.set_title(_data_and_partition(row), fontsize="small")
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_costs(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds, bytes of the busiest node and FLOPs of all peers: a line of
    panels per part.

    A method that sends nothing is a dashed line over all bytes: the accuracy that it ends with.
    """
    parts = list(dict.fromkeys(map(_data_and_partition, rows)))
    budgets = (Budget.ROUNDS, Budget.BYTES, Budget.FLOPS)
    figure = Figure(figsize=(12.6, 0.6 + 3.2 * len(parts)), layout="constrained")
    panels = figure.subplots(len(parts), len(budgets), squeeze=False, sharex="col", sharey="row")
    methods = list(dict.fromkeys(map(_method, rows)))
    for row in rows:
        line = panels[parts.index(_data_and_partition(row))]
        line[0].set_title(_data_and_partition(row), fontsize="medium")
        for axes, budget in zip(line, budgets, strict=True):
            _line(axes, row, _method(row), f"C{methods.index(_method(row)) % 10}", budget=budget)
    _finish_curves(figure, panels)
    for axes, budget in zip(panels[-1], budgets, strict=True):
        axes.set_xlabel(X_LABELS[budget])
    panels[0][budgets.index(Budget.FLOPS)].set_xscale(
        "log"
    )  # a cohort computes a fraction of what all peers do
    _write(figure, caveat, to)


def draw_drop(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against rounds: a line per drop probability, and one for each method without a
    topology."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 1, squeeze=False)
    shades = colormaps["viridis"]
    for row in rows:
        offline_prob, method = row["drop"], row["method"]
        if offline_prob == "–":
            _line(panels[0][0], row, method, "0.3", dashed=True)
        else:
            _line(
                panels[0][0],
                row,
                f"{method}, {PERCENT * float(offline_prob):g} % offline",
                shades(0.95 * float(offline_prob)),
            )
    _finish_curves(figure, panels)
    _write(figure, caveat, to)


def draw_sparsity(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw accuracy against sparsity, ours and the paper's."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: -float(row["density"]))
    sparsity = [round(1 - float(row["density"]), 3) for row in ordered]
    axes.plot(
        sparsity, [_percent(row.row.score) for row in ordered], "o-", color="C0", label="ours"
    )
    axes.plot(
        sparsity,
        [_percent(row.printed_accuracy) for row in ordered],
        "s--",
        color="C7",
        label="paper",
    )
    axes.set(
        xlabel="sparsity (1 − density)", ylabel="accuracy, mean over peers, %", xticks=sparsity
    )
    axes.grid(alpha=0.3)
    axes.legend()
    _write(figure, caveat, to)


def draw_groups(rows: Sequence[ComparedRow], caveat: str, to: Path) -> None:
    """Draw the accuracy of each group of peers as bars: a panel per partition, a colour per
    model."""
    groups = group_accuracies(rows)
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
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small"
        )
    _write(figure, caveat, to)


def draw_masks(found: RunMasks, to: Path) -> None:
    """Draw the paper's two heat maps side by side, and below them the overlap of neighbours by
    round, if recorded."""
    maps: list[tuple[str, str, str, Matrix]] = [
        (
            "Masks: bright where close",
            "Hamming distance, fraction of all weights",
            DISTANCE_COLOURS,
            found.distances,
        )
    ]
    if found.similarities is not None:
        scale = "cosine similarity of label distributions"
        maps.insert(
            0, ("Data: bright where similar", scale, SIMILARITY_COLOURS, found.similarities)
        )
    heights = [4.0, 1.4] if found.overlap else [4.0]
    figure = Figure(figsize=(4.6 * len(maps), sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), len(maps), height_ratios=heights)
    for column, (title, scale, colours, matrix) in enumerate(maps):
        axes = figure.add_subplot(grid[0, column])
        _heat_map(figure, axes, matrix, found.groups, colours, scale)
        axes.set_title(title, fontsize="medium")
    if found.overlap:
        _overlap(figure.add_subplot(grid[1, :]), found)
    figure.suptitle(
        found.title if found.similarities is None else f"{found.title}\n{found.sentence}",
        fontsize="medium",
    )
    save_figure(figure, to)


def _method(row: ComparedRow) -> str:
    return row["method"] if row["variant"] == UNKNOWN else f"{row['method']} ({row['variant']})"


def _data_and_partition(row: ComparedRow) -> str:
    """Return `cifar10, dirichlet`, or `fashion-sample for cifar10, dirichlet`."""
    data, papers = read_config(row.row.runs[0].path)["data"]["name"], row["data"]
    return f"{data if data == papers else f'{data} for {papers}'}, {row['partition']}"


def _bars(axes: Any, groups: Mapping[float, float], number: int, models: int, label: str) -> None:
    width = 0.8 / models
    centres = [group - 0.4 + width * (number + 0.5) for group in range(len(groups))]
    bars = axes.bar(
        centres,
        [PERCENT * value for value in groups.values()],
        0.92 * width,
        color=f"C{number}",
        label=label,
    )
    axes.bar_label(bars, fmt="%.0f", fontsize="small", padding=1)
    axes.set_xticks(range(len(groups)), [f"{density:g}" for density in groups])


def _line(
    axes: Any,
    row: ComparedRow,
    label: str,
    colour: Any,
    dashed: bool = False,
    budget: Budget = Budget.ROUNDS,
) -> None:
    """Draw the mean over seeds, with a band of one standard deviation."""
    curve = mean_curve(row.row, budget)
    spent, mean, spread = curve.x, curve.mean, curve.std
    percent = [PERCENT * value for value in mean]
    width = 2.0 if row["method"] == "dispfl" else 1.2
    if not any(spent):
        axes.axhline(percent[-1], linestyle="--", label=label, color=colour, linewidth=width)
        return
    axes.plot(spent, percent, "--" if dashed else "-", label=label, color=colour, linewidth=width)
    low, high = (
        [m + sign * PERCENT * s for m, s in zip(percent, spread, strict=True)] for sign in (-1, 1)
    )
    axes.fill_between(spent, low, high, color=colour, alpha=0.12, linewidth=0)


def _finish_curves(figure: Figure, panels: Any) -> None:
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes in panels[-1]:
        axes.set_xlabel("communication round")
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy, mean over peers, %")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small"
    )


def _heat_map(
    figure: Figure, axes: Any, matrix: Matrix, groups: tuple[int, ...], colours: str, scale: str
) -> None:
    """Draw one cell per pair. The diagonal stays empty: zero distances would take up most of the
    colour scale."""
    pairs = np.ma.masked_array(matrix, np.eye(len(matrix), dtype=bool))
    image = axes.imshow(pairs, cmap=colours, interpolation="nearest")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label=scale)
    for end in list(accumulate(groups))[:-1]:
        axes.axhline(end - 0.5, color="white", linewidth=1.5)
        axes.axvline(end - 0.5, color="white", linewidth=1.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="peer", ylabel="peer")


def _overlap(axes: Any, found: RunMasks) -> None:
    rounds, mean, spread = (
        np.array([entry[key] for entry in found.overlap]) for key in ("round", "mean", "std")
    )
    axes.plot(rounds, mean, color="C0", marker="." if len(rounds) < 40 else "")
    axes.fill_between(rounds, mean - spread, mean + spread, color="C0", alpha=0.15, linewidth=0)
    axes.set(xlabel="communication round", ylabel="fraction")
    axes.set_title("Kept weights of a peer that a neighbour keeps too", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)


def _percent(fraction: float | None) -> float:
    return float("nan") if fraction is None else PERCENT * fraction


def _write(figure: Figure, caveat: str, to: Path) -> None:
    """Write a figure with the caveat in small print below."""
    if caveat:
        width = int(figure.get_figwidth() * 15)
        figure.supxlabel(textwrap.fill(caveat, width), fontsize=7, color="0.35", x=0.01, ha="left")
    save_figure(figure, to)
