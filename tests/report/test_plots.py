"""Learning curves: images that show the metrics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from messages import refused
from numpy.typing import NDArray
from PIL import Image

from dispfl.errors import RunError
from dispfl.report.plots import plot_runs
from dispfl.runs.directory import RunDirectory

BLUE, ORANGE = (31, 119, 180), (255, 127, 14)  # the first and the second curve
WIDTH, HEIGHT = 1050, 630  # 7 x 4.2 inches at 150 dots


def spread(mean: float | None) -> dict[str, Any] | None:
    return None if mean is None else {"mean": mean, "std": 0.01, "per_peer": [mean]}


def a_run(
    path: Path,
    means: list[float | None],
    mixed: float | None = None,
    metric: str = "accuracy",
    higher: bool = True,
) -> Path:
    directory = RunDirectory.create(path, {"rounds": len(means), "method": {"name": path.name}})
    for t, mean in enumerate(means):
        found = spread(mean)
        scores = {metric: {"higher_is_better": higher, "format": ".3f", **found}} if found else {}
        directory.append({"round": t, "metric": metric, "scores": scores, "mixed": spread(mixed)})
    directory.close()
    return path


def drawn(file: Path, colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Where an image has exactly this colour."""
    with Image.open(file) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    return np.asarray((pixels == colour).all(axis=2))


def height_of_the_curve(file: Path, colour: tuple[int, int, int]) -> float:
    """How high above the bottom the curve ends at the right, as a share of the image; the legend is
    lower."""
    rows = np.flatnonzero(drawn(file, colour)[: HEIGHT // 2].any(axis=1))
    return 1 - float(rows.mean()) / HEIGHT


def test_one_run_is_one_curve(tmp_path: Path) -> None:
    plot_runs([a_run(tmp_path / "dispfl", [0.1, 0.5, 0.9])], tmp_path / "curve.png")
    assert drawn(tmp_path / "curve.png", BLUE).sum() > 1000
    assert not drawn(tmp_path / "curve.png", ORANGE).any()
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["curve.png"]


def test_two_runs_are_two_curves_the_better_one_above(tmp_path: Path) -> None:
    better, worse = a_run(tmp_path / "dispfl", [0.95] * 3), a_run(tmp_path / "local", [0.65] * 3)
    lowest = a_run(tmp_path / "fedavg", [0.1] * 3)
    plot_runs([worse, better, lowest], tmp_path / "curve.png")
    assert height_of_the_curve(tmp_path / "curve.png", ORANGE) > height_of_the_curve(
        tmp_path / "curve.png", BLUE
    )


def test_accuracy_after_mixing_is_a_second_dashed_line(tmp_path: Path) -> None:
    plain = a_run(tmp_path / "plain", [0.9] * 3)
    mixed = a_run(tmp_path / "mixed", [0.9] * 3, mixed=0.95)
    for run in (plain, mixed):
        plot_runs([run], tmp_path / f"{run.name}.png")
    without_legend = {
        name: drawn(tmp_path / f"{name}.png", BLUE)[: HEIGHT * 3 // 4]
        for name in ("plain", "mixed")
    }
    assert without_legend["mixed"].any(axis=1).sum() > without_legend["plain"].any(axis=1).sum()


def test_the_axis_fits_the_data(tmp_path: Path) -> None:
    """From 0.90 to 0.92, with a band of 0.01 around it, is half of the axis, and not a fiftieth."""
    plot_runs([a_run(tmp_path / "dispfl", [0.90, 0.91, 0.92])], tmp_path / "curve.png")
    rows = np.flatnonzero(drawn(tmp_path / "curve.png", BLUE)[: HEIGHT * 3 // 4].any(axis=1))
    assert np.ptp(rows) > HEIGHT / 4


def test_labels_are_drawn_as_they_are(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a_b" / r"$\frac{$", [0.5]), a_run(tmp_path / "_hidden", [0.4])]
    plot_runs(runs, tmp_path / "curve.png")
    assert drawn(tmp_path / "curve.png", ORANGE)[HEIGHT * 3 // 4 :].any()


def test_rounds_without_evaluation_are_omitted(tmp_path: Path) -> None:
    every, some = (
        a_run(tmp_path / "run", [0.8] * 5),
        a_run(tmp_path / "b" / "run", [0.8, None, 0.8, None, 0.8]),
    )
    for run in (every, some):
        plot_runs([run], run.with_suffix(".png"))
    assert height_of_the_curve(every.with_suffix(".png"), BLUE) == pytest.approx(
        height_of_the_curve(some.with_suffix(".png"), BLUE), abs=0.01
    )


def test_a_run_without_any_round_is_an_empty_plot(tmp_path: Path) -> None:
    plot_runs([a_run(tmp_path / "dispfl", [])], tmp_path / "curve.png")
    assert not drawn(tmp_path / "curve.png", BLUE)[: HEIGHT // 2].any()


def test_a_metric_other_than_accuracy_is_not_cut_off_at_one(tmp_path: Path) -> None:
    run = a_run(tmp_path / "dispfl", [30.0, 20.0, 30.0], metric="error", higher=False)
    plot_runs([run], tmp_path / "curve.png")
    assert drawn(tmp_path / "curve.png", BLUE)[: HEIGHT // 2].any()


def test_a_missing_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    run = a_run(tmp_path / "dispfl", [0.5])
    with refused(RunError):
        plot_runs([run], tmp_path / "none" / "curve.png")
    with refused(RunError):
        plot_runs([tmp_path], tmp_path / "curve.png")


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_a_figure_has_the_format_of_its_name_and_the_same_bytes_every_time(
    tmp_path: Path, ending: str, start: bytes
) -> None:
    run = a_run(tmp_path / "dispfl", [0.2, 0.4])
    for name in ("a", "b"):
        plot_runs([run], tmp_path / f"{name}.{ending}")
    first, second = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("a", "b"))
    assert first.startswith(start)
    assert first == second


def test_the_legend_is_below_the_axes_and_covers_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that fall from the upper left to the lower right, where the legend of an accuracy
    would be free."""
    drawn: list[Figure] = []
    monkeypatch.setattr("dispfl.report.plots.save_figure", lambda figure, to: drawn.append(figure))
    runs = [
        a_run(tmp_path / name, [3.0, 1.0, 0.1], metric="mse", higher=False)
        for name in ("dispfl", "local")
    ]
    plot_runs(runs, tmp_path / "curves.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
    assert axes.get_ylabel().startswith("mse on own test data")
