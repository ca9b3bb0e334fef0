"""Algorithm 2's prune-and-regrow of a ResNet-18 against one training step with a batch of 128.

A ratio of times, on one thread. The step is the bare one: forward and backward on a ready-made
batch. The gradient that regrowing looks at is not part of either side.
"""

import torch
from torch import nn

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.core.sparsity import prune_and_regrow
from dispfl.models.settings import Model
from measure import best_times, report
from synthetic import PAPER_BATCH, images

LIMIT = 0.25
DENSITY = 0.5
PRUNE_RATE = 0.5


def main() -> None:
    """At the paper's density and first prune rate."""
    torch.set_num_threads(1)
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    layout = network.layout
    method = DisPFL(density=DENSITY)
    model = method.start(network.read(), layout, DENSITY, seed=0, peer="000").model
    weights, mask = model.unpack()
    x, y = next(images(3, 32, PAPER_BATCH).batches(PAPER_BATCH))

    def step() -> None:
        network.grad.zero_()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    gradient = network.grad.clone()
    search_time, step_time = best_times(
        lambda: prune_and_regrow(weights, mask, gradient, PRUNE_RATE, layout), step, repeats=3
    )
    report(
        "prune_and_regrow",
        search_time / step_time,
        LIMIT,
        seconds=round(search_time, 3),
        seconds_a_step=round(step_time, 2),
    )


if __name__ == "__main__":
    main()
