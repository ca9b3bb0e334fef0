"""Robust averages of 11 ResNet-18 models against the plain one; ratio of times, on one thread.

A robust average passes twice over the models: once for their distances, once to average. Two
Byzantine peers are assumed among ten neighbours. At density 1 the plain average only adds what lies
side by side, so that the ratio is largest there.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from dispfl import DisPFL
from dispfl.core.allocator import keep_heap
from dispfl.core.averaging import average_of
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.models.settings import Model
from dispfl.robust.rules import Rule, robust_average_of
from dispfl.topology import peer_names
from measure import best_times, report

LIMIT = 3.0
MODELS = 11
ASSUMED_BYZANTINE = 2
RULES: tuple[Rule, ...] = ("clip", "trim", "nnm")


def measure(density: float) -> None:
    """As many models as a peer with 10 neighbours averages.

    The receiver's mask has changed since it trained its model, as in the middle of a run.
    """
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    layout = network.layout
    weights = network.read()
    rng = torch.Generator().manual_seed(0)
    models = []
    for peer in peer_names(MODELS):
        mask = DisPFL().start(weights, layout, density, seed=0, peer=peer).model.mask.unpack()
        noise = 0.01 * torch.randn(len(weights), generator=rng)
        models.append(PackedModel.pack(weights + noise, mask))
    m_k = models[0].mask.unpack()
    if density < 1:
        is_changed = torch.rand(len(m_k), generator=rng) < 0.1
        m_k = torch.where(is_changed, models[1].mask.unpack(), m_k)
    next_mask = WeightMask.pack(m_k)

    sides: list[Callable[[], object]] = [partial(average_of, models, m_k)]
    for rule in RULES:
        sides.append(partial(robust_average_of, models, 0, next_mask, rule, ASSUMED_BYZANTINE))
    plain_time, *robust_times = best_times(*sides, repeats=7, clock=time.process_time)
    for rule, robust_time in zip(RULES, robust_times, strict=True):
        report(
            "robust_average",
            robust_time / plain_time,
            LIMIT,
            rule=rule,
            density=density,
            milliseconds=round(1e3 * robust_time, 1),
            plain_milliseconds=round(1e3 * plain_time, 1),
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()  # as a run does
    for density in (0.5, 0.2, 1.0):
        measure(density)
