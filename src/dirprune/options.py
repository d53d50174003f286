"""The options of gRDA and their checks, and how to set a learning rate in any optimizer."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

MACHINE = ("foreach", "fused", "capturable")
"""Options that say how a step is executed on this machine."""
MATHEMATICS = ("lr", "c", "mu", "momentum", "nesterov", "weight_decay", "maximize")
"""Options that say what a step computes."""
_NUMBERS = {"lr": 0.1, "c": 5e-4, "mu": 0.51, "momentum": 0.9, "weight_decay": 5e-4}  # with an example value of each
_ROUNDING = 1e-12
"""How far below 0 rounding may leave a scheduler that ends at 0; a state saved with such a rate must load."""
_LOG_LARGEST = math.log(sys.float_info.max)


def check_options(options: dict[str, Any], *, wait: bool = True) -> None:
    """Raise a ValueError if an option cannot be used, and convert numbers to plain floats in place.

    Without ``wait``, a rate that lies on a device is not read, because the host would wait for it.
    """
    for name, example in _NUMBERS.items():
        value = options[name]
        if name == "lr" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            continue
        if not isinstance(value, Real):
            raise ValueError(f"{name}={value!r} is not a number; give one, e.g. {name}={example:g}")
        options[name] = float(value)  # a numpy number or a Fraction could not be saved with the state
    lr = options["lr"]
    lr = number(lr) if wait or not isinstance(lr, Tensor) or _is_on_host(lr) else 0.0
    c, mu, momentum, weight_decay = (options[name] for name in _NUMBERS if name != "lr")
    if not lr >= -_ROUNDING or math.isinf(lr):
        raise ValueError(f"lr={lr} is not a learning rate; give a finite number ≥ 0, e.g. lr=0.1")
    if not c >= 0 or math.isinf(c):
        raise ValueError(f"c={c} is not a pruning strength; give a finite number ≥ 0, e.g. c=5e-4 (c=0 prunes nothing)")
    if not 0 < mu <= 1:
        raise ValueError(
            f"mu={mu} is not a growth exponent; give a number in (0, 1], e.g. mu=0.51: above 1 the threshold outgrows "
            "every weight in the end"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is out of range; give a number in [0, 1), e.g. momentum=0.9")
    if options["nesterov"] and momentum == 0:
        raise ValueError("nesterov=True needs momentum, and momentum=0; give e.g. momentum=0.9, or nesterov=False")
    if not weight_decay >= 0 or math.isinf(weight_decay):
        raise ValueError(
            f"weight_decay={weight_decay} is not a decay; give a finite number ≥ 0, e.g. weight_decay=5e-4"
        )
    # At μ ≤ 1 the first step's growth, at a rate that stays, is the largest.
    if lr > 0 and math.log(max(c, 1.0)) + (mu + 0.5) * math.log(lr / (1 - momentum)) > _LOG_LARGEST:
        raise ValueError(f"lr={lr} and c={c} give a threshold beyond the range of float64; give smaller ones")
    if options["foreach"] and options["fused"]:
        raise ValueError("foreach=True and fused=True exclude each other; give one of them, or neither for the default")


def _is_on_host(lr: Tensor) -> bool:
    return lr.is_cpu and type(lr) in (Tensor, torch.nn.Parameter)  # a fake or a traced tensor has no value


def number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)  # a rate may require a gradient


def place_lr(group: dict[str, Any]) -> None:
    """Move a capturable group's learning rate to its device, so that a captured step sees a scheduler's changes.

    It is not moved to "meta", where it would lose its value: parameters leave "meta" before they are stepped.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim():
        group["lr"] = lr = lr.detach().reshape(())
    if group["capturable"] and group["params"] and not group["params"][0].is_meta:
        dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
        device = group["params"][0].device
        group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)  # the caller's own tensor if it is there already


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    set_lrs(optimizer.param_groups, [lr] * len(optimizer.param_groups))


def set_lrs(groups: list[dict[str, Any]], rates: list[float]) -> None:
    """Set the groups' learning rates; one that is a tensor is filled in place, where a captured graph reads it."""
    taken: dict[int, float] = {}
    for group, rate in zip(groups, rates, strict=True):
        lr = group["lr"]
        if not isinstance(lr, Tensor):
            group["lr"] = rate
        elif taken.setdefault(lr.data_ptr(), rate) == rate:
            lr.detach().fill_(rate)
        else:  # groups that shared one tensor now have different rates
            group["lr"] = torch.full_like(lr, rate)
