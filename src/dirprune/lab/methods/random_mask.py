"""A random mask that never changes: the control of every method that claims to find connections.

A layer keeps the density of an Erdős–Rényi-Kernel graph, ε · (n_in + n_out + k_h + k_w) / (n_in n_out k_h k_w), at most
1, with the ε that meets the target; or the density that another method has left it, which is that method's mask
shuffled within each layer.

In a network without normalisation the initial weights are divided by √density, so that a layer's outputs have the
variance of the dense layer's. Otherwise the signal fades from layer to layer, and a deep network never learns. In a
network with normalisation they are not changed, as in the original.

Preset: the sparsity.

References: Evci, Gale, Menick, Castro & Elsen, "Rigging the lottery: making all tickets winners", ICML 2020; shuffled
within layers: Frankle, Dziugaite, Roy & Carbin, "Pruning neural networks at initialization: why are we missing the
mark?", ICLR 2021; initial scale: Evci, Ioannou, Keskin & Dauphin, "Gradient flow in sparse neural networks and how
lottery tickets win", AAAI 2022, who use the number of inputs of each neuron; here it is the density of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from dirprune.lab.data.loader import generator
from dirprune.lab.methods.masks import Masked, keep_largest, whole_counts
from dirprune.lab.ranges import BELOW_ONE, SEED, UP_TO_ONE, BadValue, check
from dirprune.optim.groups import normalises


def erk_densities(shapes: Sequence[Sequence[int]], density: float) -> list[float]:
    """Return the density of each layer: proportional to Σ shape / Π shape, at most 1, and ``density`` over all weights.

    Args:
        shapes: the shapes of the weights, (n_out, n_in, kernel…).
        density: that of all weights together, in (0, 1].

    >>> [round(d, 4) for d in erk_densities([(10, 10), (20, 20), (100, 100)], 0.05)]
    [0.4038, 0.2019, 0.0404]
    """
    check({"density": density}, density=UP_TO_ONE)
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    budget = density * sum(sizes)
    dense: set[int] = set()
    while len(dense) < len(sizes):
        sparse = [i for i in range(len(sizes)) if i not in dense]
        epsilon = (budget - sum(sizes[i] for i in dense)) / sum(raw[i] * sizes[i] for i in sparse)
        over = {i for i in sparse if epsilon * raw[i] > 1}
        if not over:
            return [1.0 if i in dense else epsilon * raw[i] for i in range(len(sizes))]
        dense |= over  # the others take their excess: ε only rises, so these stay dense
    return [1.0] * len(sizes)


def is_normalised(model: nn.Module) -> bool:
    """Return whether a layer of the network normalises its inputs.

    Parametrizations of weights do not count, nor does local response normalisation, which divides small inputs by 1.
    """
    layers = set(model.modules())
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            layers -= set(module.modules())
    return any(normalises(layer) and not isinstance(layer, nn.LocalResponseNorm) for layer in layers)


class RandomMask(Masked):
    """Training of random connections.

    Args:
        sparsity: the fraction of the prunable weights that are zero.
        layers: the sparsity of each layer, in the order of the network, as text: "0.5,0.97"; ERK if empty.
        seed: that of the connections.

    Example:
        >>> model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 10))
        >>> method = RandomMask(sparsity=0.9, layers="0.95,0.8")
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> [layer.fraction for layer in method.sparsity().layers if layer.is_weight]
        [0.95, 0.8]
    """

    name = "random"
    knob = "sparsity"

    def __init__(self, *, sparsity: float, layers: str = "", seed: int = 0) -> None:
        check(locals(), sparsity=BELOW_ONE, seed=SEED)
        self.final = sparsity
        self.seed = seed
        try:
            self.layers = [float(word) for word in layers.split(",")] if layers else []
        except ValueError:
            raise BadValue("layers", layers, "give a sparsity for each layer, e.g. 0.5,0.97") from None
        if not all(0 <= sparsity <= 1 for sparsity in self.layers):
            raise BadValue("layers", layers, "sparsities lie in [0, 1]")

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        shapes = [weight.shape for weight in self.layer_weights.values()]
        densities = [1 - sparsity for sparsity in self.layers] or erk_densities(shapes, 1 - self.final)
        if len(densities) != len(shapes):
            raise ValueError(f"layers has {len(densities)} sparsities, and the model {len(shapes)} weights to prune")
        counts = whole_counts([shape.numel() for shape in shapes], densities)
        self.set_masks(
            {
                # Drawn on the CPU, so that all devices and processes begin with the same connections.
                name: keep_largest(torch.rand(shape, generator=generator(self.seed, number)), count)
                for number, (name, shape, count) in enumerate(zip(self.layer_weights, shapes, counts, strict=True))
            }
        )
        if not is_normalised(model):
            with torch.no_grad():
                for weight, count in zip(self.layer_weights.values(), counts, strict=True):
                    weight.mul_(math.sqrt(weight.numel() / max(count, 1)))
