"""A biased convolution before BatchNorm, without what the two do to no effect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolved(convolution: nn.Module, norm: nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Return ``norm(convolution(inputs))``.

    What a bias adds, BatchNorm subtracts with the mean of the batch, so that the derivative by the bias is zero but for
    rounding. Compiled training leaves out both passes over the result; the running mean counts the bias as always.
    """
    running, momentum = norm.running_mean, norm.momentum
    if (
        not torch.compiler.is_compiling()
        or type(convolution) is not nn.Conv2d
        or convolution.bias is None
        or type(norm) is not nn.BatchNorm2d
        or not (norm.training and norm.affine)
        or running is None
        or norm.num_batches_tracked is None
        or momentum is None
    ):
        normalized: Tensor = norm(convolution(inputs))
        return normalized
    bias = convolution.bias.detach()
    mean = running - bias
    weight = norm.weight + 0 * convolution.bias  # the bias has a derivative, zero
    unbiased = convolution._conv_forward(inputs, convolution.weight, None)
    result = F.batch_norm(unbiased, mean, norm.running_var, weight, norm.bias, True, momentum, norm.eps)
    with torch.no_grad():
        running.copy_(mean + bias)
        norm.num_batches_tracked.add_(1)
    return result
