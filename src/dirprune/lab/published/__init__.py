"""The numbers that the authors published, from the tables in this folder; README.md says where they come from.

Accuracies and sparsity are in percent. Metrics have the names of `dirprune.lab.training.loop.EpochRecord`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from dirprune.lab.records.tables import read_rows

Key = TypeVar("Key")

EXPERIMENTS = ("vgg16-cifar10", "wrn28x10-cifar10", "wrn28x10-cifar100")
"""The experiments of the paper's three CIFAR tables, by the name of their recipe."""

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "sparsity")


@dataclass(frozen=True)
class Setting:
    """One row of a published table: an experiment under one optimizer; SGD has neither c nor μ."""

    experiment: str
    optimizer: str
    c: float | None = None
    mu: float | None = None

    def __str__(self) -> str:
        return "SGD" if self.optimizer == "sgd" else f"gRDA μ={self.mu:g}"


@dataclass(frozen=True)
class Estimate:
    """A mean and a standard deviation over ``n`` runs."""

    mean: float
    std: float
    n: int


@dataclass(frozen=True)
class PublishedCell:
    """One number of a table.

    ``paper`` is as printed, with a population std over the runs that the authors used. ``every`` and ``comparable`` are
    recomputed from their logs with the sample std: over all runs, and over those that did not diverge and were measured
    as ours are. ``epoch`` is the epoch of the number, ``printed_epoch`` the heading of its column.
    """

    setting: Setting
    printed_epoch: int
    epoch: int
    metric: str
    paper: Estimate
    every: Estimate
    comparable: Estimate


@dataclass(frozen=True)
class Band:
    """A metric over epochs: its mean, std and range over the comparable runs of a setting."""

    epochs: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class NormRatio:
    """‖w‖₂/‖w‖₁ over the epochs of one run (Figure 2), and the number of parameters d in its bound d^-½."""

    setting: Setting
    parameters: int
    epochs: tuple[int, ...]
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class PublishedCost:
    """A row of the paper's table on wall time and memory: milliseconds per iteration, peak MiB of the first GPU."""

    model: str
    batch_size: int
    optimizer: str
    ms: float
    peak_mib: float
    hardware: str


@dataclass(frozen=True)
class ImageNetRun:
    """A run of Figure 3, ResNet50 at a constant rate: accuracies and sparsity in percent over its epochs."""

    setting: Setting
    epochs: tuple[int, ...]
    train_accuracy: tuple[float, ...]
    test_accuracy: tuple[float, ...]
    sparsity: tuple[float, ...]


@cache
def cells() -> list[PublishedCell]:
    """Return the 450 cells of the three CIFAR tables.

    >>> [cell] = [c for c in cells() if str(c.setting) == "gRDA μ=0.6" and c.setting.experiment == "vgg16-cifar10"
    ...           and c.metric == "sparsity" and c.epoch == 200]
    >>> cell.paper.mean, cell.paper.std
    (79.6367, 0.2028)
    """
    return [
        PublishedCell(
            setting=_setting(row["experiment"], row),
            printed_epoch=int(row["printed_epoch"]),
            epoch=int(row["epoch"]),
            metric=row["metric"],
            paper=_estimate("paper", row),
            every=_estimate("every", row),
            comparable=_estimate("comparable", row),
        )
        for row in rows("cells.csv")
    ]


def settings(experiment: str) -> list[Setting]:
    """Return the settings of an experiment in the order of its table."""
    return list(dict.fromkeys(cell.setting for cell in cells() if cell.setting.experiment == experiment))


@cache
def bands(experiment: str) -> dict[tuple[Setting, str], Band]:
    """Return the bands of an experiment by setting and metric, for every epoch up to 20 and every fifth after that."""
    if experiment not in EXPERIMENTS:
        raise ValueError(f"experiment={experiment!r} was not published; take one of {', '.join(EXPERIMENTS)}")
    groups = _grouped(f"bands_{experiment}.csv", lambda row: (_setting(experiment, row), row["metric"]))
    return {
        key: Band(
            tuple(int(row["epoch"]) for row in own),
            *(tuple(float(row[column]) for row in own) for column in ("mean", "std", "min", "max")),
        )
        for key, own in groups.items()
    }


def norm_ratios() -> list[NormRatio]:
    """Return the curves of Figure 2."""
    groups = _grouped("norm_ratios.csv", lambda row: (_setting(row["experiment"], row), int(row["parameters"])))
    return [
        NormRatio(*key, tuple(int(row["epoch"]) for row in own), tuple(float(row["ratio"]) for row in own))
        for key, own in groups.items()
    ]


def costs() -> list[PublishedCost]:
    """Return the table on wall time and memory."""
    return read_rows(Path(__file__).with_name("costs.csv"), PublishedCost)


def imagenet_runs() -> list[ImageNetRun]:
    """Return the curves of Figure 3."""
    groups = _grouped("imagenet_curves.csv", lambda row: _setting("resnet50-imagenet", row))
    columns = ("train_accuracy", "test_accuracy", "sparsity")
    return [
        ImageNetRun(
            setting,
            tuple(int(row["epoch"]) for row in own),
            *(tuple(float(row[column]) for row in own) for column in columns),
        )
        for setting, own in groups.items()
    ]


def rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file in this folder."""
    with resources.files(__name__).joinpath(name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _grouped(name: str, key: Callable[[dict[str, str]], Key]) -> dict[Key, list[dict[str, str]]]:
    """Return the rows of a CSV file by a key, in the order in which keys first occur."""
    groups: dict[Key, list[dict[str, str]]] = {}
    for row in rows(name):
        groups.setdefault(key(row), []).append(row)
    return groups


def _setting(experiment: str, row: dict[str, str]) -> Setting:
    if row["optimizer"] == "sgd":
        return Setting(experiment, "sgd")
    return Setting(experiment, row["optimizer"], float(row["c"]), float(row["mu"]))


def _estimate(kind: str, row: dict[str, str]) -> Estimate:
    return Estimate(float(row[f"{kind}_mean"]), float(row[f"{kind}_std"]), int(row[f"{kind}_n"]))
