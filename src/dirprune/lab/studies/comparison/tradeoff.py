"""The data of a comparison of pruning methods: accuracy against sparsity, and layerwise sparsity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEM, SHORTCUT = "stem conv", "shortcut"
"""The kinds of layers that do not follow from the shape; the others are "conv 3×3", "conv 1×1", …, "linear"."""

WEIGHTS, MACS = "weights", "macs"
"""What is counted: zeros among the weights, or multiplications that they save."""

APART = math.log(8)
"""Runs at a larger `distance` from each other are not interpolated: a straight line from a good network to one that a
strong setting destroyed would pass above methods that were measured in between."""


def distance(one: float, other: float) -> float:
    """Return the distance of two sparsities: the logarithm of the ratio of remaining weights.

    >>> round(distance(0.8, 0.9) / distance(0.9, 0.95), 9)
    1.0
    """
    return abs(_left(one) - _left(other))


def _left(sparsity: float) -> float:
    """Return the logarithm of the fraction of remaining weights, at least log 1e-12 for a network without any."""
    return math.log(max(1 - sparsity, 1e-12))


class Level(NamedTuple):
    """Where methods are compared: how much is gone, ``of`` the weights or of the multiplications.

    >>> Level(0.95).title, Level(0.9, MACS).title
    ('95% of the weights zero', '10% of the multiplications left')
    """

    gone: float
    of: str = WEIGHTS

    @property
    def title(self) -> str:
        if self.of == WEIGHTS:
            return f"{100 * self.gone:g}% of the weights zero"
        return f"{100 * (1 - self.gone):g}% of the multiplications left"


@dataclass(frozen=True)
class Curve:
    """Accuracy against sparsity of one method.

    A single point at sparsity 0 is a dense network, the reference for the others.

    Args:
        label: begins with the name of the method, which decides its colour: "gRDA", "gRDA c=0.005", "rigl".
        sparsity: the fraction of zeros, 0 to 1, of every point.
        accuracy: the accuracy of every point, in percent.
        spread: half the length of every point's error bar, e.g. the std over seeds; NaN if it is not known.
        dashed: draw the line dashed.

    Example:
        >>> Curve("gRDA", sparsity=[0.9, 0.95], accuracy=[93.6, 93.5], spread=[0.1, 0.2]).label
        'gRDA'
    """

    label: str
    sparsity: Sequence[float]
    accuracy: Sequence[float]
    spread: Sequence[float] | None = None
    dashed: bool = False

    def __post_init__(self) -> None:
        spread = self.sparsity if self.spread is None else self.spread
        if not len(self.sparsity) == len(self.accuracy) == len(spread):
            raise ValueError(
                f"sparsity, accuracy and spread of {self.label!r} have {len(self.sparsity)}, {len(self.accuracy)} and "
                f"{len(spread)} values; give one of each per point"
            )
        if wrong := [value for value in self.sparsity if not 0 <= value <= 1]:
            raise ValueError(f"sparsity={wrong[0]} of {self.label!r} is not a fraction; give 0.9 for 90 %")
        if wrong := [value for value in self.accuracy if not 0 <= value <= 100]:
            raise ValueError(f"accuracy={wrong[0]} of {self.label!r} must lie in 0 ... 100; leave out runs without one")
        if wrong := [value for value in spread if value < 0]:
            raise ValueError(f"spread={wrong[0]} of {self.label!r} must not be negative; give a standard deviation")

    @property
    def is_dense(self) -> bool:
        """Whether this is the reference: one point, of a network without zeros."""
        return list(self.sparsity) == [0]


@dataclass(frozen=True)
class LayerBar:
    """The sparsity of one layer with one method, as a fraction; lists of them are in network order.

    ``kind`` is the kind of layer: `STEM`, `SHORTCUT`, "conv 3×3", "conv 1×1", "linear", or another word.
    """

    method: str
    layer: str
    kind: str
    sparsity: float

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity={self.sparsity} of {self.layer!r} is not a fraction; give 0.9 for 90 %")
