"""Trained weights that the runs of a comparison start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dirprune.lab.training import runs
from dirprune.lab.training.recipe import Recipe


def starting(recipe: Recipe, source: Path) -> Recipe:
    """Return the recipe of a run that starts from trained weights.

    Args:
        recipe: the recipe; its seed, and the data that it holds out, decide where ``source`` has several networks.
        source: a run or a file, for all runs alike; or the folder of a comparison, of which every run takes the dense
            network of its own seed, and a trial one that has not seen the data by which the trial is judged.

    Raises:
        ValueError: the folder of a comparison has no such network.
    """
    if (source / "config.json").exists() or not source.is_dir():
        return replace(recipe, start=str(source))
    held_out = recipe.task.validation
    for config in sorted([*source.glob("runs/*/config.json"), *source.glob("tuning/*/runs/*/config.json")]):
        there = runs.load(config.parent).recipe
        is_dense = there.method is None and there.optimizer.knob is None
        if is_dense and (there.seed, there.task.validation) == (recipe.seed, held_out):
            return replace(recipe, start=str(config.parent))
    raise ValueError(
        f"{source} has no dense run of seed {recipe.seed}"
        + (f" with {held_out:.0%} of the training data held out; train it with --tune, as here" if held_out else "")
        + f"; give a run, a file, or a comparison whose --methods have {recipe.optimizer.dense} and as many --seeds"
    )
