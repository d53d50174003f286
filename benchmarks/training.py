"""How the benchmarks train: a recipe in memory, told by the test set even where images are held out."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from dirprune.lab.baselines import Method
from dirprune.lab.experiment import assemble, make_method
from dirprune.lab.recipes import Recipe
from dirprune.lab.reward import Reward, Sample
from dirprune.lab.train import EpochRecord, evaluate, train

CPU = torch.device("cpu")


def trained(recipe: Recipe, method: Method | None = None, root: Path | None = None) -> list[EpochRecord]:
    """Train a recipe on the CPU, as `dirprune compare` would, and return its epochs; the last is tested on all images.

    Args:
        recipe: what to train; a method that searches is rewarded by what it holds out.
        method: in the place of the recipe's own, not yet attached.
        root: folder of the data.

    >>> from dirprune.lab import recipes
    >>> [record.epoch for record in trained(recipes.changed(recipes.get("digits"), epochs=2))]
    [1, 2]
    """
    execution = recipe.execution(CPU.type)
    with execution.threading():
        parts = assemble(recipe, device=CPU, root=root)
        images, test = parts.loaders.train, parts.loaders.test
        method = method or make_method(recipe, Reward(parts.loaders, execution))
        method.attach(parts.model, parts.optimizer, steps=recipe.epochs * len(images), examples=images.examples)
        records = list(
            train(
                parts.model,
                parts.optimizer,
                images,
                Sample(tuple(islice(test, 1)), test.batch_size, test.batch_size),  # testing takes its time
                epochs=recipe.epochs,
                lr=recipe.lr,
                schedule=recipe.schedule,
                seed=recipe.seed,
                execution=execution,
                method=method,
            )
        )
        score = evaluate(parts.model, test, execution=execution)
    return [*records[:-1], replace(records[-1], test_loss=score.loss, test_accuracy=score.accuracy)]
