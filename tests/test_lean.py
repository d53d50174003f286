"""bfloat16 weights under gRDA: the run is the one with float32 weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import GPU
from torch import nn

from dirprune import GRDA
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.lean import Lean, lowered
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
PLAIN, LEAN = (Execution(precision="bfloat16", lean=lean) for lean in (False, True))


def run(folder: Path, execution: Execution, epochs: int | None = None, **changes: object) -> Run:
    recipe = recipes.get("digits").but(epochs=4, cpu=execution, keep=(0, 1, 2, 3, 4), **changes)
    made = runs.load(folder) if folder.exists() else runs.create(folder, recipe)
    for record in conduct(made, Surroundings(CPU)):
        if record.epoch == epochs:
            break
    return made


def check_same(a: Run, b: Run) -> None:
    timeless = [
        [{k: v for k, v in record.to_dict().items() if "seconds" not in k} for record in each.records()]
        for each in (a, b)
    ]
    assert timeless[0] == timeless[1]
    for epoch in range(5):
        ours, theirs = (runs.weights_of(each, epoch)[1] for each in (a, b))
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "nesterov": True, "lr": 0.01}, {"model": "test_lean:mlp"}])
def test_a_lean_run_is_the_plain_one_bit_for_bit(tmp_path: Path, changes: dict[str, object]) -> None:
    plain, slim = (run(tmp_path / name, e, **changes) for name, e in (("plain", PLAIN), ("lean", LEAN)))
    check_same(slim, plain)
    assert plain.records()[-1].sparsity > 0


def mlp(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, classes))


def test_a_lean_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", LEAN)
    run(tmp_path / "parts", LEAN, epochs=2)
    check_same(run(tmp_path / "parts", LEAN), whole)


def test_inside_weights_have_the_same_memory_every_time() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    slim = Lean(model, GRDA(model.parameters(), lr=0.1, c=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = []
    for _ in range(2):
        with slim:
            assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
            seen.append([p.data_ptr() for p in model.parameters()])
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert seen[0] == seen[1]


def test_what_reads_the_weights_otherwise_keeps_them_in_float32() -> None:
    model = nn.Linear(4, 2)
    for optimizer, execution in (
        (GRDA(model.parameters(), lr=0.1, weight_decay=0.1), LEAN),
        (GRDA(model.parameters(), lr=0.1), PLAIN),
        (GRDA(model.parameters(), lr=0.1), replace(LEAN, precision="float32")),
        (torch.optim.SGD(model.parameters(), lr=0.1), LEAN),
    ):
        with lowered(model, optimizer, execution):
            assert model.weight.dtype == torch.float32


def test_weights_of_another_precision_stay_as_they_are_and_old_gradients_go() -> None:
    exact, model = nn.Linear(4, 2).double(), nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    with Lean(exact, GRDA(exact.parameters(), lr=0.1)), Lean(model, GRDA(model.parameters(), lr=0.1)):
        assert exact.weight.dtype == torch.float64
        assert model.weight.grad is None


@GPU
def test_captured_lean_steps_train_as_plain_ones(tmp_path: Path) -> None:
    fast = Execution(precision="bfloat16", channels_last=True, compile=True, capture=True)
    found = []
    for name, execution in (("plain", fast), ("lean", replace(fast, lean=True))):
        recipe = replace(recipes.get("digits"), epochs=6, cuda=execution, keep=(6,))
        made = runs.create(tmp_path / name, recipe)
        list(conduct(made, Surroundings(torch.device("cuda"))))
        found.append(made.records()[-1])
        assert {w.dtype for w in runs.weights_of(made, 6)[1].values() if w.is_floating_point()} == {torch.float32}
    plain, slim = found
    assert slim.sparsity == pytest.approx(plain.sparsity, abs=0.01)
    assert slim.train_loss == pytest.approx(plain.train_loss, rel=0.2)
