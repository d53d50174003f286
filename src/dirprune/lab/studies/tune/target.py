"""The largest target that costs at most a tolerance of accuracy, by bisection, on held-out training data.

Every target is trained as it would be shipped, at full length, beside dense training from the same weights on the same
minibatches. Each trial halves the interval of log(1 − sparsity) in which the answer lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from dirprune._support.modes import eval_mode, seeded
from dirprune.lab import models
from dirprune.lab.data import Loaders
from dirprune.lab.records.columns import Column, Number
from dirprune.lab.studies.tune.paired import Loss, loss
from dirprune.lab.training import runs
from dirprune.lab.training.experiment import load_data
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.series import Planned
from dirprune.lab.training.surroundings import Surroundings

VALIDATION = 0.1
BETWEEN = (0.5, 0.99)
"""The targets among which the answer is searched."""


@dataclass(frozen=True)
class TriedTarget:
    """A target, what it costs against dense training on the held-out examples, in points, and what follows."""

    sparsity: Annotated[float, Column("target (%)", ".1f", scale=100)]
    accuracy: Annotated[float, Column("accuracy (%)", ".2f")]
    lost: Annotated[float, Column("points lost", ".2f")]
    low: Annotated[float, Column("from", ".2f")]
    high: Annotated[float, Column("to", ".2f")]
    passes: bool
    verdict: Annotated[str, Column("verdict")]
    seeds: Number
    examples: Number

    @property
    def noise(self) -> float:
        """Half the length of the interval of what is lost."""
        return Loss(self.lost, self.low, self.high).noise


@dataclass(frozen=True)
class Search:
    """What is searched for, and where.

    Args:
        recipe: the recipe to tune; its test set is not used.
        out: the folder of the runs; the same folder continues the search.
        tolerance: points of accuracy that may be lost.
        seeds: runs of every target, from the recipe's own seed on.
        trials: number of targets to try.
        between: the least and the largest target.
        validation: fraction of the training set to hold out; by default the recipe's own, or a tenth.
    """

    recipe: Recipe
    out: Path
    tolerance: float = 1.0
    seeds: int = 1
    trials: int = 5
    between: tuple[float, float] = BETWEEN
    validation: float | None = None

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(
                f"--tolerance {self.tolerance:g} cannot be used; give how many points of accuracy may be lost, ≥ 0"
            )
        if not 0 < self.between[0] < self.between[1] < 1:
            raise ValueError(
                f"--between {self.between[0]:g},{self.between[1]:g} holds no target; give two fractions, e.g. 0.5,0.99"
            )
        if self.validation is not None and not 0 < self.validation < 1:
            raise ValueError(
                f"--validation {self.validation:g} cannot be used; targets need held-out examples, e.g. 0.1"
            )

    def planned(self, target: float | None) -> list[Planned]:
        """Return the runs at a target, one per seed; those of dense training for None."""
        kind = self.recipe.optimizer
        held = self.validation or self.recipe.task.validation or VALIDATION
        base = self.recipe.but(method=None, validation=held)
        chosen = (
            base.but(optimizer=kind.dense) if target is None else base.but(optimizer=kind.targeted, sparsity=target)
        )
        name = "dense" if target is None else f"sparsity{target:g}"
        every = (chosen.but(seed=chosen.seed + number) for number in range(self.seeds))
        return [Planned(self.out / f"{name}-s{each.seed}", each, weights=True) for each in every]

    def next(self, judged: Sequence[TriedTarget]) -> float | None:
        """Return the target that halves the interval between what passed and what did not; None at the end."""
        if len(judged) >= self.trials:
            return None
        low = max((each.sparsity for each in judged if each.passes), default=self.between[0])
        high = min((each.sparsity for each in judged if not each.passes), default=self.between[1])
        middle = float(f"{1 - ((1 - low) * (1 - high)) ** 0.5:.3g}")
        return middle if low < middle < high else None


def loss_at(search: Search, target: float, here: Surroundings) -> TriedTarget:
    """Return what the ended runs of a target lose against the dense ones on the held-out examples."""
    loaders = load_data(search.planned(None)[0].recipe, device=here.device, root=here.root)
    dense, sparse = (_answers(search.planned(each), loaders, here.device) for each in (None, target))
    if dense is None:
        raise ValueError(f"dense training diverges at lr={search.recipe.optimizer.lr:g}; lower --lr first")
    shape = {"seeds": len(dense), "examples": dense.shape[1]}
    if sparse is None:
        nan = float("nan")
        return TriedTarget(target, nan, nan, nan, nan, passes=False, verdict="diverged", **shape)
    found = loss(dense, sparse)
    inside, outside = found.high <= search.tolerance, found.low > search.tolerance
    verdict = "within" if inside else "beyond" if outside else "unclear"
    accuracy, passes = 100 * float(sparse.mean()), found.points <= search.tolerance
    return TriedTarget(target, accuracy, found.points, found.low, found.high, passes=passes, verdict=verdict, **shape)


def _answers(planned: Sequence[Planned], loaders: Loaders, device: torch.device) -> Tensor | None:
    """Return the right answers of each run's network, [runs, held-out examples]; None if one of them diverged."""
    found = []
    for plan in planned:
        run = runs.load(plan.folder)
        if (outcome := run.outcome()) is None or outcome.diverged:
            return None
        found.append(answers(run, loaders, device))
    return torch.stack(found)


@torch.no_grad()
def answers(run: runs.Run, loaders: Loaders, device: torch.device) -> Tensor:
    """Return which held-out examples a run's network gets right, as 1 and 0; of a text, which part of each window."""
    execution = run.recipe.execution(device.type)
    with seeded(run.recipe.seed):
        model = models.build(run.recipe.model, loaders.classes)
    model.load_state_dict(runs.weights_of(run)[1])
    model, right = execution.place(model, device), []
    assert loaders.validation is not None
    with eval_mode(model), execution.threading():
        for inputs, targets in loaders.validation:
            with execution.autocast(device):
                logits = model(inputs.to(memory_format=execution.memory_format))
            right.append((logits.argmax(1) == targets).double().reshape(len(targets), -1).mean(1).cpu())
    return torch.cat(right)


def best(judged: Iterable[TriedTarget]) -> TriedTarget | None:
    """Return the largest target that passes."""
    return max((each for each in judged if each.passes), key=lambda each: each.sparsity, default=None)


def remarks(search: Search, judged: Sequence[TriedTarget]) -> Iterator[str]:
    """Yield how far the choice can be trusted."""
    chosen = best(judged)
    if chosen is None:
        return
    seeds = f"mean of {chosen.seeds} seeds" if chosen.seeds > 1 else "one seed"
    yield (
        f"{chosen.lost:.2f} points lost against dense training, 95% interval {chosen.low:.2f} to {chosen.high:.2f}: "
        f"paired over {chosen.examples:,} held-out examples, {seeds}."
    )
    sure = max((each.sparsity for each in judged if each.verdict == "within"), default=None)
    if chosen.verdict != "within":
        shown = f"only {sure:.1%} is shown to be within it" if sure else "no target tried is shown to be within it"
        yield (
            f"Noise: ± {chosen.noise:.1f} points, so a tolerance of {search.tolerance:g} is not decided: {shown}. More "
            "--seeds or a larger --validation narrow the interval."
        )
    if chosen.sparsity == max(each.sparsity for each in judged):
        yield f"No larger target was tried; --between {chosen.sparsity:g},0.999 searches there."
