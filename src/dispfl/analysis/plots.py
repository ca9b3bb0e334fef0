"""Pictures of run directories."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.runs.directory import read_config, read_metrics
from dispfl.runs.files import write_atomically


def learning_curve(paths: Sequence[Path], to: Path) -> None:
    """Draw accuracy against rounds: mean over peers and, dashed, after mixing.

    One run has a band of one standard deviation over peers; bands of several would only hide each other.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, path in enumerate(paths):
        records = [record for record in read_metrics(path) if record["accuracy"]]
        rounds = [record["round"] + 1 for record in records]
        mean = [record["accuracy"]["mean"] for record in records]
        spread = [record["accuracy"]["std"] for record in records]
        name, colour = read_config(path)["method"]["name"], f"C{number}"
        axes.plot(rounds, mean, color=colour, marker="." if len(rounds) < 40 else "", label=name)
        if len(paths) == 1:
            low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0, label="one std over peers")
        mixed = [
            (record["round"] + 1, record["accuracy_mixed"]["mean"]) for record in records if record["accuracy_mixed"]
        ]
        if mixed:
            axes.plot(
                *zip(*mixed, strict=True), color=colour, linestyle="--", linewidth=1, label=f"{name}, after mixing"
            )
    metric = read_config(paths[0]).get("metric", "accuracy")
    axes.set(xlabel="communication round", ylabel=f"{metric} on own test data (mean over peers)")
    if metric == "accuracy":
        axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_atomically(to, picture.getvalue())
