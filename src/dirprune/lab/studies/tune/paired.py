"""The accuracy that one network loses against another on the same examples, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Loss:
    """A loss of accuracy in points, and the ends of its interval."""

    points: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2


def loss(dense: Tensor, sparse: Tensor, confidence: float = CONFIDENCE) -> Loss:
    """Return the loss of accuracy of ``sparse`` against ``dense``, both [seeds, examples] of 1 right and 0 wrong.

    Every example is a pair: d is the part of the seeds with which only the dense network is right, less the part with
    which only the sparse one is. The interval holds for new examples from where these came from, for the mean of these
    seeds. It is Wald's after two more pairs, half of each kind, without which few differences would look like none:

        m = Σd / (n + 2),    m ± z √([(Σd² + 1) / (n + 2) − m²] / (n + 2))

    Reference: Agresti & Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in
    Medicine 2005.

    >>> import torch
    >>> print(loss(torch.ones(1, 98), torch.ones(1, 98)))
    Loss(points=0.0, low=-1.95..., high=1.95...)
    """
    d = (dense - sparse).double().mean(0)
    count = len(d) + 2
    mean = float(d.sum()) / count
    variance = (float(d.square().sum()) + 1) / count - mean**2
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / count)
    return Loss(100 * float(d.mean()), 100 * (mean - half), 100 * (mean + half))
