"""Learning curves: against rounds, and against what the busiest node has moved."""

from collections.abc import Sequence

from dispfl.analysis.comparison import Budget, SeedRun
from dispfl.analysis.report.blocks import figure, figures, legend, remark, section
from dispfl.analysis.report.courses import over_seeds
from dispfl.analysis.report.lines import Curve, line_chart
from dispfl.analysis.report.markup import Markup
from dispfl.analysis.report.results import Results, Series
from dispfl.analysis.report.wording import listed, score, size


def curves_section(results: Results) -> Markup:
    """The scores by round and by megabytes."""
    scored = [series for series in results.series if _course(series, Budget.ROUNDS)]
    if not scored:
        return section("curves", "Learning curves", remark("No round that all seeds have was scored."))
    y_label = f"{results.metric}, mean over peers"
    by_round = [one for series in scored for one in _by_round(series, alone=len(scored) == 1)]
    left = figure(
        "By communication round",
        line_chart(by_round, "communication round", y_label, whole_x=True, x_word="round"),
        note=_band(scored),
    )
    if not any(series.wire_mb for series in scored):
        silence = remark("Nobody sends anything, so there is no curve against traffic.")
        return section("curves", "Learning curves", legend(scored), figures([left]), silence)
    right = figure("By traffic", _traffic_chart(scored, y_label), note=_equal_bytes(results))
    return section("curves", "Learning curves", legend(scored), figures([left, right]))


def _course(series: Series, budget: Budget) -> list[tuple[float, float, float]]:
    """What was spent, the score then, and its spread over seeds."""
    return over_seeds(
        [
            [None if point.accuracy is None else (point.spent(budget), point.accuracy) for point in run.points]
            for run in series.row.runs
        ]
    )


def _by_round(series: Series, alone: bool) -> list[Curve]:
    rounds, mean, spread = map(list, zip(*_course(series, Budget.ROUNDS), strict=True))
    if len(series.runs) > 1:
        return [Curve(series.label, series.paint, rounds, mean, spread)]
    if not alone:
        return [Curve(series.label, series.paint, rounds, mean)]
    run = series.runs[0]
    peers = [record["accuracy"]["std"] for record in run.records if record["accuracy"]]
    found = [Curve(series.label, series.paint, rounds, mean, peers)]
    mixed = {r["round"] + 1.0: r["accuracy_mixed"]["mean"] for r in run.records if r.get("accuracy_mixed")}
    if mixed:
        found.append(Curve("after mixing, before training", series.paint, [*mixed], [*mixed.values()], aside=True))
    return found


def _traffic_chart(scored: Sequence[Series], y_label: str) -> Markup:
    curves = []
    for series in scored:
        spent, mean, spread = map(list, zip(*_course(series, Budget.BYTES), strict=True))
        silent = spent[-1] == 0
        band = spread if len(series.runs) > 1 and not silent else []
        label = f"{series.label}, which sends nothing" if silent else series.label
        curves.append(Curve(label, series.paint, spent, mean, band, level=silent))
    return line_chart(curves, "MB through the busiest node so far, on the wire", y_label, from_zero=True, x_unit="MB")


def _band(scored: Sequence[Series]) -> str:
    if any(len(series.runs) > 1 for series in scored):
        return "Mean over seeds; the band is one standard deviation over seeds."
    if len(scored) > 1:
        return "One seed each."
    mixed = any(record.get("accuracy_mixed") for record in scored[0].runs[0].records)
    return f"The band is one standard deviation over peers{'; dashed: after mixing, before training' if mixed else ''}."


def _equal_bytes(results: Results) -> str:
    """What each row that sends had reached when the cheapest of its seed was at its end."""
    sending = [series for series in results.series if series.wire_mb]
    silent = [series.label for series in results.series if not series.wire_mb]
    level = f" Dotted: {listed(silent)}, which {'sends' if len(silent) == 1 else 'send'} nothing." if silent else ""
    if not all(series.seeds.keys() == sending[0].seeds.keys() for series in sending):
        return level.strip()
    if len(sending) == 1:
        return f"{size(sending[0].row.mean(lambda run: run.points[-1].wire_mb))} MB in all.{level}"
    limits: dict[int, float] = {}
    for run in (run for series in sending for run in series.row.runs):
        limits[run.seed] = min(run.points[-1].wire_mb, limits.get(run.seed, run.points[-1].wire_mb))
    reached = [f"{series.label} {_reached(series.row.runs, limits)}" for series in sending]
    limit = sum(limits.values()) / len(limits)
    return f"After equal traffic, {size(limit)} MB: {', '.join(reached)}.{level}"


def _reached(runs: Sequence[SeedRun], limits: dict[int, float]) -> str:
    counted = [run.within(Budget.BYTES, limits[run.seed]).counted for run in runs]
    known = [point.accuracy for point in counted if point is not None and point.accuracy is not None]
    return score(sum(known) / len(known)) if len(known) == len(runs) else "not scored by then"
