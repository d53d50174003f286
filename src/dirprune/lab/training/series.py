"""The runs of a series, for `dirprune compare`, `dirprune tune` and `dirprune reproduce`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dirprune.lab.records import checkpoint
from dirprune.lab.training import runs
from dirprune.lab.training.experiment import Diverged, conduct
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe, differing
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings


@dataclass(frozen=True)
class Planned:
    """A run of a series, whether or not its folder exists yet; ``weights`` says whether its network is read later."""

    folder: Path
    recipe: Recipe
    weights: bool = False

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def over(self) -> bool:
        """Whether nothing is left to train."""
        return (self.folder / "outcome.json").exists()

    def steps(self, here: Surroundings) -> Iterator[RunStep]:
        """Train the run alone if it has not ended, from its current epoch; one that diverges counts as ended.

        Args:
            here: where to train; ``stopping`` is called before the run, too.

        Raises:
            ValueError: the folder holds another run.
        """
        run = _open(self)
        if run.outcome() is None:
            if here.stopping():
                return
            _clear(self.recipe)
            yield RunStep(1, run, run.saved)
            try:
                for record in conduct(run, here):
                    note = f"accuracy {record.test_accuracy:.2f}%, {record.weight_sparsity:.1%} of weights zero"
                    yield RunStep(1, run, record.epoch, note)
            except Diverged as error:
                yield RunStep(1, run, len(run.records()), str(error))
            except (ValueError, OSError):  # e.g. the data are missing
                if not run.begun:
                    run.discard()  # it would block the next attempt
                raise
            if run.outcome() is not None:
                checkpoint.prune(run.checkpoints, keep=run.recipe.keep, last=1)  # older ones are not needed any more
        if run.outcome() is not None:  # otherwise ``stopping`` returned True
            yield RunStep(1, run, self.recipe.epochs, ended=True)


@dataclass(frozen=True)
class RunStep:
    """Progress of a series: run ``number``, counted from 1, after ``epoch`` epochs, and whether it has ended."""

    number: int
    run: Run
    epoch: int
    note: str = ""
    ended: bool = False


def _open(plan: Planned) -> Run:
    """Open the planned run, or create it. An existing run keeps the checkpoints that either recipe keeps."""
    if not (plan.folder / "config.json").exists():
        return runs.create(plan.folder, plan.recipe)
    run = runs.load(plan.folder)
    if other := differing(run.recipe, plan.recipe, FREE_TO_CHANGE):
        there, here = (recipe.values()[other[0]] for recipe in (run.recipe, plan.recipe))
        raise ValueError(f"{plan.folder} holds a run with {other[0]}={there}, not {here}; give another folder")
    return runs.keeping(run, plan.recipe.keep)


def _clear(recipe: Recipe) -> None:
    """Release the memory of the last run, and its compiled code if the next run cannot reuse it.

    Models of one class share their compiled code, whatever their masks. STR creates new classes for every run; after a
    few of them the cache would be full, and torch would stop compiling.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if recipe.method and recipe.method.variant.kind.makes_classes:
        torch.compiler.reset()
