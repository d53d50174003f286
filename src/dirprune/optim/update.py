"""One step of gRDA: the mathematics, as pure functions on lists of tensors.

`take_step` is the functional form of `dirprune.GRDA`. The single-tensor path is the plain statement of the update; the
foreach path here and the fused kernel in `dirprune.optim.fused` compute the same numbers, faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dirprune.optim.options import MATHEMATICS
from dirprune.optim.threshold import are_numbers, grow_thresholds, readable, shrink, shrink_all

SMALL = 65536
"""Elements below which tensors are stepped together on a CPU."""


class Tensors(NamedTuple):
    """What a step reads and writes: entry i of every list belongs to parameter i."""

    params: list[Tensor]
    grads: list[Tensor]
    accumulators: list[Tensor]
    buffers: list[Tensor]
    """Of momentum; empty without it."""
    steps: list[Tensor]
    thresholds: list[Tensor]
    """Like the steps float64 scalars: on the host, or on the parameters' device, where no step waits for the host."""
    pruned: list[Tensor]
    """True where a weight is zero for good; empty as long as none is."""
    squares: list[Tensor]
    """Adam's second moments, whose first ones are then the buffers; else empty."""

    def changed(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [*self.params, *self.accumulators, *self.buffers, *self.steps, *self.thresholds, *self.squares]

    @classmethod
    def none(cls) -> Tensors:
        """Return lists to be filled."""
        return cls(*([] for _ in cls._fields))

    def by_device(self) -> list[Tensors]:
        """Split the lists by the device of the parameters; usually there is one device."""
        if not self.params:
            return []
        if torch.compiler.is_compiling() or len(set(map(Tensor.get_device, self.params))) == 1:
            return [self]
        devices = dict.fromkeys(p.device for p in self.params)
        return [self.only([i for i, p in enumerate(self.params) if p.device == device]) for device in devices]

    def only(self, members: Sequence[int]) -> Tensors:
        """Return the lists of these parameters."""
        return Tensors(*([tensors[i] for i in members] if tensors else [] for tensors in self))


class Rule(NamedTuple):
    """The numbers that say what a step computes."""

    lr: float | Tensor
    c: float
    mu: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    shape: str = "soft"
    rescale: bool = False
    decay: str = "weights"
    betas: tuple[float, float] | None = None
    """Of Adam's moments; without them the step is SGD's."""
    eps: float = 0.0

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rule:
        """Return the rule of a parameter group; where there is a target, its plan moves the threshold."""
        rule = cls(**{name: group[name] for name in MATHEMATICS if name in group})
        return rule._replace(c=rule.c * group["scale"] if group["plan"] is None else 0.0)


def take_step(tensors: Tensors, rule: Rule, *, foreach: bool = False, capturable: bool = False) -> None:
    """Take one gRDA step, in place, on tensors of one device; ``foreach`` needs steps and thresholds on the host."""
    steps, thresholds = tensors.steps, tensors.thresholds
    if capturable or not are_numbers(steps):
        grow_thresholds(steps, thresholds, rule.lr, rule.c, rule.mu, rule.momentum)
        _step_each(tensors, thresholds, rule)
        return
    rule = rule._replace(lr=float(rule.lr))
    grow_thresholds(steps, thresholds, rule.lr, rule.c, rule.mu, rule.momentum)
    taus = readable(thresholds)
    if foreach:
        _step_together(tensors, taus, rule, launches=True)
        return
    # One at a time, a large tensor is still in the cache when it is thresholded; of small ones, the calls are the cost.
    numels = list(map(Tensor.numel, tensors.params))
    small = [i for i, numel in enumerate(numels) if numel < SMALL]
    for members in [small, *([i] for i, numel in enumerate(numels) if numel >= SMALL)]:
        if members:
            _step_together(tensors.only(members), [taus[i] for i in members], rule)


def _step_each(tensors: Tensors, taus: Sequence[Tensor], rule: Rule) -> None:
    """Take the step with thresholds that the host does not know."""
    lr = rule.lr
    for i, (param, grad, v) in enumerate(zip(*tensors[:3], strict=True)):
        if rule.weight_decay or rule.momentum:
            grad = (grad.to_dense() if grad.is_sparse else grad).to(v.dtype)
        if rule.maximize:
            grad = -grad
        if rule.weight_decay:
            grad = _add_scaled(grad, v if rule.decay == "accumulator" else param, rule.weight_decay)
        if rule.momentum:
            buffer = tensors.buffers[i].mul_(rule.momentum).add_(grad)
            grad = _add_scaled(grad, buffer, rule.momentum) if rule.nesterov else buffer
        # A product with a scalar tensor keeps the gradient's precision, hence the cast.
        v.sub_(grad.to(v.dtype) * (lr.to(v) if isinstance(lr, Tensor) else lr))
        if tensors.pruned:
            v.masked_fill_(tensors.pruned[i], 0.0)
        shrink(v, taus[i], rule.shape, rescale=rule.rescale, out=param)


def _add_scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    # torch.compile bakes the first `alpha` it sees into the graph, and would miss later changes by a scheduler.
    return a + scale * b.to(a.dtype) if torch.compiler.is_compiling() else a.add(b, alpha=scale)


def _step_together(tensors: Tensors, taus: list[float], rule: Rule, *, launches: bool = False) -> None:
    """Take the step with thresholds that are numbers; in as few ``launches`` as a device can, or passes on a CPU."""
    params, directions, vs, buffers = tensors[:4]
    if rule.weight_decay or rule.momentum:
        directions = [(g.to_dense() if g.is_sparse else g).to(v.dtype) for g, v in zip(directions, vs, strict=True)]
    if rule.maximize:
        directions = list(torch._foreach_neg(directions))
    if rule.weight_decay:
        decayed = vs if rule.decay == "accumulator" else [p.to(v.dtype) for p, v in zip(params, vs, strict=True)]
        directions = list(torch._foreach_add(directions, decayed, alpha=rule.weight_decay))
    if rule.momentum:
        torch._foreach_mul_(buffers, rule.momentum)
        torch._foreach_add_(buffers, directions)
        directions = list(torch._foreach_add(directions, buffers, alpha=rule.momentum)) if rule.nesterov else buffers
    torch._foreach_add_(vs, directions, alpha=-float(rule.lr))
    for v, pruned in zip(vs, tensors.pruned, strict=False):
        v.masked_fill_(pruned, 0.0)
    if launches and not rule.rescale:
        shrink_all(params, vs, taus, rule.shape)
        return
    for p, v, tau in zip(params, vs, taus, strict=True):
        shrink(v, tau, rule.shape, rescale=rule.rescale, out=p)
