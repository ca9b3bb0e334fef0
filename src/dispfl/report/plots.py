"""Learning curves as PNG, PDF or SVG, drawn with matplotlib; imported only where they are drawn,
because it is slow."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.files import write_atomically
from dispfl.report.comparison import Budget, Comparison, mean_curve
from dispfl.report.labels import row_labels
from dispfl.runs.directory import read_config, read_metrics
from dispfl.runs.metrics import main_scores, measure_of

MARKER_LIMIT = 40
"""Curves with fewer points have markers."""
LEGEND_COLUMNS = 3
X_LABELS = {
    Budget.ROUNDS: "communication round",
    Budget.BYTES: "MB on the wire of the busiest node",
    Budget.FLOPS: "training FLOPs of all peers",
    Budget.SECONDS: "seconds of computing of a peer",
}


def plot_runs(paths: Sequence[Path], to: Path) -> None:
    """Plot the main metric against rounds: mean over peers and, dashed, after mixing.

    A single run has a band of one standard deviation over peers; bands of several runs would hide
    each other.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    labels = row_labels([read_config(path) for path in paths])
    for number, (path, name) in enumerate(zip(paths, labels, strict=True)):
        records = [record for record in read_metrics(path) if main_scores(record)]
        scores = [found for record in records if (found := main_scores(record))]
        rounds = [record["round"] + 1 for record in records]
        mean = [found["mean"] for found in scores]
        colour = f"C{number}"
        axes.plot(rounds, mean, color=colour, marker=_marker(mean), label=name)
        if len(paths) == 1:
            _band(
                axes, rounds, mean, [found["std"] for found in scores], colour, "one std over peers"
            )
        mixed = [
            (record["round"] + 1, record["mixed"]["mean"]) for record in records if record["mixed"]
        ]
        if mixed:
            axes.plot(
                *zip(*mixed, strict=True),
                color=colour,
                linestyle="--",
                linewidth=1,
                label=f"{name}, after mixing",
            )
    _label(axes, Budget.ROUNDS, measure_of(read_metrics(paths[0])).name)
    figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="small", frameon=False)
    save_figure(figure, to)


def plot_comparison(comparison: Comparison, to: Path) -> None:
    """Plot the main metric against what is held equal: one line per row, with a band of one std
    over seeds."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(comparison.rows):
        spent, mean, std = mean_curve(row, comparison.budget)
        colour = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        axes.plot(spent, mean, style, color=colour, marker=_marker(mean), label=row.label)
        _band(axes, spent, mean, std, colour)
    if comparison.limit is not None:
        axes.axvline(comparison.limit, color="grey", linestyle=":", linewidth=1)
    _label(axes, comparison.budget, comparison.measure.name)
    title = (
        "band: one standard\ndeviation over seeds"
        if any(len(row.runs) > 1 for row in comparison.rows)
        else None
    )
    figure.legend(loc="outside right upper", fontsize="small", title=title, title_fontsize="small")
    save_figure(figure, to)


def _marker(values: Sequence[float]) -> str:
    return "." if len(values) < MARKER_LIMIT else ""


def _band(
    axes: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    std: Sequence[float],
    colour: str,
    label: str | None = None,
) -> None:
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0, label=label)


def _label(axes: Axes, budget: Budget, metric: str) -> None:
    axes.set(xlabel=X_LABELS[budget], ylabel=f"{metric} on own test data (mean over peers)")
    if metric == "accuracy":
        axes.set_ylim(0, 1)
    if budget is Budget.ROUNDS:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def save_figure(figure: Figure, to: Path) -> None:
    """Write a figure in the format of the file's name; the same figure gives the same bytes."""
    kind, image = to.suffix.lower().removeprefix("."), BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with rc_context({"svg.hashsalt": "dispfl", "pdf.fonttype": 42}):  # fonts that publishers accept
        figure.savefig(image, format=kind, dpi=150, metadata=undated)
    write_atomically(to, image.getvalue())
