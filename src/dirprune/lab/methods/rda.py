"""ℓ₁-RDA: regularised dual averaging, which is gRDA at μ = 1 with c = λ/√γ.

    vₙ = vₙ₋₁ − γ ∇f(wₙ₋₁),   wₙ = sign(vₙ) max(|vₙ| − nγλ, 0)

The threshold grows in proportion to time, as the pull of an ℓ₁ penalty of weight λ adds up. That of gRDA with μ < 1
grows ever more slowly.

Preset: no sparsity; λ decides it. γ is the rate that the optimizer was created with, divided by 1 − momentum. When a
schedule lowers the rate, the threshold grows as gRDA's does.

Reference: Xiao, "Dual averaging methods for regularized stochastic learning and online optimization", JMLR 2010.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import Optimizer

from dirprune.lab.methods.grda import Grda


class Rda(Grda):
    """ℓ₁-RDA with penalty λ.

    >>> from dirprune import GRDA
    >>> model = nn.Linear(4, 2)
    >>> optimizer = GRDA(model.parameters(), lr=0.25)
    >>> Rda(lam=1e-3).attach(model, optimizer, steps=10, examples=100)
    >>> optimizer.param_groups[0]["c"], optimizer.param_groups[0]["mu"]
    (0.002, 1.0)
    """

    name = "rda"
    knob = "lam"

    def __init__(self, *, lam: float) -> None:
        if not 0 <= lam < math.inf:
            raise ValueError(f"lam={lam} is not a penalty; give a finite number ≥ 0, e.g. 1e-5")
        super().__init__(mu=1.0)
        self.lam = lam

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        for group in optimizer.param_groups:
            rate = float(group["lr"]) / (1 - group["momentum"])
            if rate <= 0:
                raise ValueError(
                    f"lr={float(group['lr'])} gives no c = λ/√γ; create the optimizer with its base learning rate"
                )
            if group["c"] > 0:  # 0 exempts
                group["c"] = self.lam / math.sqrt(rate)
