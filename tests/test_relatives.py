"""gRDA at the ends of its family: what it becomes there, written out from the equations of its relatives."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from dirprune import GRDA

STEPS = 200


@cache
def regression() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets of which 4 of 20 inputs matter, and initial weights without a zero."""
    generator = torch.Generator().manual_seed(0)
    inputs, start = torch.randn(80, 20, generator=generator), torch.randn(20, generator=generator)
    truth = torch.cat([torch.tensor([3.0, -2.0, 1.5, -1.0]), torch.zeros(16)])
    targets = inputs @ truth + 0.1 * torch.randn(80, generator=generator)
    return inputs.double(), targets.double(), 0.1 * start.double()


def gradient(w: Tensor, n: int) -> Tensor:
    """Return the gradient of the squared error on the n-th batch of eight."""
    inputs, targets, _ = regression()
    rows = torch.arange(8 * n, 8 * n + 8) % len(inputs)
    return inputs[rows].T @ (inputs[rows] @ w - targets[rows]) / 8


def train(optimizer: GRDA, w: nn.Parameter) -> list[Tensor]:
    """Take `STEPS` steps, and return the weights after each."""
    path = []
    for n in range(STEPS):
        w.grad = gradient(w.detach(), n)
        optimizer.step()
        path.append(w.detach().clone())
    return path


def shrink(v: Tensor, tau: float) -> Tensor:
    return v.sign() * (v.abs() - tau).clamp(min=0)


def test_as_mu_falls_to_zero_it_is_linearized_bregman() -> None:
    """LinBreg: v ← v − γ∇L(w), w = argmin_u ½‖u − v‖² + λ‖u‖₁, with v₀ ∈ w₀ + λ ∂‖w₀‖₁.

    Its λ is there from the start and does not grow: as μ → 0, all of gRDA's threshold c√γ(nγ)^μ comes with n = 1.
    """
    gamma, lam = 0.05, 0.4
    start = regression()[2]
    w = nn.Parameter(start.clone())
    optimizer = GRDA([w], lr=gamma, c=lam / math.sqrt(gamma), mu=1e-15)
    state = optimizer.begin(w, optimizer.param_groups[0])
    state["step"].fill_(1)
    state["threshold"].fill_(lam)
    state["accumulator"].add_(lam * start.sign())
    v, u = start + lam * start.sign(), start
    for n, found in enumerate(train(optimizer, w)):
        v = v - gamma * gradient(u, n)
        u = shrink(v, lam)
        torch.testing.assert_close(found, u, rtol=0, atol=1e-12)
    assert (u[4:] == 0).sum() >= 6  # and it has pruned
    assert (u[:4] != 0).all()


def test_at_mu_one_every_step_solves_the_problem_of_l1_rda() -> None:
    """RDA: w_n = argmin_u ⟨mean gradient, u⟩ + λ‖u‖₁ + ‖u − w₀‖²/(2γn), by the conditions of its optimum."""
    gamma, lam = 0.05, 0.2
    start = regression()[2]
    w = nn.Parameter(start.clone())
    total, before = torch.zeros_like(start), start
    path = train(GRDA([w], lr=gamma, c=lam / math.sqrt(gamma), mu=1.0), w)
    for n, found in enumerate(path):
        total, before = total + gradient(before, n), found
        pull = total / (n + 1) + (found - start) / (gamma * (n + 1))
        kept = found != 0
        torch.testing.assert_close(pull[kept], -lam * found[kept].sign(), rtol=0, atol=1e-10)
        assert (pull[~kept].abs() <= lam + 1e-10).all()
    assert (path[-1] == 0).sum() > 8


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_at_mu_one_it_shrinks_as_pat_does(decay: float) -> None:
    """PAT: SGD's momentum step on latent weights, then the proximal map of λ‖·‖₁ with the sum of the rates."""
    gamma, lam = 0.02, 0.1
    start = regression()[2]
    w = nn.Parameter(start.clone())
    effective = gamma / (1 - decay)
    optimizer = GRDA([w], lr=gamma, c=lam / math.sqrt(effective), mu=1.0, momentum=decay)
    latent = nn.Parameter(start.clone())
    base, u = torch.optim.SGD([latent], lr=gamma, momentum=decay), start
    for n, found in enumerate(train(optimizer, w)):
        latent.grad = gradient(u, n)
        base.step()
        u = shrink(latent.detach(), lam * effective * (n + 1))
        torch.testing.assert_close(found, u, rtol=0, atol=1e-12)


def test_with_a_threshold_that_follows_a_plan_of_zeros_it_is_the_core_of_st3() -> None:
    """ST-3: a straight-through gradient through w = S(v, τ), with the τ that makes the planned share of w zero."""
    gamma, (inputs, targets, start) = 0.05, regression()
    w = nn.Parameter(start.clone())
    optimizer = GRDA([w], lr=gamma, c=1e-30, mu=0.5)
    threshold = optimizer.begin(w, optimizer.param_groups[0])["threshold"]
    latent, tau = nn.Parameter(start.clone()), 0.0
    base = torch.optim.SGD([latent], lr=gamma)
    for n in range(STEPS):
        w.grad = gradient(w.detach(), n)
        seen = latent + (shrink(latent, tau) - latent).detach()
        rows = torch.arange(8 * n, 8 * n + 8) % len(inputs)
        base.zero_grad()
        ((inputs[rows] @ seen - targets[rows]).square().mean() / 2).backward()
        base.step()
        zeros = round(16 * (1 - (1 - min(1.0, 2 * n / STEPS)) ** 3))  # a cubic plan: sixteen zeros from half-way on
        tau = float(latent.detach().abs().sort().values[zeros - 1]) if zeros else 0.0
        threshold.fill_(tau)
        optimizer.step()
        torch.testing.assert_close(w.detach(), shrink(latent.detach(), tau), rtol=0, atol=1e-12)
        assert int((w == 0).sum()) == zeros
    assert (w[:4] != 0).all()
