"""The paper's rule for choosing c, as a procedure.

Fix μ. Start at c = 1e-4 and double it as long as a short run stays within a tolerance of SGD's accuracy on held-out
training data. Take the largest c that did. One miss may be noise, so the search ends after two in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dirprune.lab.experiment import assemble, check_fit
from dirprune.lab.recipes import Recipe, changed
from dirprune.lab.train import Divergence, EpochRecord, train

MUS = (0.501, 0.51, 0.55)
C_START = 1e-4
C_LIMIT = 1.0
MISSES = 2
VALIDATION = 0.1


@dataclass(frozen=True)
class Trial:
    """One short run; ``accuracy`` is on the validation set, in percent, and None if the run diverged."""

    optimizer: str
    c: float
    mu: float
    accuracy: float | None
    sparsity: float
    passes: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        """Return the trial as text, one cell for each of `COLUMNS`."""
        accuracy = "diverged" if self.accuracy is None else f"{self.accuracy:.2f}"
        if self.optimizer == "sgd":
            return ("SGD", "", "", accuracy, "", "")
        verdict = "within tolerance" if self.passes else "too much"
        return ("gRDA", f"{self.c:g}", f"{self.mu:g}", accuracy, f"{100 * self.sparsity:.2f}", verdict)


COLUMNS = ("", "c", "μ", "accuracy (%)", "sparsity (%)", "")


def tune(
    recipe: Recipe,
    *,
    epochs: int = 3,
    tolerance: float = 1.0,
    mus: Iterable[float] = MUS,
    device: torch.device,
    root: Path | None = None,
) -> Iterator[Trial]:
    """Yield SGD's trial, then for each μ one trial per value of c; the last two usually fail.

    Args:
        recipe: the recipe to tune. Its test set is not used; a tenth of its training set is held out instead.
        epochs: length of a trial: the first epochs of the recipe's own schedule.
        tolerance: points of accuracy that a trial may lose against SGD.
        mus: the values of μ to search c for.
        device, root: where to train, and where the data are.
    """
    if epochs < 1 or epochs > recipe.epochs:
        raise ValueError(f"--epochs {epochs} cannot be used; trials of this recipe have 1 to {recipe.epochs} epochs")
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance:g} cannot be used; give how many points of accuracy may be lost, ≥ 0")
    recipe = replace(recipe, validation=recipe.validation or VALIDATION)
    starts = [changed(recipe, optimizer="grda", c=C_START, mu=mu) for mu in mus]  # raises for a bad μ before training
    baseline = _last(replace(recipe, optimizer="sgd"), epochs, device, root)
    if baseline is None:
        raise ValueError(f"SGD itself diverges at lr={recipe.lr}; tune the learning rate first (--lr)")
    yield Trial("sgd", 0.0, 0.0, baseline.test_accuracy, baseline.sparsity, passes=True)
    for start in starts:
        c, misses = start.c, 0
        while c <= C_LIMIT and misses < MISSES:
            record = _last(replace(start, c=c), epochs, device, root)
            accuracy = record.test_accuracy if record else None
            passes = accuracy is not None and accuracy >= baseline.test_accuracy - tolerance
            yield Trial("grda", c, start.mu, accuracy, record.sparsity if record else 0.0, passes)
            misses = 0 if passes else misses + 1
            c *= 2


def choose(trials: Iterable[Trial]) -> Trial | None:
    """Return the sparsest among the trials with the largest passing c of each μ; None if no c passed."""
    passing = sorted((trial for trial in trials if trial.optimizer == "grda" and trial.passes), key=lambda t: t.c)
    greatest = {trial.mu: trial for trial in passing}
    return max(greatest.values(), key=lambda trial: trial.sparsity, default=None)


def _last(recipe: Recipe, epochs: int, device: torch.device, root: Path | None) -> EpochRecord | None:
    """Train the first ``epochs`` epochs of a recipe and return the last record, or None if it diverged."""
    parts = assemble(recipe, device=device, root=root)
    check_fit(recipe, parts, device)
    execution = recipe.execution(device.type)
    assert parts.loaders.validation is not None
    records = train(
        parts.model,
        parts.optimizer,
        parts.loaders.train,
        parts.loaders.validation,
        epochs=recipe.epochs,
        lr=recipe.lr,
        schedule=recipe.schedule,
        seed=recipe.seed,
        execution=execution,
    )
    try:
        with execution.threading():
            return list(islice(records, epochs))[-1]
    except Divergence:
        return None
