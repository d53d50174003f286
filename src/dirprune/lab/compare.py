"""Pruning methods side by side: every trial is an ordinary run, under ``runs/``. `comparison` makes tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dirprune.lab import runs
from dirprune.lab.comparison import Row
from dirprune.lab.experiment import FREE_TO_CHANGE
from dirprune.lab.recipes import Recipe
from dirprune.lab.series import Planned, series
from dirprune.lab.trials import Trial

_CHOICES = {"optimizer", "method", "options", "c", "seed"} | FREE_TO_CHANGE
"""In what runs of one comparison may differ."""


@dataclass(frozen=True)
class Progress:
    """Where a comparison is: trial ``number``, after so many epochs; ``row`` when that trial has ended."""

    number: int
    trial: Trial
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
    _check_alike(out, trials)
    planned = [Planned(out / "runs" / trial.name, trial.recipe) for trial in trials]
    for step in series(planned, device=device, root=root, stopping=stopping):
        outcome = step.run.outcome() if step.ended else None
        row = Row.of(step.run, outcome) if outcome else None
        yield Progress(step.number, trials[step.number - 1], step.epoch, step.note, row)


def _check_alike(out: Path, trials: Sequence[Trial]) -> None:
    """Raise unless what a folder holds can be compared with these trials, which share what matters here."""
    for config in sorted((out / "runs").glob("*/config.json")):
        there, here = runs.load(config.parent).recipe, trials[0].recipe
        for name in (field.name for field in fields(Recipe) if field.name not in _CHOICES):
            if getattr(there, name) != getattr(here, name):
                raise ValueError(
                    f"{config.parent} was trained with {name}={getattr(there, name)}, which cannot be compared with "
                    f"{name}={getattr(here, name)}; give another --out"
                )
