"""Pruning methods side by side: every trial is an ordinary run, under ``runs/``. `comparison` makes tables of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from dirprune.lab import checkpoint, runs
from dirprune.lab.comparison import Row
from dirprune.lab.experiment import FREE_TO_CHANGE, Diverged, conduct
from dirprune.lab.recipes import Recipe
from dirprune.lab.runs import Run
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
    for number, trial in enumerate(trials, start=1):
        run = _open(out / "runs" / trial.name, trial.recipe)
        if run.outcome() is None:
            if stopping():
                return
            _clear(trial)
            yield Progress(number, trial, max(checkpoint.epochs(run.checkpoints), default=0))
            try:
                for record in conduct(run, device=device, root=root, stopping=stopping):
                    note = f"accuracy {record.test_accuracy:.2f}%, {record.weight_sparsity:.1%} of weights zero"
                    yield Progress(number, trial, record.epoch, note)
            except Diverged as error:
                yield Progress(number, trial, len(run.records()), str(error))
            except ValueError:
                if not run.begun:
                    run.discard()  # it would stand in the way of what is tried instead
                raise
            if run.outcome() is not None:
                checkpoint.prune(run.checkpoints, keep=trial.recipe.keep, last=1)  # nobody goes back from here
        outcome = run.outcome()
        if outcome is None:  # it was asked to stop
            return
        yield Progress(number, trial, trial.recipe.epochs, row=Row.of(run, outcome))


def _open(folder: Path, recipe: Recipe) -> Run:
    """Return the run in a folder, made if it is not there."""
    return runs.load(folder) if (folder / "config.json").exists() else runs.create(folder, recipe)


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


def _clear(trial: Trial) -> None:
    """Let go of the last trial's memory and, where its compiled code cannot serve the next one, of that.

    Models of one class share their compiled code, whatever masks they train under. Those of STR are of new classes each
    time; a few of them would fill the cache, whereupon torch stops compiling.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if trial.contestant.method == "str":
        torch.compiler.reset()
