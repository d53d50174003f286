"""The kernels of `rectified_kernels` as torch operators with derivatives; imported only when used.

Every operator allocates what it returns, and none waits for the device, so that torch.compile keeps them as they are
and CUDA graphs can record them. Those with a derivative mutate nothing; a separate operator updates running statistics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from dirprune.lab.models import rectified_kernels as kernels

LAST = torch.channels_last
MOST = 2**30
"""The maximum size of a tensor: offsets have 32 bits, and the last tile may reach beyond the end."""


def _check(*tensors: Tensor | None) -> None:
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous(memory_format=LAST) for tensor in given), [tensor.stride() for tensor in given]
    assert all(tensor.dtype == given[0].dtype and tensor.shape == given[0].shape for tensor in given)
    assert given[0].numel() < MOST


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _numbers(
    a: Tensor, b: Tensor | None, offset: Tensor | None, total: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Return mean, inverse deviation, scale, shift and unbiased variance of each channel of the total."""
    channels, pixels = a.shape[1], a.numel() // a.shape[1]
    if pixels < 2:
        raise ValueError(f"a batch of {tuple(a.shape)} has one value per channel; BatchNorm needs two to train on")
    plan = kernels.planned("moments" if b is None else "sum", a)
    sums = a.new_empty(2, plan.rows, channels, dtype=_wide(a))
    added = b is not None
    kernels._moments_kernel[plan.grid](
        a, b if added else a, a if offset is None else offset, total, sums, **plan.sizes,
        ADDS=added, BIASED=offset is not None, **plan.sums, **kernels.accumulated(a),
    )  # fmt: skip
    numbers = a.new_empty(5, channels, dtype=_wide(a))
    grid, sizes = kernels.settled(channels)
    kernels._moments_settled[grid](
        sums, total, weight, bias, numbers, C=channels, rows=plan.rows, pixels=pixels, eps=eps, **sizes
    )
    return numbers


def _mapped(x: Tensor, numbers: Tensor) -> Tensor:
    plan, y = kernels.planned("map", x), torch.empty_like(x)
    kernels._forward_kernel[plan.grid](x, y, numbers, **plan.sizes, **kernels.accumulated(x))
    return y


@custom_op(
    "dirprune::rectify",
    mutates_args=(),
    schema="(Tensor x, Tensor? offset, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
)
def rectify(x, offset, weight, bias, eps):  # type: ignore[no-untyped-def]
    """Return relu(BatchNorm(x + offset)), and the numbers of each channel of x; the offset has no effect."""
    _check(x)
    numbers = _numbers(x, None, None, x, weight, bias, eps)
    return _mapped(x, numbers), numbers


@custom_op(
    "dirprune::rectify_sum",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? offset, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
)
def rectify_sum(a, b, offset, weight, bias, eps):  # type: ignore[no-untyped-def]
    """Return total = a + b + offset, relu(BatchNorm(total)), and the numbers of each channel of the total."""
    _check(a, b)
    total = torch.empty_like(a)
    numbers = _numbers(a, b, offset, total, weight, bias, eps)
    return total, _mapped(total, numbers), numbers


@custom_op(
    "dirprune::rectify_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor dy, Tensor? beside, Tensor numbers, bool biased) -> (Tensor, Tensor, Tensor, Tensor)",
)
def rectify_backward(x, dy, beside, numbers, biased):  # type: ignore[no-untyped-def]
    """Return the gradients by x, γ, β and, if ``biased``, the bias of x (else an empty tensor)."""
    _check(x, dy, beside)
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    plan, common = kernels.planned("products", x), kernels.accumulated(x)
    sums = x.new_empty(2, plan.rows, channels, dtype=numbers.dtype)
    kernels._products_kernel[plan.grid](x, dy, sums, numbers, **plan.sizes, **plan.sums, **common)
    dweight, dbias, line = (numbers.new_empty(shape) for shape in (channels, channels, (2, channels)))
    grid, sizes = kernels.settled(channels)
    kernels._products_settled[grid](
        sums, numbers, dweight, dbias, line, C=channels, rows=plan.rows, pixels=pixels, **sizes
    )
    plan, dx = kernels.planned("gradient", x), torch.empty_like(x)
    sums = x.new_empty(plan.rows if biased else 0, channels, dtype=numbers.dtype)
    kernels._gradient_kernel[plan.grid](
        x, dy, x if beside is None else beside, dx, sums, numbers, line, **plan.sizes,
        BESIDE=beside is not None, BIASED=biased, **plan.sums, **common,
    )  # fmt: skip
    total = dbias.new_empty(channels if biased else 0)
    if biased:
        kernels._sums_settled[grid](sums, total, C=channels, rows=plan.rows, **sizes)
    return dx, dweight, dbias, total


@custom_op(
    "dirprune::rectify_evaluated",
    mutates_args=(),
    schema="(Tensor a, Tensor? b, Tensor? offset, Tensor weight, Tensor bias, Tensor mean, Tensor variance, "
    "float eps) -> (Tensor, Tensor)",
)
def rectify_evaluated(a, b, offset, weight, bias, mean, variance, eps):  # type: ignore[no-untyped-def]
    """Return total = a + b + offset (empty without b), and relu(BatchNorm(total)) by running statistics."""
    _check(a, b)
    adds = b is not None
    y, total = torch.empty_like(a), torch.empty_like(a) if adds else a.new_empty(0)
    plan = kernels.planned("evaluation" if adds else "map", a)
    kernels._evaluation_kernel[plan.grid](
        a, b if adds else a, weight if offset is None else offset, total, y, weight, bias, mean, variance,
        **plan.sizes, eps=eps, ADDS=adds, BIASED=offset is not None, **kernels.accumulated(a),
    )  # fmt: skip
    return total, y


@custom_op(
    "dirprune::convolve_relu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
)
def convolve_relu(x, weight, bias, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    """Return relu(convolution + bias) in one pass of cuDNN, which torch.compile would not use."""
    options = stride, padding, dilation, groups
    if fuses(x):
        return torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *options)
    return F.relu(F.conv2d(x, weight, bias, *options))


@custom_op("dirprune::rounded", mutates_args=(), schema="(Tensor x) -> Tensor")
def rounded(x):  # type: ignore[no-untyped-def]
    """Return a copy, which forces rounding: torch.compile removes a cast to a lower type and back."""
    return x.clone()


@custom_op(
    "dirprune::track",
    mutates_args=("mean", "variance", "batches"),
    schema="(Tensor(a!) mean, Tensor(b!) variance, Tensor(c!) batches, Tensor numbers, Tensor? offset, "
    "float momentum) -> ()",
)
def track(mean, variance, batches, numbers, offset, momentum):  # type: ignore[no-untyped-def]
    """Update the running statistics by those of x + offset."""
    grid, sizes = kernels.settled(len(mean))
    kernels._tracking_kernel[grid](
        mean, variance, batches, numbers, mean if offset is None else offset, momentum=momentum, C=len(mean),
        BIASED=offset is not None, CHANNELS=sizes["CHANNELS"], num_warps=1,
    )  # fmt: skip


def fuses(x: Tensor) -> bool:
    """Return whether cuDNN may be called directly, which bypasses torch's checks of capability and determinism."""
    if not x.is_cuda or torch.version.hip or not torch.backends.cudnn.enabled:
        return False
    deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return not deterministic and torch.cuda.get_device_capability(x.device) >= (8, 0)  # for bfloat16


def suits(x: Tensor, channels: int) -> bool:
    """Return whether the operators take the output of a layer for x, with this many channels and no more pixels."""
    elements = x.numel() // max(1, x.shape[1]) * channels
    return (x.is_cuda or kernels.INTERPRETED) and x.is_contiguous(memory_format=LAST) and 0 < elements < MOST


def _like(x: Tensor) -> Tensor:
    return x.new_empty(5, x.shape[1], dtype=_wide(x))


rectify.register_fake(lambda x, offset, weight, bias, eps: (torch.empty_like(x), _like(x)))
rectify_sum.register_fake(lambda a, b, offset, weight, bias, eps: (torch.empty_like(a), torch.empty_like(a), _like(a)))
rectify_backward.register_fake(
    lambda x, dy, beside, numbers, biased: (
        torch.empty_like(x),
        *(numbers.new_empty(n) for n in (x.shape[1], x.shape[1], x.shape[1] if biased else 0)),
    )
)
rectify_evaluated.register_fake(
    lambda a, b, offset, weight, bias, mean, variance, eps: (
        a.new_empty(0) if b is None else torch.empty_like(a),
        torch.empty_like(a),
    )
)


rounded.register_fake(torch.empty_like)
convolve_relu.register_fake(lambda x, weight, bias, *options: F.conv2d(x, weight, bias, *options))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, offset, weight, bias, _ = inputs
    ctx.save_for_backward(x, output[1], offset)
    ctx.kinds = weight.dtype, bias.dtype
    ctx.set_materialize_grads(False)


def _back(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, numbers, offset = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy.contiguous(memory_format=LAST)
    dx, dweight, dbias, _ = rectify_backward(x, dy, None, numbers, False)
    zero = None if offset is None else torch.zeros_like(offset)
    return dx, zero, dweight.to(ctx.kinds[0]), dbias.to(ctx.kinds[1]), None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, offset, weight, bias, _ = inputs
    total, _, numbers = output
    ctx.save_for_backward(total, numbers)
    ctx.kinds = weight.dtype, bias.dtype, None if offset is None else offset.dtype
    ctx.set_materialize_grads(False)  # the last sum has no shortcut


def _back_sum(ctx: Any, beside: Tensor | None, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    total, numbers = ctx.saved_tensors
    weight_kind, bias_kind, offset_kind = ctx.kinds
    dy = torch.zeros_like(total) if dy is None else dy.contiguous(memory_format=LAST)
    beside = None if beside is None else beside.contiguous(memory_format=LAST)
    dx, dweight, dbias, doffset = rectify_backward(total, dy, beside, numbers, offset_kind is not None)
    back = None if offset_kind is None else doffset.to(offset_kind)
    return dx, dx, back, dweight.to(weight_kind), dbias.to(bias_kind), None


rectify.register_autograd(_back, setup_context=_keep)
rectify_sum.register_autograd(_back_sum, setup_context=_keep_sum)
