"""gRDA: the paper's method. The optimizer itself prunes, from the first step on.

    vₙ = vₙ₋₁ − γₙ ∇f(wₙ₋₁),   τₙ = τₙ₋₁ + c γₙ^(μ+½) (n^μ − (n−1)^μ),   wₙ = sign(vₙ) max(|vₙ| − τₙ, 0)

Preset: no sparsity; c and μ decide it. The optimizer's groups with c = 0 stay dense; all others are pruned.

Reference: Chao, Wang, Xing & Cheng, "Directional pruning of deep neural networks", NeurIPS 2020.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import Optimizer

from dirprune import GRDA
from dirprune.lab.methods.method import Method


class Grda(Method):
    """gRDA with this c and μ in place of the optimizer's; None keeps the optimizer's own.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = GRDA(model.parameters(), lr=0.1)
    >>> Grda(c=0.01, mu=0.6).attach(model, optimizer, steps=10, examples=100)
    >>> optimizer.param_groups[0]["c"], optimizer.param_groups[0]["mu"]
    (0.01, 0.6)
    """

    name = "grda"
    trains_with = "grda"
    knob = "c"

    def __init__(self, *, c: float | None = None, mu: float | None = None) -> None:
        if c is not None and not 0 <= c < math.inf:
            raise ValueError(f"c={c} cannot be used; give a finite number ≥ 0, or None for the optimizer's own")
        if mu is not None and not 0 < mu <= 1:
            raise ValueError(f"mu={mu} cannot be used; give a number in (0, 1], or None for the optimizer's own")
        self.c = c
        self.mu = mu

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        if not isinstance(optimizer, GRDA):
            raise ValueError(f"optimizer is {type(optimizer).__name__}; {self.name} trains with dirprune.GRDA")
        for group in optimizer.param_groups:
            if self.c is not None and group["c"] > 0:  # 0 exempts
                group["c"] = self.c
            if self.mu is not None:
                group["mu"] = self.mu
