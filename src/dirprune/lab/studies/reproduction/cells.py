"""Compare our runs with the published ones, cell by cell.

A run counts only if it follows its recipe exactly (`recipes.departures`). The published schedule depends on the total
length, so the first 60 of 600 epochs differ from a run of 60. An unfinished run counts up to its last epoch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dirprune.lab import published
from dirprune.lab.names import unknown
from dirprune.lab.published import Estimate, PublishedCell, Setting
from dirprune.lab.studies.reproduction import ledger
from dirprune.lab.studies.reproduction.ledger import Recorded
from dirprune.lab.training import recipes
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.recipe import Recipe

SURPRISING = 0.001
"""Cells whose `Cell.chance` is below this need an explanation; the page lists them."""


BY_INFORMATION: dict[str, tuple[float | None, ...]] = {
    "vgg16-cifar10": (None, 0.6, 0.51, 0.7, 0.4),
    "wrn28x10-cifar10": (0.55, None, 0.65, 0.501, 0.6),
    "wrn28x10-cifar100": (0.55, None, 0.65, 0.501, 0.6),
}
"""The settings of each experiment by their μ (None for SGD), in the order of training: most informative first."""


@dataclass(frozen=True)
class Cell:
    """A published number and our measurements of it: one value per seed, none while it is missing."""

    published: PublishedCell
    ours: tuple[float, ...] = ()

    @property
    def missing(self) -> bool:
        return not self.ours

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ours) if self.ours else math.nan

    @property
    def deviation(self) -> float | None:
        """The difference of our mean from the printed one, in printed stds."""
        return deviation(self.mean, self.published.paper)

    @property
    def comparable_deviation(self) -> float | None:
        """The difference of our mean from that of the authors' comparable runs, in sample stds.

        Comparable runs are those that measured as ours do.
        """
        return deviation(self.mean, self.published.comparable)

    @property
    def chance(self) -> float | None:
        """The probability that runs like the authors' lie at least as far from their comparable mean as ours."""
        return None if self.missing else chance(self.mean, len(self.ours), self.published.comparable)


def deviation(mean: float, estimate: Estimate) -> float | None:
    """Return (mean − estimate.mean)/estimate.std; None if the mean is NaN, or all their runs logged the same digits.

    >>> deviation(79.43, Estimate(79.63, 0.2, 9))
    -1.0
    """
    if math.isnan(mean) or estimate.std == 0:
        return None
    return round((mean - estimate.mean) / estimate.std, 9)


def chance(mean: float, n: int, estimate: Estimate) -> float | None:
    """Return the two-sided p-value of a mean of ``n`` runs, if they come from the distribution of the estimate.

        t = (mean − m)/(s·√(1/n + 1/N)),   Student with N−1 degrees of freedom

    for the estimate's mean m, sample std s and number of runs N. None if s is 0.
    """
    from scipy.stats import t as student

    if estimate.std == 0:
        return None
    t = (mean - estimate.mean) / (estimate.std * math.sqrt(1 / n + 1 / estimate.n))
    return float(2 * student.sf(abs(t), estimate.n - 1))


def compared(runs: Iterable[Recorded]) -> list[Cell]:
    """Return every cell of the published CIFAR tables with our measurements."""
    groups = reproductions(runs)
    by_setting = {
        setting: [{epoch.epoch: epoch for epoch in run.epochs} for run in runs] for setting, runs in groups.items()
    }
    return [
        Cell(
            cell,
            tuple(
                value(epochs[cell.epoch], cell.metric)
                for epochs in by_setting.get(cell.setting, [])
                if cell.epoch in epochs
            ),
        )
        for cell in published.cells()
    ]


def reproductions(runs: Iterable[Recorded]) -> dict[Setting, list[Recorded]]:
    """Return the runs with at least one epoch that follow a published recipe, by setting, published or not."""
    groups: dict[Setting, list[Recorded]] = {}
    for run in runs:
        if run.epochs and not run.entry.departs and run.entry.recipe in published.EXPERIMENTS:
            groups.setdefault(setting_of(run), []).append(run)
    return groups


def wanted(results: Path, *, experiments: Iterable[str] = published.EXPERIMENTS, seeds: int = 1) -> list[Recipe]:
    """Return the published runs that the ledger lacks, the most informative first.

    A setting has enough when ``seeds`` runs of it are complete or diverged, whatever their seeds. Missing runs get the
    smallest free seeds from 1 on. Every setting comes once before any comes a second time.

    Raises:
        ValueError: an experiment is not among the published ones.
    """
    done: dict[Setting, set[int]] = {}
    for setting, runs in reproductions(ledger.read(results)).items():
        done[setting] = {run.entry.seed for run in runs if run.entry.complete != "no"}
    rounds: list[tuple[int, Recipe]] = []
    for experiment in experiments:
        if experiment not in BY_INFORMATION:
            raise unknown("published experiment", experiment, BY_INFORMATION)
        by_mu = {setting.mu: setting for setting in published.settings(experiment)}
        for setting in (by_mu[mu] for mu in BY_INFORMATION[experiment]):
            there = done.get(setting, set())
            free = (seed for seed in itertools.count(1) if seed not in there)
            rounds += [(number, _recipe(setting, next(free))) for number in range(len(there), seeds)]
    return [recipe for _, recipe in sorted(rounds, key=lambda each: each[0])]


def _recipe(setting: Setting, seed: int) -> Recipe:
    recipe = recipes.get(setting.experiment).but(optimizer=setting.optimizer, seed=seed)
    if setting.c is None or setting.mu is None:
        return recipe
    return recipe.but(c=setting.c, mu=setting.mu)


def setting_of(run: Recorded) -> Setting:
    entry = run.entry
    if entry.optimizer == "sgd":
        return Setting(entry.recipe, "sgd")
    return Setting(entry.recipe, entry.optimizer, entry.c, entry.mu)


def value(record: EpochRecord, metric: str) -> float:
    """Return a metric of an epoch in the unit of the published tables: sparsity in percent."""
    number = float(getattr(record, metric))
    return 100 * number if metric == "sparsity" else number


SPARE = ("runs", "off by those", "comparable logs")
"""Columns that are dropped on a narrow terminal, in this order."""


def tables(cells: Iterable[Cell]) -> dict[str, list[dict[str, str]]]:
    """Return the cells that have runs, by setting, as rows of text by column."""
    found = {}
    for setting, group in by_setting(cells).items():
        if have := [cell for cell in group if not cell.missing]:
            found[f"{setting.experiment}, {setting}"] = [_row(cell) for cell in have]
    return found


def by_setting(cells: Iterable[Cell]) -> dict[Setting, list[Cell]]:
    groups: dict[Setting, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.published.setting, []).append(cell)
    return groups


def conclusion(cells: Sequence[Cell]) -> list[str]:
    """Return up to five sentences: how many cells have runs, how far off these are, where most, and what is missing."""
    have = [cell for cell in cells if not cell.missing]
    settings = by_setting(cells)
    lines = [f"{len(have)} of {len(cells)} published cells have a run of ours."]
    if measured := [cell for cell in have if cell.comparable_deviation is not None]:
        seen, expected = sum(map(is_beyond, measured)), sum(map(chance_beyond, measured))
        lines.append(
            f"Beyond {FAR}σ of the authors' comparable runs: {seen} of {len(measured)} cells, where {expected:.0f} are "
            "expected of runs like theirs."
        )
        groups: dict[str, list[Cell]] = {}
        for cell in measured:
            name = f"{cell.published.setting.experiment}, {cell.published.setting}, {_words(cell.published.metric)}"
            groups.setdefault(name, []).append(cell)
        name, most = max(groups.items(), key=lambda group: sum(map(is_beyond, group[1])))
        if count := sum(map(is_beyond, most)):
            lines.append(f"Most often: {name}, {count} of {len(most)} cells.")
    if flat := [cell for cell in have if cell.comparable_deviation is None]:
        furthest = max(abs(cell.mean - cell.published.comparable.mean) for cell in flat)
        lines.append(
            f"In {len(flat)} more all their runs logged the same digits; ours differ by at most {furthest:.2g}."
        )
    without = [s for s, group in settings.items() if all(cell.missing for cell in group)]
    begun = [s for s, group in settings.items() if s not in without and any(cell.missing for cell in group)]
    if without or begun:
        lines.append(
            f"Of {len(settings)} settings, {len(without)} have no run yet, and {len(begun)} an unfinished one."
        )
    return lines


FAR = 2
"""A cell counts as far off beyond so many stds."""


def is_beyond(cell: Cell) -> bool:
    """Return whether our mean lies more than `FAR` stds from that of the authors' comparable runs."""
    return cell.comparable_deviation is not None and abs(cell.comparable_deviation) > FAR


def chance_beyond(cell: Cell) -> float:
    """Return the probability that a mean of as many runs of theirs would lie beyond `FAR` stds of the others."""
    theirs = cell.published.comparable
    return chance(theirs.mean + FAR * theirs.std, len(cell.ours), theirs) or 0.0


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def surprising(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that deviate by more than the variation between seeds explains, the least likely first."""
    odd = [(cell.chance, i, cell) for i, cell in enumerate(cells) if cell.chance is not None]
    return [cell for p, _, cell in sorted(odd, key=lambda item: item[:2]) if p < SURPRISING]


def around(cell: Cell, runs: Iterable[Recorded], *, reach: int = 10) -> tuple[float, float] | None:
    """Return our mean and the authors' over the same epochs near a cell's, without its own; None if there are none.

    This distinguishes a single odd epoch from a run that is off throughout. After epoch 20, the authors' means are
    known for every fifth epoch only.
    """
    given = cell.published
    band = published.bands(given.setting.experiment)[given.setting, given.metric]
    means = dict(zip(band.epochs, band.mean, strict=True))
    near = {epoch for epoch in means if 0 < abs(epoch - given.epoch) <= reach}
    ours = [epoch for run in runs for epoch in run.epochs if epoch.epoch in near]
    if not ours:
        return None
    theirs = (means[epoch.epoch] for epoch in ours)  # an epoch counts as often as ours
    return statistics.fmean(value(epoch, given.metric) for epoch in ours), statistics.fmean(theirs)


def missing(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each setting with cells that no run of ours has reached."""
    lines = []
    for setting, group in by_setting(cells).items():
        epochs = sorted({cell.published.epoch for cell in group if cell.missing})
        if len(epochs) == len({cell.published.epoch for cell in group}):
            lines.append(f"{setting.experiment}, {setting}: no run yet")
        elif epochs:
            lines.append(f"{setting.experiment}, {setting}: epochs {', '.join(map(str, epochs))}")
    return lines


def _row(cell: Cell) -> dict[str, str]:
    given = cell.published
    digits = 3 if given.metric.endswith("loss") else 2
    paper, logs = (f"{e.mean:.{digits}f} ± {e.std:.{digits}f}" for e in (given.paper, given.comparable))
    return {
        "metric": given.metric.replace("accuracy", "acc.").replace("_", " "),
        "epoch": str(given.epoch),
        "ours": f"{cell.mean:.{digits}f}",
        "runs": str(len(cell.ours)),
        "paper": paper,
        "off by": format_deviation(cell.mean, given.paper),
        "comparable logs": f"{logs} ({given.comparable.n})",
        "off by those": format_deviation(cell.mean, given.comparable),
    }


def format_deviation(mean: float, estimate: Estimate) -> str:
    """Return a deviation as text for a table: in stds with a σ, or the plain difference if the std is 0.

    >>> format_deviation(79.43, Estimate(79.63, 0.2, 9)), format_deviation(5.18, Estimate(5.19, 0.0, 9))
    ('−1.0σ', '−0.01')
    """
    stds = deviation(mean, estimate)
    shown = f"{mean - estimate.mean:+.2g}" if stds is None else f"{stds:+.1f}σ"
    return shown.replace("-", "−")
