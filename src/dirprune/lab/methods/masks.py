"""Masks: which weights a method keeps. All others are exactly zero after every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dirprune.lab.methods.method import Method
from dirprune.lab.models.weights import prunable


class Masked(Method):
    """A method whose zeros are those of a mask.

    After each step, a hook on the optimizer multiplies the weights, and every optimizer state of their shape (momentum,
    accumulator), by the mask. Momentum and weight decay therefore cannot revive a weight, and one that is grown later
    starts without momentum. Gradients stay dense.
    """

    layer_weights: dict[str, Tensor]
    masks: dict[str, Tensor]
    _hook: RemovableHandle

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self.layer_weights = {name: weight.parameter for name, weight in prunable(model).items()}
        self.masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in self.layer_weights.items()}
        self._hook = optimizer.register_step_post_hook(self._after_optimizer)

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Replace masks, in place, and apply them."""
        for name, mask in masks.items():
            self.masks[name].copy_(mask)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Set masked weights and their optimizer state to zero."""
        tensors: list[Tensor] = []
        masks: list[Tensor] = []
        for name, weight in self.layer_weights.items():
            state = self.optimizer.state.get(weight, {}).values()
            held = [weight, *(s for s in state if isinstance(s, Tensor) and s.shape == weight.shape)]
            tensors += held
            masks += [self.masks[name]] * len(held)
        torch._foreach_mul_(tensors, masks)

    def finish(self) -> None:
        self._hook.remove()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.masks)

    def _after_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.apply()


def interval(asked: int | None, window: int) -> int:
    """Return the steps between two updates: as requested, else 100 or, if less, a tenth of the window.

    >>> interval(None, 2000), interval(None, 50), interval(7, 2000)
    (100, 5, 7)
    """
    return min(100, max(1, window // 10)) if asked is None else asked


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest scores; ties go to the first, on every device and process.

    >>> keep_largest(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
    tensor([ True, False,  True, False])
    """
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[scores.flatten().argsort(descending=True, stable=True)[:count]] = True
    return mask.view(scores.shape)


def keep_largest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the masks of the ``count`` largest scores of all tensors together."""
    kept = keep_largest(torch.cat([tensor.flatten() for tensor in scores.values()]), count)
    parts = torch.split(kept, [tensor.numel() for tensor in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def whole_counts(sizes: Sequence[int], densities: Sequence[float]) -> list[int]:
    """Return size·density for each layer, rounded so that the sum is the rounded sum: rounding errors do not add up.

    Args:
        sizes: the number of weights of each layer.
        densities: the fraction of each layer to keep, at most 1.

    >>> whole_counts([3, 3, 4], [0.5, 0.5, 0.5])
    [2, 1, 2]

    Reference: the method of largest remainders.
    """
    shares = [size * density for size, density in zip(sizes, densities, strict=True)]
    counts = [math.floor(share) for share in shares]
    missing = round(sum(shares)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[:missing]:
        counts[i] += 1
    return counts
