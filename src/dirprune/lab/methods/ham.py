"""HAM: after every step of the optimizer, a step in the geometry of sparse solutions; zeros come from AC/DC's phases.

    w ← w · exp(−γ (α sign(w) ∇f(w) + β))

Weights whose gradient would shrink them shrink by a factor, which speeds small ones through zero, and β pulls all of
them towards it. Exponents are kept within ±5, as the authors do.

Preset: the sparsity, as for AC/DC.

Reference: Jacobs, Gadhikar, Rubio-Madrigal & Burkholz, "Hyperbolic aware minimization: implicit bias for sparsity",
ICLR 2026. α and β are their wrapper's defaults.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune.lab.methods.acdc import Acdc
from dirprune.lab.ranges import NOT_NEGATIVE, check

LARGEST = 5.0
"""The largest size of an exponent."""


class Ham(Acdc):
    """HAM on top of AC/DC to a preset sparsity.

    Args:
        sparsity: the fraction of the prunable weights to remove.
        alpha: how strongly the gradient acts in the second step.
        beta: the pull towards zero.
        start, phase, dense, end: the phases of AC/DC.

    Example:
        >>> w, gradient = torch.tensor([0.5, -0.5]), torch.tensor([0.01, 0.01])
        >>> hyperbolic_step([w], [gradient], lr=0.1, alpha=100.0, beta=0.0)
        >>> w  # factors exp(−.1) and exp(.1)
        tensor([ 0.4524, -0.5526])
    """

    name = "ham"

    def __init__(
        self,
        *,
        sparsity: float,
        alpha: float = 200.0,
        beta: float = 1e-3,
        start: float = 0.1,
        phase: float = 0.05,
        dense: float = 0.75,
        end: float = 0.85,
    ) -> None:
        super().__init__(sparsity=sparsity, start=start, phase=phase, dense=dense, end=end)
        check(locals(), alpha=NOT_NEGATIVE, beta=NOT_NEGATIVE)
        self.alpha = alpha
        self.beta = beta

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self._weights = {id(weight) for weight in self.layer_weights.values()}

    def _after_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if id(p) in self._weights and p.grad is not None]
            if pairs:
                weights, gradients = zip(*pairs, strict=True)
                hyperbolic_step(weights, gradients, lr=group["lr"], alpha=self.alpha, beta=self.beta)
        super()._after_optimizer(optimizer, args, kwargs)


@torch.no_grad()
def hyperbolic_step(
    weights: tuple[Tensor, ...] | list[Tensor],
    gradients: tuple[Tensor, ...] | list[Tensor],
    *,
    lr: float | Tensor,
    alpha: float,
    beta: float,
) -> None:
    """Multiply the weights by exp(−γ (α sign(w) ∇f(w) + β)), in place."""
    for w, gradient in zip(weights, gradients, strict=True):
        exponent = (alpha * w.sign() * gradient + beta) * -lr
        w.mul_(exponent.clamp_(-LARGEST, LARGEST).exp_())
