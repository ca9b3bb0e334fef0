"""Robust averages of 11 ResNet-18 models against the plain one; ratio of times, on one thread.

A robust average passes twice over the models: once for their distances, once to average. Two
Byzantine peers are assumed among ten neighbours. At density 1 the plain average only adds what lies
side by side, so that the ratio is largest there.
"""

import time

import torch

from dispfl import DisPFL
from dispfl.core.allocator import keep_heap
from dispfl.core.averaging import average_of
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.models.settings import Model
from dispfl.robust.rules import Rule, robust_average_of
from measure import best_times, report

LIMIT = 3.0
MODELS = 11
RULES: tuple[Rule, ...] = ("clip", "trim", "nnm")


def measure(density: float) -> None:
    """As many models as a peer with 10 neighbours averages; our own mask changed since, as in the
    middle of a run."""
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    weights, layout = network.read(), network.layout
    rng = torch.Generator().manual_seed(0)
    models = []
    for k in range(MODELS):
        mask = DisPFL().start(weights, layout, density, seed=0, peer=f"{k:03d}").model.mask.unpack()
        models.append(
            PackedModel.pack(weights + 0.01 * torch.randn(len(weights), generator=rng), mask)
        )
    m_k = models[0].mask.unpack()
    if density < 1:
        m_k = torch.where(torch.rand(len(m_k), generator=rng) < 0.1, models[1].mask.unpack(), m_k)
    keeps = WeightMask.pack(m_k)
    plain, *robust = best_times(
        lambda: average_of(models, m_k),
        *(lambda rule=rule: robust_average_of(models, 0, keeps, rule, 2) for rule in RULES),  # type: ignore[misc]
        repeats=7,
        clock=time.process_time,
    )
    for rule, taken in zip(RULES, robust, strict=True):
        seconds = {
            "milliseconds": round(1e3 * taken, 1),
            "plain_milliseconds": round(1e3 * plain, 1),
        }
        report("robust_average", taken / plain, LIMIT, rule=rule, density=density, **seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_heap()  # as a run does
    for density in (0.5, 0.2, 1.0):
        measure(density)
