"""gRDA and ℓ₁-RDA as methods."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dirprune import GRDA, prunable_groups
from dirprune.lab.methods import Grda, Rda


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rda_thresholds_the_sum_of_gradients_by_n_gamma_lambda(momentum: float) -> None:
    """Compare with Xiao's closed form for given gradients: wₙ = soft(w₀ − γ Σ g, nγλ)."""
    lam, lr, steps = 0.05, 0.2, 7
    rate = lr / (1 - momentum)
    start = torch.linspace(-2, 2, 21, dtype=torch.float64)
    w = nn.Parameter(start.clone())
    model = nn.Module()
    model.w = w
    optimizer = GRDA([w], lr=lr, c=1.0, momentum=momentum)
    Rda(lam=lam).attach(model, optimizer, steps=steps, examples=1)
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


@pytest.mark.parametrize("method", [Grda(c=0.02, mu=0.7), Rda(lam=0.01)])
def test_what_is_exempt_stays_exempt(method: Grda) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = GRDA(prunable_groups(model, 1e-3), lr=0.25, mu=0.5)
    method.attach(model, optimizer, steps=1, examples=1)
    prunable, exempt = optimizer.param_groups
    assert prunable["c"] == pytest.approx(0.02)
    assert exempt["c"] == 0.0
    assert prunable["mu"] == exempt["mu"] == method.mu


def test_without_options_the_optimizer_keeps_its_own() -> None:
    model = nn.Linear(3, 3)
    optimizer = GRDA(model.parameters(), c=0.123, mu=0.456)
    Grda().attach(model, optimizer, steps=1, examples=1)
    assert (optimizer.param_groups[0]["c"], optimizer.param_groups[0]["mu"]) == (0.123, 0.456)


def test_another_optimizer_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="optimizer is SGD"):
        Grda().attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"c=-1\.0"):
        Grda(c=-1.0)
    with pytest.raises(ValueError, match=r"mu=0\.0"):
        Grda(mu=0.0)
    with pytest.raises(ValueError, match="lam=inf"):
        Rda(lam=float("inf"))
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"lr=0\.0"):
        Rda(lam=0.1).attach(model, GRDA(model.parameters(), lr=0.0), steps=1, examples=1)
