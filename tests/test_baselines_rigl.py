"""RigL: densities that meet the target, a constant number of weights, and growth where the gradient is largest."""

from __future__ import annotations

import math

import pytest
import torch
from test_baselines_masks import step
from test_train import noisy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from dirprune.lab import models
from dirprune.lab.methods.random_mask import RandomMask, erk_densities
from dirprune.lab.methods.rigl import RigL, drop_fraction, move_connections
from dirprune.lab.models.weights import prunable


def by_bisection(shapes: list[torch.Size], density: float) -> list[float]:
    """Return the densities min(1, ε·Σ shape/Π shape), with the ε that meets the target found by bisection."""
    sizes = [shape.numel() for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    low, high = 0.0, max(1 / r for r in raw)
    for _ in range(200):
        middle = (low + high) / 2
        kept = sum(size * min(1.0, middle * r) for size, r in zip(sizes, raw, strict=True))
        low, high = (middle, high) if kept < density * sum(sizes) else (low, middle)
    return [min(1.0, high * r) for r in raw]


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("network", ["small", "resnet18", "resnet50"])
def test_erk_densities_meet_the_target_with_layers_capped_at_one(network: str, density: float) -> None:
    with torch.device("meta"):
        shapes = [weight.parameter.shape for weight in prunable(models.build(network, 10)).values()]
    found = erk_densities(shapes, density)
    sizes = [shape.numel() for shape in shapes]
    assert sum(n * d for n, d in zip(sizes, found, strict=True)) == pytest.approx(density * sum(sizes), rel=1e-12)
    assert max(found) <= 1
    assert found == pytest.approx(by_bisection(shapes, density), rel=1e-9)
    if network == "resnet50" and density == 0.1:
        assert found.count(1.0) > 0  # some layers reach the cap, so that the test covers it


def test_the_drop_fraction_against_its_formula() -> None:
    for t in range(0, 750, 50):
        expected = 0.3 / 2 * (1 + math.cos(t * math.pi / 750))
        assert drop_fraction(t, end=750, alpha=0.3) == pytest.approx(expected, abs=1e-15)


def test_moving_connections_against_sorting_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 5, 12):
        mask = torch.rand(40, generator=generator) < 0.3
        weight = torch.randn(40, generator=generator) * mask
        gradient = torch.randn(40, generator=generator)
        active = [i for i in range(40) if mask[i]]
        count = min(count, len(active))
        kept = sorted(active, key=lambda i: -abs(weight[i].item()))[: len(active) - count]
        others = [i for i in range(40) if i not in kept]
        grown = sorted(others, key=lambda i: -abs(gradient[i].item()))[:count]
        expected = torch.zeros(40, dtype=torch.bool)
        expected[kept + grown] = True
        assert torch.equal(move_connections(weight, gradient, mask, count), expected)


@pytest.mark.parametrize("sparsity", [0.9, 0.98])
def test_a_deep_network_without_normalisation_begins_with_the_signal_of_the_dense_one(sparsity: float) -> None:
    def spread_and_gradient(model: nn.Module) -> tuple[float, float]:
        logits = model.eval()(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        cross_entropy(logits, torch.arange(8)).backward()
        first = next(iter(prunable(model).values())).parameter
        assert first.grad is not None
        return logits.std(0).mean().item(), first.grad.norm().item()

    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(models.build("vgg16", 10))
    dense, sparse = networks
    RigL(sparsity=sparsity).attach(sparse, SGD(sparse.parameters(), lr=0.1), steps=10, examples=1)
    for ours, theirs in zip(spread_and_gradient(sparse), spread_and_gradient(dense), strict=True):
        # If the initial weights were not rescaled, both numbers would be smaller by at least four orders of magnitude.
        assert theirs / 2 < ours < theirs * 2


def test_in_training_the_number_is_constant_and_growth_goes_where_the_gradient_is_largest() -> None:
    model = noisy()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    method = RigL(sparsity=0.8, every=5)
    method.attach(model, optimizer, steps=60, examples=16)
    counts = {name: int(mask.sum()) for name, mask in method.masks.items()}
    assert sum(counts.values()) == round(0.2 * (54 + 540))
    moves = 0
    for number in range(1, 61):
        step(model, optimizer, number)
        before = {name: mask.clone() for name, mask in method.masks.items()}
        method.after_step(number)
        assert {name: int(mask.sum()) for name, mask in method.masks.items()} == counts
        for name, weight in method.layer_weights.items():
            now, grown = method.masks[name], method.masks[name] & ~before[name]
            if not grown.any():  # nothing was dropped either, because the number of weights is constant
                continue
            assert number % 5 == 0
            assert number < 45
            moves += 1
            assert weight.grad is not None
            assert weight.grad[grown].abs().min() >= weight.grad[~now].abs().max()
            assert (weight[grown] == 0).all()
            assert (optimizer.state[weight]["momentum_buffer"][grown] == 0).all()
    assert moves >= 8


def test_the_smallest_weights_are_dropped_by_the_stated_number() -> None:
    model = noisy()
    optimizer = SGD(model.parameters(), lr=0.1)
    method = RigL(sparsity=0.5, every=10, alpha=0.4)
    method.attach(model, optimizer, steps=100, examples=16)
    step(model, optimizer, 0)
    weight, before = method.layer_weights["5"].detach().clone(), method.masks["5"].clone()
    gradient = method.layer_weights["5"].grad
    assert gradient is not None
    gradient.masked_fill_(before, 0.0)  # so that no dropped weight grows again
    method.after_step(30)
    dropped = before & ~method.masks["5"]
    assert int(dropped.sum()) == int(int(before.sum()) * 0.2 * (1 + math.cos(math.pi * 30 / 75)))
    assert weight[dropped].abs().max() <= weight[before & ~dropped].abs().min()


def test_connections_depend_on_the_seed_alone() -> None:
    masks = []
    for seed in (0, 0, 1):
        model = noisy()
        torch.manual_seed(len(masks))
        method = RigL(sparsity=0.8, seed=seed)
        method.attach(model, SGD(model.parameters(), lr=0.1), steps=10, examples=1)
        masks.append(method.masks["5"])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": 0.5, "alpha": 2.0}, "alpha=2.0"),
        ({"sparsity": 0.5, "every": 0}, "every=0"),
        ({"sparsity": 0.5, "until": -1.0}, "until=-1.0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RigL(**options)


def test_no_density_is_refused() -> None:
    with pytest.raises(ValueError, match="density=0"):
        erk_densities([(3, 3)], 0.0)


def test_connections_that_are_there_stay_before_those_that_are_not_though_they_be_zero() -> None:
    mask = torch.tensor([False, True, True, True])
    weight, gradient = torch.tensor([0.0, 0.0, 5.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert move_connections(weight, gradient, mask, 1).tolist() == mask.tolist()


class ScaleNorm(nn.Module):
    """A user's own normalisation layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs / inputs.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "scaled"),
    [
        (nn.Identity(), True),
        (nn.BatchNorm1d(20), False),
        (nn.LayerNorm(20), False),
        (ScaleNorm(), False),
        (nn.LocalResponseNorm(2), True),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20)), True),
    ],
)
def test_first_weights_are_those_of_the_dense_network_unless_nothing_normalises(norm: nn.Module, scaled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), norm, nn.Linear(20, 20))
    before = model[0].weight.detach().clone()
    method = RigL(sparsity=0.75)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=10, examples=100)
    mask = method.masks["0"]
    torch.testing.assert_close(model[0].weight[mask], before[mask] * (2.0 if scaled else 1.0))


def test_connections_grow_by_the_gradient_and_not_by_what_the_optimizer_makes_of_it() -> None:
    """Torch's foreach SGD would overwrite ``.grad``, which RigL reads, with Nesterov's direction."""
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    method = RigL(sparsity=0.5)
    method.attach(model, optimizer, steps=100, examples=100)
    for number in range(3):
        gradient = torch.randn(30, 30, generator=torch.Generator().manual_seed(number))
        model.weight.grad, model.bias.grad = gradient.clone(), torch.zeros(30)
        optimizer.step()
        assert torch.equal(model.weight.grad, gradient)


# ---- masks that do not move


def test_a_random_mask_is_the_one_that_rigl_begins_with_and_stays() -> None:
    models_ = [seeded_model() for _ in range(2)]
    masks = []
    for make, model in zip((RigL, RandomMask), models_, strict=True):
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        method = make(sparsity=0.8, seed=3)
        method.attach(model, optimizer, steps=10, examples=1)
        masks.append({name: mask.clone() for name, mask in method.masks.items()})
        for number in range(1, 10):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
            method.after_step(number)
        moved = any(not torch.equal(mask, method.masks[name]) for name, mask in masks[-1].items())
        assert moved == (make is RigL)
    torch.testing.assert_close(masks[0], masks[1], rtol=0, atol=0)


def seeded_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))


def test_a_shuffled_mask_has_the_given_zeros_in_every_layer() -> None:
    model = seeded_model()
    given = (551 / 600, 17 / 300)
    method = RandomMask(sparsity=568 / 900, layers=",".join(f"{share:.9g}" for share in given))
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=10, examples=1)
    assert [int((w == 0).sum()) for w in model.parameters() if w.dim() > 1] == [551, 17]


@pytest.mark.parametrize(("layers", "words"), [("0.5,a", "layers"), ("0.5,1.5", "layers"), ("0.5", "layers has 1 ")])
def test_zeros_that_fit_no_network_are_refused(layers: str, words: str) -> None:
    model = seeded_model()
    with pytest.raises(ValueError, match=words):
        RandomMask(sparsity=0.5, layers=layers).attach(model, SGD(model.parameters(), lr=0.1), steps=10, examples=1)
