"""gRDA: generalized regularized dual averaging, the optimizer that prunes while it trains.

The mathematics is in `dirprune.update`; the class here holds the state and the conventions of torch optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from dirprune.update import grda

_PER_ELEMENT = ("accumulator", "momentum_buffer")
_PER_PARAMETER = ("step", "threshold")
_MACHINE = ("foreach", "fused", "capturable")


class GRDA(Optimizer):
    r"""gRDA, the directional-pruning optimizer: SGD whose accumulated gradient is soft-thresholded at every step.

    For learning rates γₙ and an accumulator v that starts at the model's own weights,

    .. math::
        v_n = v_{n-1} - γ_n \nabla f(w_{n-1}), \qquad
        τ_n = τ_{n-1} + c\, γ_n^{μ+1/2} (n^μ - (n-1)^μ), \qquad
        w_n = \mathrm{sign}(v_n) \max(|v_n| - τ_n, 0).

    With a constant rate τₙ = c √γ (nγ)^μ. ``c = 0`` is SGD; ``mu = 1`` with ``c = λ/√γ`` is ℓ₁-RDA. With momentum m, γ
    in τ is the effective rate γ/(1−m), so that ``c`` and ``mu`` mean the same with and without it.

    The accumulator is the state that trains, and the parameters follow from it: what else writes to a parameter after
    its first step is overwritten by the next. To go on from other weights, make a new optimizer.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; see also `prunable_groups`.
        lr: learning rate γ, a number or a tensor.
        c: how much to prune. Published runs: 5e-4 (VGG16), 1e-3 (WRN28x10), 1e-3 to 1e-2 (ResNet50).
        mu: how fast the threshold grows, μ > 0; the theory asks for (0.5, 1), published runs used 0.4 to 0.85.
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
        c: float = 5e-4,
        mu: float = 0.51,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
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
        _check_options(defaults)
        self._launchers: dict[int, Any] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters start at threshold 0, whenever they come."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_parameters(group)
        except ValueError:
            self.param_groups.pop()
            raise
        _place_lr(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._launchers = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state saved by any path, on any device, with the precision it was saved in.

        The mathematics (lr, c, mu, …) comes from the saved state; how this machine computes it (foreach, fused,
        capturable) stays as this optimizer was made. Nothing changes if the state does not fit.
        """
        _check_state(self.param_groups, state_dict)
        machine = [{key: group[key] for key in _MACHINE} for group in self.param_groups]
        super().load_state_dict(state_dict)  # casts every state tensor to its parameter's dtype: undone below
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for group, flags in zip(self.param_groups, machine, strict=True):
            group.update(flags)
            _place_lr(group)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for saved_id, p in zip(saved_ids, parameters, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved:
                self.state[p] = _place_state(saved, p, _scalar_device(groups[p], p))
        self._launchers = {}

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
        # The name and the fill-these-lists signature are what lets torch.compile trace the step without this part.
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["accumulator"] = p.detach().to(accumulator_dtype(p), copy=True)
                scalar_device = _scalar_device(group, p)
                state["step"] = torch.zeros((), dtype=torch.float64, device=scalar_device)
                state["threshold"] = torch.zeros((), dtype=torch.float64, device=scalar_device)
            if state["threshold"].device != state["step"].device:  # torch.compile moves a "step" to the GPU by itself
                state["threshold"] = state["threshold"].to(state["step"].device)
            if group["momentum"] and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(state["accumulator"])
            params.append(_local(p))
            grads.append(_local_grad(p))
            accumulators.append(_local(state["accumulator"]))
            steps.append(state["step"])
            thresholds.append(state["threshold"])
            if group["momentum"]:
                buffers.append(_local(state["momentum_buffer"]))

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
        for index, group in enumerate(self.param_groups):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            accumulators: list[Tensor] = []
            buffers: list[Tensor] = []
            steps: list[Tensor] = []
            thresholds: list[Tensor] = []
            self._init_group(group, params, grads, accumulators, buffers, steps, thresholds)
            if params:
                path = _choose_path(group, params, grads)
                launcher = self._launcher(index) if path == "fused" else None
                grda(
                    params,
                    grads,
                    accumulators,
                    buffers,
                    steps,
                    thresholds,
                    lr=group["lr"],
                    c=group["c"],
                    mu=group["mu"],
                    momentum=group["momentum"],
                    nesterov=group["nesterov"],
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                    path=path,
                    capturable=group["capturable"],
                    launcher=launcher,
                )
        return loss

    def _launcher(self, index: int) -> Any:
        if index not in self._launchers:
            from dirprune._fused import Launcher

            self._launchers[index] = Launcher()
        return self._launchers[index]


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """Return float32 or wider: a low-precision accumulator would lose the small steps that decide what is pruned."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _choose_path(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return the path asked for, or else the fastest that can run; sparse gradients and compilers take "single"."""
    if torch.compiler.is_compiling() or any(grad.is_sparse for grad in grads):
        return "single"
    if _wants_fused(group, params[0]) and _fused_obstacle(params) is None:
        return "fused"
    foreach = params[0].is_cuda if group["foreach"] is None else group["foreach"]
    return "foreach" if foreach else "single"


def _wants_fused(group: dict[str, Any], p: Tensor) -> bool:
    """Whether the fused path is asked for, or is the default for the device."""
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None and p.is_cuda)


def _scalar_device(group: dict[str, Any], p: Tensor) -> torch.device:
    """Return where a parameter's step and threshold live: where the path that will step it reads them."""
    on_device = group["capturable"] or (_wants_fused(group, p) and _fused_obstacle([p]) is None)
    return p.device if on_device else torch.device("cpu")


def _fused_obstacle(params: Iterable[Tensor]) -> str | None:
    """Return why the fused path cannot run on these parameters, or None."""
    try:
        from dirprune import _fused
    except ImportError:
        return "the triton package is not installed"
    return _fused.obstacle(params)


def _local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor: the step is elementwise, so each process takes it on what it holds."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    # By its method and not its class, whose import loads much that a plain training script does not need.
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _local_grad(p: Tensor) -> Tensor:
    grad: Any = p.grad
    if type(grad) is Tensor:
        return grad
    if hasattr(grad, "placements") and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return _local(grad)


def _place_lr(group: dict[str, Any]) -> None:
    """Put a capturable group's rate on its device, so that a captured step sees what a scheduler sets."""
    if group["capturable"]:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64).to(device)


def _place_state(saved: dict[str, Any], p: Tensor, scalar_device: torch.device) -> dict[str, Any]:
    """Return a copy of a parameter's saved state where this optimizer keeps it, none of its precision lost."""
    placed: dict[str, Any] = {}
    for key, value in saved.items():
        if key in _PER_PARAMETER:
            placed[key] = torch.as_tensor(value).detach().to(scalar_device, torch.float64, copy=True)
        else:
            placed[key] = value.detach().to(p.device, accumulator_dtype(p), copy=True)
    return placed


def _check_options(options: dict[str, Any]) -> None:
    lr, c, mu, momentum = options["lr"], options["c"], options["mu"], options["momentum"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements; give a number or a tensor of one element")
    if not _number(lr) >= 0 or math.isinf(_number(lr)):
        raise ValueError(f"lr={_number(lr)} is not a learning rate; give a finite number ≥ 0, e.g. lr=0.1")
    if not c >= 0 or math.isinf(c):
        raise ValueError(f"c={c} is not a pruning strength; give a finite number ≥ 0, e.g. c=5e-4 (c=0 prunes nothing)")
    if not mu > 0 or math.isinf(mu):
        raise ValueError(f"mu={mu} is not a growth exponent; give a finite number > 0, typically between 0.5 and 1")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is out of range; give a number in [0, 1), e.g. momentum=0.9")
    if options["nesterov"] and momentum == 0:
        raise ValueError("nesterov=True needs momentum, and momentum=0; give e.g. momentum=0.9, or nesterov=False")
    weight_decay = options["weight_decay"]
    if not weight_decay >= 0 or math.isinf(weight_decay):
        raise ValueError(
            f"weight_decay={weight_decay} is not a decay; give a finite number ≥ 0, e.g. weight_decay=5e-4"
        )
    if options["foreach"] and options["fused"]:
        raise ValueError("foreach=True and fused=True exclude each other; give one of them, or neither for the default")


def _check_parameters(group: dict[str, Any]) -> None:
    for index, p in enumerate(group["params"]):
        if p.is_complex():
            raise ValueError(
                f"params: parameter {index} is complex ({p.dtype}, shape {tuple(p.shape)}), and a soft threshold needs "
                "an order; optimize torch.view_as_real(parameter) instead, or leave it to another optimizer"
            )
    obstacle = _fused_obstacle([_local(p) for p in group["params"]]) if group["fused"] else None
    if obstacle:
        raise ValueError(f"fused=True cannot run here: {obstacle}; use fused=None to take the fastest path that can")


def _check_state(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    """Raise a ValueError that names what does not fit, before anything is changed."""
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups and this optimizer {len(groups)}; "
            "make the optimizer with the groups it was saved with"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"state_dict has {len(saved['params'])} parameters in group {number} and this optimizer "
                f"{len(group['params'])}; load it into an optimizer of the same model"
            )
        missing = [key for key in ("lr", "c", "mu") if key not in saved]
        if missing:
            raise ValueError(
                f"state_dict is not one of GRDA's: group {number} has no {', '.join(missing)}; start a new GRDA on the "
                "trained weights instead"
            )
        _check_options({**group, **saved, **{key: group[key] for key in _MACHINE}})
        for saved_id, p in zip(saved["params"], group["params"], strict=True):
            state = saved_state.get(saved_id) or {}
            absent = [key for key in (_PER_ELEMENT[0], *_PER_PARAMETER) if state and key not in state]
            if absent:
                raise ValueError(
                    f"state_dict has no {', '.join(absent)} for parameter {saved_id}: not a state of GRDA's"
                )
            for key in _PER_ELEMENT:
                if key in state and state[key].shape != p.shape:
                    raise ValueError(
                        f"state_dict has an {key} of shape {tuple(state[key].shape)} for parameter {saved_id}, whose "
                        f"shape is {tuple(p.shape)}; load it into an optimizer of the same model"
                    )


def _number(value: float | Tensor) -> float:
    return float(value)


def prunable_groups(model: nn.Module, c: float, exempt: Sequence[str] = ("bias", "norm")) -> list[dict[str, Any]]:
    """Return parameter groups for `GRDA` that keep dense, by ``c = 0``, what must stay dense.

    Args:
        model: whose parameters to group; the groups keep their names.
        c: the pruning strength of everything not exempt.
        exempt: any of ``"bias"`` (every bias), ``"norm"`` (the parameters of normalisation layers), and patterns of
            parameter names such as ``"head.*"``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> [(group["c"], len(group["params"])) for group in prunable_groups(model, c=1e-3)]
        [(0.001, 1), (0.0, 3)]
    """
    if isinstance(exempt, str):
        raise ValueError(f"exempt={exempt!r} is a string; give a sequence of them, e.g. exempt=({exempt!r},)")
    norms = {
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for leaf, _ in module.named_parameters(recurse=False)
    }
    names = [name for name, _ in model.named_parameters()]
    kept_dense: set[str] = set()
    for rule in exempt:
        if rule == "bias":
            kept_dense.update(name for name in names if name.rpartition(".")[2].endswith("bias"))
        elif rule == "norm":
            kept_dense.update(norms)
        else:
            matches = [name for name in names if fnmatchcase(name, rule)]
            if not matches:
                raise ValueError(
                    f"exempt={rule!r} matches no parameter; use 'bias', 'norm' or a pattern of names like {names[0]!r}"
                )
            kept_dense.update(matches)
    prunable = [(name, p) for name, p in model.named_parameters() if name not in kept_dense]
    dense = [(name, p) for name, p in model.named_parameters() if name in kept_dense]
    groups: list[dict[str, Any]] = [{"params": prunable, "c": c}, {"params": dense, "c": 0.0}]
    return [group for group in groups if group["params"]]
