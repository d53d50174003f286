"""STR: soft threshold weight reparametrisation, with a threshold that every layer learns.

    W = sign(V) · max(|V| − σ(s), 0),    σ(s) = 1 / (1 + e^−s)

The network computes with W. V and one number s per layer are trained, by the loss and by weight decay. Decay pulls s
from its negative start towards 0, so the threshold σ(s) grows until the gradient of the loss balances the decay.

Preset: no sparsity; the decay of s decides it (the original has one decay for s and V; here V has the recipe's).
Recurrent layers stay dense, because torch reads their weights directly, bypassing any reparametrisation.

Reference: Kusupati, Ramanujan, Somani, Wortsman, Jain, Kakade & Farhadi, "Soft threshold weight reparameterization for
learnable sparsity", ICML 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from dirprune.lab.methods.method import Reparametrised
from dirprune.lab.models.weights import PrunableWeight, prunable
from dirprune.lab.ranges import FINITE, NOT_NEGATIVE, check


class SoftThreshold(nn.Module):
    """The map from V to W, with the parameter s.

    >>> SoftThreshold(start=0.0)(torch.tensor([-2.0, 0.25, 1.0])).tolist()
    [-1.5, 0.0, 0.5]
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(float(start)))

    def forward(self, v: Tensor) -> Tensor:
        return v.sign() * (v.abs() - self.s.sigmoid()).relu()


class Str(Reparametrised):
    """Soft thresholds that are learned, one per layer.

    Args:
        decay: weight decay of every s; more decay gives more sparsity.
        start: s before training; the lower, the longer the network trains densely.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> method = Str(decay=1e-3, start=100.0)  # thresholds of 1, which no weight passes
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        1.0
    """

    name = "str"
    knob = "decay"
    makes_classes = True  # a parametrized layer has a class of its own

    def __init__(self, *, decay: float = 5e-4, start: float = -10.0) -> None:
        check(locals(), decay=NOT_NEGATIVE, start=FINITE)
        self.decay = decay
        self.start = start
        self.thresholded: list[tuple[PrunableWeight, SoftThreshold]] = []

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        for weight in prunable(model).values():
            if any(isinstance(module, nn.RNNBase) for module, _ in weight.places):
                continue
            map_ = SoftThreshold(self.start).to(weight.parameter)
            for module, attribute in weight.places:
                parametrize.register_parametrization(module, attribute, map_)
            self.thresholded.append((weight, map_))
        if not self.thresholded:
            raise ValueError("model has only recurrent layers, which STR cannot prune; use another method")
        self.train_besides([map_.s for _, map_ in self.thresholded], weight_decay=self.decay)

    def replaced(self) -> list[tuple[PrunableWeight, Tensor]]:
        return [(weight, map_(weight.parameter)) for weight, map_ in self.thresholded]

    @torch.no_grad()
    def finish(self) -> None:
        for weight, final in self.replaced():
            for module, attribute in weight.places:
                parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
            weight.parameter.copy_(final)  # once, however many places there are
        self.thresholded = []
