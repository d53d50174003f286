"""Runs one after the other, each from where it stands: what `dirprune compare` and `dirprune reproduce` train by."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dirprune.lab import checkpoint, runs
from dirprune.lab.experiment import Diverged, conduct
from dirprune.lab.recipes import FREE_TO_CHANGE, Recipe, differing
from dirprune.lab.runs import Run


@dataclass(frozen=True)
class Planned:
    """A run that a series consists of, whether or not its folder is there yet."""

    folder: Path
    recipe: Recipe


@dataclass(frozen=True)
class Step:
    """Where a series is: its run ``number``, from 1, after so many epochs; ``ended`` once that run has."""

    number: int
    run: Run
    epoch: int
    note: str = ""
    ended: bool = False


def series(
    planned: Sequence[Planned],
    *,
    device: torch.device,
    root: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Train the runs that have not ended yet; one that diverges has ended too, and the series goes on.

    Args:
        planned: the runs; those whose folders are there go on.
        device, root: where to train, and where the data are.
        stopping: asked before each run and after each epoch; True saves and ends.

    Raises:
        ValueError: a folder holds another run.
    """
    for number, plan in enumerate(planned, start=1):
        run = _open(plan)
        if run.outcome() is None:
            if stopping():
                return
            _clear(plan.recipe)
            yield Step(number, run, run.saved)
            try:
                for record in conduct(run, device=device, root=root, stopping=stopping):
                    note = f"accuracy {record.test_accuracy:.2f}%, {record.weight_sparsity:.1%} of weights zero"
                    yield Step(number, run, record.epoch, note)
            except Diverged as error:
                yield Step(number, run, len(run.records()), str(error))
            except (ValueError, OSError):  # as when the data are not there
                if not run.begun:
                    run.discard()  # it would stand in the way of what is tried instead
                raise
            if run.outcome() is not None:
                checkpoint.prune(run.checkpoints, keep=run.recipe.keep, last=1)  # nobody goes back from here
        if run.outcome() is None:  # it was asked to stop
            return
        yield Step(number, run, plan.recipe.epochs, ended=True)


def _open(plan: Planned) -> Run:
    """Return the run that is planned, made if it is not there; one that is keeps what either asks to be kept."""
    if not (plan.folder / "config.json").exists():
        return runs.create(plan.folder, plan.recipe)
    run = runs.load(plan.folder)
    if other := differing(run.recipe, plan.recipe, FREE_TO_CHANGE):
        there, here = (getattr(recipe, other[0]) for recipe in (run.recipe, plan.recipe))
        raise ValueError(f"{plan.folder} holds a run with {other[0]}={there}, not {here}; give another folder")
    return runs.keeping(run, plan.recipe.keep)


def _clear(recipe: Recipe) -> None:
    """Let go of the last run's memory and, where its compiled code cannot serve the next one, of that.

    Models of one class share their compiled code, whatever masks they train under. Those of STR are of new classes each
    time; a few of them would fill the cache, whereupon torch stops compiling.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if recipe.method == "str":
        torch.compiler.reset()
