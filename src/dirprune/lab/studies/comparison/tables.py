"""Tables and figures of a comparison, made from the rows of its runs.

comparison.csv      one row per run
layers.csv          one row per layer of a run
ranking.csv         the methods at every requested sparsity, and share of the multiplications
paired.csv          the differences between every two of them, seed by seed
tradeoff.png        score against sparsity
tradeoff-macs.png   score against the share of the multiplications that is gone
layers-0.9.png      layerwise sparsity of each method's run nearest to a requested sparsity
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import mode

from matplotlib.figure import Figure

from dirprune.lab import plots
from dirprune.lab.records.tables import write_rows
from dirprune.lab.stats import Spread
from dirprune.lab.studies.comparison import figures as comparison_plots
from dirprune.lab.studies.comparison.ranking import Reached, Standing, paired_gap, rank
from dirprune.lab.studies.comparison.rows import Ended, LayerRow, Row, layer_rows
from dirprune.lab.studies.comparison.tradeoff import MACS, WEIGHTS, Curve, LayerBar, Level, distance
from dirprune.lab.studies.comparison.trials import known_as
from dirprune.lab.tasks.measure import ACCURACY, LOSS
from dirprune.lab.text import NOTHING, duration


@dataclass(frozen=True)
class RankRow:
    """A method at a requested `Level`, over its seeds; see `dirprune.lab.studies.comparison.ranking.Standing`.

    ``asked_sparsity`` and ``sparsity`` count what ``of`` names: weights, or multiplications that the zeros save.
    ``score`` is what ``measured`` names. ``gap`` is the difference from dense training with the same seeds, and
    ``gap_margin`` half the length of its 95% confidence interval; unknown values are NaN. ``first_layer`` and
    ``last_layer`` are the zeros of these layers. Costs are means over the method's runs on the device that most runs
    of the comparison had. Dense training comes first, with sparsity 0 and rank 0.
    """

    asked_sparsity: float
    rank: int
    method: str
    sparsity: float
    measured: str
    score: float
    score_std: float
    gap: float
    gap_margin: float
    seeds: int
    source: str
    seconds: float
    peak_memory_mib: float
    macs_left: float
    first_layer: float
    last_layer: float
    commits: str
    of: str = WEIGHTS
    weights_left: float = math.nan

    def is_at(self, level: Level) -> bool:
        """Whether the row belongs into the table of a level: it is there, or dense."""
        return not self.asked_sparsity or (self.asked_sparsity, self.of) == level

    def cells(self) -> dict[str, str]:
        """Return the row as text by column."""
        measure = _measures[self.measured]
        digits = measure.digits
        gap = "" if math.isnan(self.gap) else _spread(self.gap, self.gap_margin).text(digits, signed=True)
        return {
            "rank": str(self.rank or NOTHING),
            "method": known_as(self.method).title,
            "from": self.source,
            measure.title: _spread(self.score, self.score_std).text(digits),
            "− dense (95%)": gap,
            "n": str(self.seeds),
            "weights left (%)": _percent(self.weights_left),
            "MACs left (%)": _percent(self.macs_left),
            "first layer zero (%)": _percent(self.first_layer),
            "last": _percent(self.last_layer),
            "a run took": NOTHING if math.isnan(self.seconds) else duration(self.seconds),
            "MiB": NOTHING if math.isnan(self.peak_memory_mib) else f"{self.peak_memory_mib:.0f}",
        }


_measures = {measure.column: measure for measure in (ACCURACY, LOSS)}

SPARE = ("MiB", "last", "first layer zero (%)", "n", "a run took", "weights left (%)")
"""Columns that are dropped on a narrow terminal, in this order."""


@dataclass(frozen=True)
class PairRow:
    """The mean difference between two methods at a `Level` over their common seeds, and its 95% interval's half."""

    asked_sparsity: float
    method: str
    other: str
    measured: str
    difference: float
    margin: float
    seeds: int
    of: str = WEIGHTS

    @property
    def verdict(self) -> str:
        """What the interval says: "better", "worse", or "open" if it contains 0 or is not known."""
        if math.isnan(self.margin) or abs(self.difference) <= self.margin:
            return "open"
        return "better" if _measures[self.measured].best_first(self.difference) < 0 else "worse"

    def cells(self) -> dict[str, str]:
        """Return the row as text by column."""
        measure = _measures[self.measured]
        return {
            "at": Level(self.asked_sparsity, self.of).title,
            "method": known_as(self.method).title,
            f"− {known_as(self.other).title}, {measure.title} (95%)": _spread(self.difference, self.margin).text(
                measure.digits, signed=True
            ),
            "n": str(self.seeds),
            "": self.verdict,
        }


def write(found: Sequence[Ended], out: Path, levels: Sequence[Level]) -> list[Path]:
    """Write the tables and figures of a comparison, and return their paths."""
    write_rows(out / "comparison.csv", Row, [each.row for each in found])
    write_rows(out / "layers.csv", LayerRow, layer_rows(found))
    write_rows(out / "ranking.csv", RankRow, ranking(found, levels))
    write_rows(out / "paired.csv", PairRow, pairs(found, levels))
    paths = [out / f"{name}.csv" for name in ("comparison", "layers", "ranking", "paired")]
    return paths + [
        plots.save(plots.literal(draw()), out / f"{name}.png") for name, draw in figures(found, levels).items()
    ]


def figures(found: Sequence[Ended], levels: Sequence[Level]) -> dict[str, Callable[[], Figure]]:
    """Return how the figures of a comparison are drawn, by the names of their files."""
    drawings: dict[str, Callable[[], Figure]] = {}
    measured = found[0].row.measure.title
    if drawn := curves(found):
        drawings["tradeoff"] = partial(comparison_plots.tradeoff, drawn, measured=measured)
    counted = curves(found, MACS)
    if not all(curve.is_dense for curve in counted):
        gone = "multiplications gone"
        drawings["tradeoff-macs"] = partial(comparison_plots.tradeoff, counted, counted=gone, measured=measured)
    for sparsity in (level.gone for level in levels if level.of == WEIGHTS):
        if bars := nearest_layers(found, sparsity):
            title = f"runs nearest to {sparsity:.1%}"
            drawings[f"layers-{sparsity:g}"] = partial(comparison_plots.layerwise, bars, title=title)
    return drawings


def ranking(found: Iterable[Ended], levels: Iterable[Level]) -> list[RankRow]:
    """Return dense training, then the methods ranked at every level; runs that diverged are left out."""
    whole = [each for each in found if not each.row.diverged]
    usual = _usual_device(whole)
    rows = []
    dense = _dense(whole)
    places = [(WEIGHTS, place) for place in dense]
    places += [(level.of, place) for level in levels for place in _standings(whole, level)]
    for of, place in places:
        own = [each.row for each in whole if each.row.method == place.method]
        gap = (math.nan, math.nan) if place in dense else paired_gap(place.scores, dense[0].scores if dense else {})
        costs = _costs([row for row in own if row.device == usual])
        mean, std = _both(place.score)
        rows.append(
            RankRow(
                asked_sparsity=place.asked,
                rank=place.rank,
                method=place.method,
                sparsity=place.sparsity,
                measured=own[0].measure.column,
                score=mean,
                score_std=std,
                gap=gap[0],
                gap_margin=gap[1],
                seeds=place.seeds,
                source=place.source,
                seconds=costs[0],
                peak_memory_mib=costs[1],
                macs_left=place.mean("macs_left"),
                first_layer=place.mean("first"),
                last_layer=place.mean("last"),
                commits=" ".join(sorted({row.commit for row in own})),
                of=of,
                weights_left=place.mean("weights_left"),
            )
        )
    return rows


def pairs(found: Iterable[Ended], levels: Iterable[Level]) -> list[PairRow]:
    """Return the differences between every two methods that can be ranked at a level, and from dense training."""
    whole = [each for each in found if not each.row.diverged]
    rows = []
    for level in levels:
        there = [*_dense(whole), *(place for place in _standings(whole, level) if place.rank)]
        for one, other in permutations(there, 2):
            gap, common = paired_gap(one.scores, other.scores), one.scores.keys() & other.scores.keys()
            if common:
                measured = whole[0].row.measure.column
                rows.append(PairRow(level.gone, one.method, other.method, measured, *gap, len(common), level.of))
    return rows


def _standings(whole: Sequence[Ended], level: Level) -> list[Standing]:
    sparse = [each.point(level.of) for each in whole if not each.row.is_dense]
    counted = [point for point in sparse if not math.isnan(point.sparsity)]
    return rank(counted, [level.gone], whole[0].row.measure) if counted else []


def _dense(whole: Sequence[Ended]) -> list[Standing]:
    """Return how dense training stands, if it was run."""
    points = [each.point() for each in whole if each.row.is_dense]
    reached = {point.seed: Reached(point.reached.score, 1.0, 0.0, 0.0, 1.0) for point in points}
    return [Standing(0.0, 0, points[0].method, 0.0, reached, "dense")] if points else []


def curves(found: Iterable[Ended], of: str = WEIGHTS) -> list[Curve]:
    """Return a curve of the score against what is gone per method: means and stds over the seeds of each setting.

    Settings of which it is not known are left out.
    """
    by_method: dict[str, dict[str, list[Row]]] = {}
    for each in found:
        if not each.row.diverged and (each.row.is_dense or not math.isnan(each.row.gone(of))):
            by_method.setdefault(each.row.title, {}).setdefault(each.row.setting, []).append(each.row)
    made = []
    for title, settings in by_method.items():
        scores = [_both(Spread.of([row.score for row in rows])) for rows in settings.values()]
        is_dense = "" in settings
        zeros = [0.0 if is_dense else Spread.of([row.gone(of) for row in rows]).mean for rows in settings.values()]
        made.append(Curve(title, zeros, [mean for mean, _ in scores], [std for _, std in scores], is_dense))
    return made


def nearest_layers(found: Iterable[Ended], sparsity: float) -> list[LayerBar]:
    """Return the layers of each method's run nearest to a sparsity, labelled with method and the run's own sparsity."""
    nearest: dict[str, Ended] = {}
    for each in sorted(found, key=lambda each: each.row.seed):
        if not each.row.is_dense and each.layers:
            best = nearest.setdefault(each.row.title, each)
            if distance(each.row.sparsity, sparsity) < distance(best.row.sparsity, sparsity):
                nearest[each.row.title] = each
    return [
        LayerBar(f"{each.row.title}, {each.row.sparsity:.1%}", bar.layer, bar.kind, bar.sparsity)
        for each in nearest.values()
        for bar in each.layers
    ]


def notes(found: Sequence[Ended]) -> list[str]:
    """Return notes for the reader of the table: the budget of every method, and runs that diverged."""
    epochs = max(each.row.epochs for each in found)
    costs = {each.row.method: known_as(each.row.method).cost for each in found}
    lines = [
        f"Every run had {epochs} epochs of the same minibatches, from the same weights for the same seed. In addition:",
        *(f"  {name}: {cost}" for name, cost in costs.items()),
    ]
    if any(each.row.is_dense for each in found):
        lines.append(
            "− dense: the difference to dense training of the same seeds, ± its 95% confidence interval, t over seeds; "
            "an interval that contains 0 does not distinguish the two."
        )
    if all(math.isnan(each.row.peak_memory_mib) for each in found):
        lines.append("Memory is reported on GPUs only: a process's memory on a CPU says little about a single run.")
    whole = [each for each in found if not each.row.diverged]
    usual = _usual_device(whole)
    if others := sorted({each.row.device for each in whole} - {usual}):
        count = sum(each.row.device != usual for each in whole)
        lines.append(f"Times and memory are those of runs on {usual}; without {count} on {', '.join(others)}.")
    if len({each.row.seed for each in found}) == 1:
        lines.append("There is only one seed: a few tenths of a point may be chance; --seeds 3 shows how much.")
    return [*lines, *(f"{each.row.run} diverged: {each.row.diverged}" for each in found if each.row.diverged)]


def _spread(mean: float, half: float) -> Spread:
    return Spread(mean, None if math.isnan(half) else half)


def _both(spread: Spread) -> tuple[float, float]:
    return spread.mean, _number(spread.std)


def _usual_device(found: Sequence[Ended]) -> str:
    """Return the device that most runs had; "" if there are no runs."""
    return mode(each.row.device for each in found) if found else ""


def _costs(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean time of runs, and the mean memory of those whose memory is known."""
    memory = [row.peak_memory_mib for row in rows if not math.isnan(row.peak_memory_mib)]
    return _mean([row.seconds for row in rows]), _mean(memory)


def _mean(values: Sequence[float]) -> float:
    return Spread.of(values).mean if values else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _percent(fraction: float) -> str:
    return NOTHING if math.isnan(fraction) else f"{100 * fraction:.1f}"
