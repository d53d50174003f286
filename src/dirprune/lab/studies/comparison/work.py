"""Train the trials of a comparison of pruning methods. Every trial is an ordinary run under ``runs/``.

`comparison` makes tables of them. A trial that is in the tables has ended, whether or not its folder still exists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dirprune.lab.records.files import check_own
from dirprune.lab.studies.comparison.ranking import read_at
from dirprune.lab.studies.comparison.rows import Ended, Row, free, noted, read, shared
from dirprune.lab.studies.comparison.tables import ranking
from dirprune.lab.studies.comparison.tradeoff import Level
from dirprune.lab.studies.comparison.trials import TARGETED, Settings, comparable, rounded, run_name
from dirprune.lab.studies.comparison.tuning import Trial
from dirprune.lab.training import runs
from dirprune.lab.training.at_once import trained
from dirprune.lab.training.recipe import Recipe, differing
from dirprune.lab.training.series import Planned
from dirprune.lab.training.surroundings import Surroundings

MOST_VALUES = 8
"""Number of values of a knob at which a sweep is no longer widened; more values would hardly help."""


@dataclass(frozen=True)
class ComparisonStep:
    """Progress of a comparison: trial ``number`` after ``epoch`` epochs, with its ``row`` if the trial has ended."""

    number: int
    epoch: int
    note: str = ""
    row: Row | None = None

    @property
    def ended(self) -> bool:
        return self.row is not None


def compare(planned: Sequence[Recipe], out: Path, here: Surroundings) -> Iterator[ComparisonStep]:
    """Train the runs that have not ended yet, one after the other, each from its current epoch.

    A run that diverges counts as ended, and the comparison continues.

    Args:
        planned: the runs, see `dirprune.lab.studies.comparison.trials.plan`.
        out: folder of the comparison; the same folder continues it.
        here: where to train; ``stopping`` is called before each run, too.

    Raises:
        ValueError: the folder holds runs of another comparison, or links.
    """
    for folder in (out, out / "runs"):
        check_own(folder)
    elsewhere, options = [each.row for each in noted(out)], free(out)
    _check_alike(out, elsewhere, planned[0], here.device.type)
    ended = {row.run: row for row in elsewhere}
    missing = []
    for number, recipe in enumerate(planned, start=1):
        if run_name(recipe) in ended:
            yield ComparisonStep(number, recipe.epochs, row=ended[run_name(recipe)])
        else:
            missing.append((number, Planned(out / "runs" / run_name(recipe), recipe)))
    for step in trained([each for _, each in missing], here):
        row = Row.of(step.run.read(), options) if step.ended else None
        yield ComparisonStep(missing[step.number - 1][0], step.epoch, step.note, row)


def wider(planned: Sequence[Recipe], found: Sequence[Ended], sparsities: Sequence[float]) -> dict[str, list[float]]:
    """Return, for every method whose runs do not enclose all sparsities, the values of its knob and one more to try.

    The new value is twice the strongest or half the weakest, or the geometric mean of two whose runs are too far apart
    to interpolate. Methods with a preset sparsity, and those whose runs enclose all sparsities, are left out.

    Only the planned runs count, and earlier seeds before later ones. The same values are therefore chosen again,
    whatever else the folder holds, and when seeds are added.
    """
    more = {}
    names = {run_name(recipe) for recipe in planned}
    swept = [recipe.pruner for recipe in planned if recipe.pruner.knob not in (None, "sparsity")]
    for name in dict.fromkeys(pruner.name for pruner in swept):
        values = sorted({pruner.value for pruner in swept if pruner.name == name and pruner.value is not None})
        own = [one for one in found if one.row.method == name and one.row.run in names and not one.row.diverged]
        value = _missing(own, values, sparsities)
        if value is not None and len(values) < MOST_VALUES:
            more[name] = [*values, value]
    return more


def judged(folder: Path, number: int, settings: Mapping[str, Settings], sparsity: float) -> list[Trial]:
    """Return the score of every method in a trial, whose runs are in a folder of their own."""
    found = read(folder)
    scores = {row.method: row.score for row in ranking(found, [Level(sparsity)]) if row.rank or not row.asked_sparsity}
    trials = []
    for name, options in settings.items():
        own = [each.row for each in found if each.row.method == name]
        told = (json.dumps(dict(options)), scores.get(name, math.nan), len(own), sum(row.seconds for row in own))
        trials.append(Trial(name, number, sparsity, *told, own[0].commit if own else ""))
    return trials


def layers_left(found: Sequence[Ended]) -> dict[tuple[int, float], str]:
    """Return the zeros of each layer of gRDA's runs at a target, by seed and sparsity, for masks that are shuffled."""
    return {
        (each.row.seed, each.row.value): ",".join(f"{bar.sparsity:.9g}" for bar in each.layers)
        for each in found
        if each.row.method in TARGETED and each.layers
    }


def _missing(found: Sequence[Ended], values: Sequence[float], sparsities: Sequence[float]) -> float | None:
    """Return the value that the first incomplete seed needs, preferably beyond the present ones; None if none does."""
    for seed in sorted({one.row.seed for one in found}):
        own = [one for one in found if one.row.seed == seed]
        rows = sorted((one.row for one in own), key=lambda row: row.sparsity)
        beyond, between = [], []
        for sparsity in sparsities:
            reading = read_at([one.point() for one in own], sparsity)
            if reading.is_there and not reading.at_least:
                continue
            weaker = [row for row in rows if row.sparsity < sparsity]
            stronger = [row for row in rows if row.sparsity >= sparsity]
            if weaker and stronger:
                between.append((weaker[-1].value * stronger[0].value) ** 0.5)
            else:
                beyond.append(2 * max(r.value for r in weaker) if weaker else min(r.value for r in stronger) / 2)
        if new := [value for value in map(rounded, [*beyond, *between]) if value not in values]:
            return new[0]
    return None


def _check_alike(out: Path, elsewhere: Sequence[Row], recipe: Recipe, device_type: str) -> None:
    """Raise unless the runs in a folder can be compared with runs of this recipe, whatever their method."""
    precision, options = recipe.execution(device_type).precision, free(out)
    for config in sorted((out / "runs").glob("*/config.json")):
        there = runs.load(config.parent).recipe
        if other := differing(comparable(there), comparable(recipe), options):
            theirs, ours = (f"{other[0]}={each.values()[other[0]]}" for each in (there, recipe))
            raise ValueError(
                f"{config.parent} was trained with {theirs}, which cannot be compared with {ours}; give another --out"
            )
        if (other_precision := there.execution(device_type).precision) != precision:
            raise ValueError(
                f"{config.parent} is for {other_precision}, not {precision}; give --precision {other_precision}, or "
                "another --out"
            )
    for row in elsewhere:
        if row.recipe != shared(recipe, options):
            raise ValueError(
                f"{out / 'comparison.csv'} has runs of {row.recipe}, which cannot be compared with "
                f"{shared(recipe, options)}; give another --out"
            )
