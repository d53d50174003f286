"""The networks with the operators of `rectified_ops` in their forward passes.

The sum at the end of a wide block belongs to the BatchNorm that comes next: so such a block hands its branches on, not
yet added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import rectified_ops as ops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune.lab.models.normalized import convolved
from dirprune.lab.models.resnet import BasicBlock, Bottleneck, ResNet
from dirprune.lab.models.wide_resnet import WideBlock, WideResNet

Branches = tuple[tuple[nn.Module, Tensor], ...]
"""Layers with their inputs, whose outputs are yet to be added up."""


def plain_rectified(convolution: nn.Module, norm: nn.BatchNorm2d, inputs: Tensor, skip: Tensor | None = None) -> Tensor:
    """Return ``relu(norm(convolution(inputs)) + skip)``."""
    outputs = convolved(convolution, norm, inputs)
    return F.relu(outputs if skip is None else outputs + skip)


def plain_summed(branches: Branches, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the sum of the branches, which a shortcut goes on from, and ``relu(norm(sum))``."""
    total, *others = [layer(inputs) for layer, inputs in branches]
    for other in others:
        total = total + other
    return total, F.relu(norm(total))


def _suits(norm: nn.Module) -> bool:
    """Whether the operators say what this layer does; in evaluation they have no derivative."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.momentum is not None
        and norm.running_mean is not None
        and (norm.training or not torch.is_grad_enabled())
    )


def _parted(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what the layer gives without its bias, and the bias."""
    if type(layer) is nn.Conv2d and layer.bias is not None:
        return layer._conv_forward(inputs, layer.weight, None).contiguous(memory_format=ops.LAST), layer.bias
    return layer(inputs).contiguous(memory_format=ops.LAST), None


def _tracked(norm: nn.BatchNorm2d, numbers: Tensor, offset: Tensor | None) -> None:
    with torch.no_grad():
        bias = None if offset is None else offset.detach()
        ops.track(norm.running_mean, norm.running_var, norm.num_batches_tracked, numbers.detach(), bias, norm.momentum)


def normalized(x: Tensor, offset: Tensor | None, norm: nn.BatchNorm2d, skip: Tensor | None = None) -> Tensor:
    if not norm.training:
        statistics = norm.running_mean, norm.running_var
        return ops.rectify_evaluated(x, skip, offset, norm.weight, norm.bias, *statistics, norm.eps, False)[1]
    y, numbers = ops.rectify(x, skip, offset, norm.weight, norm.bias, norm.eps)
    _tracked(norm, numbers, offset)
    return y


def rectified(convolution: nn.Module, norm: nn.BatchNorm2d, inputs: Tensor, skip: Tensor | None = None) -> Tensor:
    """As `plain_rectified`."""
    if not _suits(norm):
        return plain_rectified(convolution, norm, inputs, skip)
    x, offset = _parted(convolution, inputs)
    return normalized(x, offset, norm, None if skip is None else skip.contiguous(memory_format=ops.LAST))


def summed(branches: Branches, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """As `plain_summed`."""
    if not _suits(norm) or len(branches) > 2:
        return plain_summed(branches, norm)
    if len(branches) == 1:
        total = branches[0][0](branches[0][1]).contiguous(memory_format=ops.LAST)
        return total, normalized(total, None, norm)
    (a, one), (b, two) = (_parted(*branch) for branch in branches)
    offset = one if two is None else two if one is None else one + two
    if not norm.training:
        statistics = norm.running_mean, norm.running_var
        return ops.rectify_evaluated(a, b, offset, norm.weight, norm.bias, *statistics, norm.eps, True)
    total, y, numbers = ops.rectify_sum(a, b, offset, norm.weight, norm.bias, norm.eps)
    _tracked(norm, numbers, None)
    return total, y


def _wide_block(self: WideBlock, branches: Branches) -> Branches:
    x, out = summed(branches, self.bn1)
    out = rectified(self.conv1, self.bn2, out)
    return (self.conv2, out), (self.shortcut, x)


def _wide_resnet(self: WideResNet, images: Tensor) -> Tensor:
    branches = self.layer3(self.layer2(self.layer1(((self.conv1, images),))))
    _, out = summed(branches, self.bn1)
    return self.linear(F.avg_pool2d(out, 8).flatten(1))


def _basic_block(self: BasicBlock, x: Tensor) -> Tensor:
    out = rectified(self.conv1, self.bn1, x)
    return rectified(self.conv2, self.bn2, out, x if self.downsample is None else self.downsample(x))


def _bottleneck(self: Bottleneck, x: Tensor) -> Tensor:
    out = rectified(self.conv2, self.bn2, rectified(self.conv1, self.bn1, x))
    return rectified(self.conv3, self.bn3, out, x if self.downsample is None else self.downsample(x))


def _resnet(self: ResNet, images: Tensor) -> Tensor:
    out = self.maxpool(rectified(self.conv1, self.bn1, images))
    out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
    return self.fc(self.avgpool(out).flatten(1))


_FORWARDS = {
    WideBlock: _wide_block,
    WideResNet: _wide_resnet,
    BasicBlock: _basic_block,
    Bottleneck: _bottleneck,
    ResNet: _resnet,
}


@contextmanager
def swapped() -> Iterator[None]:
    """Give the networks these forward passes; what is captured inside stays so.

    What torch compiled outside is compiled anew here, since it watches what it has compiled.
    """
    with ExitStack() as stack:
        for kind, forward in _FORWARDS.items():
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        yield
