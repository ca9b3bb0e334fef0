"""Learning curves of a comparison: mean over seeds, against what its budget is counted in."""

import statistics
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.analysis.comparison import Budget, Comparison, Row
from dispfl.runs.files import write_atomically

AXES = {
    Budget.ROUNDS: "communication round",
    Budget.BYTES: "MB on the wire of the busiest node",
    Budget.FLOPS: "training FLOPs of all peers",
}


def learning_curves(comparison: Comparison, to: Path) -> None:
    """Draw accuracy against rounds, bytes or FLOPs: one line a row, a band of one standard deviation over seeds."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(comparison.rows):
        spent, mean, spread = curve(row, comparison.budget)
        colour = f"C{number % 10}"
        line = "-" if number < 10 else "--"
        axes.plot(spent, mean, line, color=colour, marker="." if len(mean) < 40 else "", label=row.label)
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(spent, low, high, color=colour, alpha=0.12, linewidth=0)
    if comparison.limit is not None:
        axes.axvline(comparison.limit, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel=AXES[comparison.budget], ylabel=f"{comparison.metric} on own test data (mean over peers)")
    if comparison.metric == "accuracy":
        axes.set_ylim(0, 1)
    if comparison.budget is Budget.ROUNDS:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    band = "band: one standard\ndeviation over seeds" if any(len(row.runs) > 1 for row in comparison.rows) else None
    figure.legend(loc="outside right upper", fontsize="small", title=band, title_fontsize="small")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(to, picture.getvalue())


def curve(row: Row, budget: Budget) -> tuple[list[float], list[float], list[float]]:
    """What was spent, the mean accuracy and its standard deviation over seeds, at every round all seeds scored."""
    spent, mean, spread = [], [], []
    for points in zip(*(run.points for run in row.runs), strict=False):  # a run that was cut is shorter
        scores = [point.accuracy for point in points if point.accuracy is not None]
        if len(scores) == len(points):
            spent.append(statistics.fmean(point.spent(budget) for point in points))
            mean.append(statistics.fmean(scores))
            spread.append(statistics.stdev(scores) if len(scores) > 1 else 0.0)
    return spent, mean, spread
