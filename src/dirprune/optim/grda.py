"""gRDA: generalized regularized dual averaging, the optimizer that prunes while it trains.

The class follows the conventions of torch optimizers. The equations alone are in `reference`, the step on every path in
`update` and `fused`, and a target of zeros in `target`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dirprune.optim.base import Thresholded, planned
from dirprune.optim.guard import kept_unless, put_back
from dirprune.optim.paths import choose_path, refuse_capture
from dirprune.optim.state import check_shapes, local
from dirprune.optim.update import Rule, Tensors, take_step

_PLAIN = {Tensor, nn.Parameter}


class GRDA(Thresholded):
    r"""gRDA, the directional-pruning optimizer: SGD whose accumulated gradient is soft-thresholded at every step.

    For learning rates γₙ and an accumulator v that starts at the model's own weights,

    .. math::
        v_n = v_{n-1} - γ_n \nabla f(w_{n-1})

        τ_n = τ_{n-1} + c\, γ_n^{μ+1/2} (n^μ - (n-1)^μ)

        w_n = \mathrm{sign}(v_n) \max(|v_n| - τ_n, 0)

    With a constant rate τₙ = c √γ (nγ)^μ. ``c = 0`` is SGD; ``mu = 1`` with ``c = λ/√γ`` is ℓ₁-RDA. With momentum m, γ
    in τ is the effective rate γ/(1−m), so that ``c`` and ``mu`` mean the same with and without it.

    With ``prune_from=0.05, prune_until=0.5, ramp="cubic", fix_at=1.0, rescale=True, decay="accumulator"`` it is ST-3
    (Vanderschueren and De Vleeschouwer, WACV 2023).

    Training acts on the accumulator, and the parameters are computed from it. If something else writes to a parameter
    in place, as `nn.Module.load_state_dict` does, the next step starts from the nearest accumulator that gives those
    weights. Writes through ``.data``, between compiled steps or into a CUDA graph's memory are not noticed, and are
    overwritten.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; see also `prunable_groups`.
        lr: learning rate γ, a number or a tensor.
        target: the share of zeros to end with, e.g. 0.95, met exactly; ``c`` and ``mu`` are not needed then.
        of: what the target is a share of: the ``"weights"``, or the ``"cost"`` that `prunable_groups` was given.
        steps: how many optimizer steps the run takes; if not known yet, call `plan` before the first one.
        prune_from, prune_until: the part of the run in which the zeros of a target come. Before it, all weights train.
            After it, the zeros are fixed, and the weights that are left train on without a threshold.
        fix_at: when the zeros are fixed, if later than ``prune_until``; until then, weights still come and go.
        c: how much to prune without a target, 5e-4 by default. Published runs: 5e-4 (VGG16), 1e-3 (WRN28x10), 1e-3 to
            1e-2 (ResNet50).
        mu: how fast the threshold grows, 0 < μ ≤ 1; the theory asks for (0.5, 1), published runs used 0.4 to 0.85.
        momentum, nesterov, weight_decay, maximize: as in `torch.optim.SGD`; they act on the gradient before it enters
            the accumulator.
        ramp: how the zeros of a target come: ``"geometric"`` (the share that is left falls geometrically) or
            ``"cubic"`` (the share of zeros grows as 1 − (1 − u)³, u the part of the phase that has passed).
        shape: what the threshold leaves of a larger v: ``"soft"`` v ∓ τ as in the paper, ``"garrote"`` v − τ²/v, or
            ``"hard"`` v itself. The zeros are the same; large weights are shrunk less. ``"auto"`` is soft, unless the
            weights of a run with a target have moved too little by halfway to its zeros: then it is hard from there.
        rescale: scale the thresholded weights of each output channel so that the mean of ``|w|`` is that of ``|v|``.
        decay: what weight decay acts on, the ``"weights"`` or the ``"accumulator"``.
        foreach, fused: force or forbid a path; by default the fastest for the device (CUDA: fused, else foreach; CPU:
            one tensor at a time).
        capturable: keep ``lr``, step and threshold on the device, so that `step` can be captured in a CUDA graph.
        skip_nonfinite: skip a step if a gradient is infinite or NaN, without waiting for a GPU; `skipped` counts them.

    Example:
        >>> model = nn.Linear(4, 2, bias=False)
        >>> optimizer = GRDA(model.parameters(), lr=0.1, target=0.5, steps=10)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(3, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> print(optimizer.progress())
        step 10 of 10: 4 of 8 weights are zero, 50.00% of the weights (target 50.00%, fixed)

    Reference: Chao, Wang, Xing, Cheng. Directional Pruning of Deep Neural Networks. NeurIPS 2020.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *misplaced: NoReturn,
        c: float | None = None,
        mu: float = 0.51,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        target: float | None = None,
        steps: int | None = None,
        of: str = "weights",
        prune_from: float = 0.1,
        prune_until: float = 0.7,
        fix_at: float | None = None,
        ramp: str = "geometric",
        shape: str = "auto",
        rescale: bool = False,
        decay: str = "weights",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        if misplaced:
            given: object = misplaced[0]
            raise TypeError(
                f"GRDA(params, {lr}, {given}) leaves open what {given} is; if it is the momentum, as in SGD, write "
                f"GRDA(params, lr={lr}, momentum={given}); if it is the pruning strength, write c={given}"
            )
        phases = {"prune_from": prune_from, "prune_until": prune_until, "fix_at": fix_at, "ramp": ramp}
        plan = planned(target, steps, c, of, adapts=shape == "auto", **phases)
        defaults = {
            "lr": lr,
            "c": (5e-4 if c is None else c) if plan is None else 1.0,
            "mu": mu,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "shape": "soft" if shape == "auto" else shape,
            "rescale": rescale,
            "decay": decay,
            "plan": plan,
            "scale": 1.0,
            "cost": 1.0,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "skip_nonfinite": skip_nonfinite,
        }
        super().__init__(params, defaults)

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        accumulators: list[Tensor],
        buffers: list[Tensor],
        steps: list[Tensor],
        thresholds: list[Tensor],
        pruned: list[Tensor],
    ) -> None:
        # torch.compile knows this method by its name and its signature, and traces the step without it.
        has_momentum = bool(group["momentum"])
        are_fixed = group["plan"] is not None and any("pruned" in self.state.get(p, ()) for p in group["params"])
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if "accumulator" not in state or p.dtype is torch.float64:
                self.begin(p, group)
            step, threshold = state["step"], state["threshold"]
            if threshold.is_cuda != step.is_cuda:  # torch.compile moves a "step" to the GPU by itself
                state["threshold"] = threshold = threshold.to(step.device)
            params.append(p)
            grads.append(grad)
            accumulators.append(state["accumulator"])
            steps.append(step)
            thresholds.append(threshold)
            if has_momentum:
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(state["accumulator"])
                buffers.append(state["momentum_buffer"])
            if are_fixed:
                if "pruned" not in state:  # it was frozen when the zeros were fixed
                    state["pruned"] = torch.zeros_like(state["accumulator"], dtype=torch.bool)
                pruned.append(state["pruned"])
        if not _PLAIN.issuperset(map(type, chain(params, grads, accumulators, buffers, pruned))):
            torch.autograd.graph.increment_version(params)  # their shards are written behind autograd's back
            grads[:] = map(_laid_out, grads, params)
            for tensors in (params, grads, accumulators, buffers, pruned):
                tensors[:] = map(local, tensors)

    def _step_group(self, index: int, group: dict[str, Any], fine: Tensor | None) -> None:
        tensors = Tensors.none()
        self._init_group(group, *tensors[:7])
        for on_one_device in tensors.by_device():
            self._update(index, group, on_one_device, fine)

    def _update(self, index: int, group: dict[str, Any], tensors: Tensors, fine: Tensor | None) -> None:
        """Step the parameters of a group that are on one device."""
        params, grads, accumulators = tensors[:3]
        path = choose_path(group, params, grads)
        refuse_capture(group, params[0])
        if path == "fused":
            self._launcher(index, params[0].device)(tensors, Rule.of(group), fine)
            return
        if not torch.compiler.is_compiling():
            check_shapes(params, accumulators)
        changed = tensors.changed()
        before = kept_unless(fine, changed)
        take_step(tensors, Rule.of(group), foreach=path == "foreach", capturable=group["capturable"])
        put_back(fine, changed, before)


def _laid_out(grad: Any, p: Tensor) -> Tensor:
    """Return the gradient; a DTensor is redistributed to the placements of its parameter."""
    if hasattr(grad, "placements") and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    laid_out: Tensor = grad
    return laid_out
