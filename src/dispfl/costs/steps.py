"""The operations of a peer's step, before it is taken: what a clock needs to know when it begins.

They are those that the kernels do (`runs/metrics.py: kernel_flops_of`), without evaluations.
"""

from dispfl.core.train import Train
from dispfl.costs.flops import ForwardCost
from dispfl.round.context import RunContext


def step_operations(context: RunContext, cost: ForwardCost, peer: str, models: int) -> int:
    """Return the operations of a peer's step with so many received models."""
    method = context.method
    train = context.train_of(peer)
    density = context.densities[peer]
    samples = len(context.data.peers[peer].train)
    computed = computed_weights(context, density)
    scored = method.scored_samples(samples, models) * cost.sparse(computed)
    learned = samples - method.held_back(samples)
    return training_operations(context, cost, density, train, learned) + scored


def training_operations(
    context: RunContext, cost: ForwardCost, density: float, train: Train, samples: int
) -> int:
    """Return the operations of local training and mask search, with a model of this density."""
    method = context.method
    computed = computed_weights(context, density)
    searched = min(method.searched_samples(train), samples)
    operations = cost.training(computed, searched)
    for passes in method.training_passes(train, samples, context.layout, computed):
        trained = None
        if passes.trained is not None:
            trained = [
                size if count else 0 for size, count in zip(computed, passes.trained, strict=True)
            ]
        operations += cost.training(passes.kept, passes.samples, trained)
    return operations


def computed_weights(context: RunContext, density: float) -> list[int]:
    """Return how many weights of each parameter are computed with.

    With masks of channels they are those of the small network, otherwise all.
    """
    if context.method.masks_channels:
        return list(context.method.kept_counts(context.layout, density))
    return list(context.layout.sizes)
