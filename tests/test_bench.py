"""How the benchmark evaluates its times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import call
from torch import nn

from dirprune.lab import models
from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.studies.bench import work as bench
from dirprune.lab.training.recipe import Recipe

CPU = torch.device("cpu")


class Fake:
    """A trainer whose steps take 2 ms with SGD and 3 ms with gRDA, and whose epochs take four times their steps."""

    lean: set[bool]

    def __init__(self, recipe: Recipe, loaders: SimpleNamespace, batches: object, device: torch.device) -> None:
        Fake.lean.add(recipe.cpu.lean)
        self.model, self.loaders = nn.Linear(1, 1), loaders
        self.seconds, self.count = {"sgd": 2e-3, "grda": 3e-3}[recipe.optimizer.name], len(loaders.train)

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


def test_a_clock_that_falls_is_not_taken_for_overhead() -> None:
    """Half of every epoch is overhead, on a machine that gets slower by the same amount with every measurement."""
    slower = iter(range(100, 200))
    trainer = SimpleNamespace(
        loaders=SimpleNamespace(train=range(10)),
        steps=lambda count: 1e-3 * next(slower),
        epoch=lambda: 2 * 10e-3 * next(slower),
    )
    assert bench._overhead(trainer, seconds=0.0) == pytest.approx(0.5)


def test_the_time_of_a_step_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 14.0])
    monkeypatch.setattr(bench, "_now", lambda device: next(ticks))
    trainer = object.__new__(bench._Trainer)
    trainer.device = CPU
    trainer.tally = SimpleNamespace(reset=lambda: None)
    trainer.batches, trainer.step = [(0,)], lambda *batch: None
    assert trainer.steps(8) == 0.5


def test_the_clock_waits_for_the_device_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    bench._now(CPU)
    assert waited == []
    bench._now(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_the_floor_is_three_forward_passes_at_the_peak_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build", lambda name, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    floor = bench._floor_ms("any", bench.WORKLOADS["small"], 7)
    assert floor == pytest.approx(1e3 * 3 * 7 * (2 * 64 * 10) / bench.PEAK_FLOPS)


def test_the_table_compares_with_sgd_the_floor_and_the_paper() -> None:
    costs = [
        bench.StepCost("vgg16", 128, 10, "sgd", 2.0, 1.0, None, 0.1),
        bench.StepCost("vgg16", 128, 10, "grda", 3.0, 1.0, 600.0, 0.1),
    ]
    rows = bench.table(costs)
    assert [row["÷ SGD"] for row in rows] == ["1.000", "1.500"]
    assert [row["paper ms"] for row in rows] == ["21.4", "30.3"]
    assert [row["share of floor"] for row in rows] == ["50%", "33%"]
    # The column is not called "overhead", which would read as overhead over SGD.
    assert [row["rest of an epoch"] for row in rows] == ["10.0%", "10.0%"]
    assert [(row["MiB"], row["paper MiB"]) for row in rows] == [("–", "1756"), ("600", "1809")]


def pair(
    sgd: tuple[float, float, float], grda: tuple[float, float, float], model: str = "wrn28x10"
) -> list[bench.StepCost]:
    """Return the costs of a network of 1,048,576 parameters, given (ms, MiB, rest of an epoch) of each optimizer."""
    return [
        bench.StepCost(model, 128, 2**20, name, ms, 5.0, mib, rest)
        for name, (ms, mib, rest) in (("sgd", sgd), ("grda", grda))
    ]


def test_bars_are_what_the_project_asks_for() -> None:
    found = {bar.what: bar for bar in bench.bars(pair((12.4, 1000.0, 0.051), (12.6, 1014.0, 0.049)))}
    assert {what: bar.met for what, bar in found.items()} == {
        "a step, sgd": True,
        "a step, grda": False,
        "a step, gRDA ÷ SGD": True,
        "rest of an epoch, sgd": False,
        "rest of an epoch, grda": True,
        "memory, gRDA − SGD": True,
    }
    memory = found["memory, gRDA − SGD"]
    assert (memory.limit, memory.reached) == (4 + 10, 14)  # four bytes per parameter, and one percent of SGD's memory
    assert not {bar.what: bar for bar in bench.bars(pair((12.4, 1000.0, 0), (12.4, 1014.1, 0)))}[memory.what].met
    assert tuple(found["a step, grda"].cells().values()) == ("wrn28x10", "a step, grda", "≤ 12.5 ms", "12.6 ms", "no")


def test_a_bar_missed_by_a_hair_shows_the_hair() -> None:
    assert tuple(bench.Bar("m", "w", 12.5, 12.50031, "ms").cells().values())[3:] == ("12.50031 ms", "no")


def test_nothing_is_asked_of_a_cpu_or_of_half_a_pair() -> None:
    on_cpu = [replace(cost, floor_ms=None) for cost in pair((1, 1, 0), (1, 1, 0))]
    assert bench.bars(on_cpu) == bench.bars(pair((1, 1, 0), (1, 1, 0))[:1]) == []
    ratio_and_rest = bench.bars([replace(c, peak_mib=None) for c in pair((1, 1, 0), (1, 1, 0), model="resnet50")])
    assert len(ratio_and_rest) == 3


def test_measuring_one_network_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    first, second = pair((1.0, 1, 0), (1, 1, 0)), pair((2.0, 1, 0), (2, 1, 0), model="vgg16")
    path = tmp_path / "bench.csv"
    for costs in (first, second, [replace(cost, ms=3.0) for cost in first]):
        bench.write(costs, path, CPU)
    rows = read_rows(path, bench.MeasuredCost)
    assert [(row.model, row.ms) for row in rows] == [("vgg16", 2.0)] * 2 + [("wrn28x10", 3.0)] * 2
    write_rows(path, bench.MeasuredCost, [replace(row, hardware="another") for row in rows])
    bench.write(first, path, CPU)
    assert len(read_rows(path, bench.MeasuredCost)) == 6


def test_a_table_that_cannot_be_read_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.csv"
    path.write_text("something else\n")
    monkeypatch.setattr(bench, "bench", None)
    refused = call("bench", "small", "--out", path)
    assert refused.exit_code == 1
    assert "bench.csv cannot be read as a table of MeasuredCost" in refused.stderr
    assert path.read_text() == "something else\n"
