"""VGG-11 with GroupNorm(32) and a single linear layer, as in the paper's heterogeneous experiments."""

from torch import Tensor, nn

WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class VGG11(nn.Module):
    """9,231,114 parameters for 3 channels and 10 classes, for pictures of 32x32 or more."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(32, width), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.features(x).mean((2, 3)))
        return logits
