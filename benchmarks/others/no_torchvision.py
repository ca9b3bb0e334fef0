"""Lets fluke import torchvision, whose compiled part does not load with a CPU build of torch.
Nothing here uses it, but its Python part wants two operators to exist.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
