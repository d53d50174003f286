"""Learning rates of any optimizer: where they live, and how they are set."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def number(value: Any) -> float:
    """Return a number or a tensor of one as a float; one that is too large is infinite."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # a rate may require a gradient
    except OverflowError:
        return math.inf


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
