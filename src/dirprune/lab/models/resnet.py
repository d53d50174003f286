"""ResNet50 and ResNet18 with torchvision's parameter names and shapes, so that its weight files load directly."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; the first one strides."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        total: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return total


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions; the 3×3 one strides ("v1.5")."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        total: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return total


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, global average pool and one linear layer."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        counts: tuple[int, int, int, int],
        classes: int,
        *,
        small_images: bool,
    ) -> None:
        super().__init__()
        if small_images:
            self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, counts[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, counts[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, counts[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, counts[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        # BatchNorm already starts at weight 1 and bias 0.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.fc(self.avgpool(out).flatten(1))
        return logits


class SmallResNet(nn.Module):
    """Stem and three stages of one residual block each, for images of about 16×16."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = BasicBlock(width, width, 1)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.layer3 = BasicBlock(2 * width, 4 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        out = self.layer1(self.relu(self.bn1(self.conv1(images))))
        logits: Tensor = self.fc(self.avgpool(self.layer3(self.layer2(out))).flatten(1))
        return logits


def _downsample(channels: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))


def _stage(
    block: type[BasicBlock | Bottleneck], channels: int, width: int, blocks: int, *, stride: int
) -> nn.Sequential:
    rest = [block(width * block.expansion, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(block(channels, width, stride), *rest)


def resnet50(classes: int = 1000) -> ResNet:
    """Return ResNet50 for ImageNet (25,557,032 parameters with 1000 classes).

    Bottleneck "v1.5"; convolutions start as N(0, 2 / fan_out), BatchNorm at 1 and 0.

    Args:
        classes: number of outputs.

    Example:
        >>> import torch
        >>> resnet50().eval()(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 1000])

    Reference: He, Zhang, Ren & Sun, "Deep residual learning for image recognition", 2016.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, small_images=False)


def resnet18(classes: int = 10, *, small_images: bool = True) -> ResNet:
    """Return ResNet18, for CIFAR by default.

    Args:
        classes: number of outputs.
        small_images: a 3×3 stride-1 stem without max-pooling, for images of about 32×32; ``False`` gives torchvision's
            7×7 stride-2 stem. The parameter names are the same.

    Example:
        >>> import torch
        >>> resnet18(classes=10).eval()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])

    Reference: He, Zhang, Ren & Sun, "Deep residual learning for image recognition", 2016.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images=small_images)


def resnet_small(classes: int = 10, width: int = 16) -> SmallResNet:
    """Return a residual network of 78,042 parameters that a CPU trains in a minute on small images.

    Args:
        classes: number of outputs.
        width: channels of the first stage; the next have two and four times as many.

    Example:
        >>> import torch
        >>> resnet_small().eval()(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 10])

    Reference: He, Zhang, Ren & Sun, "Deep residual learning for image recognition", 2016: theirs for CIFAR-10, with one
    block a stage and projections.
    """
    return SmallResNet(classes, width)
