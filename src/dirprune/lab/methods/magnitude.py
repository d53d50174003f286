"""Magnitude pruning: the smallest weights are removed, gradually or at once.

From step t₀ to t₁, new masks are made every Δt steps, for the sparsity

    s(t) = s_f · (1 − (1 − (t − t₀)/(t₁ − t₀))³),

which removes many weights early, while there are plenty, and few late. t₀ = t₁ is one-shot pruning.

Preset: the sparsity, and how the layers share it: the same for each, including the first ("uniform"), one threshold on
|w| for all ("global"), or one sparsity per layer, by name, for instance to keep the first layer dense. With an
optimizer of Adam's kind the global threshold may act on |w| ŝ^¼, ŝ the mean squared gradient, which spares weights that
the loss is sensitive to.

Reference: Zhu & Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", 2017
(their initial sparsity is 0 here); one-shot: Han, Pool, Tran & Dally, "Learning both weights and connections for
efficient neural networks", NeurIPS 2015.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune.lab.methods.masks import Masked, interval, keep_largest, keep_largest_of_all, whole_counts
from dirprune.lab.ranges import BELOW_ONE, COUNT, FRACTION, BadValue, check

ALLOCATIONS = ("uniform", "global")
SCORES = ("magnitude", "scaled")


def cubic_sparsity(step: int, *, start: int, end: int, final: float) -> float:
    """Return the sparsity after ``step`` steps: 0 up to ``start``, ``final`` from ``end`` on.

    >>> [cubic_sparsity(step, start=0, end=4, final=0.8) for step in (0, 2, 4, 5)]
    [0.0, 0.7000000000000001, 0.8, 0.8]
    """
    if step >= end:
        return final
    if step <= start:
        return 0.0
    return final * (1 - (1 - (step - start) / (end - start)) ** 3)


def layer_masks(weights: Mapping[str, Tensor], sparsities: Mapping[str, float]) -> dict[str, Tensor]:
    """Return masks that keep the largest weights of each layer; the total number is exact."""
    counts = whole_counts([w.numel() for w in weights.values()], [1 - sparsities[name] for name in weights])
    return {name: keep_largest(w.detach().abs(), n) for (name, w), n in zip(weights.items(), counts, strict=True)}


def global_masks(weights: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """Return masks that keep the largest weights (or scores) of the network, wherever they are."""
    count = round(sum(w.numel() for w in weights.values()) * (1 - sparsity))
    return keep_largest_of_all({name: w.detach().abs() for name, w in weights.items()}, count)


class Magnitude(Masked):
    """Magnitude pruning to a preset sparsity.

    Args:
        sparsity: the fraction of the prunable weights to remove, or one fraction per layer, by name.
        allocation: "uniform" or "global"; used if there is one sparsity.
        score: by what global pruning ranks weights: their "magnitude", or that "scaled" by ŝ^¼.
        start, end: when pruning begins and is complete, as fractions of training; equal for one-shot pruning.
        every: steps between masks; by default 100, or a tenth of the pruning phase if that is less.

    Example:
        >>> model = nn.Linear(10, 10)
        >>> method = Magnitude(sparsity=0.9, start=0.0, end=0.0)
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        0.9
    """

    name = "magnitude"
    knob = "sparsity"

    def __init__(
        self,
        *,
        sparsity: float | Mapping[str, float],
        allocation: str = "uniform",
        score: str = "magnitude",
        start: float = 0.1,
        end: float = 0.75,
        every: int | None = None,
    ) -> None:
        for value in sparsity.values() if isinstance(sparsity, Mapping) else (sparsity,):
            check({"sparsity": value}, sparsity=BELOW_ONE)
        if allocation not in ALLOCATIONS:
            raise BadValue("allocation", allocation, f"take one of {', '.join(ALLOCATIONS)}")
        if score not in SCORES or (score == "scaled" and allocation != "global"):
            raise BadValue(
                "score", score, f"take one of {', '.join(SCORES)}, with another than magnitude global pruning"
            )
        check(locals(), start=FRACTION, end=FRACTION, every=COUNT)
        if start > end:
            raise ValueError(f"start={start} is later than end={end}; pruning must begin before it ends")
        self.final = sparsity
        self.allocation = allocation
        self.score = score
        self.start = start
        self.end = end
        self.every = every

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        if isinstance(self.final, Mapping) and self.final.keys() != self.layer_weights.keys():
            raise ValueError(
                f"sparsity names the layers {', '.join(self.final)}; give one for each of "
                f"{', '.join(self.layer_weights)}"
            )
        self.after_step(0)

    def after_step(self, step: int) -> None:
        start, end = round(self.start * self.steps), round(self.end * self.steps)
        if step == end or (start < step < end and (step - start) % interval(self.every, end - start) == 0):
            self.set_masks(self._masks(cubic_sparsity(step, start=start, end=end, final=1.0)))

    def _masks(self, part: float) -> dict[str, Tensor]:
        """Return the masks for this fraction of the final sparsity."""
        if isinstance(self.final, Mapping):
            return layer_masks(self.layer_weights, {name: part * sparsity for name, sparsity in self.final.items()})
        if self.allocation == "global":
            return global_masks(self._scores(), part * self.final)
        return layer_masks(self.layer_weights, dict.fromkeys(self.layer_weights, part * self.final))

    @torch.no_grad()
    def _scores(self) -> dict[str, Tensor]:
        """Return what weights are ranked by; Adam's bias correction of ŝ is the same for all, and left out."""
        if self.score == "magnitude":
            return self.layer_weights
        state = self.optimizer.state
        if lacking := [
            name for name, weight in self.layer_weights.items() if "exp_avg_sq" not in state.get(weight, ())
        ]:
            raise ValueError(
                f"score='scaled' needs the mean squared gradients of an optimizer of Adam's kind, and there are none "
                f"of {lacking[0]!r}; train with adamw, and begin after its first step (start > 0)"
            )
        return {name: w.abs() * state[w]["exp_avg_sq"] ** 0.25 for name, w in self.layer_weights.items()}
