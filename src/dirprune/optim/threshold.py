"""The threshold: how it grows from step to step, and how it makes zeros."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softshrink

CHUNK = 65536
"""Elements that are worked on at a time where a step needs temporaries: they stay in the cache."""
SHAPES = ("soft", "garrote", "hard")
LARGEST = torch.finfo(torch.float32).max
"""The largest number that options and thresholds may be."""
ZERO = torch.zeros((), device="cpu")
"""Adding this tensor takes a third of the time of adding 0.0, and for small tensors the call is the whole cost."""


def growth(n: Any, *, rate: Any, c: float, mu: float) -> Any:
    """Return the growth of the threshold, τₙ − τₙ₋₁ = c·γ^(μ+½)·(n^μ − (n−1)^μ), for numbers or tensors.

    Give n in float64: n^μ − (n−1)^μ cancels, and float32 would lose a few percent of it after some 10⁵ steps.
    """
    return c * rate ** (mu + 0.5) * (n**mu - (n - 1) ** mu)


def grow_thresholds(
    steps: list[Tensor],
    thresholds: list[Tensor],
    lr: float | Tensor,
    c: float,
    mu: float,
    momentum: float = 0.0,
    *,
    counted: bool = False,
) -> None:
    """Set n ← n + 1 unless it is counted already, then τ ← τ + growth(n), in place, with γ = lr/(1−momentum).

    A scheduler that ends at 0 may end slightly below it by rounding. γ^(μ+½) would be NaN there, so a negative rate
    counts as 0.
    """
    if isinstance(lr, Tensor) or not are_numbers(steps):
        if not counted:
            torch._foreach_add_(steps, 1.0)
        if c:
            n = torch.stack(tuple(steps))
            rate = lr.to(n).clamp(min=0) if isinstance(lr, Tensor) else max(lr, 0.0)
            torch._foreach_add_(thresholds, list(growth(n, rate=rate / (1 - momentum), c=c, mu=mu).unbind()))
        return
    # On the host, adding scalar tensors takes half the time of adding numbers.
    scalar = partial(torch.tensor, dtype=torch.float64, device="cpu")
    if not counted:
        torch._foreach_add_(steps, [scalar(1.0)] * len(steps))
    if c:
        counts = [step.item() for step in steps]
        rate = max(lr, 0.0) / (1 - momentum)
        grown = {n: scalar(growth(n, rate=rate, c=c, mu=mu)) for n in set(counts)}  # usually one
        torch._foreach_add_(thresholds, [grown[n] for n in counts])


def are_numbers(scalars: Sequence[Tensor]) -> bool:
    """Return whether the host can read these scalars now: they are neither on a device, nor traced, nor fake."""
    return not torch.compiler.is_compiling() and scalars[0].is_cpu and type(scalars[0]) is Tensor


def readable(thresholds: Sequence[Tensor]) -> list[float]:
    """Return thresholds as numbers that torch takes for any precision."""
    return [min(tau.item(), LARGEST) for tau in thresholds]


def shrink(v: Tensor, tau: float | Tensor, shape: str = "soft", *, rescale: bool = False, out: Tensor) -> None:
    """Write what a threshold leaves of v to ``out``: +0.0 within ±τ, else by shape; NaN stays NaN.

    "soft": sign(v)·(|v| − τ), "garrote": v − τ²/v, "hard": v. With ``rescale``, what is left in each output channel of
    a matrix or a convolution is then scaled so that the mean of |w| is that of |v|.
    """
    if rescale and v.dim() > 1:
        left = torch.empty_like(v)
        shrink(v, tau, shape, out=left)
        rest = _norms(left)
        factor = torch.where(rest == 0, 0.0, _norms(v) / rest)  # a channel without a weight stays empty
        out.copy_(left.mul_(factor).add_(0.0))
        return
    if shape == "soft":
        _soft(v, tau, out)
        return
    bound = tau.to(v.dtype) if isinstance(tau, Tensor) else tau
    left = v if shape == "hard" else v - bound * bound / v
    out.copy_(torch.where(v.abs() <= bound, 0.0, left))
    if out.dtype != v.dtype:
        out.add_(0.0)  # a value that underflows in the cast keeps its sign: −0.0 + 0.0 = +0.0


def shrink_all(params: list[Tensor], vs: list[Tensor], taus: list[float], shape: str) -> None:
    """Write what thresholds leave of the accumulators to the parameters, all of them in a few launches if "soft"."""
    if shape != "soft":
        for p, v, tau in zip(params, vs, taus, strict=True):
            shrink(v, tau, shape, out=p)
        return
    # −clamp(v, −τ, τ) + v, computed in the parameters' own memory if they have the accumulator's precision.
    shrunk = [p if p.dtype == v.dtype else torch.empty_like(v) for p, v in zip(params, vs, strict=True)]
    torch._foreach_copy_(shrunk, vs)
    torch._foreach_clamp_max_(shrunk, taus)
    torch._foreach_clamp_min_(shrunk, [-tau for tau in taus])
    torch._foreach_neg_(shrunk)
    torch._foreach_add_(shrunk, vs)
    for p, s in zip(params, shrunk, strict=True):
        if s is not p:
            p.copy_(s).add_(ZERO)  # a value that underflows in the cast keeps its sign: −0.0 + 0.0 = +0.0


def shrink_alike(params: list[Tensor], vs: list[Tensor], thresholds: list[Tensor], shape: str, together: bool) -> None:
    """Write what a threshold for each tensor leaves of the accumulators; ``together`` in a few launches for all."""
    taus: list[Any] = readable(thresholds) if are_numbers(thresholds) else thresholds
    if together and taus is not thresholds:
        shrink_all(params, vs, taus, shape)
        return
    for p, v, tau in zip(params, vs, taus, strict=True):
        shrink(v, tau, shape, out=p)


def unscaled(w: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """Return what has to be left of an accumulator that is near v, so that its rescaling gives w.

    With r the part of v within ±τ where w = 0, and Σ over a channel: w·(Σ|w| − Σ_{w≠0} τ − Σ|r|) / Σ|w|.
    """
    norms = _norms(w)
    inside = _norms(torch.where(w == 0, v.clamp(-tau, tau).nan_to_num(nan=0.0), tau))
    return w * torch.where(norms > inside, 1 - inside / norms, 1.0)


def _norms(tensor: Tensor) -> Tensor:
    """Return the sum of the absolute values of each output channel."""  # (out, …) -> (out, 1, …)
    return tensor.abs().sum(tuple(range(1, tensor.dim())), keepdim=True)


def grow_back(w: Tensor, tau: Tensor, shape: str) -> Tensor:
    """Return the v of which a threshold leaves w, where w ≠ 0; with a hard threshold, w itself."""
    if shape == "hard":
        return w
    if shape == "garrote":
        return (w + w.sign() * (w * w + 4 * tau * tau).sqrt()) / 2
    return w + w.sign() * tau


def _soft(v: Tensor, tau: float | Tensor, out: Tensor) -> None:
    if isinstance(tau, Tensor):
        tau = tau.to(v.dtype)
        out.copy_(v - v.clamp(-tau, tau))
        if out.dtype != v.dtype:
            out.add_(0.0)  # see below
        return
    if out.dtype != v.dtype:
        out.copy_(softshrink(v, tau))
    elif v.is_cpu and v.is_contiguous() and out.is_contiguous() and not _leaves_negative_zeros(out):
        softshrink(v, tau, out=out)  # type: ignore[call-arg]  # torch's annotation lacks out
        return
    else:
        softshrink(v, tau, out=out)  # type: ignore[call-arg]
    out.add_(ZERO)  # −0.0 + 0.0 = +0.0; a cast to lower precision can underflow to −0.0 too


_KNOWN: dict[tuple[int, torch.dtype, int], bool] = {}


def _leaves_negative_zeros(out: Tensor) -> bool:
    """Return whether softshrink gives −0.0 anywhere in a contiguous tensor of this size, whose values are lost.

    Torch's scalar code gives −0.0, its vectorised code does not. Which of them handles an element depends on the size
    and on the number of threads. One test per size saves most large tensors a pass over memory. It is done in the
    tensor that is about to be written, and so takes no memory.
    """
    kind = out.numel(), out.dtype, torch.get_num_threads()
    if kind not in _KNOWN:
        softshrink(out.fill_(-0.5), 1.0, out=out)  # type: ignore[call-arg]
        _KNOWN[kind] = any(bool(torch.signbit(part).any()) for part in torch.split(out.view(-1), CHUNK))
    return _KNOWN[kind]
