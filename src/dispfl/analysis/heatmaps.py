"""The picture of a run's masks: how alike the peers' data are, how far apart their masks, and how that came about."""

from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dispfl.analysis.run_masks import RunMasks
from dispfl.analysis.similarity import Matrix
from dispfl.runs.files import write_atomically

ALIKE, APART = "viridis", "viridis_r"  # what is close is bright in both pictures


def draw_masks(found: RunMasks, to: Path) -> None:
    """Draw the paper's two heat maps side by side, and below them the overlap of neighbours by round, if known."""
    maps: list[tuple[str, str, str, Matrix]] = [
        ("Masks: bright where close", "Hamming distance, share of all weights", APART, found.distances)
    ]
    if found.similarities is not None:
        maps.insert(
            0, ("Data: bright where alike", "cosine similarity of label distributions", ALIKE, found.similarities)
        )
    heights = [4.0, 1.4] if found.overlap else [4.0]
    figure = Figure(figsize=(4.6 * len(maps), sum(heights) + 0.6), layout="constrained")
    parts = figure.add_gridspec(len(heights), len(maps), height_ratios=heights)
    for place, (title, scale, colours, matrix) in enumerate(maps):
        axes = figure.add_subplot(parts[0, place])
        _heat_map(figure, axes, matrix, found.groups, colours, scale)
        axes.set_title(title, fontsize="medium")
    if found.overlap:
        _overlap(figure.add_subplot(parts[1, :]), found)
    figure.suptitle(
        found.title if found.similarities is None else f"{found.title}\n{found.sentence}", fontsize="medium"
    )
    picture = BytesIO()
    figure.savefig(picture, format=to.suffix.removeprefix("."), dpi=150)
    write_atomically(to, picture.getvalue())


def _heat_map(figure: Figure, axes: Any, matrix: Matrix, groups: tuple[int, ...], colours: str, scale: str) -> None:
    """One cell a pair. The diagonal is left empty: a peer's distance to itself would take up most of the scale."""
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
    rounds, mean, spread = (np.array([entry[key] for entry in found.overlap]) for key in ("round", "mean", "std"))
    axes.plot(rounds, mean, color="C0", marker="." if len(rounds) < 40 else "")
    axes.fill_between(rounds, mean - spread, mean + spread, color="C0", alpha=0.15, linewidth=0)
    axes.set(xlabel="communication round", ylabel="share of weights")
    axes.set_title("What a peer keeps and a neighbour that it hears keeps too", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
