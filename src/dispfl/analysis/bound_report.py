"""Theorem 1 beside a run: what the run tells of the premises, and what came of them as a table and a picture."""

import math
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TypeGuard

from rich import box
from rich.console import Console
from rich.table import Table

from dispfl.analysis.bound import Bound, Premises, theorem_1
from dispfl.errors import ConfigError, RunError
from dispfl.runs.files import write_atomically

FORMATS = ("png", "pdf", "svg")


def premises_of_run(path: Path) -> tuple[dict[str, float], list[str]]:
    """What a run can tell of the premises, by their names, and what is to be said about it.

    Of peers with different numbers of samples the smallest counts for N and the largest for T: neither flatters. A run
    that was cut counts as far as its newest checkpoint.
    """
    from dispfl.runs.directory import read_config  # imports torch, which the rest does without
    from dispfl.runs.reading import final_states, label_counts, saved_rounds

    config, rounds = read_config(path), saved_rounds(path)
    counts = label_counts(path)
    try:
        peers, planned, train, method = config["peers"], config["rounds"], config["train"], config["method"]["name"]
        samples = config["samples"] if counts is None else counts.sum(1).tolist()
    except KeyError as missing:
        raise RunError(f"{path / 'config.toml'} has no {missing}, which every run writes down; restore it.") from None
    states = list(final_states(path).values())[:peers]  # a server comes last
    union = states[0].model.mask.unpack()
    for state in states[1:]:
        union |= state.model.mask.unpack()
    batches = max(batch_count(size, train["batch"]) for size in samples)
    found = {
        "samples": min(samples),
        "batch": min(samples) if batches == 1 else min(train["batch"], *samples),
        "steps": rounds * train["epochs"] * batches,
        "union_density": int(union.sum()) / union.numel(),
    }
    if train.get("noise"):
        found["noise"] = train["noise"]
    notes = []
    if rounds < planned:
        notes.append(f"{path} has finished {rounds} of {planned} rounds; the steps are those of {rounds}.")
    if method != "dispfl":
        notes.append(f"The theorem is about Dis-PFL; {method} may take other steps than rounds x epochs x batches.")
    return found, notes


def batch_count(samples: int, batch: int) -> int:
    """How many batches an epoch has: a last one of a single sample joins the one before."""
    whole, rest = divmod(samples, batch)
    joins = rest == 1 and whole > 0 and batch > 1
    return whole + (rest > 0 and not joins)


def print_bound(premises: Premises, found: Bound, corrected: bool, console: Console) -> None:
    """Print the theorem's numbers and what they were computed from."""
    p = premises
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # 80 columns
    table.add_column("Theorem 1, corrected" if corrected else "Theorem 1, as printed", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for name, meaning, value in (
        ("epsilon~", "what one step may reveal of a sample", found.epsilon_step),
        ("epsilon'", "what all steps may reveal together", found.epsilon),
        ("delta'", "the chance that they reveal more", found.delta),
        ("bound", "the gap is below 9 epsilon' ...", found.bound),
        ("probability", "... with at least this probability", found.probability),
    ):
        table.add_row(name, meaning, "–" if value is None else f"{value:.6g}")
    console.print("", table, "", sep="\n")
    said = [
        f"N = {p.samples:.12g}, batch = {p.batch:.12g}, T = {p.steps:.12g}, sigma = {p.noise:g}, D_g = {p.diameter:g}, "
        f"union density = {p.union_density:.6g}, delta = {p.delta:g}, delta~ = {p.delta_tilde:g}"
    ]
    if not corrected:
        said.append("--corrected repairs three slips of the printed theorem (docs/deviations.md).")
    for sentence in said:
        console.print(sentence, style="dim", soft_wrap=True, highlight=False, markup=False)


def plot_bound(premises: Premises, to: Path, corrected: bool = False) -> None:
    """Draw the bound against the union density, with these premises marked."""
    from matplotlib.figure import Figure  # slow to import

    kind = to.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(f"--plot must end in {', '.join('.' + f for f in FORMATS)}, got {to.name!r}.")
    densities = [n / 200 for n in range(1, 201)]
    bounds = [theorem_1(replace(premises, union_density=beta), corrected) for beta in densities]
    drawn = [b.bound if _drawable(b.bound) else math.nan for b in bounds]
    if all(map(math.isnan, drawn)):
        raise ConfigError("--plot has nothing to draw: at no density is the bound between 1e-200 and 1e200.")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for holds, style, label in ((True, "-", "conditions hold"), (False, ":", "conditions do not hold")):
        heights = [d if b.conditions_hold == holds else math.nan for d, b in zip(drawn, bounds, strict=True)]
        if not all(map(math.isnan, heights)):
            axes.plot(densities, heights, style, color="C0", label=label)
    here = theorem_1(premises, corrected).bound
    if _drawable(here):
        axes.plot(premises.union_density, here, "o", color="C1", label=f"here: {here:.3g}", zorder=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    axes.axhspan(1, axes.get_ylim()[1], color="grey", alpha=0.15, linewidth=0, label="vacuous: a gap cannot exceed 1")
    axes.set(
        xlim=(0, 1),
        xlabel="union density β: share of the weights that at least one peer keeps",
        ylabel="bound on the generalization gap, 9ε′",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    picture = BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    write_atomically(to, picture.getvalue())


def _drawable(bound: float | None) -> TypeGuard[float]:
    return bound is not None and 1e-200 < bound < 1e200
