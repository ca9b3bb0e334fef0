"""What the page begins with: the answer in a few sentences, then what to be careful about."""

from collections import Counter
from pathlib import Path

from dispfl.analysis.report.markup import Markup, element, joined
from dispfl.analysis.report.results import Results, Series
from dispfl.analysis.report.verdict import verdict
from dispfl.analysis.report.wording import counted, listed, seen_from


def summary_section(results: Results, out: Path) -> Markup:
    """The verdict and the cautions."""
    cautions = [
        *(f"{seen_from(out, path)} has no finished round yet and is left out." for path in results.left_out),
        *(sentence for series in results.series for sentence in _unfinished(series)),
        *_other_settings(results),
        *_other_seeds(results),
        *(sentence for series in results.series for sentence in _failures(series)),
    ]
    lead, *more = verdict(results)
    inside = [element("p", lead, class_="lead")]
    if more:
        inside.append(element("p", " ".join(more), class_="verdict"))
    if cautions:
        heading = element("h2", "To keep in mind", id="cautions-heading")
        items = element("ul", *(element("li", sentence) for sentence in cautions))
        inside.append(element("aside", heading, items, class_="cautions", aria_labelledby="cautions-heading"))
    return joined(inside)


def _unfinished(series: Series) -> list[str]:
    cut = [run for run in series.runs if run.summary is None]
    if not cut:
        return []
    parts = [f"{len(run.records)} of {run.config['rounds']} rounds (seed {run.seed})" for run in cut]
    return [f"{series.label} is not finished: {listed(parts)}."]


def _other_settings(results: Results) -> list[str]:
    keys = list(results.differing)
    if not keys or not results.comparable:  # the verdict has said it
        return []
    many = len({series.runs[0].method for series in results.series}) > 1
    return [f"{'Beside the method, the rows' if many else 'The rows'} differ in {listed(keys)}; see the setting."]


def _other_seeds(results: Results) -> list[str]:
    said = []
    if results.other_seeds:
        shown = listed([str(seed) for seed in results.common_seeds])
        others = [f"{label} {', '.join(map(str, own))}" for label, own in results.other_seeds.items()]
        said.append(f"Only what every row has is shown, seed {shown}; left out: {'; '.join(others)}.")
    seeds = {series.label: sorted(series.seeds) for series in results.series}
    if len(set(map(tuple, seeds.values()))) > 1:
        parts = [f"{label} {', '.join(map(str, own))}" for label, own in seeds.items()]
        said.append(f"The rows have different seeds, and so different data: {'; '.join(parts)}.")
    for series in results.series:
        twice = [seed for seed, count in Counter(run.seed for run in series.runs).items() if count > 1]
        if twice:
            said.append(f"{series.label} has several runs of seed {listed(list(map(str, twice)))}; each counts as one.")
    if len(results.series) > 1 and any(run.made_in_python for run in results.runs):
        said.append("Runs made in Python do not say what data they had; it is taken to be the same.")
    return said


def _failures(series: Series) -> list[str]:
    failures = [failure for run in series.runs for failure in run.failures]
    if not failures:
        return []
    peers = {(run.seed, peer) for run in series.runs for _, peer, _ in run.failures}
    return [
        f"{series.label}: {counted(len(failures), 'step')} of {counted(len(peers), 'peer')} failed, and the peers kept "
        f"their last good model. The first: {failures[0][2]}"
    ]
