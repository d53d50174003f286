"""AdamGRDA: gRDA's accumulator and threshold around AdamW's step, for networks that are trained with AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from dirprune.optim.base import Thresholded, planned
from dirprune.optim.guard import kept_unless, put_back
from dirprune.optim.paths import choose_path, fused_obstacle, refuse_capture
from dirprune.optim.selection import Member, summed
from dirprune.optim.state import check_shapes, local
from dirprune.optim.threshold import are_numbers, grow_thresholds, shrink, shrink_alike
from dirprune.optim.update import Rule, Tensors

FLOOR = 0.01
"""What is added to the metric, as a part of its mean: weights without a gradient would have infinite thresholds."""


class AdamGRDA(Thresholded):
    r"""AdamW that prunes while it trains: its step moves an accumulator, and the weights are what a threshold leaves.

    .. math::
        v_n = (1 - γ_n λ)\, v_{n-1} - γ_n\, \hat m_n / (\sqrt{\hat s_n} + ε)

        w_n = T(v_n, τ_n q_n)

        q_n \propto 1 / (d_n + 0.01\, \overline{d_n}), \quad d_n = \hat s_n^{p/2}

    m̂ and ŝ are Adam's moments of the gradient at w, and T the threshold of `GRDA`. Power p = 0 has one threshold for
    all weights; with p > 0, weights with large gradients have lower ones (q has mean 1). ``c = 0`` is
    `torch.optim.AdamW`. In groups with ``c=0``, as `prunable_groups` makes them, all weights are plainly AdamW's.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; see also `prunable_groups`.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`. Sparse training from scratch wants about
            twice AdamW's rate.
        target: the share of zeros to end with, e.g. 0.9, met exactly.
        steps: how many optimizer steps the run takes; if not known yet, call `plan` before the first one.
        of: what the target is a share of: the ``"weights"``, or the ``"cost"`` that `prunable_groups` was given.
        prune_from, prune_until, fix_at: when the zeros of a target begin to come, when they have all come, and when
            they are fixed, as parts of the run. Until ``fix_at``, weights still come and go.
        c, mu: without a target, how much to prune, and how fast the threshold grows. No c suits every network;
            `relative_threshold` says how strong it is.
        power: p, from 0 (from scratch) to 1 (Adam's own metric); 0.5 for fine-tuning.
        shape: what the threshold leaves of a larger v: ``"soft"``, ``"garrote"`` or ``"hard"`` (for fine-tuning);
            ``"auto"`` is soft, or hard from halfway on, as in `GRDA`.
        foreach, fused: force or forbid a path; by default the fastest for the device (CUDA: fused, else foreach; CPU:
            one tensor at a time; there, ``fused=True`` takes torch's fused AdamW).
        capturable: keep ``lr``, step and threshold on the device, so that `step` can be captured in a CUDA graph.
        skip_nonfinite: skip a step if a gradient is infinite or NaN, without waiting for a GPU; `skipped` counts them.

    Example:
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = AdamGRDA(model.parameters(), lr=0.01, target=0.5, steps=20)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(3, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> print(optimizer.progress())
        step 20 of 20: 4 of 8 weights are zero, 50.00% of the weights (target 50.00%, fixed)

    Reference: Chao, Wang, Xing, Cheng. Directional Pruning of Deep Neural Networks. NeurIPS 2020. Loshchilov, Hutter.
    Decoupled Weight Decay Regularization. ICLR 2019.
    """

    PER_ELEMENT: ClassVar[tuple[str, ...]] = ("accumulator", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        target: float | None = None,
        steps: int | None = None,
        of: str = "weights",
        prune_from: float = 0.0,
        prune_until: float = 0.25,
        fix_at: float = 0.8,
        c: float | None = None,
        mu: float = 0.51,
        power: float = 0.0,
        shape: str = "auto",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        phases = {"prune_from": prune_from, "prune_until": prune_until, "fix_at": fix_at}
        plan = planned(target, steps, c, of, adapts=shape == "auto", **phases)
        if plan is None and c is None:
            raise ValueError(
                "AdamGRDA needs to know how much to prune: give target=… and steps=…, e.g. 0.9 and the number of "
                "steps of the run, or a strength c=… (c=0 prunes nothing)"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "c": c if plan is None else 1.0,
            "mu": mu,
            "power": power,
            "shape": "soft" if shape == "auto" else shape,
            "plan": plan,
            "scale": 1.0,
            "cost": 1.0,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "skip_nonfinite": skip_nonfinite,
        }
        super().__init__(params, defaults)

    def _fused_obstacle(self, params: Iterable[Tensor]) -> str | None:
        params = list(params)
        return None if _fits_torchs(params) else fused_obstacle(params)

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super().begin(p, group)
        if "exp_avg_sq" not in state:
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(state["accumulator"])
        return state

    def _step_group(self, index: int, group: dict[str, Any], fine: Tensor | None) -> None:
        """Move the accumulators as AdamW would move weights, let thresholds grow, and apply those that are alike."""
        params = [p for p in group["params"] if p.grad is not None]
        for device in dict.fromkeys(p.device for p in params):
            self._update(index, group, [p for p in params if p.device == device], fine)

    def _update(self, index: int, group: dict[str, Any], params: list[Tensor], fine: Tensor | None) -> None:
        """Step the parameters of a group that are on one device."""
        tensors = self._tensors(group, params)
        if tensors.params[0] is not params[0]:
            torch.autograd.graph.increment_version(params)  # their shards are written behind autograd's back
        path = choose_path(group, tensors.params, tensors.grads)
        refuse_capture(group, params[0])
        if path == "fused":
            rule = Rule.of(group)
            self._launcher(index, params[0].device)(tensors, rule._replace(shape="") if _varies(group) else rule, fine)
            return
        if not torch.compiler.is_compiling():
            check_shapes(tensors.params, tensors.accumulators)
        changed = tensors.changed()
        before = kept_unless(fine, changed)
        _move(tensors, group, foreach=path == "foreach")
        if not _varies(group):
            shrink_alike(tensors.params, tensors.accumulators, tensors.thresholds, group["shape"], path == "foreach")
        put_back(fine, changed, before)

    def _tensors(self, group: dict[str, Any], params: list[Tensor]) -> Tensors:
        """Return what a step of parameters that have gradients reads and writes."""
        states = [self.begin(p, group) for p in params]
        are_fixed = group["plan"] is not None and any("pruned" in state for state in states)
        for state in states if are_fixed else ():  # one was frozen when the zeros were fixed
            state.setdefault("pruned", torch.zeros_like(state["accumulator"], dtype=torch.bool))
        vs, means, squares = ([local(state[name]) for state in states] for name in self.PER_ELEMENT)
        return Tensors(
            list(map(local, params)),
            list(map(_like, params, vs)),
            vs,
            means,
            [state["step"] for state in states],
            [state["threshold"] for state in states],
            [local(state["pruned"]) for state in states] if are_fixed else [],
            squares,
        )

    def _threshold_all(self) -> None:
        """Apply the thresholds that differ from weight to weight, which takes the moments of all of them."""
        scales = {} if self._is_without_thresholds else self._scales()
        for group in filter(_varies, self.param_groups):
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                v = local(state["accumulator"])
                bound = state["threshold"].to(v) * scales.get(p, 1.0)
                shrink(v, bound, group["shape"], out=local(p))

    def _scales(self) -> dict[Tensor, float | Tensor]:
        """Return q of every thresholded parameter whose group has a power > 0; q has mean 1 over all of them."""
        parts = [(p, group) for p, group, *_ in self._thresholded() if _varies(group) and "exp_avg_sq" in self.state[p]]
        if not parts:
            return {}
        sizes = [self._metric(p, group) for p, group in parts]
        floor = FLOOR * _mean([p for p, _ in parts], sizes)
        inverse = [size.add_(floor.to(size)).reciprocal_() for size in sizes]
        mean = _mean([p for p, _ in parts], inverse)
        # Before any gradient all sizes are 0, and all thresholds alike.
        return {p: q.div_(mean.to(q)).nan_to_num_(nan=1.0) for (p, _), q in zip(parts, inverse, strict=True)}

    def _metric(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return ŝ^(power/2) of a parameter."""
        state = self.state[p]
        correction = 1 - group["betas"][1] ** state["step"]
        square = local(state["exp_avg_sq"])
        metric: Tensor = square / correction.to(square).clamp(min=torch.finfo(square.dtype).tiny)
        power = group["power"]
        if power in (0.5, 1.0):  # roots are taken many times faster than other powers
            return metric.sqrt_() if power == 1 else metric.sqrt_().sqrt_()
        return metric.pow_(power / 2)


def _like(p: Tensor, v: Tensor) -> Tensor:
    """Return a parameter's gradient as its accumulator is stored."""
    grad: Any = p.grad
    if type(grad) is Tensor and grad.dtype is v.dtype and not grad.is_sparse:
        return grad
    if hasattr(grad, "placements") and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    grad = local(grad)
    dense: Tensor = (grad.to_dense() if grad.is_sparse else grad).to(v.dtype)
    return dense


def _varies(group: dict[str, Any]) -> bool:
    """Return whether the thresholds of a group differ from weight to weight."""
    return bool(group["power"] and group["c"])


def _fits_torchs(params: Iterable[Tensor]) -> bool:
    """Return whether torch's fused AdamW takes these parameters on the CPU."""
    return all(p.is_cpu and p.is_floating_point() for p in params)


def _move(tensors: Tensors, group: dict[str, Any], *, foreach: bool) -> None:
    """Take torch's AdamW step on the accumulators, and let the thresholds grow."""
    steps = tensors.steps
    on_host = are_numbers(steps)
    fused = bool(group["fused"]) and _fits_torchs(tensors.accumulators)
    beta1, beta2 = group["betas"]
    adamw(
        tensors.accumulators,
        tensors.grads,
        tensors.buffers,
        tensors.squares,
        [],
        steps,
        foreach=foreach,
        capturable=not on_host and not fused,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]) if on_host else group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
    rule = Rule.of(group)
    grow_thresholds(steps, tensors.thresholds, rule.lr, rule.c, rule.mu, counted=True)
    for v, pruned in zip(tensors.accumulators, tensors.pruned, strict=False):
        v.masked_fill_(pruned, 0.0)


def _mean(params: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return the mean over all elements of all tensors, on all processes."""
    device = values[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p, value in zip(params, values, strict=True):
        total += summed(value.sum().double(), Member(p, value).shards).to(device)
    return total / sum(p.numel() for p in params)
