"""The kernels of `rectified_kernels` as torch operators with derivatives.

Every operator allocates what it returns and nothing waits for the device, so that torch.compile keeps them as they are
and a CUDA graph holds them. Those with a derivative change nothing; the running statistics have one of their own.
"""

from __future__ import annotations

from typing import Any

import rectified_kernels as kernels
import torch
from torch import Tensor
from torch.library import custom_op

LAST = torch.channels_last


def _check(*tensors: Tensor | None) -> None:
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous(memory_format=LAST) for tensor in given), [tensor.stride() for tensor in given]
    assert all(tensor.dtype == given[0].dtype and tensor.shape == given[0].shape for tensor in given)
    assert given[0].numel() < 2**30, "offsets are 32 bits, and the last tile may reach beyond the end"


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _numbers(
    a: Tensor, b: Tensor | None, offset: Tensor | None, total: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """Return mean, inverse deviation, scale, shift and unbiased variance of each channel of the total."""
    channels, pixels = a.shape[1], a.numel() // a.shape[1]
    if pixels < 2:
        raise ValueError(f"a batch of {tuple(a.shape)} has one value a channel; BatchNorm needs two to train on")
    plan = kernels.planned("moments" if b is None else "sum", a)
    sums = a.new_empty(2, plan.rows, channels, dtype=_wide(a))
    added = b is not None
    kernels._moments_kernel[plan.grid](
        a, b if added else a, a if offset is None else offset, total, sums, **plan.sizes,
        ADDS=added, BIASED=offset is not None, FOLD=plan.fold, **kernels.accumulated(a),
    )  # fmt: skip
    numbers = a.new_empty(5, channels, dtype=_wide(a))
    grid, sizes = kernels.settled(channels)
    kernels._moments_settled[grid](
        sums, total, weight, bias, numbers, C=channels, rows=plan.rows, pixels=pixels, eps=eps, **sizes
    )
    return numbers


def _mapped(x: Tensor, skip: Tensor | None, numbers: Tensor) -> Tensor:
    plan, y = kernels.planned("map", x), torch.empty_like(x)
    skips = skip is not None
    kernels._forward_kernel[plan.grid](
        x, skip if skips else x, y, numbers, **plan.sizes, SKIPS=skips, **kernels.accumulated(x)
    )
    return y


def _gradients(
    x: Tensor, y: Tensor | None, dy: Tensor, beside: Tensor | None, numbers: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by x, the skip, γ, β and the bias; that of the skip is dy where there is none."""
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    plan, common = kernels.planned("products", x), kernels.accumulated(x)
    sums = x.new_empty(2, plan.rows, channels, dtype=numbers.dtype)
    skips = y is not None
    g = torch.empty_like(x) if skips else dy
    kernels._products_kernel[plan.grid](
        x, y if skips else x, dy, g, sums, numbers, **plan.sizes, SKIPS=skips, FOLD=plan.fold, **common
    )
    dweight, dbias, line = (numbers.new_empty(shape) for shape in (channels, channels, (2, channels)))
    grid, sizes = kernels.settled(channels)
    kernels._products_settled[grid](
        sums, numbers, dweight, dbias, line, C=channels, rows=plan.rows, pixels=pixels, **sizes
    )
    plan, dx = kernels.planned("gradient", x), torch.empty_like(x)
    sums = x.new_empty(plan.rows if biased else 0, channels, dtype=numbers.dtype)
    kernels._gradient_kernel[plan.grid](
        x, g, x if beside is None else beside, dx, sums, numbers, line, **plan.sizes,
        MASKED=not skips, BESIDE=beside is not None, BIASED=biased, FOLD=plan.fold, **common,
    )  # fmt: skip
    total = dbias.new_empty(channels if biased else 0)
    if biased:
        kernels._sums_settled[grid](sums, total, C=channels, rows=plan.rows, **sizes)
    return dx, g, dweight, dbias, total


@custom_op(
    "dirprune::rectify",
    mutates_args=(),
    schema="(Tensor x, Tensor? skip, Tensor? offset, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
)
def rectify(x, skip, offset, weight, bias, eps):  # type: ignore[no-untyped-def]
    """relu(BatchNorm(x + offset) + skip), and the numbers of each channel of x; the offset has no effect."""
    _check(x, skip)
    numbers = _numbers(x, None, None, x, weight, bias, eps)
    return _mapped(x, skip, numbers), numbers


@custom_op(
    "dirprune::rectify_sum",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? offset, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
)
def rectify_sum(a, b, offset, weight, bias, eps):  # type: ignore[no-untyped-def]
    """total = a + b + offset, relu(BatchNorm(total)), and the numbers of each channel of the total."""
    _check(a, b)
    total = torch.empty_like(a)
    numbers = _numbers(a, b, offset, total, weight, bias, eps)
    return total, _mapped(total, None, numbers), numbers


@custom_op(
    "dirprune::rectify_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor dy, Tensor? beside, Tensor numbers, bool biased) -> (Tensor, Tensor, Tensor, Tensor)",
)
def rectify_backward(x, dy, beside, numbers, biased):  # type: ignore[no-untyped-def]
    """The gradients by x, γ, β and the bias of x, or nothing for that."""
    _check(x, dy, beside)
    dx, _, dweight, dbias, doffset = _gradients(x, None, dy, beside, numbers, biased)
    return dx, dweight, dbias, doffset


@custom_op(
    "dirprune::rectify_skip_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor y, Tensor dy, Tensor numbers) -> (Tensor, Tensor, Tensor, Tensor)",
)
def rectify_skip_backward(x, y, dy, numbers):  # type: ignore[no-untyped-def]
    """The gradients by x, the skip, γ and β."""
    _check(x, y, dy)
    return _gradients(x, y, dy, None, numbers, False)[:4]


@custom_op(
    "dirprune::rectify_evaluated",
    mutates_args=(),
    schema="(Tensor a, Tensor? b, Tensor? offset, Tensor weight, Tensor bias, Tensor mean, Tensor variance, "
    "float eps, bool adds) -> (Tensor, Tensor)",
)
def rectify_evaluated(a, b, offset, weight, bias, mean, variance, eps, adds):  # type: ignore[no-untyped-def]
    """By running statistics: total and y if ``adds``, where b comes before BatchNorm; else nothing and y."""
    _check(a, b)
    y, total = torch.empty_like(a), torch.empty_like(a) if adds else a.new_empty(0)
    plan = kernels.planned("map" if b is None else "sum", a)
    kernels._evaluation_kernel[plan.grid](
        a, a if b is None else b, weight if offset is None else offset, total, y, weight, bias, mean, variance,
        **plan.sizes, eps=eps, ADDS=adds, SKIPS=b is not None and not adds, BIASED=offset is not None,
        **kernels.accumulated(a),
    )  # fmt: skip
    return total, y


@custom_op(
    "dirprune::track",
    mutates_args=("mean", "variance", "batches"),
    schema="(Tensor(a!) mean, Tensor(b!) variance, Tensor(c!) batches, Tensor numbers, Tensor? offset, "
    "float momentum) -> ()",
)
def track(mean, variance, batches, numbers, offset, momentum):  # type: ignore[no-untyped-def]
    """Let the running statistics follow those of x + offset."""
    grid, sizes = kernels.settled(len(mean))
    kernels._tracking_kernel[grid](
        mean, variance, batches, numbers, mean if offset is None else offset, momentum=momentum, C=len(mean),
        BIASED=offset is not None, CHANNELS=sizes["CHANNELS"], num_warps=1,
    )  # fmt: skip


def _like(x: Tensor) -> Tensor:
    return x.new_empty(5, x.shape[1], dtype=_wide(x))


rectify.register_fake(lambda x, skip, offset, weight, bias, eps: (torch.empty_like(x), _like(x)))
rectify_sum.register_fake(lambda a, b, offset, weight, bias, eps: (torch.empty_like(a), torch.empty_like(a), _like(a)))
rectify_backward.register_fake(
    lambda x, dy, beside, numbers, biased: (
        torch.empty_like(x),
        *(numbers.new_empty(n) for n in (x.shape[1], x.shape[1], x.shape[1] if biased else 0)),
    )
)
rectify_skip_backward.register_fake(
    lambda x, y, dy, numbers: (
        *(torch.empty_like(x) for _ in range(2)),
        *(numbers.new_empty(x.shape[1]) for _ in range(2)),
    )
)
rectify_evaluated.register_fake(
    lambda a, b, offset, weight, bias, mean, variance, eps, adds: (
        torch.empty_like(a) if adds else a.new_empty(0),
        torch.empty_like(a),
    )
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, skip, offset, weight, bias, _ = inputs
    y, numbers = output
    ctx.save_for_backward(x, y if skip is not None else None, numbers, offset)
    ctx.kinds = weight.dtype, bias.dtype
    ctx.set_materialize_grads(False)


def _back(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, y, numbers, offset = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy.contiguous(memory_format=LAST)
    dskip = None
    if y is None:
        dx, dweight, dbias, _ = rectify_backward(x, dy, None, numbers, False)
    else:
        dx, dskip, dweight, dbias = rectify_skip_backward(x, y, dy, numbers)
    zero = None if offset is None else torch.zeros_like(offset)
    return dx, dskip, zero, dweight.to(ctx.kinds[0]), dbias.to(ctx.kinds[1]), None


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
