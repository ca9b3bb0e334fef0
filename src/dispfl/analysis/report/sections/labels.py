"""Label distribution: which classes every peer has."""

from dispfl.analysis.report.blocks import figure, figures, remark, section
from dispfl.analysis.report.heatmap import heat_map
from dispfl.analysis.report.markup import Markup
from dispfl.analysis.report.reading import Run
from dispfl.analysis.report.results import DATA_TABLES, Results, settings
from dispfl.analysis.report.wording import counted

ROOM = 25
"""Peers in one map; on a desktop two maps stand beside each other."""
MOST_PEERS, MOST_SPLITS = 100, 3


def labels_section(results: Results) -> Markup:
    """One heat map for every 25 peers of each split."""
    parts: list[Markup] = []
    splits = _splits(results)
    for said, run in list(splits.items())[:MOST_SPLITS]:
        counts = run.label_counts()
        parts += [remark(said)] if len(splits) > 1 else []
        parts += [remark(_without(run))] if counts is None else _maps(run, counts)
    if len(splits) > MOST_SPLITS:
        parts.append(remark(f"There are {len(splits) - MOST_SPLITS} other splits, which are not shown."))
    return section("labels", "What every peer has", *parts)


def _splits(results: Results) -> dict[str, Run]:
    """One run, of the lowest seed, for every way in which the data was split."""
    found: dict[str, Run] = {}
    for run in sorted(results.runs, key=lambda run: run.seed):
        own = settings(run)
        keys = [key for key in own if key.startswith(DATA_TABLES) or key == "peers"]
        found.setdefault(", ".join(f"{key} {own[key]}" for key in keys), run)
    return found


def _without(run: Run) -> str:
    if run.made_in_python:
        return "The federation was made in Python, and its data is the script’s own: no split was saved."
    return "No split was saved with the run."


def _maps(run: Run, counts: list[list[int]]) -> list[Markup]:
    shown, names = counts[:MOST_PEERS], run.roster
    most = max(max(own, default=0) for own in counts) or 1
    room = min(ROOM, len(shown))
    maps = []
    for start in range(0, len(shown), ROOM):
        part = shown[start : start + ROOM]
        own = names[start : start + ROOM]
        titles = [_title(name, labels) for name, labels in zip(own, part, strict=True)]
        who = f"Peers {own[0]} to {own[-1]}" if len(own) > 1 else f"Peer {own[0]}"
        label = f"Training samples of each class. {who}. The fullest cell has {most}."
        maps.append(figure(who, heat_map(part, own, titles, most, label, room)))
    total = {sum(own) for own in counts}
    each = f"{counted(total.pop(), 'training sample')} each" if len(total) == 1 else "unequal numbers of samples"
    note = f"{counted(len(counts), 'peer')}, {each}, in {len(counts[0])} classes (seed {run.seed}). "
    note += f"The stronger a cell’s colour, the more samples of that class; the fullest has {most}."
    if len(shown) < len(counts):
        note += f" The first {len(shown)} peers are shown."
    return [remark(note), figures(maps, "two")]


def _title(name: str, labels: list[int]) -> str:
    ranked = sorted((-count, label) for label, count in enumerate(labels) if count)
    lines = [f"class {label}: {-count}" for count, label in ranked[:12]]
    more = [f"and {len(ranked) - 12} classes more"] if len(ranked) > 12 else []
    return "\n".join([f"peer {name}: {counted(sum(labels), 'sample')}", *lines, *more])
