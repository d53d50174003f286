"""How a step is executed: which path, on which device, and what cannot be stepped at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dirprune._support.graphs import is_capturing
from dirprune.optim.state import local

_IS_SPARSE = attrgetter("is_sparse")


def choose_path(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return the requested path, or else the fastest that can run; sparse gradients and compilers get "single"."""
    fused = wants_fused(group, params[0]) and not group.get("rescale") and group.get("decay") != "accumulator"
    foreach = params[0].is_cuda if group["foreach"] is None else group["foreach"]
    if torch.compiler.is_compiling() or not (fused or foreach) or any(map(_IS_SPARSE, grads)):
        return "single"
    if fused and fused_obstacle(params) is None:
        return "fused"
    return "foreach" if foreach else "single"


def wants_fused(group: dict[str, Any], p: Tensor) -> bool:
    """Return whether the fused path was requested, or is the default for the device."""
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None and p.is_cuda)


def scalar_device(group: dict[str, Any], p: Tensor) -> torch.device:
    """Return the device for a parameter's step and threshold: the one where its path reads them."""
    on_device = (
        group["capturable"] or group["skip_nonfinite"] or (wants_fused(group, p) and fused_obstacle([p]) is None)
    )
    return p.device if on_device else torch.device("cpu")


def fused_obstacle(params: Iterable[Tensor]) -> str | None:
    """Return why the fused path cannot run on these parameters, or None."""
    try:
        from dirprune.optim import fused
    except ImportError:
        return "the triton package is not installed"
    return fused.obstacle(params)


def refuse_capture(group: dict[str, Any], p: Tensor) -> None:
    """Raise if a CUDA graph would freeze the rate and the threshold."""
    if not group["capturable"] and is_capturing(p.device):
        raise RuntimeError(
            "a CUDA graph of this step would repeat one learning rate and one threshold for ever; make the optimizer "
            "with capturable=True"
        )


def check_parameters(group: dict[str, Any], fused_obstacle: Callable[[Iterable[Tensor]], str | None]) -> None:
    for index, p in enumerate(group["params"]):
        if p.is_complex():
            raise ValueError(
                f"params: parameter {index} is complex ({p.dtype}, shape {tuple(p.shape)}), and a soft threshold needs "
                "an order; keep it as a real tensor of shape (…, 2) and call torch.view_as_complex in forward, or "
                "leave it to another optimizer"
            )
        if p.element_size() < 2:
            raise ValueError(
                f"params: parameter {index} is stored as {p.dtype}, in which a weight has too few values; "
                "keep it in bfloat16 or wider, and convert it for the forward pass"
            )
        if p.layout is not torch.strided:
            raise ValueError(
                f"params: parameter {index} is stored as {p.layout}, and pruned weights are zeros of a dense tensor; "
                "give parameter.to_dense()"
            )
    obstacle = fused_obstacle([local(p) for p in group["params"]]) if group["fused"] else None
    if obstacle:
        raise ValueError(f"fused=True cannot run here: {obstacle}; use fused=None to take the fastest path that can")
