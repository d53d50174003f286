"""PAT with a global target: the largest latent weights are seen, and all latent weights train on.

After step n from n₀ to n₁, the ⌈s(n)·N⌉ smallest of all N latent weights are hidden, as zeros, with

    s(n) = s_f · (1 − (1 − (n − n₀)/(n₁ − n₀))³),

and the gradient at the sparse weights moves all latent ones, so hidden weights may come back. From n₁ on, the zeros
are fixed, and the weights that are left train without latent ones ("healing").

Preset: the sparsity. PAT's soft threshold, `ProxLasso`, is ℓ₁-RDA, which is a method of its own here.

Reference: torchao 0.18, `torchao.prototype.pat`: `PruneOptimizer` with `GlobalMinSparsityConstraint` on single elements
and `min_sparsity_schedule`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune.lab.methods.latent import Latent
from dirprune.lab.methods.magnitude import cubic_sparsity
from dirprune.lab.methods.masks import keep_largest_of_all
from dirprune.lab.ranges import BELOW_ONE, FRACTION, check


class Pat(Latent):
    """PAT to a preset sparsity.

    Args:
        sparsity: the fraction of the prunable weights to remove.
        start, end: when hiding begins and when the zeros are fixed, as fractions of training.

    Example:
        >>> model = nn.Linear(10, 10, bias=False)
        >>> optimizer, method = torch.optim.SGD(model.parameters(), lr=0.1), Pat(sparsity=0.9, start=0.0, end=0.1)
        >>> method.attach(model, optimizer, steps=10, examples=100)
        >>> for step in range(10):
        ...     model(torch.ones(1, 10)).sum().backward()
        ...     optimizer.step()
        ...     method.after_step(step + 1)
        >>> method.sparsity().weight_fraction
        0.9
    """

    name = "pat"
    knob = "sparsity"

    def __init__(self, *, sparsity: float, start: float = 0.1, end: float = 0.75) -> None:
        check(locals(), sparsity=BELOW_ONE, start=FRACTION, end=FRACTION)
        if start >= end:
            raise ValueError(f"start={start} is not before end={end}; the zeros grow between the two")
        self.final = sparsity
        self.start = start
        self.end = end

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self.masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in self.layer_weights.items()}

    def sparsify(self) -> None:
        torch._foreach_mul_(list(self.layer_weights.values()), list(self.masks.values()))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        start = round(self.start * self.steps)
        end = max(round(self.end * self.steps), start + 1)
        if not start < step <= end:
            return
        # The plan reaches its target with the last step before `end`.
        hidden = self.final if step == end else cubic_sparsity(step - 1, start=start, end=end, final=self.final)
        total = sum(latent.numel() for latent in self.latent.values())
        sizes = {name: latent.abs() for name, latent in self.latent.items()}
        for name, mask in keep_largest_of_all(sizes, total - math.ceil(hidden * total)).items():
            self.masks[name].copy_(mask)
            self.layer_weights[name].copy_(self.latent[name] * mask)
            if step == end:
                self.latent[name].copy_(self.layer_weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {f"mask.{name}": mask for name, mask in self.masks.items()}
