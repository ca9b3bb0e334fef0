"""The built-in networks.

All have GroupNorm: batch statistics harm federated learning (the paper, appendix).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUPS = 32
VGG11_WIDTHS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


class SmallCNN(nn.Module):
    """Two strided convolutions and two linear layers: fast on a laptop.

    Yet large enough for masks to matter: 105,962 parameters for 28x28 grey images and 10 classes.
    """

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


class MLP(nn.Module):
    """Two hidden layers of 64 for tables; 6,530 parameters for 30 columns and 2 classes."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(inputs, 64)
        self.norm1 = nn.GroupNorm(4, 64)
        self.hidden2 = nn.Linear(64, 64)
        self.norm2 = nn.GroupNorm(4, 64)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm1(self.hidden1(x.flatten(1))))
        x = functional.relu(self.norm2(self.hidden2(x)))
        logits: Tensor = self.linear(x)
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut connection."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.GroupNorm(GROUPS, channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def _stage(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels_in, channels_out, stride)
    return nn.Sequential(first, BasicBlock(channels_out, channels_out, 1))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 3x3 stem, no first pooling, GroupNorm(32).

    11,173,962 parameters for 3 channels and 10 classes, whatever the image size.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, 64)
        self.stages = nn.Sequential(
            _stage(64, 64, stride=1),
            _stage(64, 128, stride=2),
            _stage(128, 256, stride=2),
            _stage(256, 512, stride=2),
        )
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(functional.relu(self.norm1(self.conv1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class VGG11(nn.Module):
    """VGG-11 with GroupNorm(32) and a single linear layer, as in the paper's experiments.

    9,231,114 parameters for 3 channels and 10 classes, for images of 32x32 or more.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in VGG11_WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1),
                    nn.GroupNorm(GROUPS, width),
                    nn.ReLU(),
                ]
                channels = width
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.features(x).mean((2, 3)))
        return logits


VOCABULARY = 4096


class TextNet(nn.Module):
    """The mean of the embeddings of a text's words, and two linear layers.

    Word numbers share the 4,096 entries of the embedding by their remainder. 133,314 parameters for
    2 classes, whatever the length of the texts.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.hidden = nn.Linear(32, 64)
        self.linear = nn.Linear(64, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.embedding(input_ids % VOCABULARY)
        mask = attention_mask[..., None].to(words.dtype)
        mean = (words * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.linear(functional.relu(self.hidden(mean)))
        return logits


class UNet(nn.Module):
    """A small U-Net: the class of each pixel of square images whose size is a multiple of 4.

    Two levels with 16 and 32 channels, and 64 between them; 118,930 parameters for 3 channels and 2
    classes, whatever the image size.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.down1 = _convolutions(channels, 16)
        self.down2 = _convolutions(16, 32)
        self.bottom = _convolutions(32, 64)
        self.up2 = _convolutions(64 + 32, 32)
        self.up1 = _convolutions(32 + 16, 16)
        self.linear = nn.Conv2d(16, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        coarsest = self.bottom(functional.max_pool2d(coarse, 2))
        coarse = self.up2(_joined(coarsest, coarse))
        logits: Tensor = self.linear(self.up1(_joined(coarse, fine)))
        return logits


def _convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )


def _joined(coarse: Tensor, fine: Tensor) -> Tensor:
    """Enlarge coarse features to twice their size, and append the fine ones."""
    return torch.cat([functional.interpolate(coarse, scale_factor=2.0), fine], 1)
