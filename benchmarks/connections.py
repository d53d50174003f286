"""What RigL's connections do in a small copy of VGG16: those that move, those that stay, and those that are chosen.

    python benchmarks/connections.py [--part 4] [--seeds 2] [--data DIR] [--out results/connections-vgg16.csv]

The network is VGG16 with a quarter of its channels, the recipe `vgg16-cifar10-modern` for 24 epochs on 10,000 images,
95% of the weights zero:

rigl                          as in `dirprune compare`; also moved ten times as often, and never
magnitude, rigl's densities   gradual magnitude pruning to the densities that RigL's formula gives every layer
magnitude, global             gradual magnitude pruning that finds densities of its own

Runs that the table has are not trained again; one takes six minutes of one core, with --part 8 two.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from training import CPU, trained

from dirprune.lab import recipes
from dirprune.lab.baselines import Magnitude, RigL
from dirprune.lab.baselines.masks import Masked
from dirprune.lab.baselines.method import prunable
from dirprune.lab.baselines.rigl import erk_densities
from dirprune.lab.execution import Execution
from dirprune.lab.models.vgg import vgg16
from dirprune.lab.ranking import paired_gap
from dirprune.lab.report import Spread
from dirprune.lab.runs import environment
from dirprune.lab.tables import merge_rows, read_rows

SPARSITY = 0.95
EPOCHS = 24


@dataclass(frozen=True)
class Row:
    """A line of the CSV file; ``kept`` is the share of RigL's first connections that are there at the end."""

    run: str
    part: int
    seed: int
    sparsity: float
    test_accuracy: float
    kept: float
    seconds: float
    hardware: str
    torch: str
    commit: str


def narrow(classes: int, part: int) -> nn.Module:
    """Return VGG16 with one channel of ``part``, its first weights drawn as those of VGG16 are."""
    model = vgg16(classes)
    for layers in (model.features, model.classifier):
        for place, layer in enumerate(layers):
            if isinstance(layer, nn.Conv2d):
                inputs = layer.in_channels if place == 0 else layer.in_channels // part
                layers[place] = thin = nn.Conv2d(inputs, layer.out_channels // part, 3, padding=1)
                nn.init.normal_(thin.weight, std=(2 / (9 * thin.out_channels)) ** 0.5)
                nn.init.zeros_(thin.bias)
            elif isinstance(layer, nn.Linear):
                outputs = classes if layer is layers[-1] else layer.out_features // part
                layers[place] = nn.Linear(layer.in_features // part, outputs)
    return model


def quarter(classes: int) -> nn.Module:
    return narrow(classes, 4)


def eighth(classes: int) -> nn.Module:
    return narrow(classes, 8)


NETWORKS = {4: quarter, 8: eighth}


def formula(model: nn.Module) -> dict[str, float]:
    """Return the sparsity that RigL gives every layer."""
    shapes = {name: weight.parameter.shape for name, weight in prunable(model).items()}
    densities = erk_densities(list(shapes.values()), 1 - SPARSITY)
    return {name: 1 - density for name, density in zip(shapes, densities, strict=True)}


RUNS: dict[str, Callable[[int, int], Masked]] = {
    "rigl": lambda part, seed: RigL(sparsity=SPARSITY, seed=seed),
    "rigl, never": lambda part, seed: RigL(sparsity=SPARSITY, seed=seed, alpha=0.0),
    "magnitude, rigl's densities": lambda part, seed: Magnitude(sparsity=formula(NETWORKS[part](10))),
    "rigl, often": lambda part, seed: RigL(sparsity=SPARSITY, seed=seed, every=10),
    "magnitude, global": lambda part, seed: Magnitude(sparsity=SPARSITY, allocation="global"),
}


def kept(method: Masked, seed: int) -> float:
    """Return the share of RigL's first connections that are there at the end, in layers that are not dense."""
    if not isinstance(method, RigL):
        return math.nan
    first, model = RigL(sparsity=SPARSITY, seed=seed), copy.deepcopy(method.model)
    first.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), steps=1, examples=1)
    sparse = [name for name, mask in first.masks.items() if not mask.all()]
    both = sum(int((first.masks[name] & method.masks[name]).sum()) for name in sparse)
    return both / sum(int(first.masks[name].sum()) for name in sparse)


def measure(run: str, part: int, seed: int, data: Path | None) -> Row:
    recipe = replace(
        recipes.get("vgg16-cifar10-modern"),
        model=f"connections:{NETWORKS[part].__name__}",
        optimizer="sgd",
        validation=0.8,  # which leaves 10,000 images to train on
        epochs=EPOCHS,
        seed=seed,
        cpu=Execution(threads=1, channels_last=True),
    )
    method, where = RUNS[run](part, seed), environment(CPU)
    records = trained(recipe, method, data)
    seconds = sum(record.train_seconds for record in records)
    numbers = (records[-1].weight_sparsity, records[-1].test_accuracy, kept(method, seed), seconds)
    return Row(run, part, seed, *numbers, where["device"], where["torch"], where["commit"])


def tell(rows: Sequence[Row]) -> None:
    """Print every kind of run over its seeds, and how far it is from RigL's of the same seed."""
    print(f"{'':28} {'seeds':>5}  {'accuracy (%)':14} {'− rigl (95%)':16} first connections kept (%)")
    rigl = {row.seed: row.test_accuracy for row in rows if row.run == "rigl"}
    for run in RUNS:
        own = [row for row in rows if row.run == run]
        if not own:
            continue
        gap, margin = paired_gap({row.seed: row.test_accuracy for row in own}, rigl)
        off = Spread(gap, None if math.isnan(margin) else margin).text(1, signed=True)
        accuracy = Spread.of([row.test_accuracy for row in own]).text(1)
        share = "" if math.isnan(own[0].kept) else Spread.of([row.kept for row in own]).text(0, 100)
        print(f"{run:28} {len(own):5}  {accuracy:14} {off if run != 'rigl' else '':16} {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=4, choices=NETWORKS, help="one channel of so many stays")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", default=list(RUNS), nargs="+", choices=RUNS, help="which kinds; by default all")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10, as for `dirprune train`")
    parser.add_argument("--out", type=Path, default=Path("results/connections-vgg16.csv"), help="the table of all runs")
    options = parser.parse_args()
    for seed in range(options.seeds):
        for run in options.runs:
            if (run, options.part, seed) not in {(r.run, r.part, r.seed) for r in read_rows(options.out, Row)}:
                row = measure(run, options.part, seed, options.data)
                merge_rows(options.out, Row, [row], key=["part", "run", "seed"], in_order=True)
    tell([row for row in read_rows(options.out, Row) if row.part == options.part and row.seed < options.seeds])


if __name__ == "__main__":
    main()
