"""A peer's whole round with masks of channels against density 1; processor times on one thread.

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

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from dispfl import DisPFL, Train
from dispfl.channels.channel_mask import ChannelMask
from dispfl.core.allocator import keep_heap
from dispfl.core.packed import Mask, PackedModel
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.round import peer_step
from measure import best_times, report, seconds_by_function
from synthetic import PAPER_BATCH, PAPER_DEGREE, federation, first_step

LIMITS = {
    "cnn": {0.5: 0.80, 0.25: 0.60, 0.125: 0.50},
    "vgg11": {0.5: 0.60, 0.25: 0.35, 0.125: 0.25},
    "resnet18": {0.5: 0.60, 0.25: 0.33, 0.125: 0.22},
}
GATHER_AND_SCATTER_LIMIT = 0.03
PARTS = {
    "mixing": ["block_average.block_average"],
    "training": ["train.learn"],
    "evolving": ["evolve_units.unit_strengths", "evolve_units.replace_units"],
    "evaluating": ["train.score"],
}
"""Functions of each part, with all that they call."""
LOADING = ["flat_module.load", "flat_module.read", "flat_module.read_buffers"]
"""Called in training and evaluating, and subtracted from them."""


def make_round(context: RunContext) -> Callable[[], None]:
    """Return a function that runs the first peer's round 1, with neighbours as before round 0.

    Round 0, of one epoch, is run here and warms up.
    """
    network = context.network()
    task, state, received = first_step(context, evaluate=False)
    short = context.changed(train=Train(epochs=1, batch_size=PAPER_BATCH))
    short = replace(short, known_layout=context.layout)
    state = peer_step(short, network, task, state, received).next_state
    task = PeerTask(task.peer, 1, task.senders)

    def run() -> None:
        models = {peer: _with_new_mask(model) for peer, model in received.items()}
        own_model = _with_new_mask(state.model)
        before = replace(state, model=own_model, next_mask=_new_mask(state.next_mask))
        assert peer_step(context, network, task, before, models).report.failure is None

    return run


def _with_new_mask(model: PackedModel) -> PackedModel:
    return PackedModel(model.values, _new_mask(model.mask))


def _new_mask(mask: Mask) -> ChannelMask:
    assert isinstance(mask, ChannelMask)
    return ChannelMask(mask.bits, mask.size, mask.layout)


def shares(run: Callable[[], None]) -> dict[str, float]:
    """Return each part's share of a round's time; what is left over is gather and scatter."""
    seconds = seconds_by_function(run, time.thread_time)
    round_seconds = seconds["round.peer_step"]
    parts = {}
    for part, functions in PARTS.items():
        parts[part] = sum(seconds[function] for function in functions) / round_seconds
    loading = sum(seconds[function] for function in LOADING) / round_seconds
    parts["gather_and_scatter"] = 1 - sum(parts.values()) + loading
    return {part: round(share, 4) for part, share in parts.items()}


def measure(model: str, samples: int, tests: int, repeats: int) -> bool:
    """One network on random 32x32 colour images: density 1 and the others, in turn.

    Return whether the limits are held.
    """
    limits = LIMITS[model]
    train = Train(batch_size=PAPER_BATCH)
    peers = PAPER_DEGREE + 1
    rounds = []
    for density in (1.0, *limits):
        method = DisPFL(structure="channels", density=density)
        context = federation(
            model, 3, 32, samples, tests, train, peers=peers, degree=PAPER_DEGREE, method=method
        )
        rounds.append(make_round(context))

    times = best_times(*rounds, repeats=repeats, clock=time.thread_time, warm_up=False)
    dense_time = times[0]
    limits_held = []
    for density, run, sparse_time in zip(limits, rounds[1:], times[1:], strict=True):
        parts = shares(run)
        held = report(
            "channel_rounds",
            sparse_time / dense_time,
            limits[density],
            model=model,
            density=density,
            seconds=round(sparse_time, 3),
            seconds_dense=round(dense_time, 3),
            shares=parts,
        )
        limits_held.append(held)
        if model == "resnet18":
            share = parts["gather_and_scatter"]
            workload = {"model": model, "density": density}
            held = report("gather_and_scatter", share, GATHER_AND_SCATTER_LIMIT, **workload)
            limits_held.append(held)
    return all(limits_held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()
    all_held = measure("cnn", samples=500, tests=100, repeats=25)
    if "--quick" not in sys.argv:
        all_held &= measure("vgg11", samples=256, tests=51, repeats=3)
        all_held &= measure("resnet18", samples=256, tests=51, repeats=2)
    sys.exit(not all_held)
