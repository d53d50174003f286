"""The rows of a comparison: one per run that ended, from the runs in its folder and from the tables of runs elsewhere.

Only config.json, environment.json, metrics.jsonl and outcome.json of a run are read. comparison.csv and layers.csv
stand in for runs whose folders are gone, so with these tables alone a comparison can continue on another machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dirprune import SparsityReport
from dirprune.lab.methods import METHODS, Narrow
from dirprune.lab.models.weights import kind_of
from dirprune.lab.records.columns import Amount, Count, Fraction, Percent
from dirprune.lab.records.files import as_read
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.comparison.ranking import Point, Reached
from dirprune.lab.studies.comparison.tradeoff import SHORTCUT, STEM, WEIGHTS, LayerBar
from dirprune.lab.studies.comparison.trials import CONTESTANTS, comparable, enter, known_as, setting
from dirprune.lab.studies.comparison.tuning import OPTIONS, TABLE
from dirprune.lab.tasks import Images, Measure, Text
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.costs import macs_left, multiplied, narrowing, priced
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe
from dirprune.lab.training.recipes import departures
from dirprune.lab.training.runs import History, Outcome

CHOICES = {"optimizer", "method", "options", "c", "lam", "of", "seed", "start"} | FREE_TO_CHANGE
"""Options in which runs of one comparison may differ."""

TUNED = {"lr", "weight_decay"}
"""Those in which they may differ besides, if every method has been tuned."""

_OF_ONE_METHOD = {"exempt", "ramp", "rescale", "decay", *(option for options in OPTIONS.values() for option in options)}
"""Options that all runs of one method share, and that other methods do not have."""


def free(out: Path) -> set[str]:
    """Return the options in which the runs of a folder may differ."""
    return CHOICES | _OF_ONE_METHOD | (TUNED if (out / TABLE).exists() else set())


@dataclass(frozen=True)
class Row:
    """A run that ended. ``sparsity`` counts weights that are multiplied, no biases and no tables. Unknown: NaN.

    ``macs_left`` is the fraction of the multiplications that the zeros leave, ``settings`` where the whole recipe of
    the run departs from the registered one, as JSON.

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
    task: str = Images.name
    settings: str = ""

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
    def measure(self) -> Measure:
        return (Text if self.task == Text.name else Images).measure

    def gone(self, of: str) -> float:
        """Return the share of the weights, or of the multiplications, that the zeros take away."""
        return self.sparsity if of == WEIGHTS else 1 - self.macs_left

    @property
    def score(self) -> float:
        """The number by which methods are ranked."""
        return float(getattr(self, self.measure.column))

    @staticmethod
    def of(run: History, free: set[str]) -> Row:
        """Return the row of a run that has ended, in a folder whose runs are `free` to differ in these options.

        Raises:
            ValueError: the records do not include the last epoch, whose numbers the row needs, or a setting is unknown.
        """
        run.run.check_known()
        pruner, records, outcome = run.recipe.pruner, run.records, run.outcome or Outcome()
        zeros = priced(outcome.zeros, run.recipe) if outcome.zeros else None
        last = records[-1] if records else None
        reached = last.epoch if last else 0
        if reached < run.recipe.epochs and not outcome.diverged:
            raise ValueError(
                f"{run.folder / 'metrics.jsonl'} ends at epoch {reached}, but the run has {run.recipe.epochs}; restore "
                f"it from a copy, or remove {run.folder}: its row of the tables then counts, or it is trained again"
            )
        gone = _number(None if last is None else share_of_weights(zeros) if zeros else last.weight_sparsity)
        saved = _number(1 - zeros.cost_left_fraction if zeros and zeros.cost_left_fraction is not None else None)
        if run.recipe.method and run.recipe.method.variant.kind is Narrow:
            gone, saved = narrowing(run.recipe, comparable(run.recipe).model)
        return Row(
            run=run.folder.name,
            method=pruner.name,
            knob=pruner.knob or "",
            value=_number(pruner.value),
            seed=run.recipe.seed,
            sparsity=gone,
            overall_sparsity=last.sparsity if last else math.nan,
            test_accuracy=last.test_accuracy if last else math.nan,
            test_loss=last.test_loss if last else math.nan,
            seconds=run.seconds,
            peak_memory_mib=_number(outcome.peak_memory_mib),
            epochs=len(records),
            diverged=outcome.diverged,
            commit=run.told("commit"),
            device=run.told("device"),
            recipe=shared(run.recipe, free),
            macs_left=1 - saved,
            task=run.recipe.task.name,
            settings=as_text(run.recipe),
        )


def share_of_weights(zeros: SparsityReport) -> float:
    """Return the share of zeros in the weights that are multiplied."""
    weights = multiplied(zeros)
    return sum(layer.zeros for layer in weights) / max(1, sum(layer.total for layer in weights))


def shared(recipe: Recipe, free: set[str]) -> str:
    """Return a description of what a run shares with all others of its comparison.

    >>> shared(recipes.get("digits").but(epochs=3, c=0.1), CHOICES)
    'digits epochs=3'
    """
    known = recipe.name in recipes.names()
    return f"{recipe.name} {departures(comparable(recipe), free) if known else ''}".rstrip()


def as_text(recipe: Recipe) -> str:
    """Return where a recipe departs from the registered one of its name, as JSON; all of it if there is none.

    >>> as_text(recipes.get("digits").but(epochs=3))
    '{"epochs": 3}'
    """
    usual = as_read(recipes.get(recipe.name).to_dict()) if recipe.name in recipes.names() else {}
    own = as_read(recipe.to_dict())
    return json.dumps({name: value for name, value in own.items() if name not in usual or usual[name] != value})


def recipe_of(row: Row) -> Recipe:
    """Return the recipe of a run, from its row alone.

    Raises:
        ValueError: the row is from before settings were noted and does not tell them by its recipe either.
    """
    name, _, others = row.recipe.partition(" ")
    if row.settings:
        usual = recipes.get(name).to_dict() if name in recipes.names() else {}
        try:
            return Recipe.from_dict({**as_read(usual), **json.loads(row.settings)})
        except runs.NO_RECIPE as error:
            raise ValueError(
                f"the row of {row.run} holds no settings of a run: {error}; restore comparison.csv from a copy"
            ) from error
    if others or name not in recipes.names() or row.method not in CONTESTANTS:
        raise ValueError(
            f"the row of {row.run} does not hold the settings of its run ({row.recipe}); only the command that trained "
            "the comparison repeats it"
        )
    return enter(recipes.get(name).but(seed=row.seed), row.method, None if row.is_dense else row.value)


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
class Ended:
    """A run that ended, with the sparsity of its layers; none if it diverged."""

    row: Row
    layers: tuple[LayerBar, ...]

    def point(self, of: str = WEIGHTS) -> Point:
        """Return what it reached, for a ranking at equal weights or at equal multiplications."""
        row = self.row
        ends = (self.layers[0].sparsity, self.layers[-1].sparsity) if self.layers else (math.nan, math.nan)
        reached = Reached(row.score, row.macs_left, *ends, weights_left=1 - row.sparsity)
        return Point(row.method, row.setting, row.seed, row.gone(of), reached)


def read(out: Path) -> list[Ended]:
    """Return the runs of a folder that have ended, by method (ours first), knob and seed."""
    found, options = noted(out), free(out)
    for config in (out / "runs").glob("*/config.json"):
        run = runs.load(config.parent).read()
        if run.outcome is not None:
            row, zeros = Row.of(run, options), run.outcome.zeros
            is_pruned = zeros and row.method not in (name for name, each in METHODS.items() if each.kind is Narrow)
            bars = layer_bars(row.title, priced(zeros, run.recipe)) if zeros and is_pruned else []
            found.append(Ended(row, tuple(bars)))
    order = {name: place for place, name in enumerate(CONTESTANTS)}

    def place(each: Ended) -> tuple[int, str, float, int]:
        value = 0.0 if each.row.is_dense else each.row.value
        return order.get(each.row.method, len(order)), each.row.method, value, each.row.seed

    return sorted(found, key=place)


def layer_bars(method: str, report: SparsityReport) -> list[LayerBar]:
    """Return the weights of a network's sparsity report with their kinds, to be drawn; no tables, which cost 0.

    >>> import torch
    >>> from dirprune import sparsity
    >>> layer_bars("gRDA", sparsity(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1))))[1]
    LayerBar(method='gRDA', layer='1', kind='conv 1×1', sparsity=0.0)
    """
    bars: list[LayerBar] = []
    for layer in (layer for layer in report.layers if layer.is_weight and layer.cost != 0):
        kind = kind_of(layer)
        if kind != "linear" and not bars:
            kind = STEM
        elif "downsample" in layer.name or "shortcut" in layer.name:
            kind = SHORTCUT
        bars.append(LayerBar(method, layer.name.removesuffix(".weight"), kind, layer.fraction))
    return bars


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


def layer_rows(found: Sequence[Ended]) -> list[LayerRow]:
    """Return the rows of layers.csv."""
    return [
        LayerRow(each.row.run, each.row.method, each.row.value, each.row.seed, bar.layer, bar.kind, bar.sparsity)
        for each in found
        for bar in each.layers
    ]


def _with_macs(row: Row, layers: Sequence[LayerRow]) -> Row:
    """Return a row of a table, with the multiplications left if the table is too old to have them."""
    name = row.recipe.partition(" ")[0]
    if not math.isnan(row.macs_left) or name not in recipes.names() or "model=" in row.recipe:
        return row
    return replace(row, macs_left=macs_left(recipes.get(name), {bar.layer: bar.sparsity for bar in layers}))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
