"""Wide residual networks for 32×32 images, as the published CIFAR runs trained them: every convolution has a bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class WideBlock(nn.Module):
    """Two pre-activation 3×3 convolutions beside a shortcut that sees the raw input; the second one strides."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1)
        same_shape = stride == 1 and channels == width
        self.shortcut: nn.Module = nn.Identity() if same_shape else nn.Conv2d(channels, width, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        result: Tensor = out + self.shortcut(x)
        return result


class WideResNet(nn.Module):
    """Stem to 16 channels, three stages of ``blocks`` blocks, BatchNorm, average pool and one linear layer."""

    def __init__(self, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = _stage(16, 16 * width, blocks, stride=1)
        self.layer2 = _stage(16 * width, 32 * width, blocks, stride=2)
        self.layer3 = _stage(32 * width, 64 * width, blocks, stride=2)
        # PyTorch's momentum is the weight of the new batch: 0.9 all but forgets the past. The published runs used it.
        self.bn1 = nn.BatchNorm2d(64 * width, momentum=0.9)
        self.linear = nn.Linear(64 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        out = F.relu(self.bn1(out))
        logits: Tensor = self.linear(F.avg_pool2d(out, 8).flatten(1))
        return logits


def _stage(channels: int, width: int, blocks: int, *, stride: int) -> nn.Sequential:
    rest = [WideBlock(width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(WideBlock(channels, width, stride), *rest)


def wide_resnet(depth: int = 28, width: int = 10, classes: int = 10) -> WideResNet:
    """Return WRN-depth-width without dropout for 3×32×32 images (28, 10: 36,489,290 parameters with 10 classes).

    Three stages of (depth − 4) / 6 blocks with 16·width, 32·width and 64·width channels; PyTorch's default init.

    Args:
        depth: number of convolutions on the longest path, 6n + 4 with n ≥ 1.
        width: widening factor, at least 1.
        classes: number of outputs.

    Example:
        >>> import torch
        >>> wide_resnet(depth=10, width=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Zagoruyko & Komodakis, "Wide residual networks", 2016.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth={depth} is not 6n + 4 with n ≥ 1; take one of 10, 16, 22, 28, 34, 40, …")
    if width < 1:
        raise ValueError(f"width={width} must be at least 1; the published network has width=10")
    return WideResNet((depth - 4) // 6, width, classes)
