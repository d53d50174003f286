"""LinBreg: linearised Bregman iterations, which start sparse and let weights in when their gradients insist.

    vₙ = vₙ₋₁ − γₙ ∇f(wₙ₋₁),   wₙ = sign(vₙ) max(|vₙ| − λ, 0)

The threshold is constant: it is gRDA at μ → 0 whose accumulator starts at w₀ + λ sign(w₀). Training starts with few
nonzero weights, drawn at random and enlarged so that signals keep their size.

Preset: no sparsity; λ decides it.

Reference: Bungert, Roith, Tenbrinck & Burger, "A Bregman learning framework for sparse neural networks", JMLR 2022.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from dirprune.lab.data.loader import generator
from dirprune.lab.methods.latent import Latent
from dirprune.lab.ranges import NOT_NEGATIVE, SEED, UP_TO_ONE, check
from dirprune.optim.threshold import shrink


class LinBreg(Latent):
    """LinBreg with threshold λ.

    Args:
        lam: the threshold.
        density: the fraction of each layer's weights that are not zero at the start.
        seed: which weights these are.

    Example:
        >>> model = nn.Linear(10, 10, bias=False)
        >>> method = LinBreg(lam=0.1, density=0.2)
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        0.8
    """

    name = "linbreg"
    knob = "lam"

    def __init__(self, *, lam: float, density: float = 0.05, seed: int = 0) -> None:
        check(locals(), lam=NOT_NEGATIVE, density=UP_TO_ONE, seed=SEED)
        self.lam = lam
        self.density = density
        self.seed = seed

    @torch.no_grad()
    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        random = generator(self.seed, 0)
        for name, weight in self.layer_weights.items():
            chosen = torch.zeros(weight.numel(), dtype=torch.bool)
            chosen[torch.randperm(weight.numel(), generator=random)[: math.ceil(self.density * weight.numel())]] = True
            mask = chosen.view(weight.shape).to(weight.device)
            start = weight * mask / math.sqrt(self.density)
            self.latent[name].copy_(start + self.lam * start.sign())
        self.sparsify()

    def sparsify(self) -> None:
        for name, weight in self.layer_weights.items():
            shrink(self.latent[name], self.lam, out=weight)
