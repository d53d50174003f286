"""VGG16 for 32×32 images, as the published CIFAR-10 runs trained it: convolutions with biases, no BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn

# (channels, convolutions) of each group; a max-pool follows every group.
_GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class VGG(nn.Module):
    """13 convolutions, named ``features.N`` as in torchvision, and 3 linear layers with dropout before two of them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in _GROUPS:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Linear(512, classes),
        )
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=(2 / (9 * layer.out_channels)) ** 0.5)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def vgg16(classes: int = 10) -> VGG:
    """Return VGG16 without BatchNorm for 3×32×32 images (15,245,130 parameters with 10 classes).

    Convolution weights start as N(0, 2 / (9·out)), convolution biases at 0, linear layers with PyTorch's default.

    Args:
        classes: number of outputs.

    Example:
        >>> import torch
        >>> vgg16(classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference: Simonyan & Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015.
    """
    return VGG(classes)
