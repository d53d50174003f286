"""Sparse variational dropout: every weight learns how much noise it bears, and goes when it bears any.

A weight is w + σ·ε with ε ~ N(0, 1); α = σ²/w². Training minimises the loss under that noise plus β/N Σ KL(log α),

    −KL(log α) ≈ k₁ S(k₂ + k₃ log α) − ½ log(1 + 1/α) − k₁,   S the logistic function,

for N examples, with β rising from 0 to its final value. The noise is drawn where it arrives, in a layer's outputs
(local reparametrisation): mean x·w, variance x²·σ². Weights with log α > 3 are zero.

Preset: no sparsity; the final β decides it (1 is the variational bound). log σ² is trained by the same optimizer as all
else, as √(pace·N)·ρ: the KL term then moves it by about pace·γ/2 a step, whatever the number of examples.

Reference: Molchanov, Ashukha & Vetrov, "Variational dropout sparsifies deep neural networks", ICML 2017; β ≠ 1: Gale,
Elsen & Hooker, "The state of sparsity in deep neural networks", 2019.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from torch.optim import Optimizer

from dirprune.lab.baselines.method import Method, check_fraction, prunable

LOG_ALPHA_LIMIT = 3.0
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695


def kl_divergence(log_alpha: Tensor) -> Tensor:
    """Return Molchanov's approximation of KL(q(w) ‖ log-uniform prior), up to a constant: 0 at α = ∞.

    >>> kl_divergence(torch.tensor([-4.0, 0.0, 4.0]))
    tensor([2.6342, 0.4312, 0.0093])
    """
    return _K1 - _K1 * (_K2 + _K3 * log_alpha).sigmoid() + 0.5 * softplus(-log_alpha)


class _Variational(nn.Module):
    """What the variational layers add to the plain ones, whose weight is the mean."""

    weight: Tensor
    bias: Any  # a tensor or None; torch declares it one way for linear layers, another for convolutions
    rho: nn.Parameter
    scale: float

    def log_sigma2(self) -> Tensor:
        # e^±20 is noise that drowns or vanishes; further out only overflows lie.
        return (self.scale * self.rho).clamp(-20, 20)

    def log_alpha(self) -> Tensor:
        return self.log_sigma2() - (self.weight.square() + 1e-16).log()

    def pruned_weight(self) -> Tensor:
        return self.weight * (self.log_alpha() <= LOG_ALPHA_LIMIT)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self.apply_weight(inputs, self.pruned_weight(), self.bias)
        mean = self.apply_weight(inputs, self.weight, self.bias)
        variance = self.apply_weight(inputs.square(), self.log_sigma2().exp(), None)
        # The root has no slope at 0, where all inputs of an output are 0.
        return mean + (variance + 1e-8).sqrt() * torch.randn_like(mean)

    def apply_weight(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class VariationalLinear(_Variational, nn.Linear):
    """A linear layer with noisy weights."""

    def apply_weight(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(inputs, weight, bias)


class _VariationalConv(_Variational):
    def apply_weight(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolved: Tensor = self._conv_forward(inputs, weight, bias)  # type: ignore[operator]
        return convolved


class VariationalConv1d(_VariationalConv, nn.Conv1d):
    """A convolution with noisy weights."""


class VariationalConv2d(_VariationalConv, nn.Conv2d):
    """A convolution with noisy weights."""


class VariationalConv3d(_VariationalConv, nn.Conv3d):
    """A convolution with noisy weights."""


_TWINS: dict[type[nn.Module], type[_Variational]] = {
    nn.Linear: VariationalLinear,
    nn.Conv1d: VariationalConv1d,
    nn.Conv2d: VariationalConv2d,
    nn.Conv3d: VariationalConv3d,
}
_PLAIN = {twin: plain for plain, twin in _TWINS.items()}


def make_variational(layer: nn.Module, *, start: float, scale: float) -> _Variational:
    """Turn a plain layer into its variational twin, in place: it stays where it is, with its own parameters."""
    if type(layer) not in _TWINS:
        known = ", ".join(plain.__name__ for plain in _TWINS)
        raise ValueError(f"a layer is of type {type(layer).__name__}; variational dropout knows {known}")
    weight: Tensor = layer.weight  # type: ignore[assignment]
    layer.__class__ = _TWINS[type(layer)]
    assert isinstance(layer, _Variational)
    layer.rho = nn.Parameter(torch.full_like(weight, start / scale))
    layer.scale = scale
    return layer


def make_plain(layer: _Variational) -> None:
    """Turn a variational layer back into a plain one, with zeros where it pruned."""
    with torch.no_grad():
        layer.weight.copy_(layer.pruned_weight())
    del layer.rho, layer.scale
    layer.__class__ = _PLAIN[type(layer)]  # type: ignore[assignment]


class VariationalDropout(Method):
    """Sparse variational dropout.

    Args:
        beta: the final weight of the KL term, what the sparsity grows with.
        anneal: when β is reached, as a fraction of training; it rises linearly.
        start: log σ² before training.
        pace: how fast log σ² moves against the weights.

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
        check_fraction(anneal, "anneal")
        if not 0 <= beta < math.inf:
            raise ValueError(f"beta={beta} is not a weight of the KL term; give a finite number ≥ 0, e.g. 1")
        if not math.isfinite(start):
            raise ValueError(f"start={start} is not a log σ²; give a finite number, e.g. -10")
        if not 0 < pace < math.inf:
            raise ValueError(f"pace={pace} moves nothing; give a finite number > 0, e.g. 0.1")
        self.beta = beta
        self.anneal = anneal
        self.start = start
        self.pace = pace
        self.layers: dict[str, _Variational] = {}

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        scale = math.sqrt(self.pace * examples)
        layers = prunable(model)
        self.layers = {n: make_variational(layer, start=self.start, scale=scale) for n, layer in layers.items()}
        group: dict[str, Any] = {"params": [layer.rho for layer in self.layers.values()], "weight_decay": 0.0}
        if "c" in optimizer.defaults:
            group["c"] = 0.0  # gRDA must not threshold the noise
        optimizer.add_param_group(group)
        device = next(iter(self.layers.values())).weight.device
        self._share = torch.zeros((), device=device)  # on the device, where a recorded step reads it
        self.after_step(0)

    def penalty(self) -> Tensor:
        total = torch.stack([kl_divergence(layer.log_alpha()).sum() for layer in self.layers.values()]).sum()
        return self._share * total

    def after_step(self, step: int) -> None:
        """Set β/N for the next step."""
        rise = min(1.0, step / (self.anneal * self.steps)) if self.anneal else 1.0
        self._share.fill_(self.beta * rise / self.examples)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        rhos = {id(layer.rho) for layer in self.layers.values()}
        named = {name: p.detach() for name, p in self.model.named_parameters() if id(p) not in rhos}
        for name, layer in self.layers.items():
            named[f"{name}.weight" if name else "weight"] = layer.pruned_weight()
        return named

    def finish(self) -> None:
        for layer in self.layers.values():
            make_plain(layer)
        self.layers = {}

    def state_dict(self) -> dict[str, Tensor]:
        return {"share": self._share}
