"""BatchNorm and relu after a convolution or a sum: plain layers, or our kernels in compiled code on a GPU.

A bias before BatchNorm is added, and subtracted again with the mean of the batch: the kernels of `rectified_kernels`
leave it out. They compute BatchNorm and relu together, in as few passes over memory as possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Branches = tuple[tuple[nn.Module, Tensor], ...]
"""Layers with their inputs; the sum of their outputs is yet to be computed."""

_ops: Any = None
"""`rectified_ops` while it may be used, else None."""


@contextmanager
def kernels() -> Iterator[None]:
    """Let code compiled inside use the kernels, given a GPU and triton. They have no second derivative."""
    global _ops
    before = _ops
    if torch.cuda.is_available() and find_spec("triton"):
        from dirprune.lab.models import rectified_ops

        _ops = rectified_ops
    try:
        yield
    finally:
        _ops = before


def rectified(convolution: nn.Module, norm: nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Return ``relu(norm(convolution(inputs)))``; with kernels, the bias's gradient is exactly 0."""
    if not _covers(norm, inputs):
        return F.relu(norm(convolution(inputs)))
    if not norm.training and _folds(convolution, inputs):
        return _folded(convolution, norm, inputs)
    return _rectified(*_parted(convolution, inputs), norm)


def summed(branches: Branches, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the sum of one or two branches, which a shortcut uses, and ``relu(norm(sum))``."""
    if not all(_covers(norm, inputs) for _, inputs in branches):
        outputs = [layer(inputs) for layer, inputs in branches]
        total: Tensor = outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]
        return total, F.relu(norm(total))
    if len(branches) == 1:
        ((layer, inputs),) = branches
        total = layer(inputs).contiguous(memory_format=torch.channels_last)
        return total, _rectified(total, None, norm)
    (a, one), (b, two) = (_parted(*branch) for branch in branches)
    offset = one if two is None else two if one is None else one + two
    if not norm.training:
        return _evaluated(a, b, offset, norm)
    total, y, numbers = _ops.rectify_sum(a, b, offset, norm.weight, norm.bias, norm.eps)
    _track(norm, numbers, None)
    return total, y


def _covers(norm: nn.BatchNorm2d, inputs: Tensor) -> bool:
    """Return whether the operators compute what this layer does; in evaluation they have no derivative."""
    return (
        _ops is not None
        and torch.compiler.is_compiling()
        and type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.momentum is not None
        and norm.track_running_stats
        and norm.running_mean is not None
        and not _hooked(norm)
        and (norm.training or not torch.is_grad_enabled())
        and bool(_ops.suits(inputs, norm.num_features))
    )


def _hooked(module: nn.Module) -> bool:
    """Return whether hooks or a replaced forward watch or change what the layer does."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in module.__dict__


def _is_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether the layer does what torch's convolution does, and nothing else."""
    return type(layer) is nn.Conv2d and not _hooked(layer)


def _parted(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the layer's output without its bias, and the bias as autocast would round it."""
    if _is_convolution(layer) and layer.bias is not None:
        unbiased = layer._conv_forward(inputs, layer.weight, None)
        return unbiased.contiguous(memory_format=torch.channels_last), layer.bias.to(unbiased.dtype)
    return layer(inputs).contiguous(memory_format=torch.channels_last), None


def _rectified(x: Tensor, offset: Tensor | None, norm: nn.BatchNorm2d) -> Tensor:
    if not norm.training:
        return _evaluated(x, None, offset, norm)[1]
    y: Tensor
    y, numbers = _ops.rectify(x, offset, norm.weight, norm.bias, norm.eps)
    _track(norm, numbers, offset)
    return y


def _folds(layer: nn.Module, inputs: Tensor) -> TypeGuard[nn.Conv2d]:
    """Return whether the layer is a convolution that cuDNN can fuse with a relu, on inputs of low precision."""
    return (
        _is_convolution(layer)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and inputs.dtype in (torch.bfloat16, torch.float16)
    )


def _folded(layer: nn.Conv2d, norm: nn.BatchNorm2d, inputs: Tensor) -> Tensor:
    """Return the layer's result with the running statistics folded into its weights, which autocast rounds first."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    # Really rounded: the running mean is that of rounded biases, and for a variance of 0 the scale is 316·γ.
    bias = 0.0 if layer.bias is None else _ops.rounded(layer.bias.to(inputs.dtype))
    shift = norm.bias + (bias - norm.running_mean) * scale
    weight = _ops.rounded(layer.weight.to(inputs.dtype)) * scale.view(-1, 1, 1, 1)
    low = weight.to(inputs.dtype), shift.to(inputs.dtype)
    y: Tensor = _ops.convolve_relu(inputs, *low, layer.stride, layer.padding, layer.dilation, layer.groups)
    return y


def _evaluated(a: Tensor, b: Tensor | None, offset: Tensor | None, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    statistics = norm.running_mean, norm.running_var
    both: tuple[Tensor, Tensor] = _ops.rectify_evaluated(a, b, offset, norm.weight, norm.bias, *statistics, norm.eps)
    return both


def _track(norm: nn.BatchNorm2d, numbers: Tensor, offset: Tensor | None) -> None:
    with torch.no_grad():
        bias = None if offset is None else offset.detach()
        buffers = norm.running_mean, norm.running_var, norm.num_batches_tracked
        _ops.track(*buffers, numbers.detach(), bias, norm.momentum)
