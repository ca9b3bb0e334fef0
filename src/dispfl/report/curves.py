"""Sections with curves by round: scores, mask changes, and other recorded quantities."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from dispfl.core.quantities import Quantity, ReportFigure, Shape
from dispfl.core.report import QUANTITIES
from dispfl.report.charts import Curve, line_chart
from dispfl.report.comparison import (
    ComparisonRow,
    Sample,
    mean_curve,
    mean_over_seeds,
    most_seeds,
    smallest_totals,
)
from dispfl.report.html import ColourLegend, Figure, Figures, Section, css_class
from dispfl.report.peer_curves import mask_maps
from dispfl.report.results import ReportResults, silence_note, split_by_traffic
from dispfl.report.runs import Budget
from dispfl.report.units import BYTES, axis_unit, bytes_text
from dispfl.report.wording import capitalized, join_and
from dispfl.runs.metrics import last, main_scores


def curves_section(results: ReportResults) -> Section:
    """Return the scores by round, by seconds of computing, by simulated time and by traffic."""
    section = Section("curves", "Learning curves")
    evaluated = [row for row in results.rows if mean_curve(row, Budget.ROUNDS).x]
    if not evaluated:
        section.remark("No round has been evaluated in all seeds.")
        return section

    figures = [_figure_by_round(results, evaluated)]
    if all(row.runs[0].points[-1].peer_seconds for row in evaluated):
        figures.append(_figure_by_seconds(results, evaluated))
    if all(row.hours for row in evaluated):
        figures.append(_figure_by_hours(results, evaluated))
    sending, _ = split_by_traffic(evaluated)
    if sending:
        figures.append(_figure_by_traffic(results, evaluated))
    other_metrics = list(_metric_figures(results))
    if other_metrics:
        figures = [replace(figure, metric=results.measure.name) for figure in figures]
    figures += other_metrics
    figures += quantity_figures(results, "curves")
    figures += _logged_figures(results)
    section.add(ColourLegend(evaluated), Figures(figures))
    if not sending:
        section.remark("No peer sends anything, so there is no curve against traffic.")
    return section


def _figure_by_round(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    curves = _score_curves(evaluated, Budget.ROUNDS)
    note = "One seed each."
    if most_seeds(evaluated) > 1:
        note = "Mean over seeds; the band is one standard deviation over seeds."
    elif len(evaluated) == 1:
        curves = _curves_of_run(evaluated[0])
        note = "The band is one standard deviation over peers."
        if len(curves) > 1:
            note = (
                "The band is one standard deviation over peers; dashed: after mixing, before"
                " training."
            )
    chart = line_chart(
        curves,
        "communication round",
        _score_label(results),
        whole_x=True,
        x_word="round",
        y_format=results.measure.format,
    )
    return Figure("By communication round", chart, note)


def _score_label(results: ReportResults) -> str:
    return f"{results.measure.name}, mean over peers"


def _score_curves(rows: Sequence[ComparisonRow], budget: Budget) -> list[Curve]:
    """Return the scores by what was spent, with a band over seeds where there are several."""
    curves = []
    for row in rows:
        mean = mean_curve(row, budget)
        curve = Curve(row.label, css_class(row), mean.x, mean.mean)
        if len(row.runs) > 1:
            curve.spread = mean.std
        curves.append(curve)
    return curves


def _curves_of_run(row: ComparisonRow) -> list[Curve]:
    """Return the scores of the only run with a band over peers, and those after mixing."""
    trained = Curve(row.label, css_class(row))
    mixed = Curve("after mixing, before training", css_class(row), secondary=True)
    for record in row.runs[0].records:
        number = record["round"] + 1.0
        scores = main_scores(record)
        if scores:
            trained.add(number, scores["mean"], scores["std"])
        if record.get("mixed"):
            mixed.add(number, record["mixed"]["mean"])
    if not mixed.x:
        return [trained]
    return [trained, mixed]


def _figure_by_seconds(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    chart = line_chart(
        _score_curves(evaluated, Budget.SECONDS),
        "seconds that a peer has computed so far",
        _score_label(results),
        from_zero=True,
        x_unit="s",
        y_format=results.measure.format,
    )
    note = "Computing time of a peer, mean over peers; waiting and transfers are not included."
    return Figure("By seconds of computing", chart, note)


def _figure_by_hours(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    chart = line_chart(
        _score_curves(evaluated, Budget.HOURS),
        "simulated hours",
        _score_label(results),
        from_zero=True,
        x_unit="h",
        y_format=results.measure.format,
    )
    note = "When the last peer has finished the round: computing, transfers and waiting."
    return Figure("By simulated time", chart, note)


def _figure_by_traffic(results: ReportResults, evaluated: Sequence[ComparisonRow]) -> Figure:
    curves = _score_curves(evaluated, Budget.BYTES)
    unit = axis_unit(max(1e6 * row.runs[0].points[-1].wire_mb for row in evaluated), BYTES)
    for curve in curves:
        curve.x = [1e6 * megabytes / unit.scale for megabytes in curve.x]
    for row, curve in zip(evaluated, curves, strict=True):
        if not row.wire_mb:
            curve.label += ", which sends nothing"
            curve.constant = True
            curve.spread = []
    chart = line_chart(
        curves,
        f"{unit.name} through the busiest node so far, on the wire",
        _score_label(results),
        from_zero=True,
        x_unit=unit.name,
        y_format=results.measure.format,
    )
    return Figure("By traffic", chart, " ".join(_traffic_notes(results)))


def _traffic_notes(results: ReportResults) -> Iterator[str]:
    """Give the score of each sending row at the total traffic of the cheapest run of its seed."""
    sending, silent = split_by_traffic(results.rows)
    if len(sending) == 1:
        total = fmean(run.points[-1].wire_mb for run in sending[0].runs)
        yield f"{bytes_text(1e6 * total)} in total."
    elif all(row.by_seed.keys() == sending[0].by_seed.keys() for row in sending):
        yield _scores_at_equal_traffic(results, sending)
    if silent:
        yield f"Dotted: {silence_note(silent, ', which')}."


def _scores_at_equal_traffic(results: ReportResults, sending: Sequence[ComparisonRow]) -> str:
    limits = smallest_totals(sending, Budget.BYTES)
    scores = []
    for row in sending:
        score = row.within(Budget.BYTES, limits).score
        text = "not evaluated by then"
        if score is not None:
            text = results.measure.text(score)
        scores.append(f"{row.label} {text}")
    limit = bytes_text(1e6 * fmean(limits.values()))
    return f"After equal traffic, {limit}: {', '.join(scores)}."


# Mask changes, and other quantities that have a figure


def masks_section(results: ReportResults) -> Section:
    """Return the share of kept weights that rounds replace, and that neighbours keep too."""
    section = Section("masks", "Mask changes")
    figures = list(quantity_figures(results, "masks"))
    if not figures:
        section.remark("No method here prunes and regrows weights in every round.")
        return section
    changing = []
    unchanging = []
    for row in results.rows:
        if last(row.runs[0].records, "mask_change"):
            changing.append(row)
        else:
            unchanging.append(row.label)
    if len(results.rows) > 1:
        section.add(ColourLegend(changing))
    section.add(Figures(figures))
    if unchanging:
        rows = join_and(unchanging)
        section.remark(f"Not recorded for {rows}: no pruning and regrowing in every round.")
    if len(results.rows) == 1:
        maps = list(mask_maps(results.rows[0].runs[0]))
        if maps:
            section.remark(
                "One column for each peer and one row for each round: the stronger the colour, the"
                " larger the share; the largest has the full colour."
            )
            section.add(Figures(maps))
    return section


def quantity_figures(results: ReportResults, section: str) -> Iterator[Figure]:
    """Yield a chart by round of each recorded quantity that is declared for a section."""
    for quantity in QUANTITIES:
        if quantity.figure and quantity.figure.section == section:
            yield from _figure(results, quantity, quantity.figure)


def _figure(results: ReportResults, quantity: Quantity, figure: ReportFigure) -> Iterator[Figure]:
    """Yield a chart of a quantity by round, if some row has it."""
    curves = []
    for row in results.rows:
        curve = _quantity_curve(row, quantity, results.several_seeds)
        if curve.x:
            curves.append(curve)
    if curves:
        chart = line_chart(
            curves, "communication round", figure.y_label, whole_x=True, x_word="round"
        )
        over = "seeds" if results.several_seeds else "peers"
        note = f"Mean over peers; the band is one standard deviation over {over}."
        yield Figure(figure.title, chart, note)


def _metric_figures(results: ReportResults) -> Iterator[Figure]:
    """Yield a chart by round of each metric but the main one."""
    names: dict[str, None] = {}
    for run in results.runs:
        for record in run.records:
            names |= dict.fromkeys(record["scores"])
    for name in names:
        if name == results.measure.name:
            continue
        curves = [_metric_curve(row, name) for row in results.rows]
        measured = [curve for curve in curves if curve.x]
        if not measured:
            continue
        chart = line_chart(
            measured,
            "communication round",
            f"{name}, mean over peers",
            whole_x=True,
            x_word="round",
        )
        yield Figure(f"{capitalized(name)} by communication round", chart, metric=name)


def _metric_curve(row: ComparisonRow, name: str) -> Curve:
    """Return the mean of a metric over peers and seeds in each round that has it."""
    seeds: list[list[Sample]] = []
    for run in row.runs:
        samples: list[Sample] = []
        for record in run.records:
            values = record["scores"].get(name)
            samples.append((record["round"] + 1.0, values["mean"]) if values else None)
        seeds.append(samples)
    mean = mean_over_seeds(seeds)
    return Curve(row.label, css_class(row), mean.x, mean.mean)


def _logged_figures(results: ReportResults) -> Iterator[Figure]:
    """Yield a chart by round of each quantity that a method logs."""
    names: dict[str, None] = {}
    for row in results.rows:
        for run in row.runs:
            for record in run.records:
                names |= dict.fromkeys(record.get("logged") or {})
    for name in names:
        yield from _figure(
            results, Quantity(f"logged.{name}", Shape.PEERS, name), ReportFigure("", name, name)
        )


def _quantity_curve(row: ComparisonRow, quantity: Quantity, band_over_seeds: bool) -> Curve:
    """Return the mean over peers and seeds, with the spread over seeds or over peers."""
    seeds: list[list[Sample]] = []
    peer_stds = []
    for run in row.runs:
        samples: list[Sample] = []
        for record in run.records:
            values = quantity.value(record)
            if values:
                samples.append((record["round"] + 1.0, values["mean"]))
                peer_stds.append(values["std"])
            else:
                samples.append(None)
        seeds.append(samples)

    mean = mean_over_seeds(seeds)
    curve = Curve(row.label, css_class(row), mean.x, mean.mean)
    if len(row.runs) > 1:
        curve.spread = mean.std
    elif not band_over_seeds:
        curve.spread = peer_stds
    return curve
