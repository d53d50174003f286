"""The paper's rule for choosing c, as a procedure.

Fix μ. Start at c = 1e-4 and double it as long as a short run stays within a tolerance of SGD's accuracy on held-out
training data. Take the largest c that did. One miss may be noise, so the search ends after two in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dirprune.lab.records.columns import Amount, Fraction, Percent
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import measuring, read_rows, write_rows
from dirprune.lab.training.at_once import together
from dirprune.lab.training.experiment import assemble, check_fit
from dirprune.lab.training.loop import Divergence, EpochRecord, train
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe, changed
from dirprune.lab.training.surroundings import Surroundings

MUS = (0.501, 0.51, 0.55)
C_START = 1e-4
C_LIMIT = 1.0
MISSES = 2
VALIDATION = 0.1
TABLE = "trials.csv"


@dataclass(frozen=True)
class ShortRun:
    """The result of a short run; ``accuracy`` is on the validation set, in percent, and None if the run diverged."""

    optimizer: str
    c: Amount
    mu: Amount
    accuracy: Percent | None
    sparsity: Fraction


@dataclass(frozen=True)
class JudgedRun(ShortRun):
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
    here: Surroundings,
    *,
    epochs: int = 3,
    tolerance: float = 1.0,
    mus: Sequence[float] = MUS,
    out: Path | None = None,
) -> Iterator[JudgedRun]:
    """Yield SGD's trial, then for each μ one trial per value of c; the last two usually fail.

    Args:
        recipe: the recipe to tune. Its test set is not used; a tenth of its training set is held out instead.
        here: where to train. Only trials that are needed whatever the others find are trained at the same time: SGD's,
            and the next two of each μ, or one after a miss.
        epochs: length of a trial: the first epochs of the recipe's own schedule.
        tolerance: points of accuracy that a trial may lose against SGD.
        mus: the values of μ to search c for.
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
    settings = {"--epochs": epochs, "--precision": recipe.execution(here.device.type).precision, **_shared(recipe)}
    with measuring(out, settings, environment(here.device), table=TABLE) if out else nullcontext():
        trials = _Trials(epochs, mus, here, out)
        dense = trials(recipe.but(optimizer="sgd", method=None), ahead=trials.needed(starts, least=-math.inf))
        assert dense.accuracy is not None
        yield JudgedRun(**asdict(dense), passes=True)
        least = dense.accuracy - tolerance
        for start in starts:
            for recipe, _ in trials.search(start, least):
                found = trials(recipe, ahead=trials.needed(starts, least))
                yield JudgedRun(**asdict(found), passes=_passes(found, least))


def _passes(found: ShortRun, least: float) -> bool:
    return found.accuracy is not None and found.accuracy >= least


@dataclass(frozen=True)
class _Short:
    """The first epochs of a recipe, to be trained in any process."""

    recipe: Recipe
    epochs: int
    folder: None = None
    weights: bool = False
    over: bool = False

    @property
    def name(self) -> str:
        pruner = self.recipe.pruner
        return "SGD" if pruner.value is None else f"c={pruner.value:g}, mu={vars(pruner)['mu']:g}"

    def steps(self, here: Surroundings) -> Iterator[_Last]:
        yield _Last(_last(self.recipe, self.epochs, here.device, here.root))


@dataclass(frozen=True)
class _Last:
    """The last record of a short run; None if it diverged."""

    record: EpochRecord | None
    ended: bool = True


class _Trials:
    """Trains trials, except those that are recorded in the folder ``out``."""

    def __init__(self, epochs: int, mus: Sequence[float], here: Surroundings, out: Path | None) -> None:
        self.epochs, self.here = epochs, here
        self.table = out / TABLE if out else None
        self.place = {mu: place for place, mu in enumerate(mus)}
        known = read_rows(self.table, ShortRun) if self.table else []
        self.known = {(each.optimizer, each.c, each.mu): each for each in known}

    def search(self, start: Recipe, least: float) -> Iterator[tuple[Recipe, int]]:
        """Yield trials of the search for c, each to be trained before the next, and how many from it on are sure."""
        c, misses = C_START, 0
        while c <= C_LIMIT and misses < MISSES:
            recipe = start.but(c=c)
            yield recipe, MISSES - misses
            misses = 0 if _passes(self.known[_key(recipe)], least) else misses + 1
            c *= 2

    def needed(self, starts: Iterable[Recipe], least: float) -> Iterator[Recipe]:
        """Yield the next trials of each search, as far as they are needed whatever they find."""
        for start in starts:
            for recipe, sure in self.search(start, least):
                if _key(recipe) not in self.known:
                    values = [vars(recipe.optimizer)["c"] * 2**i for i in range(sure)]
                    yield from (start.but(c=value) for value in values if value <= C_LIMIT)
                    break

    def __call__(self, recipe: Recipe, ahead: Iterable[Recipe]) -> ShortRun:
        """Return the trial of a recipe. If it must be trained, some of those ``ahead`` are trained at the same time."""
        if _key(recipe) not in self.known:
            several = {_key(each): each for each in (recipe, *ahead)}
            count = self.here.at_once or (len(several) if self.here.cluster else 1)
            self._train(list(several.values())[:count])
        return self.known[_key(recipe)]

    def _train(self, recipes: Sequence[Recipe]) -> None:
        shorts = [_Short(recipe, self.epochs) for recipe in recipes]
        for number, last in together(shorts, self.here):
            key, record = _key(recipes[number - 1]), last.record
            if record is None and key[0] == "sgd":  # there is no search to continue
                lr = recipes[number - 1].optimizer.lr
                raise ValueError(f"SGD itself diverges at lr={lr}; tune the learning rate first (--lr)")
            accuracy, zeros = (record.test_accuracy, record.sparsity) if record else (None, 0.0)
            self.known[key] = ShortRun(*key, accuracy, zeros)
            if self.table:
                write_rows(self.table, ShortRun, sorted(self.known.values(), key=self._order))

    def _order(self, trial: ShortRun) -> tuple[bool, int, float, float]:
        """Return where a trial stands in the table: SGD first, then one μ after the other, as they were given."""
        return trial.optimizer != "sgd", self.place.get(trial.mu, len(self.place)), trial.mu, trial.c


def _key(recipe: Recipe) -> tuple[str, float, float]:
    options = vars(recipe.optimizer)
    return recipe.optimizer.name, options.get("c", 0.0), options.get("mu", 0.0)


def _shared(recipe: Recipe) -> dict[str, Any]:
    """Return what all trials of a search share."""
    varied = {"optimizer", "c", "mu"} | FREE_TO_CHANGE
    values = {name: value for name, value in recipe.values().items() if name not in varied}
    return {**values, "schedule": asdict(recipe.schedule)}


def choose(trials: Iterable[JudgedRun]) -> JudgedRun | None:
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
