"""Packing and unpacking a ResNet-18 at density 0.5, against torch's indexing by the same mask."""

import torch
from torch import Tensor

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
    method = DisPFL(density=0.5)
    packed = method.start(network.read(), network.layout, 0.5, seed=0, peer="000").model
    weights, mask = packed.unpack()

    def pack() -> PackedModel:
        return PackedModel.pack(weights, mask)

    def pack_by_indexing() -> PackedModel:
        return PackedModel(weights[mask].add_(0.0), WeightMask.pack(mask))

    def unpack_by_indexing() -> Tensor:
        unpacked = torch.zeros(packed.mask.size)
        unpacked[packed.mask.unpack()] = packed.values
        return unpacked

    pack_time, indexed_pack_time, unpack_time, indexed_unpack_time = best_times(
        pack, pack_by_indexing, packed.unpack, unpack_by_indexing
    )
    report("packing", pack_time / indexed_pack_time, LIMIT, what="pack")
    report("packing", unpack_time / indexed_unpack_time, LIMIT, what="unpack")


if __name__ == "__main__":
    main()
