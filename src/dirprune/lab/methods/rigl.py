"""RigL: sparse from beginning to end, with connections that move to where the gradient is large.

It begins with a random mask of ERK densities (see `random_mask`). Every ΔT steps, up to step T_end, it drops the
fraction

    f(t) = α/2 · (1 + cos(π t / T_end))

of its weights, those of smallest |w|, and grows as many, at 0, where the dense gradient |∂f/∂w| is largest.

Preset: the sparsity. The number of weights never changes. Unlike in the original, connections move after the step that
uses the same gradient.

Reference: Evci, Gale, Menick, Castro & Elsen, "Rigging the lottery: making all tickets winners", ICML 2020.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune.lab.methods.masks import interval, keep_largest
from dirprune.lab.methods.random_mask import RandomMask
from dirprune.lab.ranges import COUNT, FRACTION, check


def drop_fraction(step: int, *, end: int, alpha: float) -> float:
    """Return f(t), the fraction of a layer's weights that move at ``step``.

    >>> [round(drop_fraction(step, end=100, alpha=0.3), 4) for step in (0, 50, 100)]
    [0.3, 0.15, 0.0]
    """
    return alpha / 2 * (1 + math.cos(math.pi * step / end))


def move_connections(weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the mask without its ``count`` smallest weights, and with the ``count`` largest gradients outside it.

    A weight that was just dropped may be grown again.

    >>> import torch
    >>> move_connections(*torch.tensor([[5.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 3.0]]), torch.arange(4) < 2, 1)
    tensor([ True, False, False,  True])
    """
    kept = keep_largest(weight.abs().masked_fill(~mask, -1.0), int(mask.sum()) - count)
    return kept | keep_largest(gradient.abs().masked_fill(kept, -1.0), count)


class RigL(RandomMask):
    """Sparse training with moving connections.

    Args:
        sparsity: the fraction of the prunable weights that are zero.
        alpha: the fraction of a layer's weights that move at first.
        every: ΔT, the steps between moves; by default 100, or a tenth of T_end if that is less.
        until: T_end as a fraction of training.
        seed: that of the initial connections.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 10))
        >>> method = RigL(sparsity=0.9)
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        0.9
    """

    name = "rigl"
    knob = "sparsity"

    def __init__(
        self,
        *,
        sparsity: float,
        alpha: float = 0.3,
        every: int | None = None,
        until: float = 0.75,
        seed: int = 0,
    ) -> None:
        super().__init__(sparsity=sparsity, seed=seed)
        check(locals(), until=FRACTION, alpha=FRACTION, every=COUNT)
        self.alpha = alpha
        self.every = every
        self.until = until

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        for group in optimizer.param_groups:
            if not group.get("fused"):  # torch's foreach SGD overwrites the gradient with Nesterov's direction
                group["foreach"] = False

    def after_step(self, step: int) -> None:
        end = self.until * self.steps
        if step % interval(self.every, round(end)) or step >= end:
            return
        fraction = drop_fraction(step, end=round(end), alpha=self.alpha)
        moved = {}
        for name, weight in self.layer_weights.items():
            if weight.grad is not None:
                mask = self.masks[name]
                moved[name] = move_connections(weight.detach(), weight.grad, mask, int(fraction * int(mask.sum())))
        self.set_masks(moved)
