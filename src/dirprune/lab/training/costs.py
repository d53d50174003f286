"""The multiplications that the zeros of a run leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch

from dirprune import SparsityReport, macs
from dirprune.lab import models
from dirprune.lab.data.text import VOCABULARY
from dirprune.lab.tasks import Text
from dirprune.lab.training.recipe import Recipe
from dirprune.zeros import LayerSparsity

FORMATS = {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "imagenet": ((3, 224, 224), 1000),
}
"""The shape of an image and the number of classes."""


def classes_of(recipe: Recipe) -> int | None:
    """Return how many outputs a network of the recipe's data has; None if the data are somebody's own."""
    if recipe.task.name == Text.name:
        return VOCABULARY
    return FORMATS[recipe.task.data][1] if recipe.task.data in FORMATS else None


def priced(zeros: SparsityReport, recipe: Recipe) -> SparsityReport:
    """Return the zeros with the multiplications of each layer: those noted with them, or of a network of the lab.

    Other networks are not built, because a run may come from elsewhere; their zeros are returned as they are.
    """
    costs = {layer.name: layer.cost for layer in _dense(recipe).layers}
    if zeros.cost is not None or costs.keys() != {layer.name for layer in zeros.layers}:
        return zeros
    return SparsityReport(tuple(replace(layer, cost=costs[layer.name]) for layer in zeros.layers))


def multiplied(zeros: SparsityReport) -> list[LayerSparsity]:
    """Return the weights that are multiplied, or all of unknown cost: a table that is only looked up costs nothing."""
    return [layer for layer in zeros.layers if layer.is_weight and layer.cost != 0]


def macs_left(recipe: Recipe, sparsities: Mapping[str, float]) -> float:
    """Return the fraction of a lab network's multiplications that weights with these sparsities leave; NaN of others.

    >>> from dirprune.lab.training.recipes import get
    >>> layers = {"conv1": 0.0, "conv2": 1.0, "conv3": 0.0, "fc1": 0.0, "fc2": 0.0}
    >>> f"{macs_left(get('digits'), layers):.4f}"
    '0.5213'
    """
    costs = {
        layer.name.removesuffix(".weight"): layer.cost or 0.0 for layer in _dense(recipe).layers if layer.is_weight
    }
    if not costs or costs.keys() != sparsities.keys():
        return math.nan
    return sum(cost * (1 - sparsities[name]) for name, cost in costs.items()) / sum(costs.values())


def narrowing(recipe: Recipe, wide: str) -> tuple[float, float]:
    """Return which share of the weights and of the multiplications of a wide network the recipe's does without.

    >>> from dirprune.lab.training.recipes import get
    >>> [round(share, 2) for share in narrowing(get("digits").but(model="small4"), "small")]
    [0.93, 0.93]
    """
    ours, theirs = _dense(recipe), _dense(recipe.but(model=wide))
    counts = [sum(layer.total for layer in multiplied(each)) for each in (ours, theirs)]
    costs = [each.cost or math.nan for each in (ours, theirs)]
    return 1 - counts[0] / counts[1] if counts[1] else math.nan, 1 - costs[0] / costs[1]


def _dense(recipe: Recipe) -> SparsityReport:
    """Return the layers of a network of the lab without zeros, with their multiplications; none of others."""
    task, classes = recipe.task, classes_of(recipe)
    if classes is None or not models.is_built_quickly(recipe.model):
        return SparsityReport(())
    if isinstance(task, Text):
        return _layers(recipe.model, classes, (task.context,), torch.int64)
    shape, _ = FORMATS[task.data]
    side = task.size or shape[-1]
    return _layers(recipe.model, classes, (shape[0], side, side), torch.float32)


@cache
def _layers(model: str, classes: int, shape: tuple[int, ...], dtype: torch.dtype) -> SparsityReport:
    with torch.device("meta"), suppress(RuntimeError, ValueError):  # of a network that does not fit the data
        network = models.build(model, classes)
        layers = tuple(LayerSparsity(name, tuple(p.shape), 0) for name, p in network.named_parameters())
        return SparsityReport(layers).priced(macs(network, torch.zeros(1, *shape, dtype=dtype)))
    return SparsityReport(())
