"""ResNet-18 for small pictures: 3x3 stem, no first pooling, GroupNorm(32)."""

from torch import Tensor, nn
from torch.nn import functional

GROUPS = 32


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, channels_out)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.GroupNorm(GROUPS, channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.around(x))


class ResNet18(nn.Module):
    """11,173,962 parameters for 3 channels and 10 classes, whatever the picture's size."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, 64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.stages = nn.Sequential(
            *(nn.Sequential(BasicBlock(i, o, stride), BasicBlock(o, o, 1)) for i, o, stride in widths)
        )
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(functional.relu(self.norm1(self.conv1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits
