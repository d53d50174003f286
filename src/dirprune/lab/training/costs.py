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
from dirprune.lab.training.recipe import Recipe
from dirprune.zeros import LayerSparsity

FORMATS = {
    "digits": ((1, 8, 8), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "imagenet": ((3, 224, 224), 1000),
}
"""The shape of an image and the number of classes."""


def priced(zeros: SparsityReport, recipe: Recipe) -> SparsityReport:
    """Return the zeros with the multiplications of each layer: those noted with them, or of a network of the lab.

    Other networks are not built, because a run may come from elsewhere; their zeros are returned as they are.
    """
    costs = {layer.name: layer.cost for layer in _dense(recipe).layers}
    if zeros.cost is not None or costs.keys() != {layer.name for layer in zeros.layers}:
        return zeros
    return SparsityReport(tuple(replace(layer, cost=costs[layer.name]) for layer in zeros.layers))


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


def _dense(recipe: Recipe) -> SparsityReport:
    """Return the layers of a network of the lab without zeros, with their multiplications; none of others."""
    data = getattr(recipe.task, "data", "")
    known = recipe.model in models.NAMES and data in FORMATS
    return _layers(recipe.model, data) if known else SparsityReport(())


@cache
def _layers(model: str, data: str) -> SparsityReport:
    shape, classes = FORMATS[data]
    with torch.device("meta"), suppress(RuntimeError):  # of a network that does not fit the data
        network = models.build(model, classes)
        layers = tuple(LayerSparsity(name, tuple(p.shape), 0) for name, p in network.named_parameters())
        return SparsityReport(layers).priced(macs(network, torch.zeros(1, *shape)))
    return SparsityReport(())
