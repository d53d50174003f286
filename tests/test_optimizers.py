"""The optimizers as parts of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dirprune.lab.training.optimizers import Grda, Rda, Sgd, TrainingPlan, optimizer


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rda_thresholds_the_sum_of_gradients_by_n_gamma_lambda(momentum: float) -> None:
    """Compare with Xiao's closed form for given gradients: wₙ = soft(w₀ − γ Σ g, nγλ)."""
    lam, lr, steps = 0.05, 0.2, 7
    rate = lr / (1 - momentum)
    start = torch.linspace(-2, 2, 21, dtype=torch.float64)
    w = nn.Parameter(start.clone())
    model = nn.Module()
    model.w = w
    optimizer = Rda(lam=lam, lr=lr, momentum=momentum).make(model)
    buffer, moved = torch.zeros_like(start), torch.zeros_like(start)
    for number in range(steps):
        gradient = torch.linspace(0.3, -0.1, 21, dtype=torch.float64) * (number + 1)
        w.grad = gradient.clone()
        optimizer.step()
        buffer = momentum * buffer + gradient
        moved += lr * buffer
    v = start - moved
    expected = v.sign() * (v.abs() - steps * rate * lam).clamp_min(0)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-9, atol=1e-9)
    assert (expected == 0).any()


@pytest.mark.parametrize(
    "spec", [Grda(c=0.02, lr=0.25, exempt=("bias", "norm")), Rda(lam=0.01, lr=0.25, exempt=["norm", "bias"])]
)
def test_what_is_exempt_stays_exempt(spec: Grda | Rda) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    prunable, exempt = spec.make(model).param_groups
    assert prunable["c"] == pytest.approx(0.02)
    assert exempt["c"] == 0.0
    assert prunable["mu"] == exempt["mu"] == (spec.mu if isinstance(spec, Grda) else 1.0)
    hash(spec)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("grda", {"c": -1.0}, r"c=-1.0 cannot be used; give a finite number ≥ 0"),
        ("grda", {"c": "abc"}, "c='abc' cannot be used; give a finite number"),
        ("grda", {"mu": 0.0}, r"mu=0.0 .* in \(0, 1\]"),
        ("grda", {"mu": float("nan")}, "mu=nan"),
        ("rda", {"lam": float("inf")}, "lam=inf"),
        ("sgd", {"lr": 0}, "lr=0 .* > 0"),
        ("sgd", {"momentum": 1}, "momentum=1"),
        ("sgd", {"nesterov": True}, "nesterov=True .* needs a momentum"),
        ("sgd", {"c": 0.1}, "c=0.1 cannot be used; sgd takes lr, weight_decay, momentum, nesterov"),
        ("adam", {}, "no optimizer 'adam'"),
    ],
)
def test_options_that_an_optimizer_cannot_use_are_refused_by_name(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer(name, **options)


def test_the_rate_of_captured_steps_is_a_tensor() -> None:
    for spec in (Sgd(lr=0.25), Grda(lr=0.25)):
        [group] = spec.make(nn.Linear(2, 2), TrainingPlan(1, torch.zeros(1, 2), torch.device("cpu"))).param_groups
        assert torch.equal(group["lr"], torch.tensor(0.25, dtype=group["lr"].dtype))
