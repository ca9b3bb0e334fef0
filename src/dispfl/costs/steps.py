"""The operations of a peer's step, before it is taken: what a clock needs to know when it begins.

They are those that the kernels do (`runs/metrics.py: kernel_flops_of`), without evaluations.
"""

from collections.abc import Sequence

from dispfl.core.train import Train
from dispfl.costs.flops import ForwardCost
from dispfl.methods.base import Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.fedfomo import FedFOMO
from dispfl.round.context import RunContext


def step_operations(context: RunContext, cost: ForwardCost, peer: str, models: int) -> int:
    """Return the operations of a peer's step with so many received models."""
    method = context.method
    train = context.train_of(peer)
    samples = len(context.data.peers[peer].train)
    computed: Sequence[int] = context.layout.sizes
    if method.masks_channels:
        computed = method.kept_counts(context.layout, context.densities[peer])

    held_back = 0
    validation = context.data.peers[peer].validation
    if isinstance(method, FedFOMO):
        if validation is not None:
            held_back = len(validation)
        elif samples > 1:
            held_back = max(1, int(method.validation * samples))
            samples -= held_back

    operations = 0
    for passes in method.training_passes(train, samples, context.layout, computed):
        trained = None
        if passes.trained is not None:
            trained = [
                size if count else 0 for size, count in zip(computed, passes.trained, strict=True)
            ]
        operations += cost.training(passes.kept, passes.samples, trained)
    operations += cost.training(computed, _search_samples(method, train, samples))
    candidates = models + 2  # with the peer's own model before and after training
    return operations + candidates * held_back * cost.sparse(computed)


def _search_samples(method: Method, train: Train, samples: int) -> int:
    """Return the samples of the dense gradient by which masks regrow."""
    if isinstance(method, DisPFL) and not method.masks_channels and method.searches_by_gradient:
        return min(train.batch_size, samples)
    return 0
