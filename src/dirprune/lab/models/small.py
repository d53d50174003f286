"""A small convolutional network that learns 8×8 digits in seconds on a CPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SmallNet(nn.Module):
    """Three 3×3 convolutions and two linear layers.

    There is no BatchNorm and no dropout: the gradient of a batch is the mean over its examples, so training on several
    processes with the same global batch equals training on one.
    """

    def __init__(self, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.fc1 = nn.Linear(4 * width * 2 * 2, 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)
        # Without normalisation the default init shrinks the signal layer by layer and plain SGD starts slowly.
        for layer in (self.conv1, self.conv2, self.conv3, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        out = F.relu(self.conv1(images))
        out = F.max_pool2d(F.relu(self.conv2(out)), 2)
        out = F.max_pool2d(F.relu(self.conv3(out)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(out.flatten(1))))
        return logits


def small(classes: int = 10, channels: int = 1, width: int = 16) -> SmallNet:
    """Return a network of 40,394 parameters for 1×8×8 images in 10 classes.

    The layers followed by a ReLU start as N(0, 2 / fan_in) with biases 0; the last one has PyTorch's default init.

    Args:
        classes: number of outputs.
        channels: number of channels of an image.
        width: channels after the first layer; those after the others follow.

    Example:
        >>> import torch
        >>> small()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])

    Reference: the init is that of He, Zhang, Ren & Sun, "Delving deep into rectifiers", 2015.
    """
    return SmallNet(classes, channels, width)
