"""Measure the cost of a training step with SGD and with gRDA, next to the arithmetic floor and the paper's figures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dirprune.lab import data, models, published
from dirprune.lab.data import Batch, Loaders, Synthetic
from dirprune.lab.names import unknown
from dirprune.lab.records.columns import Amount, Count, Number
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import merge_rows
from dirprune.lab.text import NOTHING
from dirprune.lab.training import recipes
from dirprune.lab.training.execution import Tally, make_scoring, make_step
from dirprune.lab.training.experiment import make_optimizer
from dirprune.lab.training.lean import lowered
from dirprune.lab.training.loop import batch_sizes, evaluate
from dirprune.lab.training.recipe import Recipe, changed

PEAK_FLOPS = 790e12
"""The rate that one H200 reaches in a large bf16 matrix product on random data; the floor assumes this rate."""


@dataclass(frozen=True)
class Workload:
    """A network trained as in a published run, but on noise, with the same ratio of test to training images."""

    recipe: str
    shape: tuple[int, int, int]
    classes: int
    examples: int
    test_examples: int


WORKLOADS = {
    "vgg16": Workload("vgg16-cifar10", (3, 32, 32), 10, 50_000, 10_000),
    "wrn28x10": Workload("wrn28x10-cifar10", (3, 32, 32), 10, 50_000, 10_000),
    "resnet50": Workload("resnet50-imagenet", (3, 224, 224), 1000, 6_400, 250),
    "small": Workload("digits", (1, 8, 8), 10, 1_438, 359),
}
MOST_MS = {"vgg16": 1.4, "wrn28x10": 12.5}
MOST_RATIO = 1.02
MOST_OVERHEAD = 0.05
"""Our targets on one H200: milliseconds per step, gRDA's time relative to SGD's, and the rest of an epoch."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step with one network and optimizer: milliseconds (median of rounds) and peak MiB."""

    model: str
    batch_size: Number
    parameters: Count
    optimizer: str
    ms: Amount
    floor_ms: Amount | None
    peak_mib: Amount | None
    overhead: float
    """Fraction of an epoch outside training steps: data handling and evaluation, but not the counting of zeros."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Trainer:
    """A network under one optimizer, ready to step."""

    def __init__(self, recipe: Recipe, loaders: Loaders, batches: Sequence[Batch], device: torch.device) -> None:
        self.execution = recipe.execution(device.type)
        torch.manual_seed(0)
        self.model = self.execution.place(models.build(recipe.model, loaders.classes), device)
        optimizer_ = make_optimizer(recipe, self.model, device, loaders)
        lowered(self.model, optimizer_, self.execution).__enter__()  # never left: the trainer is thrown away
        self.scoring = make_scoring(self.model, self.model, self.execution, device)
        self.loaders = loaders
        self.batches = batches
        self.device = device
        self._epoch = 0
        self.tally = Tally(len(loaders.train), device)
        sizes = batch_sizes(loaders.train)
        self.step = make_step(self.model, self.model, optimizer_, self.tally, self.execution, batches, sizes)

    def steps(self, count: int) -> float:
        """Run ``count`` steps and return the seconds per step."""
        self.tally.reset()
        start = _now(self.device)
        for i in range(count):
            self.step(*self.batches[i % len(self.batches)])
        return (_now(self.device) - start) / count

    def epoch(self) -> float:
        """Run an epoch as in training, with data, steps and evaluation, and return its seconds."""
        self.tally.reset()
        start = _now(self.device)
        self._epoch += 1
        for batch in self.loaders.train.epoch(self._epoch):
            self.step(*batch)
        evaluate(self.model, self.loaders.test, scoring=self.scoring)
        return _now(self.device) - start


def bench(
    name: str, *, device: torch.device, lean: bool | None = None, rounds: int = 7, steps: int = 50
) -> Iterator[StepCost]:
    """Yield the cost of a step of this network with SGD, then with gRDA. Rounds of the two alternate.

    ``lean`` decides whether gRDA's weights are bfloat16; None takes the recipe's value.
    """
    if name not in WORKLOADS:
        raise unknown("benchmark", name, WORKLOADS)
    workload = WORKLOADS[name]
    recipe = changed(recipes.get(workload.recipe), lean=lean)
    loaders = data.load(
        "synthetic",
        batch_size=recipe.batch_size,
        seed=0,
        device=device,
        synthetic=Synthetic(workload.shape, workload.classes, workload.examples, workload.test_examples),
    )
    batches = list(islice(loaders.train.epoch(1), 8))
    steps = min(steps, len(loaders.train))
    # One-time initialisation, and the memory it takes, should count for neither optimizer.
    _Trainer(recipe.but(optimizer="sgd"), loaders, batches, device)
    trainers: dict[str, _Trainer] = {}
    peaks: dict[str, float | None] = {}
    for optimizer in ("sgd", "grda"):
        before = _reset_peak(device)
        trainers[optimizer] = _Trainer(recipe.but(optimizer=optimizer), loaders, batches, device)
        trainers[optimizer].steps(steps)
        peaks[optimizer] = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if before is not None else None
        trainers[optimizer].epoch()  # the first epoch compiles and captures the evaluation
    times: dict[str, list[float]] = {optimizer: [] for optimizer in trainers}
    for _ in range(rounds):
        for optimizer, trainer in trainers.items():
            times[optimizer].append(trainer.steps(steps))
    for optimizer, trainer in trainers.items():
        ms = 1e3 * statistics.median(times[optimizer])
        yield StepCost(
            model=name,
            batch_size=recipe.batch_size,
            parameters=sum(p.numel() for p in trainer.model.parameters()),
            optimizer=optimizer,
            ms=ms,
            floor_ms=_floor_ms(recipe.model, workload, recipe.batch_size) if device.type == "cuda" else None,
            peak_mib=peaks[optimizer],
            overhead=_overhead(trainer),
        )


def _overhead(trainer: _Trainer, seconds: float = 10.0) -> float:
    """Return the fraction of an epoch outside training steps: the median over 3 to 15 epochs, as time allows.

    Each epoch is compared with as many bare steps just before and just after it, because a GPU under load lowers its
    clock.
    """
    count = len(trainer.loaders.train)
    shares: list[float] = []
    alone, start = count * trainer.steps(count), time.perf_counter()
    while len(shares) < 3 or (len(shares) < 15 and time.perf_counter() - start < seconds):
        whole, before = trainer.epoch(), alone
        alone = count * trainer.steps(count)
        shares.append(1 - (before + alone) / 2 / whole)
    return max(0.0, statistics.median(shares))


def ratio_to_sgd(cost: StepCost, costs: Sequence[StepCost]) -> float:
    """Return the time of a step as a multiple of SGD's with the same network, which must be among ``costs``."""
    return cost.ms / next(each.ms for each in costs if (each.model, each.optimizer) == (cost.model, "sgd"))


SPARE = ("floor ms", "rest of an epoch", "MiB")
"""Columns that are dropped on a narrow terminal, in this order."""


def table(costs: Sequence[StepCost]) -> list[dict[str, str]]:
    """Return the costs as rows of text by column, next to the paper's V100 figures."""
    published_costs = {(cost.model, cost.optimizer): cost for cost in published.costs()}
    rows = []
    for cost in costs:
        paper = published_costs.get((cost.model, cost.optimizer))
        rows.append(
            {
                "model": cost.model,
                "optimizer": cost.optimizer,
                "ms": f"{cost.ms:.3f}",
                "floor ms": f"{cost.floor_ms:.2f}" if cost.floor_ms else NOTHING,
                "share of floor": f"{cost.floor_ms / cost.ms:.0%}" if cost.floor_ms else NOTHING,
                "÷ SGD": f"{ratio_to_sgd(cost, costs):.3f}",
                "paper ms": f"{paper.ms:.1f}" if paper else NOTHING,
                "MiB": f"{cost.peak_mib:.0f}" if cost.peak_mib else NOTHING,
                "paper MiB": f"{paper.peak_mib:.0f}" if paper else NOTHING,
                "rest of an epoch": f"{cost.overhead:.1%}",
            }
        )
    return rows


@dataclass(frozen=True)
class Bar:
    """A target for a network on a GPU and the measured value, both in ``unit``."""

    model: str
    what: str
    limit: float
    reached: float
    unit: str

    @property
    def met(self) -> bool:
        return self.reached <= self.limit

    def cells(self) -> dict[str, str]:
        """Return the bar as text by column."""
        limit, reached = (f"{value:.4g}" for value in (self.limit, self.reached))
        if reached == limit and not self.met:
            reached = f"{self.reached:.7g}"  # enough digits to show the difference
        return {
            "network": self.model,
            "what": self.what,
            "bar": f"≤ {limit} {self.unit}".strip(),
            "measured": f"{reached} {self.unit}".strip(),
            "met": "yes" if self.met else "no",
        }


def bars(costs: Sequence[StepCost]) -> list[Bar]:
    """Return the targets and measured values of every network that was measured on a GPU with both optimizers."""
    found = []
    by_model: dict[str, dict[str, StepCost]] = {}
    for cost in costs:
        by_model.setdefault(cost.model, {})[cost.optimizer] = cost
    for model, pair in by_model.items():
        if len(pair) < 2 or any(cost.floor_ms is None for cost in pair.values()):
            continue
        sgd, grda = pair["sgd"], pair["grda"]
        if model in MOST_MS:
            found += [Bar(model, f"a step, {c.optimizer}", MOST_MS[model], c.ms, "ms") for c in (sgd, grda)]
        found.append(Bar(model, "a step, gRDA ÷ SGD", MOST_RATIO, grda.ms / sgd.ms, ""))
        for c in (sgd, grda):
            found.append(Bar(model, f"rest of an epoch, {c.optimizer}", 100 * MOST_OVERHEAD, 100 * c.overhead, "%"))
        if sgd.peak_mib and grda.peak_mib:
            least = 4 * sgd.parameters / 2**20  # the accumulator
            memory = least + 0.01 * sgd.peak_mib, grda.peak_mib - sgd.peak_mib
            found.append(Bar(model, "memory, gRDA − SGD", *memory, "MiB"))
    return found


@dataclass(frozen=True)
class MeasuredCost(StepCost):
    """A cost, with the hardware, torch version, commit and command of its measurement."""

    hardware: str
    torch: str
    commit: str
    command: str


def write(costs: Sequence[StepCost], path: Path, device: torch.device) -> None:
    """Write the costs to a CSV file. Its rows for other networks and other hardware are kept."""
    where = environment(device)
    told: dict[str, Any] = {"torch": where.torch, "commit": where.commit, "command": where.command}
    rows = [MeasuredCost(**cost.to_dict(), hardware=where.device, **told) for cost in costs]
    merge_rows(path, MeasuredCost, rows, key=("model", "batch_size", "optimizer", "hardware"))


def _floor_ms(model: str, workload: Workload, batch_size: int) -> float:
    """Return the milliseconds that forward and backward (three times the forward's FLOPs) take at PEAK_FLOPS."""
    with torch.device("meta"):
        network: nn.Module = models.build(model, workload.classes)
        counter = FlopCounterMode(display=False)
        with counter:
            network(torch.empty(1, *workload.shape))
    return 1e3 * 3 * batch_size * counter.get_total_flops() / PEAK_FLOPS


def _reset_peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _now(device: torch.device) -> float:
    """Return the time at which the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
