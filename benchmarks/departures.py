"""How other settings of gRDA's rivals change their results on digits, compared with those in `dirprune compare`.

    python benchmarks/departures.py [held-out,dense-start,…] [--seeds 10] [--out results/departures-digits.csv]

held-out       a tenth of the training images is held out for AMC's reward; with dense training on the same images
dense-start    STR's thresholds start at σ(−3200), its authors' value for ResNet50, instead of our σ(−10)
one-stage      AMC prunes all at once instead of in four stages
masks-alone    RigL's initial weights are not divided by √density

Runs that are in the table are not trained again. For each setting and sparsity it prints the accuracy, as mean ±
standard deviation over the seeds; the difference to dense training on the same images; and the change of that
difference against the method as set in `results/compare-digits`. Differences are taken seed by seed, ± their 95%
confidence interval.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from dirprune.lab import recipes
from dirprune.lab.comparison import Row, shared
from dirprune.lab.experiment import assemble, make_method
from dirprune.lab.ranking import paired_gap, rank
from dirprune.lab.recipes import Option, Recipe
from dirprune.lab.report import Spread
from dirprune.lab.reward import Reward, Sample
from dirprune.lab.runs import environment
from dirprune.lab.tables import merge_rows, read_rows
from dirprune.lab.train import EpochRecord, evaluate, train
from dirprune.lab.trials import Trial, contestant

CPU = torch.device("cpu")
COMPARED = Path("results/compare-digits/comparison.csv")
SPARSITIES = (0.8, 0.9, 0.95)
DECAYS = (0.055, 0.075, 0.11)
"""The decays that lead to these sparsities with STR's dense start."""

Accuracies = Mapping[int, float]
"""Accuracies by seed."""


def variants(method: str, values: Sequence[float], **options: Option) -> list[Recipe]:
    """Return the digits recipe with this method at these values of its knob, with further options."""
    made = [contestant(method).enter(recipes.get("digits"), value) for value in values]
    return [replace(recipe, options=(*recipe.options, *options.items())) for recipe in made]


def departures() -> dict[str, list[Recipe]]:
    dense = contestant("sgd").enter(recipes.get("digits"), None)
    return {
        "held-out": [replace(recipe, validation=0.1) for recipe in (dense, *variants("amc", SPARSITIES))],
        "dense-start": variants("str", DECAYS, start=-3200.0),
        "one-stage": variants("amc", SPARSITIES, stages=1),
        "masks-alone": variants("rigl", SPARSITIES, rescale=False),
    }


def trained(recipe: Recipe) -> list[EpochRecord]:
    """Train a recipe in memory, as `dirprune compare` would, and return its epochs.

    The last epoch is tested on the test set. Held-out images are only used for the reward of a method that searches.

    >>> [record.epoch for record in trained(recipes.changed(recipes.get("digits"), epochs=2))]
    [1, 2]
    """
    execution = recipe.execution(CPU.type)
    with execution.threading():
        parts = assemble(recipe, device=CPU, root=None)
        images, test = parts.loaders.train, parts.loaders.test
        method = make_method(recipe, Reward(parts.loaders, execution))
        method.attach(parts.model, parts.optimizer, steps=recipe.epochs * len(images), examples=images.examples)
        records = list(
            train(
                parts.model,
                parts.optimizer,
                images,
                Sample(tuple(islice(test, 1)), test.batch_size, test.batch_size),  # one batch: testing takes time
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


def measure(recipe: Recipe) -> Row:
    trial, records, where = Trial.of(recipe), trained(recipe), environment(CPU)
    last = records[-1]
    return Row(
        run=name(recipe),
        method=trial.contestant.name,
        knob=trial.contestant.knob or "",
        value=math.nan if trial.value is None else trial.value,
        seed=recipe.seed,
        sparsity=last.weight_sparsity,
        overall_sparsity=last.sparsity,
        test_accuracy=last.test_accuracy,
        test_loss=last.test_loss,
        seconds=sum(record.train_seconds + record.test_seconds for record in records),
        peak_memory_mib=math.nan,
        epochs=len(records),
        diverged="",
        commit=where["commit"],
        device=where["device"],
        recipe=shared(recipe),
    )


def name(recipe: Recipe) -> str:
    return f"{Trial.of(recipe).name} {shared(recipe)}"


def dense_of(rows: Iterable[Row]) -> Accuracies:
    return {row.seed: row.test_accuracy for row in rows if row.is_dense}


def gaps(accuracies: Accuracies, dense: Accuracies) -> Accuracies:
    return {seed: accuracy - dense[seed] for seed, accuracy in accuracies.items() if seed in dense}


def tell(departure: str, rows: Sequence[Row], compared: Sequence[Row]) -> None:
    """Print the results of a departure's runs, with their change against the comparison."""
    plain = dense_of(compared)
    dense = dense_of(rows) or plain
    if dense is not plain:
        numbers = Spread.of(list(dense.values())).text(2), "", signed(*paired_gap(dense, plain))
        print(f"{departure:12} {'dense':>6} {len(dense):5}  {numbers[0]:14} {numbers[1]:16} {numbers[2]}", flush=True)
    ours = [row for row in rows if not row.is_dense]
    method = ours[0].method.split()[0]
    as_it_is = [row.point for row in compared if row.method == method]
    places = zip(rank([row.point for row in ours], SPARSITIES), rank(as_it_is, SPARSITIES), strict=True)
    for there, usual in places:
        gap = gaps(there.accuracies, dense)
        change = paired_gap(gap, gaps(usual.accuracies, plain))
        numbers = there.accuracy.text(2), signed(*paired_gap(there.accuracies, dense)), signed(*change)
        where = f"{100 * there.sparsity:.1f}%{'' if there.rank else '!'}"
        print(f"{departure:12} {where:>6} {there.seeds:5}  {numbers[0]:14} {numbers[1]:16} {numbers[2]}", flush=True)


def signed(mean: float, margin: float) -> str:
    return Spread(mean, None if math.isnan(margin) else margin).text(2, signed=True)


def main() -> None:
    known = departures()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("departures", nargs="?", default=",".join(known), help="which, separated by commas")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/departures-digits.csv"), help="the table of all runs")
    options = parser.parse_args()
    compared = read_rows(COMPARED, Row)
    print(f"{'':12} {'zeros':>6} {'seeds':>5}  {'accuracy (%)':14} {'− dense':16} change of that", flush=True)
    for departure in options.departures.split(","):
        wanted = [replace(each, seed=seed) for seed in range(options.seeds) for each in known[departure]]
        for recipe in wanted:
            if name(recipe) not in {row.run for row in read_rows(options.out, Row)}:
                merge_rows(options.out, Row, [measure(recipe)], key=["run"], in_order=True)
        names = {name(recipe) for recipe in wanted}
        tell(departure, [row for row in read_rows(options.out, Row) if row.run in names], compared)


if __name__ == "__main__":
    main()
