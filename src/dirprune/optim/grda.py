"""gRDA: generalized regularized dual averaging, the optimizer that prunes while it trains.

The class follows the conventions of torch optimizers. The equations alone are in `reference`, the step on every path in
`update` and `fused`, the checks of the options in `options`, and the state of each parameter in `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from dirprune._support.graphs import is_capturing
from dirprune._support.rates import place_lr
from dirprune.optim.options import check_options
from dirprune.optim.state import Loading, adopt_weights, check_shapes, first_state, local
from dirprune.optim.update import Rule, Tensors, take_step

_PLAIN = {Tensor, nn.Parameter}
# Read from every tensor at every step, with `map`: a Python loop would take longer than the update on the device.
_IS_SPARSE, _VERSION = attrgetter("is_sparse"), attrgetter("_version")


class GRDA(Optimizer):
    r"""gRDA, the directional-pruning optimizer: SGD whose accumulated gradient is soft-thresholded at every step.

    For learning rates γₙ and an accumulator v that starts at the model's own weights,

    .. math::
        v_n = v_{n-1} - γ_n \nabla f(w_{n-1}), \qquad
        τ_n = τ_{n-1} + c\, γ_n^{μ+1/2} (n^μ - (n-1)^μ), \qquad
        w_n = \mathrm{sign}(v_n) \max(|v_n| - τ_n, 0).

    With a constant rate τₙ = c √γ (nγ)^μ. ``c = 0`` is SGD; ``mu = 1`` with ``c = λ/√γ`` is ℓ₁-RDA. With momentum m, γ
    in τ is the effective rate γ/(1−m), so that ``c`` and ``mu`` mean the same with and without it.

    Training acts on the accumulator, and the parameters are computed from it. If something else writes to a parameter
    in place, as `nn.Module.load_state_dict` does, the next step starts from the nearest accumulator that gives those
    weights. Writes through ``.data``, between compiled steps or into a CUDA graph's memory are not noticed, and are
    overwritten.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; see also `prunable_groups`.
        lr: learning rate γ, a number or a tensor.
        c: how much to prune. Published runs: 5e-4 (VGG16), 1e-3 (WRN28x10), 1e-3 to 1e-2 (ResNet50).
        mu: how fast the threshold grows, 0 < μ ≤ 1; the theory asks for (0.5, 1), published runs used 0.4 to 0.85.
        momentum, nesterov, weight_decay, maximize: as in `torch.optim.SGD`; they act on the gradient before it enters
            the accumulator.
        foreach, fused: force or forbid a path; by default the fastest for the device (CUDA: fused, else foreach; CPU:
            one tensor at a time).
        capturable: keep ``lr``, step and threshold on the device, so that `step` can be captured in a CUDA graph.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = GRDA(model.parameters(), lr=0.1, c=5e-4, mu=0.51)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()

    Reference: Chao, Wang, Xing, Cheng. Directional Pruning of Deep Neural Networks. NeurIPS 2020.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        *misplaced: NoReturn,
        c: float = 5e-4,
        mu: float = 0.51,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        if misplaced:
            given: object = misplaced[0]
            raise TypeError(
                f"GRDA(params, {lr}, {given}) leaves open what {given} is; if it is the momentum, as in SGD, write "
                f"GRDA(params, lr={lr}, momentum={given}); if it is the pruning strength, write c={given}"
            )
        defaults = {
            "lr": lr,
            "c": c,
            "mu": mu,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
        }
        check_options(defaults)
        self._launchers: dict[tuple[int, torch.device], Any] = {}
        self._versions: list[list[int]] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters start at threshold 0, however late they are added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            _check_parameters(group)
        except Exception:
            self.param_groups.pop()
            raise
        place_lr(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = []
        self.__dict__.setdefault("_launchers", {})  # kept when a state is loaded: captured graphs read their tables

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state, in the precision it was saved in; it may come from another path or device.

        The mathematical options (lr, c, mu, …) come from the saved state. The options of execution (foreach, fused,
        capturable) stay as they are in this optimizer. If the state does not fit, nothing changes.
        """
        loading = Loading(self, _scalar_device)
        # torch casts every state tensor to its parameter's dtype. These two hooks undo that. The first one runs last
        # before loading, so that it sees the state as other hooks left it. The second one runs first after loading.
        hooks = (
            self.register_load_state_dict_pre_hook(loading.check),
            self.register_load_state_dict_post_hook(loading.finish, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter of a group, creating it from the present weights if there is none.

        The first step does this by itself. Call it earlier if the weights are about to be cast to a lower precision:
        the accumulator then keeps what the cast loses.
        """
        state: dict[str, Any] = self.state[p]
        if "accumulator" not in state:  # a wrapper may keep entries of its own there
            place_lr(group)  # again: the parameters may have been on "meta" when the group was added
            state.update(first_state(p, _scalar_device(group, p)))
        return state

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        accumulators: list[Tensor],
        buffers: list[Tensor],
        steps: list[Tensor],
        thresholds: list[Tensor],
    ) -> None:
        # torch.compile knows this method by its name and its signature, and traces the step without it.
        has_momentum = bool(group["momentum"])
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if "accumulator" not in state:
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
        if not _PLAIN.issuperset(map(type, chain(params, grads, accumulators, buffers))):
            torch.autograd.graph.increment_version(params)  # their shards are written behind autograd's back
            grads[:] = map(_laid_out, grads, params)
            for tensors in (params, grads, accumulators, buffers):
                tensors[:] = map(local, tensors)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; a closure re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            for group in self.param_groups:
                check_options(group, wait=False)
        self._adopt()
        for index, group in enumerate(self.param_groups):
            tensors = Tensors([], [], [], [], [], [])
            self._init_group(group, *tensors)
            for on_one_device in tensors.by_device():
                self._update(index, group, on_one_device)
        if not torch.compiler.is_compiling():
            self._versions = [_versions(group) for group in self.param_groups]
        return loss

    def _adopt(self) -> None:
        """Move the accumulators of parameters that something else has written to since the last step.

        If nothing is known of that step, as after loading a state, all accumulators are compared with their weights.
        """
        if torch.compiler.is_compiling():
            return
        for index, group in enumerate(self.param_groups):
            params, now = group["params"], _versions(group)
            before = self._versions[index] if index < len(self._versions) else []
            if before == now or any(is_capturing(p.device) for p in params):
                continue
            for p, old, new in zip_longest(params, before[: len(params)], now):
                if old != new and "accumulator" in self.state.get(p, ()):
                    adopt_weights(p, self.state[p])

    def _update(self, index: int, group: dict[str, Any], tensors: Tensors) -> None:
        """Step the parameters of a group that are on one device."""
        params, grads, accumulators = tensors[:3]
        path = _choose_path(group, params, grads)
        _refuse_capture(group, params[0])
        if path == "fused":
            self._launcher(index, params[0].device)(tensors, Rule.of(group))
            return
        if not torch.compiler.is_compiling():
            check_shapes(params, accumulators)
        take_step(tensors, Rule.of(group), foreach=path == "foreach", capturable=group["capturable"])

    def _launcher(self, index: int, device: torch.device) -> Any:
        key = (index, device)
        if key not in self._launchers:
            from dirprune.optim.fused import Launcher

            self._launchers[key] = Launcher()
        return self._launchers[key]


def _versions(group: dict[str, Any]) -> list[int]:
    """Return how often each parameter has been written to in place, as autograd counts it."""
    return list(map(_VERSION, group["params"]))


def _refuse_capture(group: dict[str, Any], p: Tensor) -> None:
    """Raise if a CUDA graph would freeze the rate and the threshold."""
    if not group["capturable"] and is_capturing(p.device):
        raise RuntimeError(
            "a CUDA graph of this step would repeat one learning rate and one threshold for ever; make the optimizer "
            "with capturable=True"
        )


def _choose_path(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return the requested path, or else the fastest that can run; sparse gradients and compilers get "single"."""
    if torch.compiler.is_compiling() or any(map(_IS_SPARSE, grads)):
        return "single"
    if _wants_fused(group, params[0]) and _fused_obstacle(params) is None:
        return "fused"
    foreach = params[0].is_cuda if group["foreach"] is None else group["foreach"]
    return "foreach" if foreach else "single"


def _wants_fused(group: dict[str, Any], p: Tensor) -> bool:
    """Return whether the fused path was requested, or is the default for the device."""
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None and p.is_cuda)


def _scalar_device(group: dict[str, Any], p: Tensor) -> torch.device:
    """Return the device for a parameter's step and threshold: the one where its path reads them."""
    on_device = group["capturable"] or (_wants_fused(group, p) and _fused_obstacle([p]) is None)
    return p.device if on_device else torch.device("cpu")


def _fused_obstacle(params: Iterable[Tensor]) -> str | None:
    """Return why the fused path cannot run on these parameters, or None."""
    try:
        from dirprune.optim import fused
    except ImportError:
        return "the triton package is not installed"
    return fused.obstacle(params)


def _laid_out(grad: Any, p: Tensor) -> Tensor:
    """Return the gradient; a DTensor is redistributed to the placements of its parameter."""
    if hasattr(grad, "placements") and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    laid_out: Tensor = grad
    return laid_out


def _check_parameters(group: dict[str, Any]) -> None:
    for index, p in enumerate(group["params"]):
        if p.is_complex():
            raise ValueError(
                f"params: parameter {index} is complex ({p.dtype}, shape {tuple(p.shape)}), and a soft threshold needs "
                "an order; keep it as a real tensor of shape (…, 2) and call torch.view_as_complex in forward, or "
                "leave it to another optimizer"
            )
        if p.layout is not torch.strided:
            raise ValueError(
                f"params: parameter {index} is stored as {p.layout}, and pruned weights are zeros of a dense tensor; "
                "give parameter.to_dense()"
            )
    obstacle = _fused_obstacle([local(p) for p in group["params"]]) if group["fused"] else None
    if obstacle:
        raise ValueError(f"fused=True cannot run here: {obstacle}; use fused=None to take the fastest path that can")
