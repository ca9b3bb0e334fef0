"""A run's masks on the terminal: what they say, and the numbers behind it in two small tables."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dispfl.analysis.run_masks import Layer, RunMasks
from dispfl.analysis.similarity import Matrix, pairs_of, within_groups

LAYERS_SHOWN = 16


def print_masks(found: RunMasks, console: Console) -> None:
    """Print the verdict, distances and similarities over the pairs, and densities layer by layer."""

    def say(sentence: str, style: str | None = None) -> None:
        console.print(sentence, style=style, soft_wrap=True, highlight=False, markup=False)

    say(found.title, "bold")
    say(found.sentence)
    console.print("", _pairs_table(found), "", sep="\n")
    thinned = [layer for layer in found.layers if layer.least < 1]
    shown = sorted(thinned, key=lambda layer: -layer.weights)[:LAYERS_SHOWN]
    if shown:
        console.print(_layers_table([layer for layer in thinned if layer in shown]), "", sep="\n")
    for note in _notes(found, len(thinned) - len(shown)):
        say(note, "dim")


def _table(first: str) -> Table:
    """An empty table with a column of names and three of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in ("least", "mean", "most"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _pairs_table(found: RunMasks) -> Table:
    """How far apart masks are and how alike labels, over the pairs."""
    table = _table("over pairs of peers")

    def row(name: str, values: Matrix) -> None:
        if len(values):
            table.add_row(name, *(f"{number:.3f}" for number in (values.min(), values.mean(), values.max())))

    distances = pairs_of(found.distances)
    row("distance of masks", distances)
    if found.groups:
        within = within_groups(found.groups)
        row("  within a group", distances[within])
        row("  between groups", distances[~within])
    if found.independent is not None:
        table.add_row("  if drawn independently", "", f"{found.independent:.3f}", "")
    if found.similarities is not None:
        row("similarity of labels", pairs_of(found.similarities))
    return table


def _layers_table(layers: Sequence[Layer]) -> Table:
    """What share of each layer the peers keep."""
    table = _table("density over peers")
    table.add_column("weights", justify="right", no_wrap=True)
    for layer in layers:
        shares = (f"{share:.3f}" for share in (layer.least, layer.mean, layer.most))
        table.add_row(layer.name, *shares, f"{layer.weights:,}")
    return table


def _notes(found: RunMasks, smaller: int) -> Iterator[str]:
    """What a reader of the numbers should know; so many smaller layers are not in the table."""
    if found.between_groups is not None:
        pairs = int((~within_groups(found.groups)).sum())
        yield f"Between groups alone the rank correlation is {found.between_groups:.2f} over {pairs} pairs."
    whole = sum(layer.least == 1 for layer in found.layers)
    left_out = [f"{whole} that every peer keeps whole"] * (whole > 0) + [f"{smaller} smaller ones"] * (smaller > 0)
    if left_out:
        yield f"Layers left out above: {', '.join(left_out)}; --json has them."
    if max(found.densities) - min(found.densities) > 0.01:
        yield "The peers' densities differ, which sets masks apart whatever the data."
    if found.overlap:
        first, last = found.overlap[0], found.overlap[-1]
        yield (
            f"A neighbour that is heard holds {first['mean']:.3f} of what a peer keeps in round {first['round']:.0f}, "
            f"{last['mean']:.3f} in round {last['round']:.0f}."
        )
    else:
        yield "The overlap with neighbours, round by round, is left out: the run did not record it."
    yield "Distance: share of all weights that one of the two keeps alone. Similarity: cosine of label counts."
