"""Lets fluke import torchvision, whose compiled part does not load with a CPU build of torch.

Nothing uses it here, but its Python part needs two operators to exist.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
