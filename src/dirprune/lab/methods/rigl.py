"""RigL: sparse from beginning to end, with connections that move to where the gradient is large.

A layer keeps the density of an Erdős–Rényi-Kernel graph, ε · (n_in + n_out + k_h + k_w) / (n_in n_out k_h k_w), at most
1, with the ε that meets the target. Every ΔT steps, up to step T_end, it drops the fraction

    f(t) = α/2 · (1 + cos(π t / T_end))

of its weights, those of smallest |w|, and grows as many, at 0, where the dense gradient |∂f/∂w| is largest.

In a network without normalisation the initial weights are divided by √density, so that a layer's outputs have the
variance of the dense layer's. Otherwise the signal fades from layer to layer, and a deep network never learns. In a
network with normalisation they are not changed, as in the original.

Preset: the sparsity. The number of weights never changes. Unlike in the original, connections move after the step that
uses the same gradient.

References: Evci, Gale, Menick, Castro & Elsen, "Rigging the lottery: making all tickets winners", ICML 2020; initial
scale: Evci, Ioannou, Keskin & Dauphin, "Gradient flow in sparse neural networks and how lottery tickets win",
AAAI 2022, who use the number of inputs of each neuron; here it is the density of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from dirprune.lab.data.loader import generator
from dirprune.lab.methods.masks import Masked, interval, keep_largest, whole_counts
from dirprune.lab.ranges import BELOW_ONE, COUNT, FRACTION, SEED, UP_TO_ONE, check
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


def drop_fraction(step: int, *, end: int, alpha: float) -> float:
    """Return f(t), the fraction of a layer's weights that move at ``step``.

    >>> [round(drop_fraction(step, end=100, alpha=0.3), 4) for step in (0, 50, 100)]
    [0.3, 0.15, 0.0]
    """
    return alpha / 2 * (1 + math.cos(math.pi * step / end))


def move_connections(weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the mask without its ``count`` smallest weights, and with the ``count`` largest gradients outside it.

    A weight that was just dropped may be grown again.

    >>> move_connections(*torch.tensor([[5.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 3.0]]), torch.arange(4) < 2, 1)
    tensor([ True, False, False,  True])
    """
    kept = keep_largest(weight.abs().masked_fill(~mask, -1.0), int(mask.sum()) - count)
    return kept | keep_largest(gradient.abs().masked_fill(kept, -1.0), count)


def is_normalised(model: nn.Module) -> bool:
    """Return whether a layer of the network normalises its inputs.

    Parametrizations of weights do not count, nor does local response normalisation, which divides small inputs by 1.
    """
    layers = set(model.modules())
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            layers -= set(module.modules())
    return any(normalises(layer) and not isinstance(layer, nn.LocalResponseNorm) for layer in layers)


class RigL(Masked):
    """Sparse training with moving connections.

    Args:
        sparsity: the fraction of the prunable weights that are zero.
        alpha: the fraction of a layer's weights that move at first.
        every: ΔT, the steps between moves; by default 100, or a tenth of T_end if that is less.
        until: T_end as a fraction of training.
        seed: that of the initial connections.

    Example:
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
        check(locals(), sparsity=BELOW_ONE, until=FRACTION, alpha=FRACTION, every=COUNT, seed=SEED)
        self.final = sparsity
        self.alpha = alpha
        self.every = every
        self.until = until
        self.seed = seed

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        shapes = [weight.shape for weight in self.layer_weights.values()]
        counts = whole_counts([shape.numel() for shape in shapes], erk_densities(shapes, 1 - self.final))
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
