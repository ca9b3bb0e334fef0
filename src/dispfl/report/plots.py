"""Learning curves as PNG, PDF or SVG, drawn with matplotlib.

Imported only where they are drawn, because matplotlib is slow to import.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.core.metric import Measure
from dispfl.files import write_atomically
from dispfl.report.comparison import Comparison, MeanCurve, mean_curve
from dispfl.report.runs import Budget, RecordedRun, load_run, run_labels
from dispfl.report.units import BYTES, FLOPS, axis_unit
from dispfl.runs.metrics import main_scores

MARKER_LIMIT = 40
"""Curves with fewer points have markers."""
LEGEND_COLUMNS = 3
COLOURS = 10
"""Lines after these many repeat the colours, dashed."""
UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""By format, the metadata that leave the time out."""
X_LABELS = {
    Budget.ROUNDS: "communication round",
    Budget.BYTES: "bytes on the wire of the busiest node",
    Budget.FLOPS: "training FLOPs of all peers",
    Budget.SECONDS: "seconds of computing of a peer",
    Budget.HOURS: "simulated hours",
}


def plot_runs(paths: Sequence[Path], to: Path) -> None:
    """Plot the main metric against rounds: mean over peers and, dashed, after mixing.

    A single run has a band of one standard deviation over peers; bands of several runs would hide
    each other.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    runs = list(map(load_run, paths))
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True)):
        _plot_run(axes, run, literal(label), f"C{number}", with_band=len(runs) == 1)
    _label(axes, Budget.ROUNDS, runs[0].measure)
    figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="small", frameon=False)
    save_figure(figure, to)


def _plot_run(axes: Axes, run: RecordedRun, label: str, colour: str, with_band: bool) -> None:
    curve = MeanCurve([], [], [])
    mixed_rounds = []
    mixed_scores = []
    for record in run.records:
        scores = main_scores(record)
        if not scores:
            continue
        curve.x.append(record["round"] + 1)
        curve.mean.append(scores["mean"])
        curve.std.append(scores["std"])
        if record["mixed"]:
            mixed_rounds.append(record["round"] + 1)
            mixed_scores.append(record["mixed"]["mean"])

    axes.plot(curve.x, curve.mean, color=colour, marker=_marker(curve), label=label)
    if with_band:
        _band(axes, curve, colour, "one std over peers")
    if mixed_rounds:
        label = f"{label}, after mixing"
        axes.plot(
            mixed_rounds, mixed_scores, color=colour, linestyle="--", linewidth=1, label=label
        )


def plot_comparison(comparison: Comparison, to: Path) -> None:
    """Plot the main metric against what is held equal, with a band of one std over seeds."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(comparison.rows):
        curve = mean_curve(row, comparison.budget)
        colour = f"C{number % COLOURS}"
        style = "-" if number < COLOURS else "--"
        marker = _marker(curve)
        label = literal(row.label)
        axes.plot(curve.x, curve.mean, style, color=colour, marker=marker, label=label)
        _band(axes, curve, colour)
    if comparison.limit is not None:
        axes.axvline(comparison.limit, color="grey", linestyle=":", linewidth=1)
    _label(axes, comparison.budget, comparison.measure)
    title = None
    if comparison.most_seeds > 1:
        title = "band: one standard\ndeviation over seeds"
    figure.legend(loc="outside right upper", fontsize="small", title=title, title_fontsize="small")
    save_figure(figure, to)


def literal(label: str) -> str:
    """Return a label that matplotlib draws as it is: no formula, and not hidden by its `_`."""
    escaped = label.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _marker(curve: MeanCurve) -> str:
    if len(curve.x) < MARKER_LIMIT:
        return "."
    return ""


def _band(axes: Axes, curve: MeanCurve, colour: str, label: str | None = None) -> None:
    low = []
    high = []
    for mean, std in zip(curve.mean, curve.std, strict=True):
        low.append(mean - std)
        high.append(mean + std)
    axes.fill_between(curve.x, low, high, color=colour, alpha=0.12, linewidth=0, label=label)


def _label(axes: Axes, budget: Budget, measure: Measure) -> None:
    """Label the axes; that of y fits the data, and ends where no score can be."""
    axes.set(xlabel=X_LABELS[budget], ylabel=f"{measure.name} on own test data (mean over peers)")
    if measure.name.removesuffix(" (%)") == "accuracy":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0.0), min(high, 1.0))
    if measure.scale != 1:
        axes.yaxis.set_major_formatter(lambda score, _: f"{measure.scale * score:.4g}")
    if budget is Budget.BYTES:
        unit = axis_unit(1e6 * axes.get_xlim()[1], BYTES)
        axes.set_xlabel(f"{unit.name} on the wire of the busiest node")
        axes.xaxis.set_major_formatter(lambda megabytes, _: f"{1e6 * megabytes / unit.scale:.4g}")
    elif budget is Budget.FLOPS:
        unit = axis_unit(axes.get_xlim()[1], FLOPS)
        axes.set_xlabel(f"training {unit.name} of all peers")
        axes.xaxis.set_major_formatter(lambda flops, _: f"{flops / unit.scale:.4g}")
    if budget is Budget.ROUNDS:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def save_figure(figure: Figure, to: Path) -> None:
    """Write a figure in the format of the file's name; the same figure gives the same bytes."""
    image_format = to.suffix.lower().removeprefix(".")
    undated = UNDATED.get(image_format)
    image = BytesIO()
    with rc_context({"svg.hashsalt": "dispfl", "pdf.fonttype": 42}):  # fonts that publishers accept
        figure.savefig(image, format=image_format, dpi=150, metadata=undated)
    write_atomically(to, image.getvalue())
