"""What the benchmark makes of its times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dirprune.lab import bench, models
from dirprune.lab.recipes import Recipe

CPU = torch.device("cpu")


class Fake:
    """A step takes 2 ms with SGD and 3 ms with gRDA; an epoch takes four times its steps."""

    lean: set[bool]

    def __init__(self, recipe: Recipe, loaders: SimpleNamespace, batches: object, device: torch.device) -> None:
        Fake.lean.add(recipe.cpu.lean)
        self.model = nn.Linear(1, 1)
        self.seconds, self.count = {"sgd": 2e-3, "grda": 3e-3}[recipe.optimizer], len(loaders.train)

    def steps(self, count: int) -> float:
        return self.seconds

    def epoch(self) -> float:
        return 4 * self.count * self.seconds


@pytest.mark.parametrize("lean", [True, False])
def test_steps_are_told_in_milliseconds_beside_the_rest_of_an_epoch(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_Trainer", Fake)
    Fake.lean = set()
    found = {cost.optimizer: (cost.ms, cost.overhead) for cost in bench.bench("small", device=CPU, lean=lean)}
    assert found == {"sgd": (2.0, 0.75), "grda": (3.0, 0.75)}
    assert Fake.lean == {lean}


def test_the_time_of_a_step_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 14.0])
    monkeypatch.setattr(bench, "_now", lambda: next(ticks))
    trainer = object.__new__(bench._Trainer)
    trainer.tally = SimpleNamespace(reset=lambda: None)
    trainer.batches, trainer.step = [(0,)], lambda *batch: None
    assert trainer.steps(8) == 0.5


def test_the_floor_is_three_forward_passes_at_the_peak_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build", lambda name, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    floor = bench._floor_ms("any", bench.WORKLOADS["small"], 7)
    assert floor == pytest.approx(1e3 * 3 * 7 * (2 * 64 * 10) / bench.PEAK_FLOPS)


def test_the_table_compares_with_sgd_the_floor_and_the_paper() -> None:
    costs = [
        bench.Cost("vgg16", 128, 10, "sgd", 2.0, 1.0, None, 0.1),
        bench.Cost("vgg16", 128, 10, "grda", 3.0, 1.0, 600.0, 0.1),
    ]
    rows = [dict(zip(bench.COLUMNS, row, strict=True)) for row in bench.table(costs)]
    assert [row["÷ SGD"] for row in rows] == ["1.000", "1.500"]
    assert [row["paper ms"] for row in rows] == ["21.4", "30.3"]
    assert [row["share of floor"] for row in rows] == ["50%", "33%"]
    assert [(row["MiB"], row["paper MiB"]) for row in rows] == [("–", "1756"), ("600", "1809")]
