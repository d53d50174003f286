"""What gRDA's target owes to each of its options: one is changed at a time, scored on held-out training data.

    python benchmarks/levers.py resnet-small-cifar10-16 --data DIR --sparsity 0.95 --seeds 3 --out results/levers.csv

A row is a run. The table is written after each, and the same command trains those that are missing. At the end the
differences from the options by default are printed, seed by seed, with 95% intervals.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dirprune.lab.records.columns import Amount, Count, Fraction, Percent
from dirprune.lab.records.tables import merge_rows, read_rows
from dirprune.lab.studies.comparison import rows
from dirprune.lab.studies.comparison.ranking import paired_gap
from dirprune.lab.studies.comparison.trials import enter
from dirprune.lab.training import recipes
from dirprune.lab.training.at_once import trained
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.series import Planned
from dirprune.lab.training.surroundings import Surroundings

HELD_OUT = 0.2
FIRST_SEED = 200
"""Other seeds than those of comparisons and of their trials."""

LEVERS: dict[str, dict[str, Any]] = {
    "default": {},
    "garrote": {"shape": "garrote"},
    "hard": {"shape": "hard"},
    "from the start": {"prune_from": 0.0},
    "zeros until .5": {"prune_until": 0.5},
    "zeros until .85": {"prune_until": 0.85},
    "fixed at 1": {"fix_at": 1.0},
    "cubic": {"ramp": "cubic"},
    "rescaled": {"rescale": True},
    "decay of v": {"decay": "accumulator"},
    "no decay": {"weight_decay": 0.0},
    "of macs": {"of": "macs"},
    "ST-3": {"optimizer": "st3"},
    "global magnitude": {"optimizer": "magnitude-global"},
}


@dataclass(frozen=True)
class Row:
    lever: str
    recipe: str
    asked_sparsity: Fraction
    seed: Count
    held_out_accuracy: Percent
    sparsity: Fraction
    macs_left: Fraction
    seconds: Amount
    device: str
    commit: str
    diverged: str = ""


def planned(name: str, sparsity: float, seed: int, lever: str) -> Recipe:
    changes = dict(LEVERS[lever])
    base = recipes.get(name).but(validation=HELD_OUT, seed=seed)
    return enter(base, changes.pop("optimizer", "grda-target"), sparsity, changes)


def measured(missing: list[tuple[str, Recipe, float]], here: Surroundings) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Planned(Path(folder) / str(number), recipe) for number, (_, recipe, _) in enumerate(missing)]
        for step in trained(jobs, here):
            if step.ended:
                lever, recipe, asked = missing[step.number - 1]
                row = rows.Row.of(step.run.read(), rows.CHOICES)
                told = (
                    row.test_accuracy,
                    row.sparsity,
                    row.macs_left,
                    row.seconds,
                    row.device,
                    row.commit,
                    row.diverged,
                )
                yield Row(lever, recipe.name, asked, recipe.seed, *told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.95])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    key = ("lever", "recipe", "asked_sparsity", "seed")
    known = {tuple(getattr(row, name) for name in key) for row in read_rows(given.out, Row)}
    missing = [
        (lever, planned(given.recipe, sparsity, seed, lever), sparsity)
        for seed in range(FIRST_SEED, FIRST_SEED + given.seeds)
        for sparsity in given.sparsity
        for lever in given.levers
        if (lever, given.recipe, sparsity, seed) not in known
    ]
    for row in measured(missing, Surroundings(torch.device(given.device), root=given.data)):
        merge_rows(given.out, Row, [row], key=key)
        print(f"{row.lever} at {row.asked_sparsity:g}, seed {row.seed}: {row.held_out_accuracy:.2f}%", flush=True)
    report([row for row in read_rows(given.out, Row) if row.recipe == given.recipe], given.sparsity)


def report(found: list[Row], sparsities: list[float]) -> None:
    for asked in sparsities:
        scores = {
            lever: {
                row.seed: row.held_out_accuracy for row in found if (row.lever, row.asked_sparsity) == (lever, asked)
            }
            for lever in LEVERS
        }
        print(f"\nAt {asked:.0%}, default {sum(scores['default'].values()) / max(1, len(scores['default'])):.2f}")
        for lever, own in scores.items():
            gap, margin = paired_gap(own, scores["default"])
            if not math.isnan(gap) and lever != "default":
                print(f"{lever:20} {gap:+.2f} ± {margin:.2f} ({len(own)} seeds)")


if __name__ == "__main__":
    main()
