"""Every method's options, chosen on held-out training data, with the same number of trials for each.

A trial gives every method one choice of its options and trains all of them, as a comparison of its own, on a part of
the training data; the score is that on the rest. Trial 0 has the recipe's own options. Those of later trials are taken
from the values below, which come equally often: learning rate and weight decay in turn and alike for all methods, dense
training included, and each method's own at random. A method whose knob does not preset the sparsity sweeps it in every
trial, and is scored where the sweep passes the sparsity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from dirprune.lab.methods import Option
from dirprune.lab.records.columns import Amount, Count
from dirprune.lab.studies.comparison.trials import Settings, rounded
from dirprune.lab.tasks import Measure
from dirprune.lab.training.recipe import Recipe

TABLE = "tuning.csv"
HELD_OUT = 0.2
FIRST_SEED = 100
"""Trials have other initial weights than the runs that are compared."""

LR_FACTORS = (0.5, 2.0, 0.25, 1.0)
DECAY_FACTORS = (3.0, 0.3, 1.0)
DECAYS = (5e-4, 2e-3, 0.0)
"""The values of weight decay for a recipe without any."""

_RAMP = {"start": (0.0, 0.1, 0.2), "end": (0.4, 0.5, 0.6, 0.75, 0.9)}
_ACDC = {"phase": (0.025, 0.05, 0.1), "end": (0.8, 0.85, 0.9)}
_TARGET = {"shape": ("soft", "garrote", "hard")}
_SGD_TARGET: Mapping[str, Sequence[Option]] = {**_TARGET, "prune_from": (0.0, 0.1), "prune_until": (0.3, 0.5, 0.7)}

OPTIONS: Mapping[str, Mapping[str, Sequence[Option]]] = {
    "grda": {"mu": (0.51, 0.6, 0.7, 0.8)},
    "grda-target": _SGD_TARGET,
    "grda-macs": _SGD_TARGET,
    "adamgrda": {**_TARGET, "power": (0.0, 0.5), "prune_until": (0.25, 0.5), "fix_at": (0.55, 0.8)},
    "magnitude": _RAMP,
    "magnitude-global": _RAMP,
    "magnitude-scored": _RAMP,
    "pat": _RAMP,
    "acdc": _ACDC,
    "ham": {"alpha": (20.0, 200.0), "beta": (0.0, 1e-3, 1e-2)},
    "linbreg": {"density": (0.05, 0.2, 0.5)},
    "rigl": {"alpha": (0.1, 0.3, 0.5), "until": (0.5, 0.75, 0.9)},
    "str": {"start": (-10.0, -6.0)},
    "variational-dropout": {"anneal": (0.25, 0.5, 0.75), "pace": (0.03, 0.1, 0.3)},
}
"""The options of each method that are chosen, besides learning rate and weight decay, and their values."""


@dataclass(frozen=True)
class Trial:
    """A method's score on held-out data in one trial, NaN if it has none there; ``settings`` as JSON."""

    method: str
    number: Count
    asked_sparsity: float
    settings: str
    score: float
    runs: Count
    seconds: Amount
    commit: str


def drawn(recipe: Recipe, name: str, number: int) -> Settings:
    """Return the options of a method in a trial, {} for the recipe's own.

    >>> from dirprune.lab.training.recipes import get
    >>> [drawn(get("digits"), "pat", number).get("end") for number in range(5)]
    [None, 0.75, 0.5, 0.4, 0.9]
    """
    if number == 0:
        return {}
    decay = recipe.optimizer.weight_decay
    rates = [rounded(factor * recipe.optimizer.lr) for factor in LR_FACTORS]
    decays = [rounded(factor * decay) for factor in DECAY_FACTORS] if decay else DECAYS
    own = {option: _at_random(f"{name} {option}", values, number) for option, values in OPTIONS.get(name, {}).items()}
    return {"lr": rates[(number - 1) % len(rates)], "weight_decay": decays[(number - 1) % len(decays)]} | own


def _at_random(label: str, values: Sequence[Option], number: int) -> Option:
    """Return the value for a trial: all of them in random order, then again in another."""
    turn, place = divmod(number - 1, len(values))
    return Random(f"{label} {turn}").sample(values, len(values))[place]


def chosen(trials: Iterable[Trial], measure: Measure) -> dict[str, Settings]:
    """Return each method's options in its best trial, the first of equals.

    Raises:
        ValueError: no trial of a method has a score.
    """
    best: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        known = best.setdefault(trial.method, trial)
        if math.isnan(known.score) or measure.best_first(trial.score) < measure.best_first(known.score):
            best[trial.method] = trial
    if failed := [name for name, trial in best.items() if math.isnan(trial.score)]:
        raise ValueError(
            f"no trial of {failed[0]} reached {best[failed[0]].asked_sparsity:.0%}; give more trials (--tune), or "
            "leave it out of --methods"
        )
    return {name: _settings(trial) for name, trial in best.items()}


def _settings(trial: Trial) -> Settings:
    """Return the options of a trial; raise if its row of the table names others than are chosen here."""
    with suppress(ValueError, RecursionError):
        found = json.loads(trial.settings)
        if isinstance(found, dict) and found.keys() <= {"lr", "weight_decay", *OPTIONS.get(trial.method, ())}:
            return found
    raise ValueError(
        f"{TABLE} has settings={trial.settings[:200]!r} for trial {trial.number} of {trial.method}, which are no "
        "options that are tuned; restore it from a copy, or remove the row"
    )
