"""A small CNN for small pictures: quick on a laptop, yet large enough for masks to matter."""

from torch import Tensor, nn
from torch.nn import functional


class SmallCNN(nn.Module):
    """Two strided convolutions and two linear layers; for 28x28 grey pictures 105,962 parameters."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, stride=2, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        side = (size + 3) // 4  # two strides of 2, each rounding up
        self.hidden = nn.Linear(32 * side * side, 64)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm1(self.conv1(x)))
        x = functional.relu(self.norm2(self.conv2(x)))
        logits: Tensor = self.linear(functional.relu(self.hidden(x.flatten(1))))
        return logits
