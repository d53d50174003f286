"""The multiplications that the zeros of a run leave."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch

from dirprune import SparsityReport, macs
from dirprune.lab import models
from dirprune.lab.training.recipe import Recipe

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
    if zeros.cost is not None or recipe.model not in models.NAMES or recipe.task.data not in FORMATS:
        return zeros
    cost = _macs(recipe.model, recipe.task.data)
    return zeros.priced(cost) if cost.keys() == {layer.name for layer in zeros.layers} else zeros


@cache
def _macs(model: str, data: str) -> dict[str, float]:
    shape, classes = FORMATS[data]
    with torch.device("meta"), suppress(RuntimeError):  # of a network that does not fit the data
        return macs(models.build(model, classes), torch.zeros(1, *shape))
    return {}
