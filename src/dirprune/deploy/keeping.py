"""Zeros that stay zero while a sparse network trains on, under any optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class KeptZeros:
    """Zeros that an optimizer keeps, until `remove` is called."""

    hooks: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Let the optimizer change all weights again."""
        for hook in self.hooks:
            hook.remove()


def keep_zeros(optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> KeptZeros:
    """Keep weights that are zero now at zero after every later step, whatever the optimizer adds to them.

    Parameters that the optimizer gets later keep the zeros that they have before their first step.

    Args:
        optimizer: any torch optimizer, on the weights that are to stay sparse.
        parameters: those whose zeros are kept; by default all.

    Example:
        >>> weight = torch.tensor([0.0, 2.0, 0.0], requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> kept = keep_zeros(optimizer)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([0.0000, 1.9000, 0.0000])
    """
    only = None if parameters is None else set(parameters)
    zeros: dict[Tensor, Tensor] = {}  # where each parameter was zero before its first step

    @torch.no_grad()
    def note(*_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in zeros and (only is None or p in only):
                    zeros[p] = _local(p) == 0

    @torch.no_grad()
    def restore(*_: Any) -> None:
        for p, zero in zeros.items():
            _local(p).masked_fill_(zero, 0)

    note()
    _warn(list(zeros.values()))
    return KeptZeros((optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(restore)))


def _warn(zeros: list[Tensor]) -> None:
    """Warn of a call that cannot be what its caller wants."""
    whole = sum(bool(zero.all()) for zero in zeros if zero.numel())
    if not any(bool(zero.any()) for zero in zeros):
        message = "no weight is zero yet; load the sparse weights first, then call keep_zeros"
        warnings.warn(message, stacklevel=3)
    elif whole:
        message = (
            f"{whole} of the parameters are wholly zero and stay so; to train them, give only others in parameters="
        )
        warnings.warn(message, stacklevel=3)


def _local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this process holds."""
    whole = parameter.detach()
    part: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return part
