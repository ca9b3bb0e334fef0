"""Algorithm 2's prune-and-regrow of a ResNet-18 against one training step with a batch of 128;
ratio, on one thread.

The step is the bare one: forward and backward on a ready-made batch. The gradient that regrowing
looks at is not part of either side.
"""

import torch
from torch import nn

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.core.sparsity import prune_and_regrow
from dispfl.models.settings import Model
from measure import best_times, report
from synthetic import images

LIMIT = 0.25


def main() -> None:
    """At the paper's density and first prune rate."""
    torch.set_num_threads(1)
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    weights, mask = (
        DisPFL(density=0.5)
        .start(network.read(), network.layout, 0.5, seed=0, peer="000")
        .model.unpack()
    )
    x, y = next(images(3, 32, 128).batches(128))

    def step() -> None:
        network.grad.zero_()
        nn.functional.cross_entropy(network(x), y).backward()

    step()
    grad = network.grad.clone()
    search, training = best_times(
        lambda: prune_and_regrow(weights, mask, grad, 0.5, network.layout), step, repeats=3
    )
    report(
        "prune_and_regrow",
        search / training,
        LIMIT,
        seconds=round(search, 3),
        seconds_a_step=round(training, 2),
    )


if __name__ == "__main__":
    main()
