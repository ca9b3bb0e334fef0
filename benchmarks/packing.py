"""Packing and unpacking a ResNet-18 at density 0.5, against torch's indexing by the same mask;
ratios of time."""

import torch

from dispfl import DisPFL
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.models.settings import Model
from measure import best_times, report

LIMIT = 0.5


def main() -> None:
    """Both ways, on one thread."""
    torch.set_num_threads(1)
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    packed = (
        DisPFL(density=0.5).start(network.read(), network.layout, 0.5, seed=0, peer="000").model
    )
    weights, mask = packed.unpack()

    def pack_by_indexing() -> PackedModel:
        return PackedModel(weights[mask].add_(0.0), WeightMask.pack(mask))

    def unpack_by_indexing() -> torch.Tensor:
        spread = torch.zeros(packed.mask.size)
        spread[packed.mask.unpack()] = packed.values
        return spread

    times = best_times(
        lambda: PackedModel.pack(weights, mask), pack_by_indexing, packed.unpack, unpack_by_indexing
    )
    report("packing", times[0] / times[1], LIMIT, what="pack")
    report("packing", times[2] / times[3], LIMIT, what="unpack")


if __name__ == "__main__":
    main()
