"""The loss along a curve between two networks, and over a plane around it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dirprune._support.batches import Batch
from dirprune.connect.curve import BezierCurve, Plane
from dirprune.connect.landscape import Evaluator, Measurement, profile_points


@dataclass(frozen=True)
class Profile:
    """The measured points of a curve or a plane, and the extremes among them."""

    points: tuple[Measurement, ...]

    @property
    def highest(self) -> Measurement:
        """The point with the highest training loss, where the barrier is; NaN counts as highest."""
        return max(self.points, key=lambda point: _nan_is_worst(point.train_loss))

    @property
    def highest_test(self) -> Measurement:
        """The same on the test data."""
        return max(self.points, key=lambda point: _nan_is_worst(point.test_loss))

    @property
    def best(self) -> Measurement:
        """The point with the lowest test error; among equals, the one with the lowest test loss."""
        return min(self.points, key=lambda point: (_nan_is_worst(point.test_error), _nan_is_worst(point.test_loss)))


@dataclass(frozen=True)
class CurveProfile(Profile):
    """The measured points of a curve in the order of t, and its barriers."""

    @property
    def barrier(self) -> float:
        """max loss − loss of the worse endpoint, on the training data; 0 when the curve stays in the valley."""
        return self.highest.train_loss - max(self.points[0].train_loss, self.points[-1].train_loss)

    @property
    def test_barrier(self) -> float:
        """The same on the test data."""
        return self.highest_test.test_loss - max(self.points[0].test_loss, self.points[-1].test_loss)


def curve_profile(
    model: nn.Module,
    curve: BezierCurve,
    train: Iterable[Batch],
    test: Iterable[Batch],
    points: int = 61,
    **options: Any,
) -> CurveProfile:
    """Measure loss and error along the curve on plain data, with BatchNorm statistics of their own at every point.

    With BatchNorm, ``train`` must not be sorted by class. If it shuffles, the result depends on the global seed,
    because the statistics are means over its batches; a batch of one example has no part in them.

    Args:
        model: gives the architecture; it does not change.
        curve: a curve between its weights.
        train, test: minibatches of (inputs, targets).
        points: how many equidistant t from 0 to 1, endpoints included.
        options: the `Evaluator`'s.

    >>> import torch
    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> line = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)}, bends=0)
    >>> curve_profile(nn.Linear(2, 2, bias=False), line, train=data, test=data, points=3).best.place
    (1.0,)
    """
    if points < 2:
        raise ValueError(f"points is {points}; a profile needs at least its two endpoints")
    places = [(i / (points - 1),) for i in range(points)]
    return CurveProfile(tuple(profile_points(Evaluator(model, train, test, **options), curve.point, places)))


def plane_profile(
    model: nn.Module,
    plane: Plane,
    train: Iterable[Batch],
    test: Iterable[Batch],
    *,
    grid: int = 21,
    margin: float = 0.2,
    **options: Any,
) -> Profile:
    """Measure the places of ``plane.grid(grid, margin)``, in that order, as `curve_profile` does those of a curve.

    ``model``, ``train``, ``test`` and ``options`` are what they are there.
    """
    return Profile(
        tuple(profile_points(Evaluator(model, train, test, **options), plane.point, plane.grid(grid, margin)))
    )


def _nan_is_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
