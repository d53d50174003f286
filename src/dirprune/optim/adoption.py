"""Weights that something else has written: the accumulators move to where a threshold leaves those weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from dirprune.optim.state import check_devices, check_shapes
from dirprune.optim.threshold import grow_back, shrink, unscaled

CHUNK = 262144
"""Elements that are worked on at a time on a CPU: enough for several threads, and they stay in the cache."""
GLANCE = 1024


class Written(NamedTuple):
    """A parameter that something else may have written to: this process's part of it, and what gave its weights."""

    w: Tensor
    v: Tensor
    """Its accumulator."""
    tau: float | Tensor
    """One number, of which the host knows the first kind, or one for each element."""
    shape: str
    rescale: bool = False

    @property
    def is_simple(self) -> bool:
        """Whether a few operations that every CPU has in vectors do."""
        plain = self.shape == "soft" and not self.rescale and isinstance(self.tau, float) and self.v.is_cpu
        return plain and self.v.is_contiguous() and self.w.is_contiguous()


@torch.no_grad()
def adopt_weights(members: Sequence[Written]) -> None:
    """Move each accumulator to the nearest value that gives the present weights.

        v ← argmin |u − v| over the u of which the threshold leaves w; for "soft", sign(u)·max(|u| − τ, 0) = w

    For "soft" this is w + sign(w)·τ where w ≠ 0, and v clipped to ±τ where w = 0 (0 if v is NaN). Where v already gives
    w, after rounding to the precision of the weights, it stays: to the bit if nothing near it has changed.
    """
    check_shapes([m.w for m in members], [m.v for m in members])
    alike: dict[tuple[Any, ...], list[Written]] = {}
    for m in members:
        check_devices(m.w, m.v)
        if m.is_simple:
            alike.setdefault((m.w.dtype, m.v.dtype, m.tau), []).append(m)
        else:
            _adopt(m)
    for (*_, tau), group in alike.items():
        for vs, ws in _chunks(group):
            v, w = (tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in (vs, ws))
            if _adopt_softly(v, w, tau) and len(vs) > 1:
                torch._foreach_copy_(vs, torch.split(v, [each.numel() for each in vs]))


def _adopt(m: Written) -> None:
    """Do it whatever the shape and the device."""
    tau = torch.as_tensor(m.tau, dtype=m.v.dtype, device=m.v.device)
    plain = not m.rescale and not tau.dim()
    for v, w in _pieces(m.v, m.w) if plain else [(m.v, m.w)]:
        given = torch.empty_like(w)
        shrink(v, tau, m.shape, rescale=m.rescale, out=given)
        wide = w.to(v.dtype)
        if m.rescale and v.dim() > 1:
            wide = unscaled(wide, v, tau)
        nearest = torch.where(wide == 0, v.clamp(-tau, tau).nan_to_num(nan=0.0), grow_back(wide, tau, m.shape))
        v.copy_(torch.where(given == w, v, nearest))


def _adopt_softly(v: Tensor, w: Tensor, tau: float) -> bool:
    """Do it for a soft threshold, without comparisons by element, which are slow on a CPU; return whether v changed.

    The new v is w + r with r = sign(w)·τ, or v within ±τ where w = 0.
    """
    # Most often, a glance shows that something has changed.
    if _gives(v[:GLANCE], w[:GLANCE], tau) and (v.numel() <= GLANCE or _gives(v, w, tau)):
        return False
    largest = torch.finfo(w.dtype).max
    if w.dtype == v.dtype:
        v.nan_to_num_(nan=0.0).add_(w, alpha=largest).clamp_(-tau, tau).add_(w)
        return True
    # Where v gives w after rounding, w does not give v back.
    differs = softshrink(v, tau).to(w.dtype).sub_(w).to(v.dtype).abs_().nan_to_num_(nan=1.0)
    differs.mul_(torch.finfo(v.dtype).max).clamp_(max=1.0)
    wide = w.to(v.dtype)
    near = torch.nan_to_num(v, nan=0.0).add_(wide, alpha=torch.finfo(v.dtype).max).clamp_(-tau, tau).add_(wide)
    v.nan_to_num_(nan=0.0).lerp_(near, differs)
    return True


def _gives(v: Tensor, w: Tensor, tau: float) -> bool:
    given = softshrink(v, tau)
    if w.dtype != v.dtype:
        return torch.equal(given.to(w.dtype), w)
    low, high = given.sub_(w).aminmax()  # a comparison by element takes five times as long
    return not low and not high  # NaN is neither


def _chunks(members: Sequence[Written]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Join small tensors, and cut large ones, into lists of accumulators and weights of some `CHUNK` elements."""
    vs, ws, held = list[Tensor](), list[Tensor](), 0
    for m in members:
        if m.v.numel() >= CHUNK:
            yield from (([v], [w]) for v, w in _pieces(m.v, m.w))
        elif m.v.numel():
            vs.append(m.v.view(-1))
            ws.append(m.w.view(-1))
            held += m.v.numel()
            if held >= CHUNK:
                yield vs, ws
                vs, ws, held = [], [], 0
    if vs:
        yield vs, ws


def _pieces(v: Tensor, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut two tensors into pieces that need little memory, in the order in which they lie there; or give them whole."""
    order = sorted(range(v.dim()), key=v.stride, reverse=True)
    v_dense, w_dense = v.permute(order), w.permute(order)
    if v_dense.is_contiguous() and w_dense.is_contiguous():
        size = CHUNK if v.is_cpu else 16 * CHUNK
        yield from zip(torch.split(v_dense.view(-1), size), torch.split(w_dense.view(-1), size), strict=True)
    else:
        yield v, w
