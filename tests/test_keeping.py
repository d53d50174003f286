"""Zeros that stay zero: a network that is trained on equals one whose weights never had the zeros as parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dirprune import GRDA
from dirprune.deploy import keep_zeros

Make = Callable[[Iterable[Tensor]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def sparse_network() -> nn.Module:
    net = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 4))
    for p in net.parameters():
        p.data.masked_fill_(torch.rand_like(p) < 0.8, 0).flatten()[:1].fill_(0.3)  # no tensor is wholly zero
    return net


def zeros(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() == 0 for p in net.parameters()])


def step(net: nn.Module, optimizer: Optimizer, seed: int) -> None:
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_is_as_if_only_the_other_weights_existed(name: str) -> None:
    """The twin trains vectors of the nonzero weights, which are put into zeros for every forward pass."""
    net = sparse_network()
    twin = copy.deepcopy(net)
    before = zeros(net)
    free = {n: nn.Parameter(p.detach()[p != 0].clone()) for n, p in twin.named_parameters()}
    optimizer, other = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](free.values())
    keep_zeros(optimizer)
    for seed in range(10):
        step(net, optimizer, seed)
        whole = {n: torch.zeros_like(p).masked_scatter(p != 0, free[n]) for n, p in twin.named_parameters()}
        inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed))
        other.zero_grad()
        torch.func.functional_call(twin, whole, inputs).square().mean().backward()
        other.step()
        assert torch.equal(zeros(net), before)
    for n, p in net.named_parameters():
        torch.testing.assert_close(p.detach()[p != 0], free[n].detach())


@pytest.mark.parametrize(
    "make", [lambda p: GRDA(p, lr=0.1, momentum=0.9, c=1e-3), lambda p: torch.optim.LBFGS(p, lr=0.1)]
)
def test_zeros_are_kept_by_other_optimizers(make: Make) -> None:
    net = sparse_network()
    before, optimizer = zeros(net), make(net.parameters())
    keep_zeros(optimizer)
    inputs = torch.randn(16, 12)

    def loss() -> Any:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(loss)
        assert bool(zeros(net)[before].all())
        assert not any(torch.signbit(p[p == 0]).any() for p in net.parameters())  # +0.0, which packs


def test_without_it_the_zeros_fill_and_after_remove_too() -> None:
    net = sparse_network()
    before = int(zeros(net).sum())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    kept = keep_zeros(optimizer)
    step(net, optimizer, 0)
    assert int(zeros(net).sum()) == before
    kept.remove()
    step(net, optimizer, 1)
    assert int(zeros(net).sum()) < before


def test_a_late_group_keeps_the_zeros_that_it_comes_with() -> None:
    net = sparse_network()
    before = zeros(net)
    optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    keep_zeros(optimizer)
    step(net, optimizer, 0)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.5})
    for seed in range(3):
        step(net, optimizer, seed)
    assert torch.equal(zeros(net), before)


def test_a_state_that_is_loaded_goes_on_with_the_same_zeros() -> None:
    net = sparse_network()
    before = zeros(net)
    first = torch.optim.AdamW(net.parameters(), lr=0.1)
    keep_zeros(first)
    step(net, first, 0)
    second = torch.optim.AdamW(net.parameters(), lr=0.3)
    second.load_state_dict(first.state_dict())
    keep_zeros(second)
    step(net, second, 1)
    assert torch.equal(zeros(net), before)


def test_an_average_of_the_weights_has_the_same_zeros() -> None:
    net = sparse_network()
    before = zeros(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    keep_zeros(optimizer)
    for average in (AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))):
        for seed in range(3):
            step(net, optimizer, seed)
            average.update_parameters(net)
        assert torch.equal(zeros(average.module), before)


def test_only_the_named_parameters_are_kept() -> None:
    net = nn.Sequential(sparse_network(), nn.Linear(4, 2))
    nn.init.zeros_(net[1].bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    keep_zeros(optimizer, net[0].parameters())
    before = zeros(net[0])
    step(net, optimizer, 0)
    assert torch.equal(zeros(net[0]), before)
    assert bool((net[1].bias != 0).all())


def test_a_call_that_cannot_be_meant_is_a_warning() -> None:
    net = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no weight is zero yet; load the sparse weights first") as warned:
        keep_zeros(torch.optim.SGD(net.parameters(), lr=0.1))
    assert warned[0].filename == __file__
    net.weight.data[0] = 0
    nn.init.zeros_(net.bias)
    with pytest.warns(UserWarning, match="1 of the parameters are wholly zero and stay so") as warned:
        keep_zeros(torch.optim.SGD(net.parameters(), lr=0.1))
    assert warned[0].filename == __file__
