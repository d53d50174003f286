"""Which weights are the smallest of many tensors: an estimate from a sample while training, and the exact answer once.

Every process of a sharded model gets the same answer: samples are gathered, and numbers of weights are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SAMPLE = 32768
"""Weights that an estimate looks at. At 95% zeros it is off by 2% of the weights that are left (standard error)."""
FEW = 4096
"""Weights whose start is kept, and saved with the state, to tell how far they have moved: to 1% (standard error)."""


@dataclass(frozen=True)
class Member:
    """A tensor whose weights compete, with |v| / scale, for being kept."""

    p: Tensor
    v: Tensor
    """This process's part of its accumulator."""
    scale: float | Tensor = 1.0
    """One number, or one for each element of v."""
    cost: float = 1.0
    """What one of its weights costs: zeros are counted in this."""

    @property
    def shards(self) -> tuple[Any, ...]:
        """The process groups over which the tensor is spread."""
        placements = enumerate(getattr(self.p, "placements", ()))
        mesh: Any = getattr(self.p, "device_mesh", None)
        return tuple(mesh.get_group(dim) for dim, placed in placements if placed.is_shard())

    @property
    def total(self) -> float:
        """What all of its weights cost, on all processes."""
        return self.p.numel() * self.cost


class Sample:
    """The same random weights at every look, each drawn as often as it costs; all weights if they are few."""

    def __init__(self, members: Sequence[Member]) -> None:
        total = sum(m.total for m in members)
        takes_all = sum(m.p.numel() for m in members) <= SAMPLE and len({m.cost for m in members}) == 1
        generator = torch.Generator().manual_seed(0)
        self._chosen: list[Tensor | None] = []
        for m in members:
            draws = round(SAMPLE * m.v.numel() * m.cost / total)
            chosen = torch.randint(max(1, m.v.numel()), (draws,), generator=generator, device="cpu")
            self._chosen.append(None if takes_all else chosen.to(m.v.device))

    def few(self, members: Sequence[Member]) -> Tensor:
        """Return v / scale of every so many of the weights, few enough to be saved."""
        values = torch.cat([values.to(members[0].v.device) for values in self._values(members)])
        return values[:: max(1, values.numel() // FEW)].float()

    def moved(self, members: Sequence[Member], start: Tensor | None) -> Tensor | None:
        """Return by how much they have moved from the ``few`` at the start (root mean square); None if not known."""
        now = self.few(members)
        if start is None or start.numel() != now.numel():
            return None
        total = torch.stack([(now - start.to(now)).double().square().sum(), now.new_tensor(now.numel()).double()])
        for groups in dict.fromkeys(m.shards for m in members):
            total = summed(total, groups)
        return (total[0] / total[1].clamp(min=1)).sqrt()

    def _values(self, members: Sequence[Member]) -> list[Tensor]:
        """Return v / scale of the chosen weights of each member."""
        drawn = []
        for m, chosen in zip(members, self._chosen, strict=True):
            values = m.v.flatten() if chosen is None else torch.take(m.v, chosen)
            if isinstance(m.scale, Tensor):
                values = values / (m.scale.flatten() if chosen is None else torch.take(m.scale, chosen))
            elif m.scale != 1:
                values = values / m.scale
            drawn.append(values)
        return drawn

    def threshold(self, members: Sequence[Member], share: float) -> Tensor:
        """Return the |v| / scale under which this share of the cost lies, in float64."""
        parts: dict[tuple[Any, ...], list[Tensor]] = {}
        for m, values in zip(members, self._values(members), strict=True):
            parts.setdefault(m.shards, []).append(values.abs().to(members[0].v.device))
        values = torch.cat([_gather(torch.cat(sizes), groups) for groups, sizes in parts.items()])
        k = round(share * values.numel())
        if not k:
            return values.new_zeros((), dtype=torch.float64)
        # Faster on a CPU; on CUDA torch calls it nondeterministic.
        return (values.kthvalue(k).values if values.is_cpu else values.sort().values[k - 1]).double()


def _gather(values: Tensor, groups: Sequence[Any]) -> Tensor:
    """Join the values of all processes of the groups."""
    for group in groups:
        count = torch.tensor([values.numel()], device=values.device)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, count, group=group)
        sizes = [int(c) for c in counts]
        padded = torch.nn.functional.pad(values, (0, max(sizes) - values.numel()))
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded, group=group)
        values = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
    return values


@dataclass(frozen=True)
class Zeros:
    """Which weights are the smallest, and the |v| / scale up to which they are."""

    masks: list[Tensor]
    """True where a weight of a member is one of them."""
    bounds: Tensor
    """Of each member, in float64; lower than the top where the member has to keep more weights than the top leaves."""
    top: Tensor


@torch.no_grad()
def smallest(members: Sequence[Member], goal: float, least: Sequence[int]) -> Zeros:
    """Find the weights of smallest |v| / scale: as few as cost ``goal``.

    Of member t, ``least[t]`` weights stay. Equal sizes are taken in order.
    """
    kind = torch.float64 if any(m.v.dtype == torch.float64 for m in members) else torch.float32
    device = members[0].v.device
    sizes = [(m.v.abs().to(kind) / m.scale).nan_to_num(nan=torch.inf) for m in members]
    # Sizes are not negative, so they are ordered as the integers with their bits are.
    keys = [size.view(torch.int64 if kind == torch.float64 else torch.int32) for size in sizes]
    costs = torch.tensor([m.cost for m in members], dtype=torch.float64, device=device)
    most = torch.tensor([m.p.numel() - n for m, n in zip(members, least, strict=True)], device=device)

    top = _largest_key(keys, members, lambda counts: (torch.minimum(counts, most) * costs).sum() < goal)
    below, equal = _count(keys, members, torch.lt, top), _count(keys, members, torch.eq, top)
    quotas = _share_out(below.tolist(), equal.tolist(), most.tolist(), costs.tolist(), goal)
    tops = top
    if bool((below > most).any()):
        wanted = torch.tensor(quotas, device=device)
        own = _largest_key(keys, members, lambda counts: counts < wanted)
        tops = torch.where(below > most, own, top)
        below = _count(keys, members, torch.lt, tops)
    masks = [
        _first(key, tops[t].to(key.device), quota - int(below[t]), m.shards)
        for t, (key, quota, m) in enumerate(zip(keys, quotas, members, strict=True))
    ]
    return Zeros(masks, tops.view(kind).double(), top.view(kind).double()[0])


def _largest_key(keys: Sequence[Tensor], members: Sequence[Member], short: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each member, the largest key such that fewer smaller ones there are ``short`` of what is wanted."""
    tops = torch.zeros(len(keys), dtype=keys[0].dtype, device=keys[0].device)
    for bit in reversed(range(8 * keys[0].element_size() - 1)):
        trial = tops | (1 << bit)
        tops = torch.where(short(_count(keys, members, torch.lt, trial)), trial, tops)
    return tops


def _count(keys: Sequence[Tensor], members: Sequence[Member], relation: Any, bounds: Tensor) -> Tensor:
    """Return how many keys of each member, on all processes, stand in this relation to its bound."""
    held = [relation(key, bounds[t].to(key.device)).sum().to(bounds.device) for t, key in enumerate(keys)]
    counts = torch.stack(held)
    spread: dict[tuple[Any, ...], list[int]] = {}
    for t, m in enumerate(members):
        spread.setdefault(m.shards, []).append(t)
    for groups, indices in spread.items():
        if groups:
            counts[indices] = summed(counts[indices], groups)
    return counts


def summed(counts: Tensor, groups: Sequence[Any]) -> Tensor:
    """Return the sum of counts over all processes of the groups."""
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def _share_out(
    below: Sequence[int], equal: Sequence[int], most: Sequence[int], costs: Sequence[float], goal: float
) -> list[int]:
    """Return how many zeros each member gets: all below the bound, and of those that equal it what is missing."""
    quotas = [min(b, limit) for b, limit in zip(below, most, strict=True)]
    missing = goal - sum(quota * cost for quota, cost in zip(quotas, costs, strict=True))
    for t, (tied, cost) in enumerate(zip(equal, costs, strict=True)):
        if missing > 0 and cost > 0:
            more = min(tied, most[t] - quotas[t], -int(-missing // cost))
            quotas[t] += more
            missing -= more * cost
    return quotas


def _first(key: Tensor, top: Tensor, ties: int, groups: Sequence[Any]) -> Tensor:
    """Return where the key is below the top, or one of the first so many that equal it, over all processes."""
    tied = key == top
    before = 0
    for group in groups:
        count = tied.sum()
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, count, group=group)
        before += sum(int(c) for c in counts[: dist.get_rank(group)])
    return (key < top) | (tied & (tied.flatten().cumsum(0).view_as(key) + before <= ties))
