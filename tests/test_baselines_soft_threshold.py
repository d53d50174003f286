"""STR: the map, its gradients, and thresholds that decay raises and the loss holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dirprune import GRDA
from dirprune.lab.methods.soft_threshold import SoftThreshold, Str


def test_the_map_is_the_proximal_operator_of_the_absolute_value() -> None:
    """W minimises ½(W − V)² + σ(s)|W|: compare with a search over a grid."""
    threshold = 1 / (1 + math.exp(0.4))
    v = torch.tensor([-1.3, -0.4, -0.1, 0.0, 0.2, 0.41, 0.9], dtype=torch.float64)
    grid = torch.linspace(-2, 2, 40_001, dtype=torch.float64)
    best = grid[(0.5 * (grid[:, None] - v).square() + threshold * grid[:, None].abs()).argmin(0)]
    found = SoftThreshold(-0.4).double()(v)
    torch.testing.assert_close(found, best, rtol=0, atol=1e-4)


def test_gradients_against_differences() -> None:
    map_ = SoftThreshold(-1.0).double()
    v = torch.tensor([-1.3, -0.4, -0.1, 0.05, 0.6], dtype=torch.float64, requires_grad=True)

    def weighed(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(map_, {"s": s}, (v,))

    assert torch.autograd.gradcheck(weighed, (v, map_.s.detach().requires_grad_()))


def test_decay_raises_the_threshold_at_its_own_rate() -> None:
    """With zero gradients, s becomes s·(1 − γ·decay)ⁿ; the weights keep the optimizer's own decay, which is 0 here."""
    layer = nn.Linear(5, 4)
    optimizer = SGD(layer.parameters(), lr=0.1)
    method = Str(decay=0.5, start=-6.0)
    method.attach(layer, optimizer, steps=10, examples=1)
    v = layer.parametrizations.weight.original
    before = v.detach().clone()
    for _ in range(10):
        optimizer.zero_grad()
        (0.0 * layer(torch.ones(1, 5)).sum()).backward()
        optimizer.step()
    s = layer.parametrizations.weight[0].s
    assert s.item() == pytest.approx(-6.0 * (1 - 0.1 * 0.5) ** 10, rel=1e-5)
    assert torch.equal(v, before)
    threshold = torch.sigmoid(s).item()
    assert method.sparsity().zeros == int((before.abs() <= threshold).sum())
    assert set(method.weights()) == {"weight", "bias"}


def test_the_loss_holds_a_threshold_that_would_cost_too_much() -> None:
    """Least squares: on targets that need every weight no weight is pruned, on targets that need none all are."""
    results = []
    for size in (2.0, 0.0):
        method = Str(decay=0.5, start=-6.0)
        layer = nn.Linear(8, 8, bias=False)
        nn.init.constant_(layer.weight, 0.3)  # a weight that had to cross 0 would get stuck, where W has no gradient
        optimizer = SGD(layer.parameters(), lr=0.05)
        method.attach(layer, optimizer, steps=200, examples=1)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        for _ in range(200):
            optimizer.zero_grad()
            (layer(inputs) - inputs @ torch.full((8, 8), size)).square().sum(1).mean().backward()
            optimizer.step()
        results.append(method.sparsity().weight_fraction)
    assert results == [0.0, 1.0]


def test_grda_does_not_threshold_thresholds() -> None:
    model = nn.Linear(3, 3)
    optimizer = GRDA(model.parameters(), c=0.5)
    Str().attach(model, optimizer, steps=1, examples=1)
    assert [group["c"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decay=-1\.0"):
        Str(decay=-1.0)
    with pytest.raises(ValueError, match="start=nan"):
        Str(start=math.nan)
