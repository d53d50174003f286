"""Steps that are not taken, because a gradient is infinite or not a number (``skip_nonfinite``)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dirprune.optim.selection import Member, summed
from dirprune.optim.state import local


class Skipped(UserWarning):
    """Steps were skipped, because a gradient was not finite."""


class Guard:
    """Tells before each step whether its gradients are finite, and counts the steps that are skipped.

    Both are on the device of the first parameter, at the same addresses in every step, so that neither the host nor a
    CUDA graph has to wait or to look.
    """

    def __init__(self, skipped: int = 0) -> None:
        self._skipped = torch.tensor(skipped, device="cpu")
        self._fine = torch.ones((), dtype=torch.int32, device="cpu")
        self._told = skipped

    def look(self, params: Sequence[Tensor]) -> Tensor:
        """Return 1 if all gradients are finite, on all processes; otherwise count a step, and return 0."""
        device = params[0].device
        if self._fine.device != device:
            self._fine, self._skipped = self._fine.to(device), self._skipped.to(device)
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            grad = local(p.grad)  # type: ignore[arg-type]  # the caller leaves out those without
            values = grad.coalesce().values() if grad.is_sparse else grad
            beside = alike.setdefault((Member(p, values).shards, values.device, values.dtype), [])
            if values.numel():
                beside.append(values)
        bad = torch.zeros_like(self._skipped)
        for (shards, *_), grads in alike.items():
            found = torch.stack(_extremes(grads)) if grads else bad.new_zeros(1).double()
            bad += summed((~found.isfinite()).sum().to(bad), shards)
        self._fine.copy_(bad == 0)
        self._skipped.add_(bad > 0)
        return self._fine

    @property
    def skipped(self) -> int:
        """How many steps have been skipped; the host waits for the answer, and warns when the number has doubled."""
        count = int(self._skipped)
        if count >= max(1, 2 * self._told):
            self._told = count
            warnings.warn(
                f"{count} {'step was' if count == 1 else 'steps were'} skipped so far, because a gradient was infinite "
                "or not a number; if more are, lower lr, clip the gradients, or go on from an earlier checkpoint",
                Skipped,
                stacklevel=3,
            )
        return count


def _extremes(grads: list[Tensor]) -> list[Tensor]:
    """Return values that are infinite or NaN if any of these tensors has one: the fastest to compute on the device."""
    if grads[0].is_cuda:
        return list(torch._foreach_norm(grads, math.inf))
    return [extreme for grad in grads for extreme in grad.aminmax()]


def kept_unless(fine: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors that `put_back` may need after a step."""
    return [] if fine is None else [tensor.clone() for tensor in tensors]


def put_back(fine: Tensor | None, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Undo a step that should not have been taken, without asking whether it should."""
    if fine is not None:
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(torch.where(fine.to(tensor.device).bool(), tensor, before))
