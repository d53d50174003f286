"""Variational dropout: its KL against integration, its noise against sampled weights, its layers against plain ones."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad
from torch import nn
from torch.optim import SGD

from dirprune import GRDA
from dirprune.lab.methods.variational_dropout import (
    Variational,
    VariationalDropout,
    kl_divergence,
    make_plain,
    make_variational,
)


def noisy_twin(layer: nn.Module, *, start: float, scale: float) -> Variational:
    assert isinstance(layer.weight, nn.Parameter)
    return make_variational(layer, nn.Parameter(torch.full_like(layer.weight, start / scale)), scale=scale)


def kl_by_integration(log_alpha: float) -> float:
    """KL of N(1, α) from the log-uniform prior, up to the constant that makes it 0 at α = ∞.

    KL = E log|z| − ½ log α + const for z ~ N(1, α); for a centred normal of variance α the first two terms give
    −(γ_Euler + log 2)/2.
    """
    sigma = math.exp(log_alpha / 2)

    def integrand(z: float) -> float:
        return math.log(abs(z)) * math.exp(-0.5 * ((z - 1) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))

    edges = sorted({1 - 12 * sigma, 1 - sigma, 1.0, 1 + sigma, 1 + 12 * sigma} | {0.0})
    expectation = sum(
        quad(integrand, a, b, limit=200)[0]
        for a, b in pairwise(edges)
        if b > 1 - 12 * sigma  # the edge at 0 may lie below the range that matters
    )
    euler = 0.57721566490153286
    return expectation - 0.5 * log_alpha + (euler + math.log(2)) / 2


@pytest.mark.parametrize("log_alpha", [-8.0, -5.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0])
def test_the_kl_against_numerical_integration(log_alpha: float) -> None:
    found = kl_divergence(torch.tensor(log_alpha, dtype=torch.float64)).item()
    assert found == pytest.approx(kl_by_integration(log_alpha), abs=0.01)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "grouped"])
def test_the_noise_in_outputs_is_that_of_noisy_weights(kind: str) -> None:
    """Compare mean and deviation of every output: from the layer's own noise, and from weights drawn at random."""
    torch.manual_seed(0)
    layer: nn.Module
    layer, inputs = {
        "linear": (nn.Linear(5, 3), torch.randn(1, 5)),
        "conv1d": (nn.Conv1d(2, 3, 3, padding=1), torch.randn(1, 2, 4)),
        "conv2d": (nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), torch.randn(1, 2, 4, 4)),
        "grouped": (nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="circular"), torch.randn(1, 4, 3, 3)),
    }[kind]
    mean_weight = layer.weight.detach().clone()
    draws = 3000
    with torch.no_grad():
        sampled = []
        for _ in range(draws):
            layer.weight.copy_(mean_weight + math.exp(-1.0) * torch.randn_like(mean_weight))
            sampled.append(layer(inputs))
        expected = torch.cat(sampled)
        layer.weight.copy_(mean_weight)
        noisy = noisy_twin(layer, start=-2.0, scale=7.0)
        found = noisy.train()(inputs.expand(draws, *inputs.shape[1:]))
    deviation = expected.std(0)
    torch.testing.assert_close(found.std(0), deviation, rtol=0.1, atol=0)
    assert ((found.mean(0) - expected.mean(0)).abs() < 6 * deviation / math.sqrt(draws)).all()


def test_weights_with_too_much_noise_are_zero_in_evaluation_and_at_the_end() -> None:
    layer = nn.Conv2d(2, 4, 3)
    parameters = dict(layer.named_parameters())
    weight = layer.weight
    alpha = math.exp(-3.0) / weight.detach().square()
    expected = weight.detach().clone()
    expected[alpha > math.exp(3.0)] = 0
    assert 0 < int((expected == 0).sum()) < expected.numel()
    method = VariationalDropout(start=-3.0)
    method.attach(layer, SGD(layer.parameters(), lr=0.1), steps=1, examples=10)
    assert isinstance(layer, Variational)
    assert isinstance(layer, nn.Conv2d)
    assert dict(layer.named_parameters()).items() >= parameters.items()  # the same objects, which the optimizer holds
    inputs = torch.randn(3, 2, 5, 5)
    with torch.no_grad():
        logits = layer.eval()(inputs)
        torch.testing.assert_close(logits, nn.functional.conv2d(inputs, expected, layer.bias))
        method.finish()
        assert type(layer) is nn.Conv2d
        assert list(dict(layer.named_parameters())) == ["weight", "bias"]
        torch.testing.assert_close(layer(inputs), logits, rtol=0, atol=0)
    assert layer.weight is weight
    assert torch.equal(layer.weight, expected)


def test_a_layer_is_its_own_self_again() -> None:
    class Own(nn.Linear):
        pass

    layer = Own(2, 2)
    before = layer.weight.detach().clone()
    make_plain(noisy_twin(layer, start=-10.0, scale=1.0))
    assert type(layer) is Own
    assert torch.equal(layer.weight, before)


def test_the_kl_term_rises_to_beta_over_the_number_of_examples() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    method = VariationalDropout(beta=2.0, anneal=0.5)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=100, examples=50)
    weights = torch.cat([model[0].weight.flatten(), model[1].weight.flatten()]).detach()
    total = kl_divergence(-10.0 - weights.square().log()).sum().item()
    for step, share in ((0, 0.0), (10, 0.2), (25, 0.5), (50, 1.0), (100, 1.0)):
        method.after_step(step)
        assert method.penalty().item() == pytest.approx(2.0 / 50 * share * total, rel=1e-4)


def test_the_kl_moves_log_sigma_at_its_pace_whatever_the_number_of_examples() -> None:
    for examples in (100, 10_000):
        layer = nn.Linear(4, 3)
        nn.init.constant_(layer.weight, 1.0)
        optimizer = SGD(layer.parameters(), lr=0.1)
        method = VariationalDropout(pace=0.2, anneal=0.0, start=-10.0)
        method.attach(layer, optimizer, steps=10, examples=examples)
        method.penalty().backward()
        optimizer.step()
        [(_, [noisy])] = method.noisy
        moved = noisy.log_sigma2() + 10.0
        torch.testing.assert_close(moved, torch.full((3, 4), 0.2 * 0.1 / 2), rtol=0.01, atol=0)


def test_what_has_no_twin_stays_dense_and_alone_is_refused() -> None:
    class Own(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).relu()

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 2))
    method = VariationalDropout(start=20.0)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    assert {name: (w == 0).all().item() for name, w in method.weights().items() if w.dim() > 1} == {
        "0.weight": False,
        "1.weight": True,
    }
    with pytest.raises(ValueError, match="no linear or convolutional layer that noise can be added to"):
        VariationalDropout().attach(Own(2, 2), SGD(Own(2, 2).parameters(), lr=0.1), steps=1, examples=1)


def test_grda_leaves_the_noise_alone() -> None:
    model = nn.Linear(3, 3)
    optimizer = GRDA(model.parameters(), c=0.5, weight_decay=0.1)
    VariationalDropout().attach(model, optimizer, steps=1, examples=1)
    assert [(group["c"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.1), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("option", "value"), [("beta", -1.0), ("anneal", 2.0), ("start", math.inf), ("pace", 0.0)], ids=lambda v: str(v)
)
def test_bad_options_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        VariationalDropout(**{option: value})


def attached(**options: float) -> tuple[nn.Linear, VariationalDropout]:
    model, method = nn.Linear(4, 2), VariationalDropout(**options)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=10, examples=100)
    return model, method


def test_derivatives_are_finite_where_inputs_or_weights_are_zero() -> None:
    model, _ = attached()
    model(torch.zeros(3, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model, method = attached(anneal=0.0)
    nn.init.zeros_(model.weight)
    penalty = method.penalty()
    assert penalty is not None
    penalty.backward()
    assert model.weight.grad.isfinite().all()
    assert model.rho.grad.isfinite().all()


def test_outputs_are_finite_however_large_the_noise() -> None:
    model, _ = attached(start=500.0)
    assert model(torch.ones(3, 4)).isfinite().all()
