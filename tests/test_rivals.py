"""PAT, AC/DC, HAM and LinBreg, against their authors' code or the equations of their papers."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from dirprune.lab.methods import Acdc, Ham, LinBreg, Method, Pat
from dirprune.optim.reference import ReferenceGRDA

SGD_OPTIONS = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(20, 12, dtype=torch.double, generator=random), torch.randint(5, (20,), generator=random))
        for _ in range(steps)
    ]


def trained(model: nn.Module, method: Method | None, optimizer: Any, steps: int) -> list[dict[str, Tensor]]:
    """Return the weights after each step."""
    if method is not None:
        method.attach(model, optimizer, steps=steps, examples=20)
    path = []
    for step, (inputs, targets) in enumerate(batches(steps), start=1):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if method is not None:
            method.after_step(step)
        path.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return path


def same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_pat_is_that_of_torchao() -> None:
    from torchao.prototype.pat.optim import PruneOptimizer

    model, twin = network(), network()
    found = trained(model, Pat(sparsity=0.8, start=0.1, end=0.7), SGD(model.parameters(), **SGD_OPTIONS), 40)
    pruned = {"prox_type": "GlobalMinSparsityConstraint", "group_type": "KElementGrouper", "k": 1}
    weights = [p for p in twin.parameters() if p.dim() > 1]
    groups = [
        {"params": weights, "min_sparsity": 0.8, "min_sparsity_schedule": True, **pruned},
        {"params": [p for p in twin.parameters() if p.dim() == 1]},
    ]
    theirs = PruneOptimizer(SGD(groups, **SGD_OPTIONS), warmup_steps=4, healing_start_step=28)
    same(found, trained(twin, None, theirs, 40))
    assert sum(int((found[-1][name] == 0).sum()) for name in ("0.weight", "2.weight")) == math.ceil(0.8 * 272)


def test_the_largest_of_all_latent_weights_are_seen_and_hidden_ones_come_back() -> None:
    model = network()
    path = trained(model, Pat(sparsity=0.8, start=0.0, end=1.0), SGD(model.parameters(), lr=0.5), 40)
    hidden = [torch.cat([(weights[name] == 0).flatten() for name in ("0.weight", "2.weight")]) for weights in path]
    assert any(bool((before & ~after).any()) for before, after in itertools.pairwise(hidden))


def test_acdc_alternates_between_the_largest_weights_and_all() -> None:
    model, method = network(), Acdc(sparsity=0.9, start=0.2, phase=0.1, dense=0.5, end=0.8)
    assert method.switches(20) == {4: True, 6: False, 8: True, 10: False, 16: True}
    path = trained(model, method, SGD(model.parameters(), **SGD_OPTIONS), 20)
    zeros = [sum(int((weights[name] == 0).sum()) for name in ("0.weight", "2.weight")) for weights in path]
    pruned = 272 - 27
    assert [count == pruned for count in zeros] == [4 <= n <= 6 or 8 <= n <= 10 or n >= 16 for n in range(1, 21)]


def test_acdc_is_sgd_with_masks_that_come_and_go() -> None:
    """A step written out: momentum starts at zero with each dense phase, and is kept through the compressed ones."""
    model, twin = network(), network()
    schedule = {"start": 0.2, "phase": 0.2, "dense": 0.6, "end": 0.8}
    method = Acdc(sparsity=0.75, **schedule)
    found = trained(model, method, SGD(model.parameters(), lr=0.1, momentum=0.9), 10)
    momentum = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    masks = {name: torch.ones_like(p) for name, p in twin.named_parameters()}
    expected = []
    for step, (inputs, targets) in enumerate(batches(10), start=1):
        twin.zero_grad()
        cross_entropy(twin(inputs), targets).backward()
        with torch.no_grad():
            for name, p in twin.named_parameters():
                assert p.grad is not None
                momentum[name] = (0.9 * momentum[name] + p.grad) * masks[name]
                p.sub_(0.1 * momentum[name]).mul_(masks[name])
            if step in (2, 8):
                every = torch.cat([twin[0].weight.flatten(), twin[2].weight.flatten()]).abs()
                least = every.sort(descending=True).values[67]
                for name in ("0.weight", "2.weight"):
                    masks[name] = (twin.get_parameter(name).abs() >= least).double()
                    twin.get_parameter(name).mul_(masks[name])
                    momentum[name] *= masks[name]
            elif step in (4, 6):
                masks = {name: torch.ones_like(p) for name, p in twin.named_parameters()}
                momentum = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
        expected.append({name: p.detach().clone() for name, p in twin.named_parameters()})
    assert method.switches(10) == {2: True, 4: False, 6: False, 8: True}
    same(found, expected)


def test_ham_multiplies_the_weights_after_each_step() -> None:
    model, twin = network(), network()
    method = Ham(sparsity=0.5, alpha=30.0, beta=0.4, start=0.5, phase=0.1, dense=0.6, end=0.7)
    found = trained(model, method, SGD(model.parameters(), lr=0.05, momentum=0.9), 10)[:4]  # before the first mask
    plain = SGD(twin.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for inputs, targets in batches(10)[:4]:
        plain.zero_grad()
        cross_entropy(twin(inputs), targets).backward()
        plain.step()
        with torch.no_grad():
            for p in twin.parameters():
                if p.dim() > 1:
                    assert p.grad is not None
                    p.mul_(torch.exp(0.05 * (-30.0 * p.sign() * p.grad - 0.4)))
        expected.append({name: p.detach().clone() for name, p in twin.named_parameters()})
    same(found, expected)


def test_exponents_are_bounded() -> None:
    from dirprune.lab.methods.ham import hyperbolic_step

    w = torch.ones(2)
    hyperbolic_step([w], [torch.tensor([1e9, -1e9])], lr=1.0, alpha=1.0, beta=0.0)
    torch.testing.assert_close(w, torch.tensor([math.exp(-5), math.exp(5)]))


def test_linbreg_is_grda_with_a_constant_threshold_from_a_shifted_start() -> None:
    model = network()
    method = LinBreg(lam=0.03, density=0.3, seed=4)
    optimizer = SGD(model.parameters(), lr=0.1)
    method.attach(model, optimizer, steps=30, examples=20)
    twin = copy.deepcopy(model)
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    assert [int((start[name] != 0).sum()) for name in ("0.weight", "2.weight")] == [58, 24]  # rounded up
    weights = [p for p in twin.parameters() if p.dim() > 1]
    biases = [p for p in twin.parameters() if p.dim() == 1]
    theirs = ReferenceGRDA([{"params": weights}, {"params": biases}], lr=0.1, c=0.0)
    for w in weights:
        theirs.state[w].update(step=0, threshold=0.03, accumulator=w.detach() + 0.03 * w.detach().sign())
        theirs.state[w]["momentum_buffer"] = torch.zeros_like(w)
    for step, (inputs, targets) in enumerate(batches(30), start=1):
        for net, stepper in ((model, optimizer), (twin, theirs)):
            net.zero_grad()
            cross_entropy(net(inputs), targets).backward()
            stepper.step()
        method.after_step(step)
        torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    moved = torch.cat([(start[name] == 0).flatten() != (model.get_parameter(name) == 0).flatten() for name in start])
    assert moved.any()  # some weights came in or went


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Pat(sparsity=1.0), "sparsity=1.0"),
        (lambda: Pat(sparsity=0.9, start=0.5, end=0.5), "start=0.5 is not before end=0.5"),
        (lambda: Acdc(sparsity=-0.1), "sparsity=-0.1"),
        (lambda: Acdc(sparsity=0.9, phase=0.0), "phase=0.0"),
        (lambda: Acdc(sparsity=0.9, dense=0.9), "must follow one another"),
        (lambda: Ham(sparsity=0.9, alpha=math.nan), "alpha=nan"),
        (lambda: LinBreg(lam=-1.0), "lam=-1.0"),
        (lambda: LinBreg(lam=0.1, density=0.0), "density=0.0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
