"""Tables and figures of a comparison, made from the runs in its folder and from the table rows of runs elsewhere.

comparison.csv      one row per run
layers.csv          one row per layer of a run
ranking.csv         the methods at every requested sparsity
tradeoff.png        accuracy against sparsity
tradeoff-macs.png   accuracy against the share of the multiplications that is gone
layers-0.9.png      layerwise sparsity of each method's run nearest to a requested sparsity

Only config.json, environment.json, metrics.jsonl and outcome.json of a run are read. The first two tables stand in for
runs whose folders are gone, so with these tables alone a comparison can continue on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mode

from matplotlib.figure import Figure

from dirprune.lab import plots
from dirprune.lab.records.columns import Amount, Count, Fraction, Percent
from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.stats import Spread
from dirprune.lab.studies.comparison import figures as comparison_plots
from dirprune.lab.studies.comparison.figures import layer_bars
from dirprune.lab.studies.comparison.ranking import Point, paired_gap, rank
from dirprune.lab.studies.comparison.tradeoff import Curve, LayerBar, distance
from dirprune.lab.studies.comparison.trials import CONTESTANTS, known_as, setting
from dirprune.lab.text import NOTHING, duration
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.costs import macs_left, priced
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe
from dirprune.lab.training.recipes import departures
from dirprune.lab.training.runs import History, Outcome


@dataclass(frozen=True)
class Row:
    """A run that ended. ``sparsity`` counts weights only, which can be pruned. Unknown values are NaN.

    ``macs_left`` is the fraction of the multiplications that the zeros leave.

    For a run that diverged (``diverged`` says how), the numbers are those of its last good epoch.
    """

    run: str
    method: str
    knob: str
    value: float
    seed: int
    sparsity: Fraction
    overall_sparsity: Fraction
    test_accuracy: Percent
    test_loss: float
    seconds: Amount
    peak_memory_mib: Amount
    epochs: Count
    diverged: str
    commit: str
    device: str
    recipe: str
    """What all runs of a comparison share: the name of a recipe, and where they depart from it."""
    macs_left: Fraction = math.nan

    @property
    def is_dense(self) -> bool:
        return math.isnan(self.value)

    @property
    def setting(self) -> str:
        """The knob and its value: "c=8e-05", "" for dense training."""
        return setting(self.knob, None if self.is_dense else self.value)

    @property
    def title(self) -> str:
        return known_as(self.method).title

    @property
    def point(self) -> Point:
        return Point(self.method, self.setting, self.seed, self.sparsity, self.test_accuracy, self.macs_left)

    @staticmethod
    def of(run: History) -> Row:
        """Return the row of a run that has ended.

        Raises:
            ValueError: the records do not include the last epoch, whose numbers the row needs, or a setting is unknown.
        """
        run.check_known()
        pruner, records, outcome = run.recipe.pruner, run.records, run.outcome or Outcome()
        last = records[-1] if records else None
        reached = last.epoch if last else 0
        if reached < run.recipe.epochs and not outcome.diverged:
            raise ValueError(
                f"{run.folder / 'metrics.jsonl'} ends at epoch {reached}, but the run has {run.recipe.epochs}; restore "
                f"it from a copy, or remove {run.folder}: its row of the tables then counts, or it is trained again"
            )
        return Row(
            run=run.folder.name,
            method=pruner.label if run.recipe.method else pruner.name,
            knob=pruner.knob or "",
            value=_number(pruner.value),
            seed=run.recipe.seed,
            sparsity=last.weight_sparsity if last else math.nan,
            overall_sparsity=last.sparsity if last else math.nan,
            test_accuracy=last.test_accuracy if last else math.nan,
            test_loss=last.test_loss if last else math.nan,
            seconds=run.seconds,
            peak_memory_mib=_number(outcome.peak_memory_mib),
            epochs=len(records),
            diverged=outcome.diverged,
            commit=run.told("commit"),
            device=run.told("device"),
            recipe=shared(run.recipe),
            macs_left=_number(priced(outcome.zeros, run.recipe).cost_left_fraction if outcome.zeros else None),
        )


CHOICES = {"optimizer", "method", "options", "c", "lam", "seed"} | FREE_TO_CHANGE
"""Options in which runs of one comparison may differ."""

_OF_ONE_METHOD = {"mu", "exempt"}
"""Options that all runs of one method share, and that other methods do not have."""


def shared(recipe: Recipe) -> str:
    """Return a description of what a run shares with all others of its comparison.

    >>> shared(recipes.get("digits").but(epochs=3, c=0.1))
    'digits epochs=3'
    """
    known = recipe.name in recipes.names()
    return f"{recipe.name} {departures(recipe, CHOICES | _OF_ONE_METHOD) if known else ''}".rstrip()


@dataclass(frozen=True)
class LayerRow:
    """A layer of a run that ended without diverging."""

    run: str
    method: str
    value: float
    seed: int
    layer: str
    kind: str
    sparsity: Fraction


@dataclass(frozen=True)
class RankRow:
    """A method at a requested sparsity, over its seeds; see `dirprune.lab.studies.comparison.ranking.Standing`.

    ``gap`` is the difference from dense training with the same seeds, in points, and ``gap_margin`` half the length of
    its 95% confidence interval; unknown values are NaN. Costs are means over the method's runs on the device that most
    runs of the comparison had. Dense training comes first, with sparsity 0 and rank 0.
    """

    asked_sparsity: float
    rank: int
    method: str
    sparsity: float
    test_accuracy: float
    test_accuracy_std: float
    gap: float
    gap_margin: float
    seeds: int
    source: str
    seconds: float
    peak_memory_mib: float
    macs_left: float = math.nan

    def cells(self) -> dict[str, str]:
        """Return the row as text by column."""
        return {
            "rank": str(self.rank or NOTHING),
            "method": known_as(self.method).title,
            "from": self.source,
            "test accuracy (%)": _spread(self.test_accuracy, self.test_accuracy_std).text(2),
            "MACs left (%)": NOTHING if math.isnan(self.macs_left) else f"{100 * self.macs_left:.1f}",
            "− dense (95%)": "" if math.isnan(self.gap) else _spread(self.gap, self.gap_margin).text(2, signed=True),
            "seeds": str(self.seeds),
            "a run took": NOTHING if math.isnan(self.seconds) else duration(self.seconds),
            "MiB": NOTHING if math.isnan(self.peak_memory_mib) else f"{self.peak_memory_mib:.0f}",
        }


SPARE = ("MiB", "seeds", "a run took")
"""Columns that are dropped on a narrow terminal, in this order."""


@dataclass(frozen=True)
class Ended:
    """A run that ended, with the sparsity of its layers; none if it diverged."""

    row: Row
    layers: tuple[LayerBar, ...]


def read(out: Path) -> list[Ended]:
    """Return the runs of a folder that have ended, by method (ours first), knob and seed."""
    found = noted(out)
    for config in (out / "runs").glob("*/config.json"):
        run = runs.load(config.parent).read()
        if run.outcome is not None:
            row = Row.of(run)
            bars = layer_bars(row.title, run.outcome.zeros) if run.outcome.zeros else []
            found.append(Ended(row, tuple(bars)))
    order = {name: place for place, name in enumerate(CONTESTANTS)}

    def place(each: Ended) -> tuple[int, str, float, int]:
        value = 0.0 if each.row.is_dense else each.row.value
        return order.get(each.row.method, len(order)), each.row.method, value, each.row.seed

    return sorted(found, key=place)


def noted(out: Path) -> list[Ended]:
    """Return the runs that are in the tables of a folder, but have not ended in the folder itself."""
    layers: dict[str, list[LayerRow]] = {}
    for line in read_rows(out / "layers.csv", LayerRow):
        layers.setdefault(line.run, []).append(line)
    return [
        Ended(
            _with_macs(row, layers.get(row.run, ())),
            tuple(LayerBar(row.title, bar.layer, bar.kind, bar.sparsity) for bar in layers.get(row.run, ())),
        )
        for row in read_rows(out / "comparison.csv", Row)
        if not (out / "runs" / row.run / "outcome.json").exists()
    ]


def _with_macs(row: Row, layers: Sequence[LayerRow]) -> Row:
    """Return a row of a table, with the multiplications left if the table is too old to have them."""
    name = row.recipe.partition(" ")[0]
    if not math.isnan(row.macs_left) or name not in recipes.names() or "model=" in row.recipe:
        return row
    return replace(row, macs_left=macs_left(recipes.get(name), {bar.layer: bar.sparsity for bar in layers}))


def write(found: Sequence[Ended], out: Path, sparsities: Sequence[float]) -> list[Path]:
    """Write the tables and figures of a comparison, and return their paths."""
    layers = [
        LayerRow(each.row.run, each.row.method, each.row.value, each.row.seed, bar.layer, bar.kind, bar.sparsity)
        for each in found
        for bar in each.layers
    ]
    write_rows(out / "comparison.csv", Row, [each.row for each in found])
    write_rows(out / "layers.csv", LayerRow, layers)
    write_rows(out / "ranking.csv", RankRow, ranking(found, sparsities))
    paths = [out / "comparison.csv", out / "layers.csv", out / "ranking.csv"]
    return paths + [
        plots.save(plots.literal(draw()), out / f"{name}.png") for name, draw in figures(found, sparsities).items()
    ]


def figures(found: Sequence[Ended], sparsities: Sequence[float]) -> dict[str, Callable[[], Figure]]:
    """Return how the figures of a comparison are drawn, by the names of their files."""
    drawings: dict[str, Callable[[], Figure]] = {}
    if drawn := curves(found):
        drawings["tradeoff"] = partial(comparison_plots.tradeoff, drawn)
    counted = curves(found, _macs_gone)
    if not all(curve.is_dense for curve in counted):
        drawings["tradeoff-macs"] = partial(comparison_plots.tradeoff, counted, counted="multiplications gone")
    for sparsity in sparsities:
        if bars := nearest_layers(found, sparsity):
            title = f"runs nearest to {sparsity:.1%}"
            drawings[f"layers-{sparsity:g}"] = partial(comparison_plots.layerwise, bars, title=title)
    return drawings


def ranking(found: Iterable[Ended], sparsities: Iterable[float]) -> list[RankRow]:
    """Return dense training, then the methods ranked at every sparsity; runs that diverged are left out."""
    whole = [each for each in found if not each.row.diverged]
    usual = _usual_device(whole)
    timed = [each.row for each in whole if each.row.device == usual]
    dense = [each.row for each in whole if each.row.is_dense]
    rows = []
    if dense:
        numbers = (0.0, *_both(Spread.of([row.test_accuracy for row in dense])), math.nan, math.nan)
        rows.append(RankRow(0.0, 0, "sgd", *numbers, len(dense), "dense", *_costs(timed, "sgd"), 1.0))
    by_seed = {row.seed: row.test_accuracy for row in dense}
    for place in rank([each.row.point for each in whole if not each.row.is_dense], sparsities):
        numbers = (place.sparsity, *_both(place.accuracy), *paired_gap(place.accuracies, by_seed))
        told = (place.seeds, place.source, *_costs(timed, place.method), place.macs_left)
        rows.append(RankRow(place.asked, place.rank, place.method, *numbers, *told))
    return rows


def _sparsity(row: Row) -> float:
    return row.sparsity


def _macs_gone(row: Row) -> float:
    return 1 - row.macs_left


def curves(found: Iterable[Ended], gone: Callable[[Row], float] = _sparsity) -> list[Curve]:
    """Return a curve of accuracy against what is gone per method: means and stds over the seeds of each setting.

    ``gone`` tells the fraction for a run; settings of which it is not known are left out.
    """
    by_method: dict[str, dict[str, list[Row]]] = {}
    for each in found:
        if not each.row.diverged and (each.row.is_dense or not math.isnan(gone(each.row))):
            by_method.setdefault(each.row.title, {}).setdefault(each.row.setting, []).append(each.row)
    made = []
    for title, settings in by_method.items():
        accuracies = [_both(Spread.of([row.test_accuracy for row in rows])) for rows in settings.values()]
        is_dense = "" in settings
        zeros = [0.0 if is_dense else Spread.of([gone(row) for row in rows]).mean for rows in settings.values()]
        made.append(Curve(title, zeros, [mean for mean, _ in accuracies], [std for _, std in accuracies], is_dense))
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
    if "sgd" in costs:
        lines.append(
            "− dense: the difference to dense training of the same seeds, in points, ± its 95% confidence interval "
            "over seeds; an interval that contains 0 does not distinguish the two."
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


def _costs(rows: Sequence[Row], method: str) -> tuple[float, float]:
    """Return the mean time of a method's runs among the rows, and the mean memory of those whose memory is known."""
    seconds = [row.seconds for row in rows if row.method == method]
    memory = [row.peak_memory_mib for row in rows if row.method == method and not math.isnan(row.peak_memory_mib)]
    return _mean(seconds), _mean(memory)


def _mean(values: Sequence[float]) -> float:
    return Spread.of(values).mean if values else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value
