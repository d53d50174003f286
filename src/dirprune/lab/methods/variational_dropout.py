"""Sparse variational dropout: every weight learns how much noise it tolerates; those that tolerate any are pruned.

A weight is w + σ·ε with ε ~ N(0, 1); α = σ²/w². Training minimises the loss under that noise plus β/N Σ KL(log α),

    −KL(log α) ≈ k₁ S(k₂ + k₃ log α) − ½ log(1 + 1/α) − k₁,   S the logistic function,

for N examples, with β rising from 0 to its final value. The noise is drawn for a layer's outputs
(local reparametrisation): mean x·w, variance x²·σ². Weights with log α > 3 are zero.

Preset: no sparsity; the final β decides it (1 is the variational bound). log σ² is trained by the same optimizer as the
rest, as √(pace·N)·ρ: the KL term then moves it by about pace·γ/2 per step, whatever the number of examples.
Linear layers and convolutions are noisy. Other weights stay dense: embeddings, recurrent layers, the layers inside
torch's attention, and layers with their own forward method.

Reference: Molchanov, Ashukha & Vetrov, "Variational dropout sparsifies deep neural networks", ICML 2017; β ≠ 1: Gale,
Elsen & Hooker, "The state of sparsity in deep neural networks", 2019.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from torch.optim import Optimizer

from dirprune.lab.methods.method import Reparametrised
from dirprune.lab.models.weights import PrunableWeight, prunable
from dirprune.lab.ranges import FINITE, FRACTION, NOT_NEGATIVE, POSITIVE, check

LOG_ALPHA_LIMIT = 3.0
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695


def kl_divergence(log_alpha: Tensor) -> Tensor:
    """Return Molchanov's approximation of KL(q(w) ‖ log-uniform prior), up to a constant: 0 at α = ∞.

    >>> kl_divergence(torch.tensor([-4.0, 0.0, 4.0]))
    tensor([2.6342, 0.4312, 0.0093])
    """
    return _K1 - _K1 * (_K2 + _K3 * log_alpha).sigmoid() + 0.5 * softplus(-log_alpha)


class Variational(nn.Module):
    """Mixin that makes a layer variational; the layer's own weight is the mean."""

    plain: type[nn.Module]
    bias: Any  # a tensor or None; torch declares it one way for linear layers, another for convolutions
    rho: nn.Parameter
    scale: float

    @property
    def mean(self) -> Tensor:
        mean = self._parameters["weight"]
        assert mean is not None
        return mean

    @property
    def weight(self) -> Tensor:
        """The weight for code that reads it without calling the layer, as torch's transformer does in evaluation."""
        return self.mean if self.training else self.pruned_weight()

    def log_sigma2(self) -> Tensor:
        # e^±20 is as good as infinite or no noise; beyond that, exp may overflow.
        return (self.scale * self.rho).clamp(-20, 20)

    def log_alpha(self) -> Tensor:
        return self.log_sigma2() - (self.mean.square() + 1e-16).log()

    def pruned_weight(self) -> Tensor:
        return self.mean * (self.log_alpha() <= LOG_ALPHA_LIMIT)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self.apply_weight(inputs, self.pruned_weight(), self.bias)
        mean = self.apply_weight(inputs, self.mean, self.bias)
        variance = self.apply_weight(inputs.square(), self.log_sigma2().exp(), None)
        # The square root has no derivative at 0, which occurs if all inputs of an output are 0.
        return mean + (variance + 1e-8).sqrt() * torch.randn_like(mean)

    def apply_weight(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if issubclass(self.plain, nn.Linear):
            return linear(inputs, weight, bias)
        convolved: Tensor = self._conv_forward(inputs, weight, bias)  # type: ignore[operator]
        return convolved


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@cache
def twin(kind: type[nn.Module]) -> type[Variational]:
    """Return the variational subclass of a layer class."""
    return type(f"Variational{kind.__name__}", (Variational, kind), {"plain": kind})


def has_twin(layer: nn.Module) -> bool:
    """Return whether a layer, of whatever class, computes like torch's linear layers or convolutions.

    >>> has_twin(nn.Conv2d(1, 1, 1)), has_twin(nn.ConvTranspose2d(1, 1, 1))
    (True, False)
    """
    ways = ("forward", "_conv_forward")
    return any(
        isinstance(layer, kind) and all(getattr(type(layer), way, None) is getattr(kind, way, None) for way in ways)
        for kind in _LAYERS
    )


def make_variational(layer: nn.Module, rho: nn.Parameter, *, scale: float) -> Variational:
    """Make a layer variational, in place; it keeps its parameters."""
    layer.__class__ = twin(type(layer))  # type: ignore[arg-type]  # mypy takes a class's hash for its objects'
    assert isinstance(layer, Variational)
    layer.rho = rho
    layer.scale = scale
    return layer


def make_plain(layer: Variational) -> None:
    """Turn a variational layer back into a plain one; its weight is the mean."""
    del layer.rho, layer.scale
    layer.__class__ = layer.plain  # type: ignore[assignment]


class VariationalDropout(Reparametrised):
    """Sparse variational dropout.

    Args:
        beta: the final weight of the KL term; a larger one gives more sparsity.
        anneal: when β is reached, as a fraction of training; it rises linearly.
        start: log σ² before training.
        pace: how fast log σ² moves relative to the weights.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> method = VariationalDropout(start=20.0)  # noise that no weight bears
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        1.0
    """

    name = "variational-dropout"
    knob = "beta"

    def __init__(self, *, beta: float = 1.0, anneal: float = 0.5, start: float = -10.0, pace: float = 0.1) -> None:
        check(locals(), anneal=FRACTION, beta=NOT_NEGATIVE, start=FINITE, pace=POSITIVE)
        self.beta = beta
        self.anneal = anneal
        self.start = start
        self.pace = pace
        self.noisy: list[tuple[PrunableWeight, list[Variational]]] = []

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        scale = math.sqrt(self.pace * examples)
        # torch's attention reads the weights of its layers instead of calling them.
        inside = {
            c for module in model.modules() if isinstance(module, nn.MultiheadAttention) for c in module.children()
        }
        for weight in prunable(model).values():
            layers = [layer for layer, attribute in weight.places if attribute == "weight" and has_twin(layer)]
            if len(layers) == len(weight.places) and not inside.intersection(layers):
                rho = nn.Parameter(torch.full_like(weight.parameter, self.start / scale))
                self.noisy.append((weight, [make_variational(layer, rho, scale=scale) for layer in layers]))
        if not self.noisy:
            raise ValueError(
                "model has no linear or convolutional layer that noise can be added to; use another method"
            )
        rhos = [layers[0].rho for _, layers in self.noisy]
        self.train_besides(rhos, weight_decay=0.0)
        self._share = torch.zeros((), device=rhos[0].device)  # on the device, where a recorded step reads it
        self.after_step(0)

    def penalty(self) -> Tensor:
        total = torch.stack([kl_divergence(layers[0].log_alpha()).sum() for _, layers in self.noisy]).sum()
        return self._share * total

    def after_step(self, step: int) -> None:
        """Set β/N for the next step."""
        rise = min(1.0, step / (self.anneal * self.steps)) if self.anneal else 1.0
        self._share.fill_(self.beta * rise / self.examples)

    def replaced(self) -> list[tuple[PrunableWeight, Tensor]]:
        return [(weight, layers[0].pruned_weight()) for weight, layers in self.noisy]

    @torch.no_grad()
    def finish(self) -> None:
        for weight, final in self.replaced():
            weight.parameter.copy_(final)
        for _, layers in self.noisy:
            for layer in layers:
                make_plain(layer)
        self.noisy = []

    def state_dict(self) -> dict[str, Tensor]:
        return {"share": self._share}
