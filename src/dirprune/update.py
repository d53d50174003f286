"""One step of gRDA: the mathematics, as pure functions on lists of tensors.

`grda` is the functional form of `dirprune.optim.GRDA`. The single-tensor path is the plain statement of the update; the
foreach path here and the fused kernel in `dirprune._fused` compute the same numbers, faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softshrink

Thresholds = Sequence[Tensor] | list[float]
_ZERO = torch.zeros((), device="cpu")
"""Adding this tensor takes a third of the time of adding 0.0, and for small tensors the call is the whole cost."""


def grda(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    thresholds: Sequence[Tensor],
    *,
    lr: float | Tensor,
    c: float,
    mu: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    foreach: bool = False,
    capturable: bool = False,
) -> None:
    """Take one gRDA step, in place, on tensors of one device.

    ``buffers`` holds the momentum buffers, and is empty without momentum. ``steps`` and ``thresholds`` are float64
    scalars. They are all on the host or, with ``capturable``, all on the parameters' device, where no step waits for
    the host. ``foreach`` needs them on the host.
    """
    options: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    if capturable or not _are_numbers(steps):
        grow_thresholds(steps, thresholds, lr=lr, c=c, mu=mu, momentum=momentum)
        _single_tensor_grda(params, grads, accumulators, buffers, thresholds, lr=lr, **options)
        return
    rate = float(lr)
    grow_thresholds(steps, thresholds, lr=rate, c=c, mu=mu, momentum=momentum)
    taus = [threshold.item() for threshold in thresholds]
    update = _foreach_grda if foreach else _single_tensor_grda
    update(params, grads, accumulators, buffers, taus, lr=rate, **options)


def growth(n: Any, *, rate: Any, c: float, mu: float) -> Any:
    """Return the growth of the threshold, τₙ − τₙ₋₁ = c·γ^(μ+½)·(n^μ − (n−1)^μ), for numbers or tensors.

    Give n in float64: n^μ − (n−1)^μ cancels, and float32 would lose a few percent of it after some 10⁵ steps.
    """
    return c * rate ** (mu + 0.5) * (n**mu - (n - 1) ** mu)


def grow_thresholds(
    steps: Sequence[Tensor],
    thresholds: Sequence[Tensor],
    *,
    lr: float | Tensor,
    c: float,
    mu: float,
    momentum: float = 0.0,
) -> None:
    """Set n ← n + 1, then τ ← τ + growth(n), in place, with the effective rate γ = lr/(1−momentum).

    A scheduler that ends at 0 may end slightly below it by rounding. γ^(μ+½) would be NaN there, so a negative rate
    counts as 0.
    """
    if isinstance(lr, Tensor) or not _are_numbers(steps):
        torch._foreach_add_(list(steps), 1.0)
        if c:
            n = torch.stack(tuple(steps))
            rate = lr.to(n).clamp(min=0) if isinstance(lr, Tensor) else max(lr, 0.0)
            torch._foreach_add_(list(thresholds), list(growth(n, rate=rate / (1 - momentum), c=c, mu=mu).unbind()))
        return
    # On the host, adding scalar tensors takes half the time of adding numbers.
    scalar = partial(torch.tensor, dtype=torch.float64, device="cpu")
    torch._foreach_add_(list(steps), [scalar(1.0)] * len(steps))
    if c:
        counts = [step.item() for step in steps]
        rate = max(lr, 0.0) / (1 - momentum)
        grown = {n: scalar(growth(n, rate=rate, c=c, mu=mu)) for n in set(counts)}  # usually one
        torch._foreach_add_(list(thresholds), [grown[n] for n in counts])


def _are_numbers(scalars: Sequence[Tensor]) -> bool:
    """Return whether the host can read these scalars now: they are neither on a device, nor traced, nor fake."""
    return not torch.compiler.is_compiling() and scalars[0].is_cpu and type(scalars[0]) is Tensor


def _single_tensor_grda(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    buffers: Sequence[Tensor],
    taus: Thresholds,
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> None:
    for i, (param, grad, v) in enumerate(zip(params, grads, accumulators, strict=True)):
        tau = taus[i]
        if weight_decay or momentum:
            grad = (grad.to_dense() if grad.is_sparse else grad).to(v.dtype)
        if maximize:
            grad = -grad
        if weight_decay:
            grad = _add_scaled(grad, param, weight_decay)
        if momentum:
            buffer = buffers[i].mul_(momentum).add_(grad)
            grad = _add_scaled(grad, buffer, momentum) if nesterov else buffer
        if isinstance(tau, Tensor):  # a product with a scalar tensor keeps the gradient's precision, hence the cast
            v.sub_(grad.to(v.dtype) * (lr.to(v) if isinstance(lr, Tensor) else lr))
        else:
            v.add_(grad, alpha=-float(lr))
        soft_threshold(v, tau, out=param)


def _add_scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    # torch.compile bakes the first `alpha` it sees into the graph, and would miss later changes by a scheduler.
    return a + scale * b.to(a.dtype) if torch.compiler.is_compiling() else a.add(b, alpha=scale)


def _foreach_grda(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    buffers: Sequence[Tensor],
    taus: list[float],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> None:
    params, directions, vs = list(params), list(grads), list(accumulators)
    if weight_decay or momentum:
        directions = [g.to(v.dtype) for g, v in zip(directions, vs, strict=True)]
    if maximize:
        directions = list(torch._foreach_neg(directions))
    if weight_decay:
        decayed = [p.to(v.dtype) for p, v in zip(params, vs, strict=True)]
        directions = list(torch._foreach_add(directions, decayed, alpha=weight_decay))
    if momentum:
        torch._foreach_mul_(list(buffers), momentum)
        torch._foreach_add_(list(buffers), directions)
        directions = list(torch._foreach_add(directions, list(buffers), alpha=momentum)) if nesterov else list(buffers)
    torch._foreach_add_(vs, directions, alpha=-lr)
    # −clamp(v, −τ, τ) + v, computed in the parameters' own memory if they have the accumulator's precision.
    shrunk = [p if p.dtype == v.dtype else torch.empty_like(v) for p, v in zip(params, vs, strict=True)]
    torch._foreach_copy_(shrunk, vs)
    torch._foreach_clamp_max_(shrunk, taus)
    torch._foreach_clamp_min_(shrunk, [-tau for tau in taus])
    torch._foreach_neg_(shrunk)
    torch._foreach_add_(shrunk, vs)
    for p, s in zip(params, shrunk, strict=True):
        if s is not p:
            p.copy_(s).add_(_ZERO)  # a value that underflows in the cast keeps its sign: −0.0 + 0.0 = +0.0


def soft_threshold(v: Tensor, tau: float | Tensor, *, out: Tensor) -> None:
    """Write sign(v)·max(|v| − τ, 0) to ``out``; values within ±τ become +0.0, and NaN stays NaN."""
    if isinstance(tau, Tensor):
        tau = tau.to(v.dtype)
        out.copy_(v - v.clamp(-tau, tau))
        if out.dtype != v.dtype:
            out.add_(0.0)  # see below
        return
    if out.dtype == v.dtype:
        softshrink(v, tau, out=out)  # type: ignore[call-arg]  # torch's annotation lacks out
        if (
            v.is_cpu
            and v.is_contiguous()
            and out.is_contiguous()
            and not _softshrink_leaves_negative_zeros(v.numel(), v.dtype, torch.get_num_threads())
        ):
            return
    else:
        out.copy_(softshrink(v, tau))
    out.add_(_ZERO)  # −0.0 + 0.0 = +0.0; a cast to lower precision can underflow to −0.0 too


@cache
def _softshrink_leaves_negative_zeros(numel: int, dtype: torch.dtype, threads: int) -> bool:
    """Return whether softshrink gives −0.0 anywhere in a contiguous tensor of this size.

    Torch's scalar code gives −0.0, its vectorised code does not. Which of them handles an element depends on the size
    and on the number of threads. One test per size saves most large tensors a pass over memory.
    """
    probe = softshrink(torch.full((numel,), -0.5, dtype=dtype, device="cpu"), 1.0)
    return bool(torch.signbit(probe).any())
