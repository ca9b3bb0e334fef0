"""A peer's whole round with masks of channels against the same at density 1; ratio of processor
times, on one thread.

The round is `peer_step` with evaluation: mix with 10 neighbours, evaluate, 5 epochs in batches of
128, evolve the mask, pack, evaluate. The large networks have 256 samples, two batches to an epoch,
because a batch takes seconds. That is the harder case: what mixing, evolving and loading cost is
spread over 10 batches instead of 20 with 500 samples.

Every repetition gets masks without what they have computed for earlier ones (positions, shapes),
because a peer's mask is new in every round; and the peer's own state is one after a round, whose
next mask has regrown units.

`gather_and_scatter` is the share of a round that is none of mixing, training, evolving and
evaluating: to choose the small network, load it, read it back and pack it. Its limit is for
ResNet-18.
"""

import cProfile
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dispfl import DisPFL, Train
from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.allocator import keep_heap
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.round import peer_step
from measure import best_times, report
from synthetic import federation, first_step

LIMITS = {
    "cnn": {0.5: 0.80, 0.25: 0.60, 0.125: 0.50},
    "vgg11": {0.5: 0.60, 0.25: 0.35, 0.125: 0.25},
    "resnet18": {0.5: 0.60, 0.25: 0.33, 0.125: 0.22},
}
GATHER_AND_SCATTER = 0.03
PARTS = {
    "mixing": ["blocks.block_average"],
    "training": ["train.learn"],
    "evolving": ["blocks.mean_squares", "sparsity.replace_units"],
    "evaluating": ["train.score"],
}
"""Functions of `dispfl.core` with what they call."""
LOADING = ["network.load", "network.read", "network.read_buffers"]
"""Called in training and evaluating, and subtracted from them."""


def make_round(context: RunContext) -> Callable[[], None]:
    """Return a function that runs the first peer's round 1, with neighbours as they are before
    round 0.

    Round 0, of one epoch, is run here and warms up.
    """
    network, (task, state, received) = (
        FlatModule(context.module()),
        first_step(context, evaluate=False),
    )
    short = replace(context, train=Train(epochs=1), known_layout=context.layout)
    state = peer_step(short, network, task, state, received).next_state
    task = PeerTask(task.peer, 1, task.graph)

    def run() -> None:
        models = {
            peer: PackedModel(model.values, _new(model.mask)) for peer, model in received.items()
        }
        own = PackedModel(state.model.values, _new(state.model.mask))
        before = replace(state, model=own, next_mask=_new(state.next_mask))
        assert peer_step(context, network, task, before, models).report.failure is None

    return run


def _new(mask: object) -> ChannelMask:
    assert isinstance(mask, ChannelMask)
    return ChannelMask(mask.bits, mask.size, mask.layout)


def shares(run: Callable[[], None]) -> dict[str, float]:
    """Return the shares of a round's time that its parts take; the rest is gather and scatter."""
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(run)
    spent: Counter[str] = Counter()
    for (file, _, function), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        spent[f"{Path(file).stem}.{function}"] += cumulative
    whole = spent["round.peer_step"]
    parts = {part: sum(spent[name] for name in names) / whole for part, names in PARTS.items()}
    loading = sum(spent[name] for name in LOADING) / whole
    rest = 1 - sum(parts.values()) + loading
    return {part: round(share, 4) for part, share in {**parts, "gather_and_scatter": rest}.items()}


def measure(model: str, samples: int, tests: int, repeats: int) -> bool:
    """One network on random 32x32 colour images: density 1 and the others, in turn. Return whether
    limits are held."""
    limits = LIMITS[model]
    rounds = []
    for density in (1.0, *limits):
        method = DisPFL(structure="channels", density=density)
        context = federation(
            model, 3, 32, samples, tests, Train(), peers=11, degree=10, method=method
        )
        rounds.append(make_round(context))
    dense, *others = best_times(*rounds, repeats=repeats, clock=time.thread_time, warm_up=False)
    held = []
    for (density, limit), taken, run in zip(limits.items(), others, rounds[1:], strict=True):
        parts, seconds = shares(run), {"seconds": round(taken, 3), "seconds_dense": round(dense, 3)}
        what = {"model": model, "density": density}
        held.append(report("channel_rounds", taken / dense, limit, **what, **seconds, shares=parts))
        if model == "resnet18":
            held.append(
                report(
                    "gather_and_scatter", parts["gather_and_scatter"], GATHER_AND_SCATTER, **what
                )
            )
    return all(held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()
    held = [measure("cnn", samples=500, tests=100, repeats=25)]
    if "--quick" not in sys.argv:
        held += [
            measure("vgg11", samples=256, tests=51, repeats=3),
            measure("resnet18", samples=256, tests=51, repeats=2),
        ]
    sys.exit(not all(held))
