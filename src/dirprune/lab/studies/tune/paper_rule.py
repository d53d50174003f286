"""The paper's rule for choosing c, as a procedure.

Fix μ. Start at c = 1e-4 and double it as long as a short run stays within a tolerance of SGD's accuracy on held-out
training data. Take the largest c that did. One miss may be noise, so the search ends after two in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dirprune.lab.records.columns import Amount, Fraction, Percent
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import measuring, merge_rows, read_rows
from dirprune.lab.training.experiment import assemble, check_fit
from dirprune.lab.training.loop import Divergence, EpochRecord, train
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe, changed

MUS = (0.501, 0.51, 0.55)
C_START = 1e-4
C_LIMIT = 1.0
MISSES = 2
VALIDATION = 0.1
TABLE = "trials.csv"


@dataclass(frozen=True)
class Measured:
    """The result of a short run; ``accuracy`` is on the validation set, in percent, and None if the run diverged."""

    optimizer: str
    c: Amount
    mu: Amount
    accuracy: Percent | None
    sparsity: Fraction


@dataclass(frozen=True)
class Trial(Measured):
    """A short run, and whether it is within the tolerance."""

    passes: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> dict[str, str]:
        """Return the trial as text by column."""
        accuracy = "diverged" if self.accuracy is None else f"{self.accuracy:.2f}"
        if self.optimizer == "sgd":
            return {"": "SGD", "c": "", "μ": "", "accuracy (%)": accuracy, "sparsity (%)": "", "verdict": ""}
        return {
            "": "gRDA",
            "c": f"{self.c:g}",
            "μ": f"{self.mu:g}",
            "accuracy (%)": accuracy,
            "sparsity (%)": f"{100 * self.sparsity:.2f}",
            "verdict": "within tolerance" if self.passes else "too much",
        }


def tune(
    recipe: Recipe,
    *,
    epochs: int = 3,
    tolerance: float = 1.0,
    mus: Iterable[float] = MUS,
    device: torch.device,
    root: Path | None = None,
    out: Path | None = None,
) -> Iterator[Trial]:
    """Yield SGD's trial, then for each μ one trial per value of c; the last two usually fail.

    Args:
        recipe: the recipe to tune. Its test set is not used; a tenth of its training set is held out instead.
        epochs: length of a trial: the first epochs of the recipe's own schedule.
        tolerance: points of accuracy that a trial may lose against SGD.
        mus: the values of μ to search c for.
        device, root: where to train, and where the data are.
        out: folder to record the trials in. Trials that it holds are not trained again.

    Raises:
        ValueError: a value cannot be used, SGD itself diverges, or ``out`` holds trials of another recipe or length.
    """
    if epochs < 1 or epochs > recipe.epochs:
        raise ValueError(f"--epochs {epochs} cannot be used; trials of this recipe have 1 to {recipe.epochs} epochs")
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance:g} cannot be used; give how many points of accuracy may be lost, ≥ 0")
    recipe = recipe.but(validation=recipe.task.validation or VALIDATION)
    starts = [
        changed(recipe, optimizer="grda", method=None, c=C_START, mu=mu) for mu in mus
    ]  # raises for a bad μ before training
    settings = {"--epochs": epochs, "--precision": recipe.execution(device.type).precision, **_shared(recipe)}
    with measuring(out, settings, environment(device), table=TABLE) if out else nullcontext():
        trial = _Trials(epochs, device, root, out)
        dense = trial(recipe.but(optimizer="sgd", method=None))
        if dense.accuracy is None:
            raise ValueError(f"SGD itself diverges at lr={recipe.optimizer.lr}; tune the learning rate first (--lr)")
        yield dense
        for start in starts:
            c, misses = C_START, 0
            while c <= C_LIMIT and misses < MISSES:
                found = trial(start.but(c=c), least=dense.accuracy - tolerance)
                yield found
                misses = 0 if found.passes else misses + 1
                c *= 2


class _Trials:
    """Trains trials, except those that are recorded in the folder ``out``."""

    def __init__(self, epochs: int, device: torch.device, root: Path | None, out: Path | None) -> None:
        self.epochs, self.device, self.root = epochs, device, root
        self.table = out / TABLE if out else None
        known = read_rows(self.table, Measured) if self.table else []
        self.known = {(each.optimizer, each.c, each.mu): each for each in known}

    def __call__(self, recipe: Recipe, *, least: float = -math.inf) -> Trial:
        """Return the trial of a recipe, which passes if its accuracy is at least ``least``."""
        options = vars(recipe.optimizer)
        key = (recipe.optimizer.name, options.get("c", 0.0), options.get("mu", 0.0))
        found = self.known.get(key)
        if found is None:
            record = _last(recipe, self.epochs, self.device, self.root)
            accuracy, zeros = (record.test_accuracy, record.sparsity) if record else (None, 0.0)
            found = Measured(*key, accuracy, zeros)
            if self.table and (record or "c" in options):  # without SGD there is no search to continue
                merge_rows(self.table, Measured, [found], key=("optimizer", "c", "mu"))
        return Trial(**asdict(found), passes=found.accuracy is not None and found.accuracy >= least)


def _shared(recipe: Recipe) -> dict[str, Any]:
    """Return what all trials of a search share."""
    varied = {"optimizer", "c", "mu"} | FREE_TO_CHANGE
    values = {name: value for name, value in recipe.values().items() if name not in varied}
    return {**values, "schedule": asdict(recipe.schedule)}


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
        lr=recipe.optimizer.lr,
        schedule=recipe.schedule,
        seed=recipe.seed,
        execution=execution,
    )
    try:
        with execution.threading():
            return list(islice(records, epochs))[-1]
    except Divergence:
        return None
