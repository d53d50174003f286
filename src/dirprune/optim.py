"""gRDA: generalized regularized dual averaging, the optimizer that prunes while it trains.

The mathematics is in `dirprune.update`; the class here holds the state and the conventions of torch optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from dirprune.update import grda

_PER_ELEMENT = ("accumulator", "momentum_buffer")
_PER_PARAMETER = ("step", "threshold")
_PLAIN = {Tensor, nn.Parameter}
# Asked of every tensor at every step, by `map`: a loop in Python would take longer than the update on the device.
_DEVICE, _IS_SPARSE = attrgetter("device"), attrgetter("is_sparse")
_MACHINE = ("foreach", "fused", "capturable")
_MATHEMATICS = ("lr", "c", "mu", "momentum", "nesterov", "weight_decay", "maximize")
_NUMBERS = {"lr": 0.1, "c": 5e-4, "mu": 0.51, "momentum": 0.9, "weight_decay": 5e-4}  # with an example of each


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
        self._launchers: dict[tuple[int, torch.device], Any] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters start at threshold 0, whenever they come."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_parameters(group)
        except Exception:
            self.param_groups.pop()
            raise
        _place_lr(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_launchers", {})  # a load keeps them: captured graphs read their tables

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state saved by any path, on any device, with the precision it was saved in.

        The mathematics (lr, c, mu, …) comes from the saved state; how this machine computes it (foreach, fused,
        capturable) stays as this optimizer was made. Nothing changes if the state does not fit.
        """
        machine = [{key: group[key] for key in (*_MACHINE, "lr")} for group in self.param_groups]
        placed: dict[Tensor, dict[str, Any]] = {}

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            _check_state(self.param_groups, final)
            placed.update(_place_states(self.param_groups, final))

        def restore(_: Optimizer) -> None:
            rates = [_number(group["lr"]) for group in self.param_groups]
            for group, own in zip(self.param_groups, machine, strict=True):
                for key in _MATHEMATICS:
                    group.setdefault(key, self.defaults[key])
                group.update(own)
            _set_lrs(self.param_groups, rates)
            for p, state in placed.items():
                _put_state(self.state[p], before.get(p, {}), state)

        # torch casts every state tensor to its parameter's dtype. These two undo that: the first as the last hook
        # before loading, so that it sees what others made of the state; the second as the first one after it.
        before = {p: dict(state) for p, state in self.state.items()}
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter of a group; made now, if there is none, from the weights that it has now.

        The first step does it otherwise. Called before, the accumulator keeps what the weights lose if they are put
        into a lower precision.
        """
        state: dict[str, Any] = self.state[p]
        if not state:
            state["accumulator"] = p.detach().to(accumulator_dtype(p), copy=True)
            scalar_device = _scalar_device(group, p)
            state["step"] = torch.zeros((), dtype=torch.float64, device=scalar_device)
            state["threshold"] = torch.zeros((), dtype=torch.float64, device=scalar_device)
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
        # The name and the fill-these-lists signature are what lets torch.compile trace the step without this part.
        has_momentum = bool(group["momentum"])
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p] or self.begin(p, group)
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
            grads[:] = map(_laid_out, grads, params)
            for tensors in (params, grads, accumulators, buffers):
                tensors[:] = map(_local, tensors)

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
            lists = (params, grads, accumulators, buffers, steps, thresholds)
            for on_one_device in _by_device(lists):
                self._update(index, group, *on_one_device)
        return loss

    def _update(self, index: int, group: dict[str, Any], params: list[Tensor], *lists: list[Tensor]) -> None:
        """Step the parameters of a group that lie on one device."""
        path = _choose_path(group, params, lists[0])
        _refuse_capture(group, params[0])
        options = {key: group[key] for key in _MATHEMATICS}
        if path == "fused":
            self._launcher(index, params[0].device)(params, *lists, **options)
        else:
            grda(params, *lists, **options, foreach=path == "foreach", capturable=group["capturable"])

    def _launcher(self, index: int, device: torch.device) -> Any:
        key = (index, device)
        if key not in self._launchers:
            from dirprune._fused import Launcher

            self._launchers[key] = Launcher()
        return self._launchers[key]


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """Return float32 or wider: a low-precision accumulator would lose the small steps that decide what is pruned."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _by_device(lists: tuple[list[Tensor], ...]) -> list[list[list[Tensor]]]:
    """Return the lists for each device of the first one, the parameters; usually there is one."""
    params = lists[0]
    if not params:
        return []
    if torch.compiler.is_compiling() or len(devices := dict.fromkeys(map(_DEVICE, params))) == 1:
        return [list(lists)]
    split = []
    for device in devices:
        members = [i for i, p in enumerate(params) if p.device == device]
        split.append([[tensors[i] for i in members] if tensors else [] for tensors in lists])
    return split


def _refuse_capture(group: dict[str, Any], p: Tensor) -> None:
    """Raise if a CUDA graph would freeze the rate and the threshold."""
    if p.is_cuda and not group["capturable"] and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph of this step would repeat one learning rate and one threshold for ever; make the optimizer "
            "with capturable=True"
        )


def _choose_path(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return the path asked for, or else the fastest that can run; sparse gradients and compilers take "single"."""
    if torch.compiler.is_compiling() or any(map(_IS_SPARSE, grads)):
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
    # By its method and not its class, whose import loads much that a plain training script does not need.
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _laid_out(grad: Any, p: Tensor) -> Tensor:
    """Return a gradient, if it is a DTensor with the placements of its parameter."""
    if hasattr(grad, "placements") and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    laid_out: Tensor = grad
    return laid_out


def _place_lr(group: dict[str, Any]) -> None:
    """Put a capturable group's rate on its device, so that a captured step sees what a scheduler sets."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        group["lr"] = lr = lr.detach().reshape(())
    if group["capturable"] and group["params"]:
        dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
        device = group["params"][0].device
        group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)  # the caller's own, if it can be


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)  # a rate may have a gradient


def _set_lrs(groups: list[dict[str, Any]], rates: list[float]) -> None:
    """Set the groups' rates, in their tensors if they have them: a captured graph reads them there."""
    taken: dict[int, float] = {}
    for group, rate in zip(groups, rates, strict=True):
        lr = group["lr"]
        if not isinstance(lr, Tensor):
            group["lr"] = rate
        elif taken.setdefault(lr.data_ptr(), rate) == rate:
            lr.detach().fill_(rate)
        else:  # groups that shared one tensor, and from now on do not have one rate
            group["lr"] = torch.full_like(lr, rate)


def _place_states(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Return copies of all saved states where this optimizer keeps them, none of their precision lost."""
    placed: dict[Tensor, dict[str, Any]] = {}
    for group, saved_group in zip(groups, state_dict["param_groups"], strict=True):
        for saved_id, p in zip(saved_group["params"], group["params"], strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved:
                placed[p] = _place_state(saved, p, _scalar_device(group, p))
    return placed


def _place_state(saved: dict[str, Any], p: Tensor, scalar_device: torch.device) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    for key in _PER_ELEMENT:
        if saved.get(key) is not None:
            # In the parameter's memory layout, not in that of the model it was saved from: the kernel counts on it.
            placed[key] = torch.empty_like(p.detach(), dtype=accumulator_dtype(p)).copy_(saved[key].detach())
    for key in _PER_PARAMETER:
        placed[key] = torch.as_tensor(saved[key], dtype=torch.float64, device=scalar_device).detach().clone()
    return placed


def _put_state(state: dict[str, Any], before: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Replace a state by the loaded one, where that fits in the memory it had: a captured graph reads it there."""
    state.clear()
    for key, value in loaded.items():
        own = before.get(key)
        fits = own is not None and _kind(own) == _kind(value)
        state[key] = own.copy_(value) if fits else value  # type: ignore[union-attr]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _check_options(options: dict[str, Any]) -> None:
    """Raise if an option cannot be used, and make numbers plain floats."""
    for name, example in _NUMBERS.items():
        value = options[name]
        if name == "lr" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            continue
        if not isinstance(value, Real):
            raise ValueError(f"{name}={value!r} is not a number; give one, e.g. {name}={example:g}")
        options[name] = float(value)  # not numpy's or a Fraction, which a state could not be saved with
    lr, c, mu, momentum, weight_decay = (_number(options[name]) for name in _NUMBERS)
    if not lr >= 0 or math.isinf(lr):
        raise ValueError(f"lr={lr} is not a learning rate; give a finite number ≥ 0, e.g. lr=0.1")
    if not c >= 0 or math.isinf(c):
        raise ValueError(f"c={c} is not a pruning strength; give a finite number ≥ 0, e.g. c=5e-4 (c=0 prunes nothing)")
    if not mu > 0 or math.isinf(mu):
        raise ValueError(f"mu={mu} is not a growth exponent; give a finite number > 0, typically between 0.5 and 1")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is out of range; give a number in [0, 1), e.g. momentum=0.9")
    if options["nesterov"] and momentum == 0:
        raise ValueError("nesterov=True needs momentum, and momentum=0; give e.g. momentum=0.9, or nesterov=False")
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
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise ValueError(f"state_dict has the keys {list(state_dict)}; give what GRDA.state_dict() returned")
    saved_groups = state_dict["param_groups"]
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
            state = state_dict["state"].get(saved_id)
            if state:
                _check_parameter_state(state, saved_id, p)


def _check_parameter_state(state: dict[str, Any], name: Any, p: Tensor) -> None:
    absent = [key for key in (_PER_ELEMENT[0], *_PER_PARAMETER) if state.get(key) is None]
    if absent:
        raise ValueError(f"state_dict has no {', '.join(absent)} for parameter {name}: not a state of GRDA's")
    for key in _PER_PARAMETER:
        value = torch.as_tensor(state[key], device="cpu")
        if value.numel() != 1 or value.dim() or not 0 <= float(value) < math.inf:
            raise ValueError(f"state_dict has {key}={value.tolist()} for parameter {name}; it is one finite number ≥ 0")
    for key in _PER_ELEMENT:
        tensor = state.get(key)
        if tensor is None:
            continue
        if tensor.shape != p.shape:
            raise ValueError(
                f"state_dict has an {key} of shape {tuple(tensor.shape)} for parameter {name}, whose shape is "
                f"{tuple(p.shape)}; load it into an optimizer of the same model"
            )
        if getattr(tensor, "placements", None) != getattr(p, "placements", None):
            raise ValueError(
                f"state_dict has an {key} for parameter {name} that is not sharded as the parameter is; load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
