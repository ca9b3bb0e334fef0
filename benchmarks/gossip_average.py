"""The average of 11 ResNet-18 models against the bandwidth that a plain copy reaches.

A ratio of times, on one thread. A ratio of 2 is half of the bandwidth: twice the time that a copy
of as many bytes would take. Bytes of a copy are those that it reads and those that it writes, into
memory that exists already. Bytes of the average are

    dense    11 models of 4 bytes a weight, the receiver's mask of 1 byte a weight,
             and the result of 4 bytes a weight
    packed   the same with the models as they are kept: 4 bytes a kept weight and 1 bit a weight

The ratio is for dense bytes, the kinder of the two. With NumPy and torch half of the bandwidth is
not reached. At density 1, where a model is added as it lies, the rest is calls, the division and
the mask. Below it, a value's place must be found in the bits (`flatnonzero`) and the value added
there (`scatter_add_`), both one weight at a time, where a copy moves 32 bytes at once. The obvious
way is to unpack each model and add whole vectors.
"""

import torch
from torch import Tensor

from dispfl import DisPFL
from dispfl.core.averaging import average_of
from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel
from dispfl.models.settings import Model
from dispfl.topology import peer_names
from measure import best_times, report

LIMIT = 2.0
MODELS = 11


def measure(density: float) -> None:
    """As many models as a peer with 10 neighbours averages."""
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    layout = network.layout
    size = layout.size
    weights = network.read()
    models = []
    for peer in peer_names(MODELS):
        mask = DisPFL().start(weights, layout, density, seed=0, peer=peer).model.mask
        models.append(PackedModel.pack(weights, mask.unpack()))
    m_k = models[0].mask.unpack()
    target = torch.empty(size)

    def obvious() -> Tensor:
        total = torch.zeros(size)
        holders = torch.zeros(size)
        for model in models:
            w_j, m_j = model.unpack()
            total += w_j
            holders += m_j
        return torch.where(m_k, total / holders.clamp_(min=1), 0.0)

    assert average_of(models, m_k).equal(obvious())
    average_time, copy_time, obvious_time = best_times(
        lambda: average_of(models, m_k), lambda: target.copy_(weights), obvious
    )

    seconds_a_byte = copy_time / (8 * size)
    mask_and_result = (1 + 4) * size
    dense_bytes = 4 * MODELS * size + mask_and_result
    packed_bytes = mask_and_result
    for model in models:
        packed_bytes += 4 * model.values.numel() + model.mask.bits.numel()
    report(
        "gossip_average",
        average_time / (dense_bytes * seconds_a_byte),
        LIMIT,
        density=density,
        ratio_for_packed_bytes=round(average_time / (packed_bytes * seconds_a_byte), 3),
        ratio_to_the_obvious_way=round(average_time / obvious_time, 3),
        milliseconds=round(1e3 * average_time, 1),
        copy_gb_a_second=round(1e-9 / seconds_a_byte, 1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for density in (1.0, 0.5, 0.2):
        measure(density)
