"""Pruning methods side by side: every trial is an ordinary run, under ``runs/``. `comparison` makes tables of them.

A trial that the tables know has ended, whether or not its folder is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dirprune.lab import runs
from dirprune.lab.comparison import CHOICES, Row, noted, shared
from dirprune.lab.recipes import Recipe, differing
from dirprune.lab.series import Planned, series
from dirprune.lab.trials import Trial


@dataclass(frozen=True)
class Progress:
    """Where a comparison is: trial ``number``, after so many epochs; ``row`` when that trial has ended."""

    number: int
    epoch: int
    note: str = ""
    row: Row | None = None

    @property
    def ended(self) -> bool:
        return self.row is not None


def compare(
    trials: Sequence[Trial],
    out: Path,
    *,
    device: torch.device,
    root: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Progress]:
    """Train the trials that have not ended yet, one after the other, each from where it stands.

    A trial that diverges has ended too, and the comparison goes on.

    Args:
        trials: see `dirprune.lab.trials.plan`.
        out: folder of the comparison; the same one goes on with it.
        device, root: where to train, and where the data are.
        stopping: asked before each trial and after each epoch; True saves and ends.

    Raises:
        ValueError: the folder holds runs of another comparison.
    """
    elsewhere = [each.row for each in noted(out)]
    _check_alike(out, elsewhere, trials[0].recipe)
    ended = {row.run: row for row in elsewhere}
    for number, trial in enumerate(trials, start=1):
        if trial.name in ended:
            yield Progress(number, trial.recipe.epochs, row=ended[trial.name])
    numbers = [number for number, trial in enumerate(trials, start=1) if trial.name not in ended]
    planned = [Planned(out / "runs" / trials[n - 1].name, trials[n - 1].recipe) for n in numbers]
    for step in series(planned, device=device, root=root, stopping=stopping):
        outcome = step.run.outcome() if step.ended else None
        row = Row.of(step.run, outcome) if outcome else None
        yield Progress(numbers[step.number - 1], step.epoch, step.note, row)


def _check_alike(out: Path, elsewhere: Sequence[Row], recipe: Recipe) -> None:
    """Raise unless what a folder holds can be compared with runs of this recipe, whatever their method."""
    for config in sorted((out / "runs").glob("*/config.json")):
        there = runs.load(config.parent).recipe
        if other := differing(there, recipe, CHOICES):
            theirs, ours = (f"{other[0]}={getattr(each, other[0])}" for each in (there, recipe))
            raise ValueError(
                f"{config.parent} was trained with {theirs}, which cannot be compared with {ours}; give another --out"
            )
    for row in elsewhere:
        if row.recipe != shared(recipe):
            raise ValueError(
                f"{out / 'comparison.csv'} has runs of {row.recipe}, which cannot be compared with "
                f"{shared(recipe)}; give another --out"
            )
