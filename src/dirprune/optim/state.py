"""The state that gRDA keeps for each parameter: created from its weights, or loaded from a saved state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dirprune._support.rates import number, set_lrs
from dirprune.optim.options import MACHINE, check_options
from dirprune.optim.target import Plan
from dirprune.optim.threshold import shrink

_PER_ELEMENT = ("accumulator", "momentum_buffer", "exp_avg", "exp_avg_sq", "pruned")
_PER_PARAMETER = ("step", "threshold")
_SHAPE = attrgetter("shape")
_MOST = torch.finfo(torch.float32).max


def first_state(p: Tensor, scalar_device: torch.device) -> dict[str, Tensor]:
    """Return the state before the first step: the accumulator starts at the weights."""
    zero = torch.zeros((), dtype=torch.float64, device=scalar_device)
    return {"accumulator": p.detach().to(accumulator_dtype(p), copy=True), "step": zero, "threshold": zero.clone()}


def accumulator_dtype(parameter: Tensor) -> torch.dtype:
    """Return float32 or wider: a low-precision accumulator would lose the small steps that decide what is pruned."""
    return torch.promote_types(parameter.dtype, torch.float32)


class Loading:
    """Loads a state in the precision it was saved in, and leaves the options of this machine as they are.

    ``scalar_device(group, p)`` returns the device for a parameter's step and threshold.
    """

    def __init__(self, optimizer: Optimizer, scalar_device: Callable[[dict[str, Any], Tensor], torch.device]) -> None:
        self._scalar_device = scalar_device
        self._states = {p: dict(state) for p, state in optimizer.state.items()}
        self._machine = [{key: group[key] for key in (*MACHINE, "lr")} for group in optimizer.param_groups]
        self._loaded: dict[Tensor, dict[str, Any]] = {}

    def check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Raise if the state does not fit, and copy it before torch casts it."""
        check_state(optimizer, state_dict)
        for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for saved_id, p in zip(saved_group["params"], group["params"], strict=True):
                saved = state_dict["state"].get(saved_id)
                if saved:
                    self._loaded[p] = _place_state(saved, p, self._scalar_device(group, p))

    def finish(self, optimizer: Optimizer) -> None:
        """Put the copies in the place of what torch has cast, and give the groups the options of this machine."""
        rates = [number(group["lr"]) for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self._machine, strict=True):
            for key in optimizer.defaults.keys() - {"differentiable"}:  # which torch adds to them when it loads
                group.setdefault(key, optimizer.defaults[key])
            group.update(own)
        plan = optimizer.param_groups[0]["plan"]
        plan = Plan.from_dict(plan) if isinstance(plan, dict) else plan
        for options in (optimizer.defaults, *optimizer.param_groups):
            options["plan"] = plan
        set_lrs(optimizer.param_groups, rates)
        for p, state in self._loaded.items():
            put_state(optimizer.state[p], self._states.get(p, {}), state)
        if plan is not None and plan.is_fixed:  # distributed checkpoints load only what a fresh optimizer has
            for p in (p for group in optimizer.param_groups if group["c"] for p in group["params"]):
                if p.requires_grad and "accumulator" in optimizer.state[p]:
                    optimizer.state[p].setdefault("pruned", optimizer.state[p]["accumulator"] == 0)


def widen(state: dict[str, Any]) -> None:
    """Convert a state to float64, which its parameter has become."""
    for key in _PER_ELEMENT:
        if key != "pruned" and key in state:
            state[key] = state[key].double()


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise a ValueError that names what does not fit; nothing has been changed by then."""
    groups, kind = optimizer.param_groups, type(optimizer).__name__
    per_element: tuple[str, ...] = getattr(optimizer, "PER_ELEMENT", _PER_ELEMENT[:1])
    check_form(state_dict, kind)
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved_groups)} parameter groups and this optimizer {len(groups)}; "
            "make the optimizer with the groups it was saved with"
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"state_dict has {len(saved['params'])} parameters in group {index} and this optimizer "
                f"{len(group['params'])}; load it into an optimizer of the same model"
            )
        missing = [key for key in ("lr", "c", "mu", "betas") if key in group and key not in saved]
        if missing:
            raise ValueError(
                f"state_dict is not one of {kind}'s: group {index} has no {', '.join(missing)}; start a new {kind} on "
                "the trained weights instead"
            )
        for key in MACHINE:
            if not isinstance(saved.get(key), (bool, type(None))):
                raise ValueError(f"state_dict has {key}={saved[key]!r} in group {index}; give True, False or None")
        skipped = saved.get("skipped", 0)
        if not isinstance(skipped, int) or not 0 <= skipped < 2**63:
            raise ValueError(f"state_dict has skipped={skipped!r} in group {index}; give a number of steps")
        options = [*saved.items(), *(saved["plan"].items() if isinstance(saved.get("plan"), dict) else ())]
        if empty := [key for key, value in options if isinstance(value, Tensor) and not _holds_numbers(value)]:
            raise ValueError(f"state_dict has no number as {empty[0]} of group {index}, but a tensor without values")
        _check_plan(group["plan"], saved)
        check_options({**group, **saved, **{key: group[key] for key in MACHINE}})
        for saved_id, p in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(saved_id)
            if state:
                _check_parameter_state(state, saved_id, p, per_element, kind)


def check_form(state_dict: Any, kind: str) -> None:
    """Raise unless this is built as the state of an optimizer is."""
    keys = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
    if not {"state", "param_groups"} <= {*keys}:
        raise ValueError(f"state_dict has the keys {keys}; give what {kind}.state_dict() returned")
    groups, states = state_dict["param_groups"], state_dict["state"]
    lists = isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )
    names = lists and all(isinstance(name, (int, str)) for group in groups for name in group["params"])
    if not (names and isinstance(states, Mapping) and all(isinstance(state, Mapping) for state in states.values())):
        raise ValueError(
            f"state_dict is not built as the state of an optimizer; give what {kind}.state_dict() returned"
        )


def _check_plan(own: Plan | None, saved: dict[str, Any]) -> None:
    plan = saved.get("plan", own)
    if isinstance(plan, dict):
        Plan.from_dict(plan)
    elif plan is not own:
        raise ValueError(
            f"state_dict was saved without a target, and this optimizer has target={getattr(own, 'target', None)}; "
            "load it into one without, or start a new one on the trained weights"
        )


def _check_parameter_state(state: dict[str, Any], name: Any, p: Tensor, needed: tuple[str, ...], kind: str) -> None:
    absent = [key for key in (*needed, *_PER_PARAMETER) if state.get(key) is None]
    if absent:
        raise ValueError(f"state_dict has no {', '.join(absent)} for parameter {name}; it is not from {kind}")
    for key in _PER_PARAMETER:
        value = state[key]
        held = _holds_numbers(value) and not value.dim() and value.is_floating_point()
        if not (held or isinstance(value, Real)) or not 0 <= number(value) <= _MOST:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"state_dict has {key}={value.item() if held else shown} for parameter {name}; give a finite number "
                "≥ 0 that float32 can hold"
            )
    for key in _PER_ELEMENT:
        tensor = state.get(key)
        if tensor is None:
            continue
        if not _holds_numbers(tensor) or tensor.is_complex():
            raise ValueError(
                f"state_dict has a {type(tensor).__name__} as {key} of parameter {name}; give a dense tensor of numbers"
            )
        if tensor.shape != p.shape:
            raise ValueError(
                f"state_dict has {key} of shape {tuple(tensor.shape)} for parameter {name}, whose shape is "
                f"{tuple(p.shape)}; load it into an optimizer of the same model"
            )
        if getattr(tensor, "placements", None) != getattr(p, "placements", None):
            raise ValueError(
                f"state_dict has {key} for parameter {name} that is not sharded as the parameter is; load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


def _holds_numbers(value: Any) -> bool:
    """Return whether this is a tensor whose elements can be read as they are."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
    )


def _place_state(saved: dict[str, Any], p: Tensor, scalar_device: torch.device) -> dict[str, Any]:
    own = (*_PER_ELEMENT, *_PER_PARAMETER)
    placed = {key: copy.deepcopy(value) for key, value in saved.items() if key not in own}  # a wrapper's entries
    for key in _PER_ELEMENT:
        if saved.get(key) is not None:
            # The kernel needs the parameter's memory layout; the model that was saved may have had another one.
            dtype = torch.bool if key == "pruned" else accumulator_dtype(p)
            placed[key] = torch.empty_like(p.detach(), dtype=dtype).copy_(saved[key].detach())
    for key in _PER_PARAMETER:
        placed[key] = torch.as_tensor(saved[key], dtype=torch.float64, device=scalar_device).detach().clone()
    return placed


def put_state(state: dict[str, Any], before: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Replace a state by the loaded one, in the same memory where it fits: a captured graph reads it there."""
    state.clear()
    for key, value in loaded.items():
        own = before.get(key)
        if isinstance(own, Tensor) and isinstance(value, Tensor) and _kind(own) == _kind(value):
            value = own.copy_(value)
        state[key] = value
    if "pruned" in before and "pruned" not in loaded:
        state["pruned"] = before["pruned"].zero_()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_shapes(params: Sequence[Tensor], accumulators: Sequence[Tensor]) -> None:
    """Raise if a parameter and its accumulator differ in shape: a step would resize it, or write past its end."""
    if any(map(ne, map(_SHAPE, params), map(_SHAPE, accumulators))):
        p, v = next((p, v) for p, v in zip(params, accumulators, strict=True) if p.shape != v.shape)
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} had the shape {tuple(v.shape)} when its accumulator was made; make "
            "a new optimizer after resizing parameters"
        )


def check_devices(p: Tensor, *others: Tensor) -> None:
    """Raise unless gradient and state are on the parameter's device: a kernel would misread their addresses."""
    device = p.device
    for tensor in others:
        if tensor.device != device:
            raise RuntimeError(
                f"a parameter is on {device}, and its gradient or a part of its state on {tensor.device}; move the "
                "model first, then load the state with load_state_dict, which moves it there"
            )


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor; a step is elementwise, so each process steps its own shard."""
    # Known by its method: importing the class would load much that a plain training script does not need.
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


@torch.no_grad()
def fix_zeros(p: Tensor, state: dict[str, Any], zeros: Tensor, tau: Tensor, shape: str, *, rescale: bool) -> None:
    """Make these weights zero for good; what a threshold leaves of the others is their accumulator from now on.

    Of those that it would make zero as well, because it ran ahead of the plan, the smallest number stays.
    """
    w, v = local(p), local(state["accumulator"])
    left = torch.empty_like(v)
    shrink(v, tau.to(v), shape, rescale=rescale, out=left)
    least = torch.finfo(w.dtype).tiny
    left = torch.where(left.abs() < least, torch.where(v < 0, -least, least), left)
    v.copy_(left.masked_fill_(zeros, 0.0))
    w.copy_(v)
    if "pruned" not in state:
        state["pruned"] = torch.zeros_like(state["accumulator"], dtype=torch.bool)
    local(state["pruned"]).copy_(zeros)  # in place: a CUDA graph may read it there
    state["threshold"].zero_()
