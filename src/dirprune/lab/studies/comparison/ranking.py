"""Rank methods at equal sparsity, or at equal multiplications: below, read the share of them that is gone as s.

If a method has no run at sparsity s, its two nearest runs around s are interpolated, linearly in log(1 − s): halving
the remaining weights counts the same at every sparsity. If all its runs are sparser, the least sparse one is a lower
bound, unless it is much sparser. There is no other extrapolation, and no interpolation between runs that are far apart,
because one of them may have lost everything. In these cases the nearest run is shown without a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dirprune.lab.stats import Spread
from dirprune.lab.studies.comparison.tradeoff import APART, distance
from dirprune.lab.tasks.measure import ACCURACY, Measure

EXACT = 0.02
"""A run within this `distance` of a sparsity counts as being at it: 0.2 points at 90%, 0.04 at 98%."""

SPARSER = math.log(2)
"""How much sparser a run may be to serve as a lower bound: it has at least half as many weights left."""


class Reached(NamedTuple):
    """What a network has reached: its score, the fractions of the multiplications and of the weights that are left, the
    zeros of its outer layers.

    What is not known is NaN.
    """

    score: float
    macs_left: float = math.nan
    first: float = math.nan
    last: float = math.nan
    weights_left: float = math.nan

    def towards(self, other: Reached, way: float) -> Reached:
        """Return what lies between the two; what is left shrinks by equal factors, the rest changes by equal steps."""
        between = {name: one + way * (two - one) for name, one, two in zip(self._fields, self, other, strict=True)}
        for name in ("macs_left", "weights_left"):
            one, two = getattr(self, name), getattr(other, name)
            between[name] = one * (two / one) ** way if one > 0 else between[name]
        return Reached(**between)


@dataclass(frozen=True)
class Point:
    """A finished run: its method, setting and seed, and what it reached; ``sparsity`` is of what is compared."""

    method: str
    setting: str
    seed: int
    sparsity: float
    reached: Reached


@dataclass(frozen=True)
class Reading:
    """What a method reaches at a sparsity, from the runs of one seed.

    ``is_there`` is False if it is only that of the nearest run. ``at_least`` is True if a sparser run is a lower bound;
    ``sparsity`` is then that run's own.
    """

    sparsity: float
    reached: Reached
    source: str
    is_there: bool
    at_least: bool = False


@dataclass(frozen=True)
class Standing:
    """A method at a requested sparsity, over its seeds; rank 0 means that it cannot be ranked there.

    ``sparsity`` is where it was read what they reached, by seed: the requested one, or that of sparser or nearest runs.
    ``source`` names the runs of the first seed.
    """

    asked: float
    rank: int
    method: str
    sparsity: float
    reached: Mapping[int, Reached]
    source: str

    @property
    def scores(self) -> dict[int, float]:
        return {seed: each.score for seed, each in self.reached.items()}

    @property
    def score(self) -> Spread:
        return Spread.of(list(self.scores.values()))

    @property
    def seeds(self) -> int:
        return len(self.reached)

    def mean(self, what: str) -> float:
        """Return the mean over the seeds of one of the things they reached."""
        return Spread.of([getattr(each, what) for each in self.reached.values()]).mean


def read_at(points: Sequence[Point], sparsity: float) -> Reading:
    """Return what a method reaches at a sparsity, from its runs of one seed.

    >>> points = [Point("grda", "c=1", 0, 0.9, Reached(94.0)), Point("grda", "c=2", 0, 0.975, Reached(92.0))]
    >>> reading = read_at(points, 0.95)  # what is left is halved, then halved again
    >>> round(reading.reached.score, 9), reading.source
    (93.0, 'c=1 – 2 (90.0–97.5%)')
    >>> read_at(points, 0.99).is_there
    False
    """
    nearest = min(points, key=lambda point: distance(point.sparsity, sparsity))
    if distance(nearest.sparsity, sparsity) <= EXACT:
        return Reading(sparsity, nearest.reached, nearest.setting, is_there=True)
    below = max((p for p in points if p.sparsity < sparsity), key=lambda p: p.sparsity, default=None)
    above = min((p for p in points if p.sparsity > sparsity), key=lambda p: p.sparsity, default=None)
    if below is None and distance(nearest.sparsity, sparsity) <= SPARSER:
        told = f"at least: {_name(nearest)}"
        return Reading(nearest.sparsity, nearest.reached, told, is_there=True, at_least=True)
    if below is None or above is None or distance(below.sparsity, above.sparsity) > APART:
        told = f"nearest run: {_name(nearest)}"
        return Reading(nearest.sparsity, nearest.reached, told, is_there=False)
    way = distance(below.sparsity, sparsity) / distance(below.sparsity, above.sparsity)
    reached = below.reached.towards(above.reached, way)
    return Reading(sparsity, reached, _between(below, above), is_there=True)


def rank(points: Iterable[Point], sparsities: Iterable[float], measure: Measure = ACCURACY) -> list[Standing]:
    """Return the methods at every sparsity, the best first, then those that cannot be ranked there."""
    by_method: dict[str, dict[int, list[Point]]] = {}
    for point in points:
        by_method.setdefault(point.method, {}).setdefault(point.seed, []).append(point)
    standings: list[Standing] = []
    for asked in sparsities:
        unranked = [_stand(asked, method, seeds) for method, seeds in by_method.items()]
        ordered = sorted(unranked, key=lambda each: (not each.rank, measure.best_first(each.score.mean)))
        standings += [_with_rank(each, place) for place, each in enumerate(ordered, start=1)]
    return standings


def paired_gap(scores: Mapping[int, float], others: Mapping[int, float]) -> tuple[float, float]:
    """Return a method's mean difference from another, or from dense training, over common seeds, and its margin.

        d̄ ± t(0.975, n−1) · s/√n,   mean d̄ and standard deviation s of the n differences

    Runs with the same seed share their initial weights and minibatches, so the difference is taken seed by seed. The
    margin is half the length of the 95% confidence interval. It is NaN for one seed; both are NaN without any.

    >>> gap, margin = paired_gap({0: 93.0, 1: 94.0, 2: 93.5}, {0: 94.0, 1: 94.0, 2: 94.0})
    >>> round(gap, 3), round(margin, 3)
    (-0.5, 1.242)
    """
    from scipy.special import stdtrit

    differences = [score - others[seed] for seed, score in scores.items() if seed in others]
    if not differences:
        return math.nan, math.nan
    spread, n = Spread.of(differences), len(differences)
    return spread.mean, math.nan if spread.std is None else float(stdtrit(n - 1, 0.975)) * spread.std / math.sqrt(n)


def _stand(asked: float, method: str, seeds: dict[int, list[Point]]) -> Standing:
    """Return a method's standing over the seeds that can be ranked at the sparsity, with rank 1; 0 if none can."""
    every = {seed: read_at(points, asked) for seed, points in sorted(seeds.items())}
    there = {seed: reading for seed, reading in every.items() if reading.is_there}
    readings = there or every
    sparsity = Spread.of([reading.sparsity for reading in readings.values()]).mean
    first = next(iter(readings.values()))
    return Standing(
        asked=asked,
        rank=int(bool(there)),
        method=method,
        sparsity=sparsity,
        reached={seed: reading.reached for seed, reading in readings.items()},
        source=first.source if there or len(every) == 1 else f"nearest runs, {sparsity:.1%} on average",
    )


def _with_rank(standing: Standing, place: int) -> Standing:
    return replace(standing, rank=place) if standing.rank else standing


def _between(below: Point, above: Point) -> str:
    knob, _, first = below.setting.partition("=")
    last = above.setting.removeprefix(f"{knob}=")
    return f"{knob}={first} – {last} ({100 * below.sparsity:.1f}–{100 * above.sparsity:.1f}%)"


def _name(point: Point) -> str:
    return f"{point.setting} ({point.sparsity:.1%})"
