from __future__ import annotations

import copy
import importlib.util
import io
import math
import os
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from dirprune import GRDA, AdamGRDA, prunable_groups, sparsity
from dirprune.optim.base import Thresholded
from dirprune.optim.reference import ReferenceGRDA
from dirprune.optim.threshold import grow_thresholds, shrink

ROOT = Path(__file__).parent.parent
PATHS: list[dict[str, Any]] = [
    {"foreach": False, "fused": False},
    {"foreach": True},
    {"capturable": True},
]
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.02},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02, "maximize": True},
]
SHAPES = [(5, 4), (7,), (), (0,), (3, 2, 3, 3)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, params: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [0.3 * torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def adam(
    params: Any,
    lr: float | Tensor = 0.1,
    *,
    c: float = 5e-4,
    momentum: float = 0.0,
    nesterov: bool = False,
    **options: Any,
) -> AdamGRDA:
    """Return an AdamGRDA whose momentum is its β₁."""
    return AdamGRDA(params, lr, (momentum, 0.999), **{"weight_decay": 0.0, "c": c} | options)


Kind = Callable[..., Thresholded]
KINDS: list[Kind] = [GRDA, adam]


def drive(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, grad in zip(params, gradients(step, params), strict=True):
            p.grad = grad
        optimizer.step()


def assert_same(a: list[nn.Parameter], b: list[nn.Parameter]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_equals_the_slow_reference_with_a_dropping_rate(path: dict[str, Any], options: dict[str, Any]) -> None:
    rates = [0.05] * 150 + [0.005] * 100 + [0.02] * 50
    params, twins = parameters(torch.float64), parameters(torch.float64)
    optimizer = GRDA(params, lr=rates[0], c=0.02, mu=0.6, **path, **options)
    slow = ReferenceGRDA(twins, lr=rates[0], c=0.02, mu=0.6, **options)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = torch.tensor(rate, dtype=torch.float64) if "capturable" in path else rate
        slow.param_groups[0]["lr"] = rate
        drive(optimizer, params, range(step, step + 1))
        drive(slow, twins, range(step, step + 1))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
    assert 0 < sum(int((p == 0).sum()) for p in params) < sum(p.numel() for p in params)


def thresholds(rates: Iterable[float], c: float, mu: float, momentum: float = 0.0) -> list[float]:
    """Return the thresholds τ₁, τ₂, … for the learning rates γ₁, γ₂, …, in Python floats."""
    tau, taus = 0.0, []
    for n, rate in enumerate(rates, start=1):
        tau += c * (rate / (1 - momentum)) ** (mu + 0.5) * (n**mu - (n - 1) ** mu)
        taus.append(tau)
    return taus


@pytest.mark.parametrize("path", PATHS)
def test_a_constant_rate_gives_the_closed_form(path: dict[str, Any]) -> None:
    lr, c, mu, steps = 0.1, 5e-4, 0.51, 200
    params = parameters()
    optimizer = GRDA(params, lr=lr, c=c, mu=mu, **path)
    drive(optimizer, params, range(steps))
    for p in params:
        assert float(optimizer.state[p]["step"]) == steps
        assert float(optimizer.state[p]["threshold"]) == pytest.approx(c * lr**0.5 * (steps * lr) ** mu, rel=1e-12)


def test_a_dropped_rate_slows_the_threshold_and_never_lowers_it() -> None:
    # ResNet50/ImageNet: 5,005 steps per epoch, c=.005, mu=.51, a ten-fold drop at epoch 140 of 146.
    per_epoch, c, mu = 5005, 0.005, 0.51
    rates = [0.1] * (140 * per_epoch) + [0.01] * (6 * per_epoch)
    taus = thresholds(rates, c, mu)
    assert taus[-1] == pytest.approx(0.469, abs=5e-4)
    assert taus == sorted(taus)
    # The library's thresholds, over the 200 steps around the drop, with step counts as large as they are there.
    drop = 140 * per_epoch
    step = torch.tensor(drop - 100, dtype=torch.float64)
    tau = torch.tensor(taus[drop - 101], dtype=torch.float64)
    for n in range(drop - 100, drop + 100):
        grow_thresholds([step], [tau], lr=rates[n], c=c, mu=mu)
        assert float(tau) == pytest.approx(taus[n], rel=1e-12)
    closed_form_with_the_current_rate = c * 0.01**0.5 * (146 * per_epoch * 0.01) ** mu
    assert closed_form_with_the_current_rate == pytest.approx(0.047, abs=5e-4)


def test_the_threshold_uses_the_effective_rate_of_momentum() -> None:
    taus = []
    for lr, momentum in [(0.1, 0.0), (0.01, 0.9)]:
        params = parameters()
        optimizer = GRDA(params, lr=lr, c=0.003, mu=0.55, momentum=momentum)
        drive(optimizer, params, range(50))
        taus.append(float(optimizer.state[params[0]]["threshold"]))
    assert taus[0] == pytest.approx(taus[1], rel=1e-12)
    assert taus[1] == pytest.approx(thresholds([0.01] * 50, 0.003, 0.55, 0.9)[-1], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_c_zero_is_sgd_bit_for_bit(options: dict[str, Any], foreach: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    grda = GRDA(ours, lr=0.1, c=0.0, foreach=foreach, fused=False, **options)
    sgd = torch.optim.SGD(theirs, lr=0.1, foreach=foreach, **options)
    for optimizer, params in [(grda, ours), (sgd, theirs)]:
        scheduler = lr_scheduler.StepLR(optimizer, 20, gamma=0.3)
        for step in range(60):
            drive(optimizer, params, range(step, step + 1))
            scheduler.step()
    assert_same(ours, theirs)


class Recorder(TorchDispatchMode):
    """Records the operations on tensors with more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if isinstance(first, Tensor) and first.numel() > 1:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_default_on_the_cpu_is_two_passes_without_temporaries() -> None:
    """Small tensors share the first pass; a large one is still in the cache when its second begins."""
    params = [nn.Parameter(torch.ones(size)) for size in (1 << 16, 32, 64)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = GRDA(params, c=0.1)
    optimizer.step()  # creates the state
    with Recorder() as recorder:
        optimizer.step()
    add, shrink = "aten._foreach_add_.List", "aten.softshrink.out"
    assert recorder.names == [add, shrink, shrink, add, shrink]


def test_mu_one_is_l1_rda() -> None:
    # Xiao (2010): w = soft threshold of w₀ − γ Σ g at nγλ.
    lam, lr, steps = 0.03, 0.05, 80
    params = parameters(torch.float64)
    start = [p.detach().clone() for p in params]
    drive(GRDA(params, lr=lr, c=lam / math.sqrt(lr), mu=1.0), params, range(steps))
    for i, p in enumerate(params):
        v = start[i] - lr * sum(gradients(step, params)[i] for step in range(steps))
        expected = v.sign() * (v.abs() - steps * lr * lam).clamp(min=0)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_pruned_is_plus_zero_and_nan_is_not_hidden(path: dict[str, Any], dtype: torch.dtype, kind: Kind) -> None:
    p = nn.Parameter(torch.tensor([0.1, -0.1, -0.0, 0.0, 3.0, -3.0, math.nan, math.inf], dtype=dtype))
    optimizer = kind([p], lr=1.0, c=1.0, mu=0.6, **path)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p[:4].tolist() == [0.0] * 4
    assert not torch.signbit(p[:4]).any()
    assert p[4:6].tolist() == [2.0, -2.0]
    assert p[6].isnan()
    assert p[7].isinf()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("numel", [1, 15, 16, 100, 128, 1000, 70_001])
@pytest.mark.parametrize("kind", KINDS)
def test_no_negative_zero_at_any_size(path: dict[str, Any], numel: int, kind: Kind) -> None:
    p = nn.Parameter(torch.full((numel,), -0.1))
    optimizer = kind([p], lr=1.0, c=1.0, mu=0.6, **path)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert not torch.signbit(p).any()
    assert not p.any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_underflows_in_half_precision_is_plus_zero(path: dict[str, Any], kind: Kind) -> None:
    p = nn.Parameter(torch.tensor([-0.1], dtype=torch.float16))
    optimizer = kind([p], lr=1.0, c=float(-p.detach().float()) - 1e-8, mu=0.6, **path)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.item() == 0.0
    assert not torch.signbit(p).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lr", [-2.2e-18, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_ends_at_zero_or_just_below_grows_nothing(path: dict[str, Any], lr: float, kind: Kind) -> None:
    params = parameters()
    optimizer = kind(params, lr=0.1, c=0.05, **path)
    drive(optimizer, params, range(3))
    before, tau = [p.detach().clone() for p in params], float(optimizer.state[params[0]]["threshold"])
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(lr, dtype=torch.float64) if isinstance(group["lr"], Tensor) else lr
    drive(optimizer, params, range(3, 6))
    assert float(optimizer.state[params[0]]["threshold"]) == tau
    for p, q in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), q)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SGD_OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_left_untouched(path: dict[str, Any], options: dict[str, Any], kind: Kind) -> None:
    params = parameters()
    optimizer = kind(params, c=0.1, **path, **options)
    grads = gradients(0, params)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    state = torch.get_rng_state()
    for _ in range(3):
        optimizer.step()
        for p, grad in zip(params, grads, strict=True):  # after each step: two changes of sign would not show
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_comes_late_starts_at_threshold_zero(path: dict[str, Any], kind: Kind) -> None:
    early, late, added = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = kind([early, late], lr=0.1, c=0.1, mu=0.6, **path)
    for step in range(10):
        early.grad = torch.ones(3)
        late.grad = torch.ones(3) if step >= 6 else None  # frozen at first
        if step == 8:
            optimizer.add_param_group({"params": [added], "c": 0.2})
        added.grad = torch.ones(3) if step >= 8 else None
        optimizer.step()
    taus = [float(optimizer.state[p]["threshold"]) for p in (early, late, added)]
    expected = [thresholds([0.1] * n, c, 0.6)[-1] for n, c in [(10, 0.1), (4, 0.1), (2, 0.2)]]
    assert taus == pytest.approx(expected, rel=1e-12)
    assert [float(optimizer.state[p]["step"]) for p in (early, late, added)] == [10, 4, 2]


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", PATHS)
@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues(
    dtype: torch.dtype, source: dict[str, Any], target: dict[str, Any], kind: Kind
) -> None:
    options = {"lr": 0.05, "c": 0.03, "mu": 0.6, "momentum": 0.9}
    params = parameters(dtype)
    first = kind(params, **options, **source)
    drive(first, params, range(20))
    state = saved_and_loaded(first.state_dict())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    second = kind(others, lr=7.0, c=7.0, mu=0.9, **target)
    second.load_state_dict(state)
    assert second.param_groups[0]["c"] == 0.03
    assert second.param_groups[0]["capturable"] is bool(target.get("capturable"))
    for p, q in zip(params, others, strict=True):
        for key, value in first.state[p].items():
            assert second.state[q][key].dtype == value.dtype
            assert torch.equal(second.state[q][key], value)
            assert value.data_ptr() != second.state[q][key].data_ptr() or value.numel() == 0
    drive(first, params, range(20, 40))
    drive(second, others, range(20, 40))
    if source == target:
        assert_same(params, others)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind", KINDS)
def test_load_state_dict_obeys_hooks_and_leaves_what_it_was_given(kind: Kind) -> None:
    params = parameters(torch.bfloat16)[:2]
    optimizer = kind(params, c=0.03)
    drive(optimizer, params, range(3))
    saved = optimizer.state_dict()
    swapped = {**saved, "param_groups": [{**saved["param_groups"][0], "c": 0.5}]}
    optimizer.register_load_state_dict_pre_hook(lambda _, state: swapped)
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[params[0]]["accumulator"].zero_())
    given = copy.deepcopy(saved)
    optimizer.load_state_dict(given)
    assert optimizer.param_groups[0]["c"] == 0.5
    assert not optimizer.state[params[0]]["accumulator"].any()
    assert given["state"][0]["accumulator"].any()
    assert optimizer.state[params[1]]["accumulator"].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_loading_keeps_the_memory_and_the_kind_of_rate_it_has(kind: Kind) -> None:
    params = parameters()
    rate = torch.tensor(0.1)
    optimizer = kind(params, lr=rate, c=0.03, capturable=True)
    assert optimizer.param_groups[0]["lr"].data_ptr() == rate.data_ptr()
    drive(optimizer, params, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.05
    addresses = {key: value.data_ptr() for key, value in optimizer.state[params[0]].items()}
    drive(optimizer, params, range(3, 6))
    optimizer.load_state_dict(state)
    assert {key: value.data_ptr() for key, value in optimizer.state[params[0]].items()} == addresses
    assert rate.item() == pytest.approx(0.05)  # a captured graph reads this very tensor
    assert float(optimizer.state[params[0]]["step"]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_share_a_rate_tensor_load_rates_of_their_own(kind: Kind) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]

    saved = kind(groups(), lr=0.5).state_dict()
    rate = torch.tensor(0.1)
    optimizer = kind(groups(), lr=rate)
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]
    rate.fill_(0.25)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]  # they still share a tensor
    saved["param_groups"][1]["lr"] = 2.0
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 2.0]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_loaded_state_takes_the_memory_layout_of_the_parameter(stepped: bool) -> None:
    values = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    source, target = nn.Parameter(values.to(memory_format=torch.channels_last)), nn.Parameter(values.clone())
    first, second = GRDA([source], momentum=0.9), GRDA([target])
    source.grad, target.grad = values.clone(), values.clone()
    first.step()
    if stepped:  # it already has a state, without a momentum buffer and in the parameter's former layout
        second.step()
        target.data = target.data.transpose(2, 3).contiguous().transpose(2, 3)
    second.load_state_dict(first.state_dict())
    for key in ("accumulator", "momentum_buffer"):
        assert second.state[target][key].stride() == target.stride()
        assert torch.equal(second.state[target][key], first.state[source][key])


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_bfloat16_weights_need_no_master_copy(options: dict[str, Any]) -> None:
    """They train bit for bit as float32 weights under autocast do: the accumulator serves as the master copy."""
    torch.manual_seed(0)
    low = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    for layer in (low[0], low[4]):
        layer.to(torch.bfloat16)
    full = copy.deepcopy(low).float()
    optimizers = [GRDA(model.parameters(), lr=0.1, c=0.01, mu=0.7, **options) for model in (low, full)]
    for _ in range(40):
        inputs, targets = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))
        for model, optimizer in zip((low, full), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    for p, q in zip(low.parameters(), full.parameters(), strict=True):
        a, b = optimizers[0].state[p], optimizers[1].state[q]
        assert torch.equal(a["accumulator"], b["accumulator"])
        assert torch.equal(p, q.to(p.dtype))
        assert torch.equal(p == 0, q == 0)
        torch.testing.assert_close(nn.functional.softshrink(a["accumulator"], float(a["threshold"])), q)
    assert 0 < float((low[4].weight == 0).float().mean()) < 1


def test_low_precision_parameters_have_a_float32_accumulator() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = GRDA([p], lr=1.0, c=0.0)
    for _ in range(256):  # a single step of this size would be lost in bfloat16
        p.grad = torch.full_like(p, 2.0**-10)
        optimizer.step()
    assert optimizer.state[p]["accumulator"].dtype == torch.float32
    assert p.tolist() == [0.75] * 4


@pytest.mark.parametrize("path", PATHS)
def test_steps_too_small_for_half_precision_add_up(path: dict[str, Any]) -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = GRDA([p], lr=1e-4, c=0.0, **path)
    p.grad = torch.full_like(p, 2.0**-13)  # times the learning rate, this is too small for float16
    for _ in range(100):
        optimizer.step()
    expected = torch.full((4,), -100 * 1e-4 * 2.0**-13)
    torch.testing.assert_close(optimizer.state[p]["accumulator"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_device_does_not_matter(path: dict[str, Any], kind: Kind) -> None:
    results = []
    for device in ("meta", "cpu"):  # tensors that a step made on the default device meta would have no values
        params = [nn.Parameter(torch.full((n,), -0.1)) for n in (3, 4099)]
        for p in params:
            p.grad = torch.ones_like(p)
        with torch.device(device):
            optimizer = kind(params, lr=0.1, c=0.1, momentum=0.9, **path)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        results.append(params)
    assert_same(*results)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_continue_on_their_own(copier: Callable[[Any], Any], kind: Kind) -> None:
    params = parameters()
    optimizer = kind(params, c=0.03, momentum=0.9, fused=None)
    drive(optimizer, params, range(10))
    twin = copier(optimizer)
    drive(optimizer, params, range(10, 20))
    drive(twin, twin.param_groups[0]["params"], range(10, 20))
    assert_same(params, twin.param_groups[0]["params"])


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 5, gamma=0.1),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("path", PATHS)
def test_learning_rate_schedulers(make: Callable[[Any], Any], path: dict[str, Any]) -> None:
    p = nn.Parameter(torch.tensor([1.0, -0.02], dtype=torch.float64))
    optimizer = GRDA([p], lr=0.1, c=0.01, mu=0.6, momentum=0.5, **path)
    scheduler = make(optimizer)
    tau = 0.0
    v = p.detach().clone()
    buffer = torch.zeros_like(v)
    lrs = set()
    for n in range(1, 16):
        lr, momentum = float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]
        lrs.add(lr)
        tau += 0.01 * (lr / (1 - momentum)) ** 1.1 * (n**0.6 - (n - 1) ** 0.6)
        p.grad = torch.tensor([0.1, 0.0], dtype=p.dtype)
        buffer = momentum * buffer + p.grad
        v -= lr * buffer
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    assert len(lrs) > 1
    torch.testing.assert_close(p.detach(), v.sign() * (v.abs() - tau).clamp(min=0), rtol=1e-12, atol=0)


def test_closures_return_the_loss_and_hooks_run() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = GRDA([p], lr=0.1, c=0.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()  # autograd must be on here, although `step` itself runs without it
        calls.append("closure")
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert p.item() == pytest.approx(1.6)
    assert calls == ["before", "closure", "after"]


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_and_clipped_gradients(kind: Kind) -> None:
    torch.manual_seed(3)
    whole, parts = nn.Linear(4, 2), nn.Linear(4, 2)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(8, 4)
    optimizers = [kind(m.parameters(), lr=0.1, c=0.05) for m in (whole, parts)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(x).square().mean().backward()
        for half in x.chunk(2):
            (parts(half).square().mean() / 2).backward()
        for model, optimizer in zip((whole, parts), optimizers, strict=True):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            optimizer.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert float(optimizers[1].state[parts.weight]["step"]) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_grad_scaler_skips_does_not_count(kind: Kind) -> None:
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1, c=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 3)).float().square().mean()
        scaler.scale(loss * (math.inf if step in (2, 4) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = optimizer.state[model.weight]
    assert float(state["step"]) == 4
    assert float(state["threshold"]) == pytest.approx(thresholds([0.1] * 4, 0.1, 0.51)[-1], rel=1e-12)
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_learning_rate(path: dict[str, Any], kind: Kind) -> None:
    with_number, with_tensor = parameters(torch.float64), parameters(torch.float64)
    lr = torch.tensor(0.05, dtype=torch.float64)
    drive(kind(with_number, lr=0.05, c=0.03), with_number, range(20))
    drive(kind(with_tensor, lr=lr, c=0.03, **path), with_tensor, range(20))
    for p, q in zip(with_number, with_tensor, strict=True):
        torch.testing.assert_close(p, q)
    assert lr.item() == 0.05


@pytest.mark.parametrize(
    ("dtype", "options", "scheduler"),
    [
        (torch.float32, {}, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
        (torch.bfloat16, {"weight_decay": 0.7}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (
            torch.float32,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            lambda o: lr_scheduler.OneCycleLR(o, 0.2, 30),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the compiler's warnings about other code
def test_a_compiled_step(dtype: torch.dtype, options: dict[str, Any], scheduler: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    plain, compiled = parameters(dtype), parameters(dtype)
    optimizers = [GRDA(params, lr=0.1, c=0.05, **options) for params in (plain, compiled)]
    schedulers = [scheduler(optimizer) for optimizer in optimizers]
    step = torch.compile(optimizers[1].step, backend="aot_eager")
    for i in range(8):  # the learning rate changes at every step; with OneCycleLR, the momentum too
        for params in (plain, compiled):
            for p, grad in zip(params, gradients(i, params), strict=True):
                p.grad = grad
        optimizers[0].step()
        step()
        for s in schedulers:
            s.step()
    for p, q in zip(plain, compiled, strict=True):
        torch.testing.assert_close(p, q)
        accumulators = optimizers[0].state[p]["accumulator"], optimizers[1].state[q]["accumulator"]
        torch.testing.assert_close(*accumulators, rtol=1e-5, atol=1e-6)
    assert float(optimizers[1].state[compiled[0]]["step"]) == 8


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_layouts(path: dict[str, Any], kind: Kind) -> None:
    values = torch.randn(4, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    layouts = [
        values.clone(),
        values.clone().to(memory_format=torch.channels_last),
        torch.empty(4, 4, 8, 4).permute(3, 2, 0, 1).copy_(values),
        torch.empty(4, 8, 4, 8)[..., ::2].copy_(values),
    ]
    assert not any(layout.is_contiguous() for layout in layouts[1:])
    results = []
    for layout in layouts:
        p = nn.Parameter(layout)
        strides = p.stride()
        optimizer = kind([p], lr=0.1, c=0.2, momentum=0.9, **path)
        for step in range(5):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        assert p.stride() == strides
        assert (p == 0).sum() > 10
        assert not torch.signbit(p[p == 0]).any()
        results.append(p.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_equal_dense_ones(path: dict[str, Any], options: dict[str, Any], kind: Kind) -> None:
    tables = []
    for sparse in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 3, sparse=sparse)
        optimizer = kind(embedding.parameters(), lr=0.1, c=0.1, **options, **path)
        for step in range(5):
            optimizer.zero_grad()
            embedding(torch.tensor([step, 2, 2])).square().sum().backward()
            optimizer.step()
        tables.append(embedding.weight.detach())
    torch.testing.assert_close(tables[0], tables[1])


def test_numbers_of_other_kinds_become_floats() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = GRDA([p], lr=Fraction(1, 8), c=np.float64(0.5), momentum=np.float32(0.5), weight_decay=0)
    p.grad = torch.ones(2)
    optimizer.step()
    assert {type(optimizer.param_groups[0][name]) for name in ("lr", "c", "mu", "momentum", "weight_decay")} == {float}
    saved_and_loaded(optimizer.state_dict())  # with weights_only=True, which loads plain values only


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, ["lr=-0.1", "≥ 0"]),
        ({"lr": math.nan}, ["lr=nan", "finite"]),
        ({"lr": math.inf}, ["lr=inf", "finite"]),
        ({"lr": torch.tensor([0.1, 0.2])}, ["lr=tensor(", "give one"]),
        ({"lr": torch.tensor(1j)}, ["lr=tensor(", "give one"]),
        ({"weight_decay": torch.tensor([0.1])}, ["weight_decay=tensor(", "give one"]),
        ({"lr": "a"}, ["lr='a'", "number", "lr=0.1"]),
        ({"lr": "0.1"}, ["lr='0.1'", "number"]),
        ({"mu": "x"}, ["mu='x'", "number", "mu=0.51"]),
        ({"momentum": None}, ["momentum=None", "momentum=0.9"]),
        ({"weight_decay": [0.1]}, ["weight_decay=[0.1]", "weight_decay=0.0005"]),
        ({"c": -1.0}, ["c=-1.0", "≥ 0"]),
        ({"c": math.nan}, ["c=nan"]),
        ({"c": math.inf}, ["c=inf", "finite"]),
        ({"mu": 0.0}, ["mu=0.0", "(0, 1]"]),
        ({"mu": 1.3}, ["mu=1.3", "(0, 1]", "outgrows"]),
        ({"mu": math.nan}, ["mu=nan"]),
        ({"mu": math.inf}, ["mu=inf", "(0, 1]"]),
        ({"lr": 1e306}, ["lr=1e+306", "finite"]),
        ({"c": 1e308}, ["c=1e+308", "finite"]),
        ({"c": 1e38, "lr": 10.0}, ["lr=10.0 and c=1e+38", "float32"]),
        ({"weight_decay": 1e308}, ["weight_decay=1e+308", "finite"]),
        ({"momentum": 1.0}, ["momentum=1.0", "[0, 1)"]),
        ({"momentum": -0.1}, ["momentum=-0.1"]),
        ({"weight_decay": -1e-4}, ["weight_decay=-0.0001"]),
        ({"weight_decay": math.nan}, ["weight_decay=nan"]),
        ({"nesterov": True}, ["nesterov", "momentum=0.9"]),
        ({"foreach": True, "fused": True}, ["foreach", "fused"]),
        ({"fused": True}, ["fused=True", "cpu", "fused=None"]),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: list[str]) -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=next(iter(options))) as constructed:
        GRDA([p], **options)
    good = GRDA([p])
    with pytest.raises(ValueError, match=next(iter(options))) as added:
        good.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(good.param_groups) == 1
    for error in (constructed, added):
        assert all(word in str(error.value) for word in words), error.value


def test_a_call_meant_for_sgd_is_refused_and_shows_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"GRDA\(params, lr=0.1, momentum=0.9\).*c=0.9"):
        GRDA([nn.Parameter(torch.ones(2))], 0.1, 0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((GRDA, "momentum", value) for value in (1.0, "x")),
        *((AdamGRDA, name, -1.0) for name in ("eps", "power")),
        *((AdamGRDA, "betas", value) for value in ((0.9, 1.0), 0.9)),
        *(
            (kind, name, value)
            for kind in (GRDA, AdamGRDA)
            for name, value in [
                *(("lr", math.nan), ("c", -1.0), ("mu", 2.0), ("weight_decay", math.inf), ("scale", 0.0)),
                *(("cost", "dear"), ("shape", "firm"), ("maximize", "no"), ("skip_nonfinite", None)),
            ]
        ),
    ],
)
def test_an_option_spoilt_between_steps_is_named_before_anything_changes(
    path: dict[str, Any], kind: Kind, option: str, value: Any
) -> None:
    params = [[p] for p in parameters()[:2]]
    optimizer = kind([{"params": group} for group in params], lr=0.1, c=0.1, **path)
    flat = [p for group in params for p in group]
    drive(optimizer, flat, range(2))
    before = copy.deepcopy(optimizer.state_dict()["state"]), [p.detach().clone() for p in flat]
    group = optimizer.param_groups[1]
    group[option] = torch.tensor(value) if isinstance(group[option], Tensor) else value
    with pytest.raises(ValueError, match="^" + re.escape(f"{option}={value!r}")):
        drive(optimizer, flat, range(2, 3))
    for p, q in zip(flat, before[1], strict=True):
        assert torch.equal(p, q)
    for index, state in before[0].items():
        assert all(torch.equal(optimizer.state_dict()["state"][index][key], value) for key, value in state.items())


@pytest.mark.parametrize("mu", [0.4, 0.5, 1.0])
def test_mu_outside_the_range_of_the_theory_is_allowed(mu: float) -> None:
    params = parameters()
    optimizer = GRDA(params, lr=0.1, c=0.1, mu=mu)
    drive(optimizer, params, range(3))
    assert float(optimizer.state[params[0]]["threshold"]) == pytest.approx(0.1 * 0.1**0.5 * 0.3**mu, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_complex_parameters_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"parameter 1 is complex.*view_as_complex"):
        kind([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def changed(state_dict: dict[str, Any], **values: Any) -> dict[str, Any]:
    state_dict = copy.deepcopy(state_dict)
    state_dict["state"][1].update(values)
    return state_dict


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    def stepped(*shapes: tuple[int, ...]) -> GRDA:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = GRDA(params, c=0.2)
        optimizer.step()
        return optimizer

    mine = stepped((3,), (2, 2))
    before = copy.deepcopy(mine.state_dict())
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))])
    without_threshold = copy.deepcopy(before)
    del without_threshold["state"][1]["threshold"]
    for state, message in [
        (stepped((3,), (4,)).state_dict(), r"accumulator of shape \(4,\) for parameter 1, whose shape is \(2, 2\)"),
        (stepped((3,)).state_dict(), "1 parameters in group 0 and this optimizer 2"),
        (sgd.state_dict(), "no c, mu"),
        (without_threshold, "no threshold for parameter 1"),
        (changed(before, threshold=torch.tensor(math.nan)), "threshold=nan for parameter 1"),
        (changed(before, momentum_buffer=torch.ones(3)), r"momentum_buffer of shape \(3,\) for parameter 1"),
        (changed(before, step=torch.ones(2)), r"step=a tensor of shape \(2,\) for parameter 1"),
        ({"state": before["state"]}, "has the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            mine.load_state_dict(state)
    two_groups = stepped((3,))
    two_groups.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(ValueError, match="2 parameter groups and this optimizer 1"):
        mine.load_state_dict(two_groups.state_dict())
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in state.items())


class BatchNormAct2d(nn.BatchNorm2d):
    """A normalisation layer by its type, not by its name, as in timm."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = BatchNormAct2d(2)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("exempt", "dense"),
    [
        (
            ("bias", "norm"),
            {"conv.bias", "bn.", "norm.", "attention.in_proj_bias", "attention.out_proj.bias", "head.bias"},
        ),
        (("norm",), {"bn.", "norm."}),
        (("head.*", "conv.weight"), {"head.", "conv.weight"}),
        ((), set()),
    ],
)
def test_prunable_groups(exempt: tuple[str, ...], dense: set[str]) -> None:
    model = Block()
    groups = prunable_groups(model, 0.01, exempt)
    names = {name: group["c"] for group in groups for name, _ in group["params"]}
    assert names.keys() == dict(model.named_parameters()).keys()
    for name, c in names.items():
        assert c == (0.0 if any(name.startswith(prefix) for prefix in dense) else 0.01), name
    optimizer = GRDA(groups, lr=1.0, mu=0.51)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = [name for name, p in model.named_parameters() if float(optimizer.state[p]["threshold"]) == 0]
    assert set(kept) == {name for name, c in names.items() if c == 0}


class RMSNormGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))


class Normalized(nn.Linear):
    """A linear layer, despite its name."""


class LinearNorm(nn.Linear):
    """A linear layer that also normalises: its weight is a matrix, and is pruned."""


def test_prunable_groups_knows_biases_and_norms_by_any_name() -> None:
    model = nn.ModuleDict()
    model["rnn"], model["attention"] = nn.LSTM(2, 3, bidirectional=True), nn.MultiheadAttention(4, 2, add_bias_kv=True)
    model["gated"], model["linear"] = RMSNormGated(), Normalized(4, 4)
    model["outer"], model["shape"] = nn.Module(), nn.LayerNorm((3, 4))
    model["inner"], model["called"] = nn.LayerNorm(4), LinearNorm(4, 4)
    model["outer"].gain = model["inner"].weight
    pruned = {name for group in prunable_groups(model, 0.1) if group["c"] for name, _ in group["params"]}
    matrices = {f"rnn.weight_{part}_l0{way}" for part in ("ih", "hh") for way in ("", "_reverse")}
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert pruned == matrices | attention | {"gated.gate", "linear.weight", "called.weight"}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_with_a_gradient_is_a_rate(shape: tuple[int, ...]) -> None:
    rate = torch.full(shape, 0.1, requires_grad=True)
    optimizer = GRDA(nn.Linear(2, 2).parameters(), lr=rate)
    assert (optimizer.param_groups[0]["lr"] is rate) == (shape == ())
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_prunable_groups_needs_the_names_that_a_module_has() -> None:
    model: Any = nn.Linear(2, 2).parameters()
    with pytest.raises(ValueError, match=r"^model=<generator.* is not a module; pass the model itself"):
        prunable_groups(model, 0.01)


def test_prunable_groups_refuses_what_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"exempt='hed\.\*' matches no parameter"):
        prunable_groups(Block(), 0.01, ("bias", "hed.*"))
    with pytest.raises(ValueError, match=r"exempt=\('bias',\)"):
        prunable_groups(Block(), 0.01, "bias")


def first_example(page: str) -> str:
    [code, *_] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_first_example_of_the_quickstart_prunes_and_learns() -> None:
    """gRDA is more accurate than SGD, which also fits the irrelevant inputs."""
    inputs = torch.randn(5000, 20, generator=torch.Generator().manual_seed(1))
    targets = inputs[:, 0] * inputs[:, 1] > 0

    def run(code: str) -> tuple[float, float]:
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        model = namespace["model"]
        return sparsity(model).weight_fraction, float((model(inputs).argmax(1) == targets).float().mean())

    code = first_example("docs/quickstart.md")
    zeros, accuracy = run(code)
    assert zeros == 0.9
    assert accuracy > 0.955
    line = "GRDA(prunable_groups(model), lr=0.1, target=0.9, steps=steps)"
    assert line in code
    zeros, accuracy = run(code.replace(line, "torch.optim.SGD(model.parameters(), lr=0.1)"))
    assert zeros == 0
    assert 0.93 < accuracy < 0.95


def test_the_loop_of_the_readme_trains_a_sparse_network(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    images, labels = torch.randn(60, 3, 8, 8), torch.arange(60) % 10
    loader = list(zip(images.split(20), labels.split(20), strict=True))
    loss = float(nn.functional.cross_entropy(model(images), labels).detach())
    namespace: dict[str, Any] = {}
    exec(first_example("README.md"), namespace)
    namespace["train"](model, loader, 20)
    assert sparsity(model).weight_fraction == pytest.approx(0.9, abs=1e-3)
    assert str(sparsity(model)) in capsys.readouterr().out
    assert float(nn.functional.cross_entropy(model(images), labels).detach()) < loss / 2


# ---- loading, in detail


def stepped(kind: Kind = GRDA, **options: Any) -> tuple[nn.Parameter, Thresholded]:
    """Return a parameter and its optimizer after one step."""
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([p], lr=0.1, **options)
    p.grad = torch.ones(3)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_shares_nothing_with_the_one_whose_state_it_loaded(kind: Kind) -> None:
    p, source = stepped(kind)
    q = nn.Parameter(torch.ones(3))
    other = kind([q], lr=0.1)
    other.load_state_dict(source.state_dict())
    q.grad = torch.ones(3)
    other.step()
    assert (source.state[p]["step"], other.state[q]["step"]) == (1, 2)


def test_loading_leaves_no_hooks_behind_whether_it_succeeds_or_not() -> None:
    _, optimizer = stepped()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="keys"):
        optimizer.load_state_dict({})
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("key", ["step", "threshold"])
def test_a_negative_step_or_threshold_is_not_loaded(key: str) -> None:
    _, optimizer = stepped()
    state = optimizer.state_dict()
    state["state"][0][key] = torch.tensor(-1.0, dtype=torch.float64)
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict(state)


def test_a_state_saved_after_a_schedule_that_ended_below_zero_by_rounding_is_loaded() -> None:
    p, optimizer = stepped()
    scheduler = lr_scheduler.LinearLR(optimizer, 0.3, 0.0, 3)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict()
    assert -1e-12 < state["param_groups"][0]["lr"] <= 0
    state["param_groups"][0]["lr"] = -2e-18  # where other rates, lengths or versions of torch end
    optimizer.load_state_dict(state)
    state["param_groups"][0]["lr"] = -1e-3
    with pytest.raises(ValueError, match=r"lr=-0\.001"):
        optimizer.load_state_dict(state)


def test_saved_options_are_checked_like_given_ones() -> None:
    _, optimizer = stepped()
    state = optimizer.state_dict()
    state["param_groups"][0]["c"] = -1.0
    with pytest.raises(ValueError, match="c=-1"):
        optimizer.load_state_dict(state)


def test_a_learning_rate_of_one_element_serves_a_scalar_parameter() -> None:
    p = nn.Parameter(torch.tensor(1.0))
    optimizer = GRDA([p], lr=torch.tensor([0.1]), c=0.0, capturable=True)
    p.grad = torch.tensor(1.0)
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


def test_no_negative_zeros_are_written_across_memory_formats() -> None:
    out = torch.empty(64, 64)
    shrink(torch.full((64, 64), -0.5).t(), 1.0, out=out)
    assert not torch.signbit(out).any()


# ---- parameters that are changed between steps


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_that_others_write_are_where_the_next_step_starts(path: dict[str, Any], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = GRDA(params, lr=0.1, c=0.5, mu=0.7, **path)
    drive(optimizer, params, range(5))
    before = {p: optimizer.state[p]["accumulator"].clone() for p in params}
    kept = [p.detach().clone() for p in params]
    written = torch.tensor([2.0, 0.0, -1.0, 0.0], dtype=dtype)
    with torch.no_grad():
        params[0][:2] = written  # three rows of five stay as they were
    for p in params:
        p.grad = torch.zeros_like(p)
    old = float(optimizer.state[params[0]]["threshold"])
    optimizer.step()
    new = float(optimizer.state[params[0]]["threshold"])
    v = optimizer.state[params[0]]["accumulator"]
    # Expected is the accumulator nearest to the old one among those that give the written weight: search a fine grid.
    candidates = torch.linspace(-4, 4, 80_001, dtype=torch.float64)
    gives = candidates.sign() * (candidates.abs() - old).clamp(min=0)
    for w, was, now in zip(written.tolist() * 2, before[params[0]][:2].flatten(), v[:2].flatten(), strict=True):
        fitting = candidates[(gives - w).abs() < 1e-4] if w else candidates[gives == 0]
        nearest = fitting[(fitting - float(was)).abs().argmin()]
        assert float(now) == pytest.approx(float(nearest), abs=3e-4)
    shrunk = written.double().sign() * (written.double().abs() + old - new).clamp(min=0)
    torch.testing.assert_close(params[0][0].double(), shrunk, rtol=0, atol=1e-5 if dtype != torch.bfloat16 else 1e-2)
    torch.testing.assert_close(v[2:], before[params[0]][2:], rtol=0, atol=2 * torch.finfo(v.dtype).eps)
    assert all(torch.equal(optimizer.state[p]["accumulator"], before[p]) for p in params[1:])
    assert any((one != other).any() for one, other in zip(kept[1:], params[1:], strict=True))  # the threshold grew


@pytest.mark.parametrize("path", PATHS[:2])
def test_without_pruning_it_is_sgd_for_those_who_write_to_parameters_too(path: dict[str, Any]) -> None:
    def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[nn.Parameter]:
        params = parameters()
        optimizer = make(params)
        for step in range(12):
            drive(optimizer, params, range(step, step + 1))
            with torch.no_grad():
                for p in params:
                    p.clamp_(-0.4, 0.4)
        return params

    sgd = trained(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert_same(trained(lambda params: GRDA(params, lr=0.1, c=0.0, momentum=0.9, **path)), sgd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_is_adopted_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces, the result is that of one piece; no piece that nothing was written to changes."""
    accumulators = []
    for size in (64, 10**6):
        monkeypatch.setattr("dirprune.optim.adoption.CHUNK", size)
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(8, 3, 5, 5).to(dtype, memory_format=torch.channels_last))
        optimizer = GRDA([p], lr=0.1, c=0.3, mu=0.7)
        drive(optimizer, [p], range(4))
        before = optimizer.state[p]["accumulator"].clone()
        with torch.no_grad():
            p[:4].mul_(-0.5)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        v = optimizer.state[p]["accumulator"]
        accumulators.append(v.clone())
        changed = before[:4].abs() > 0.5
        assert (v[:4][changed].sign() == -before[:4][changed].sign()).all()
    torch.testing.assert_close(*accumulators, rtol=0, atol=1e-6)
    assert torch.equal(accumulators[0][5:], before[5:])


@pytest.mark.parametrize("kind", KINDS)
def test_loading_other_weights_in_the_middle_of_training_goes_on_from_them(kind: Kind) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = kind(model.parameters(), lr=0.05, c=0.05, mu=0.6)
    best = copy.deepcopy(model.state_dict())
    for _ in range(30):
        optimizer.zero_grad()
        (model(torch.ones(2, 6)) - 3).square().mean().backward()
        optimizer.step()
    assert (model.weight - best["weight"]).abs().max() > 0.1
    model.load_state_dict(best)
    optimizer.step()
    assert (model.weight - best["weight"]).abs().max() < 0.02


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit_whichever_is_loaded_first(optimizer_first: bool, kind: Kind) -> None:
    whole, first = parameters(), parameters()
    optimizer, half = (kind(params, lr=0.1, c=0.05, mu=0.6, momentum=0.9) for params in (whole, first))
    drive(optimizer, whole, range(20))
    drive(half, first, range(10))
    saved, weights = copy.deepcopy(half.state_dict()), [p.detach().clone() for p in first]
    params = parameters()
    resumed = kind(params, lr=0.1, c=0.05, mu=0.6, momentum=0.9)
    drive(resumed, params, range(3))  # it already has a state of its own
    if optimizer_first:
        resumed.load_state_dict(saved)
    with torch.no_grad():
        for p, weight in zip(params, weights, strict=True):
            p.copy_(weight)
    if not optimizer_first:
        resumed.load_state_dict(saved)
    drive(resumed, params, range(10, 20))
    assert_same(params, whole)


@pytest.mark.parametrize("by", ["deepcopy", "pickle", "begin", "load"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_written_before_an_optimizer_first_steps_are_kept(by: str, kind: Kind) -> None:
    """However the optimizer got its state: from a copy, a pickle, `begin` or `load_state_dict`."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.01]))
    optimizer = kind([weight], lr=0.1, c=0.1, mu=0.6)
    if by == "begin":
        optimizer.begin(weight, optimizer.param_groups[0])
    else:
        weight.grad = torch.ones(3)
        optimizer.step()
        if by == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            optimizer = copy.deepcopy(optimizer) if by == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
            weight = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.fill_(0.3)
    weight.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.3), rtol=0, atol=0.02)


def test_good_weights_bring_a_run_back_from_nan() -> None:
    params = parameters()
    optimizer = GRDA(params, lr=0.1, c=0.5, mu=0.7)
    drive(optimizer, params, range(5))
    good = [p.detach().clone() for p in params]
    assert any((p == 0).any() for p in good)
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    with torch.no_grad():
        for p, weight in zip(params, good, strict=True):
            p.copy_(weight)
    drive(optimizer, params, range(5, 8))
    assert all(p.isfinite().all() for p in params)


def test_parameters_that_share_their_memory_or_left_their_group_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = torch.randn(8)
    one, other = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    optimizer = GRDA([{"params": [one]}, {"params": [other]}], lr=0.1, c=0.01)
    drive(optimizer, [one, other], range(1))
    calls: list[Any] = []
    monkeypatch.setattr("dirprune.optim.base.adopt_weights", calls.extend)
    drive(optimizer, [one, other], range(1, 4))
    assert calls == []
    optimizer.param_groups[0]["params"] = []
    drive(optimizer, [other], range(4, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_loaded_after_a_state_was_asked_for_are_kept(kind: Kind) -> None:
    """torch's distributed checkpoints take a step at a learning rate of zero to find the structure of the state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, c=1e-3, mu=0.6)
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        model.weight.fill_(7.0)
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    assert (model.weight - 7).abs().max() < 1e-2


def assert_old_graphs_are_refused(path: dict[str, Any], device: str = "cpu") -> None:
    weight = nn.Parameter(torch.tensor([2.0], device=device))
    optimizer = GRDA([weight], lr=0.1, c=0.0, **path)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_that_needs_the_old_weights_is_refused(path: dict[str, Any]) -> None:
    assert_old_graphs_are_refused(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_was_resized_is_refused(path: dict[str, Any], kind: Kind) -> None:
    weight = nn.Parameter(torch.ones(6, 3))
    optimizer = kind([weight], lr=0.1, **path)
    weight.grad = torch.ones(6, 3)
    optimizer.step()
    before = optimizer.state[weight]["accumulator"].clone()
    weight.data = weight.data[:1]
    weight.grad = torch.ones(1, 3)
    for write in (lambda: None, lambda: nn.init.ones_(weight)):
        write()
        with pytest.raises(RuntimeError, match=r"shape \(1, 3\) had the shape \(6, 3\).*new optimizer"):
            optimizer.step()
    assert weight.shape == (1, 3)
    assert torch.equal(optimizer.state[weight]["accumulator"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_wrappers_keep_in_a_state_is_left_alone(kind: Kind) -> None:
    params, others = parameters(), parameters()
    optimizer, second = (kind(each, lr=0.1, c=0.01) for each in (params, others))
    optimizer.state[params[0]]["z"] = torch.arange(3.0)  # before the first step, as some wrappers do
    drive(optimizer, params, range(2))
    second.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    assert torch.equal(second.state[others[0]]["z"], torch.arange(3.0))
    drive(optimizer, params, range(2, 4))
    drive(second, others, range(2, 4))
    assert_same(params, others)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_can_be_taken_on_fake_tensors(path: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(3, 3)
        optimizer = GRDA(model.parameters(), lr=0.1, c=0.01, momentum=0.9, **path)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["accumulator"].shape == (3, 3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_parameters_may_get_their_memory_later(path: dict[str, Any], kind: Callable[[float], Any]) -> None:
    """An optimizer made on the meta device keeps its rate, and can step once the network is on another device."""
    params = [nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    optimizer = GRDA(params, lr=kind(0.1), c=0.0, **path)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    for p in params:
        torch.utils.swap_tensors(p, nn.Parameter(torch.ones(3)))
        p.grad = torch.ones(3)
    for rate in (0.1, 0.05):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rate)
        optimizer.step()
        scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == (kind is torch.tensor or "capturable" in path)
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full((3,), 0.85))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_parameters_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 is stored as torch.sparse_coo.*to_dense"):
        kind([nn.Parameter(torch.eye(3).to_sparse())])


def test_biases_with_a_parametrization_stay_dense_too() -> None:
    model = nn.Linear(3, 2)
    nn.utils.parametrize.register_parametrization(model, "bias", nn.Identity())
    prunable, dense = prunable_groups(model, c=1e-3)
    assert [name for name, _ in dense["params"]] == ["parametrizations.bias.original"]
    assert [name for name, _ in prunable["params"]] == ["weight"]


def test_orthogonal_weights_stay_dense() -> None:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert [name for name, _ in prunable_groups(model)[0]["params"]] == ["1.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_eight_bits_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 is stored as torch.float8_e4m3fn.*bfloat16 or wider"):
        kind([nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)])


@pytest.mark.parametrize(
    "make", [lambda p: GRDA([p], lr=0.1, c=0.0, momentum=0.9), lambda p: AdamGRDA([p], lr=1e-9, c=0.0)]
)
def test_a_model_made_double_goes_on_in_double(make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = make(p)
    for dtype in (torch.float32, torch.float64):
        p.data = p.data.to(dtype)
        p.grad = torch.full((2,), 1e-9, dtype=dtype)
        optimizer.step()
    assert {value.dtype for value in optimizer.state[p].values()} == {torch.float64}
    assert (p < 1).all()  # in float32, the step would be lost


def steps_without(bad: set[int], make: Callable[[list[nn.Parameter]], Thresholded]) -> tuple[Thresholded, list[Any]]:
    """Take eight steps, those in ``bad`` with a gradient that is not finite; return what they lead to."""
    params = parameters()
    optimizer = make(params)
    for step in range(8):
        for p, grad in zip(params, gradients(step, params), strict=True):
            p.grad = grad
        if step in bad:
            grad = params[step % 2].grad
            assert grad is not None
            grad.view(-1)[step] = (math.nan, math.inf, -math.inf)[step % 3]
        optimizer.step()
    return optimizer, [params, [optimizer.state[p] for p in params]]


@pytest.mark.filterwarnings("ignore:.*skipped so far")
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"skip_nonfinite": False}])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(
    kind: Kind, path: dict[str, Any], options: dict[str, Any]
) -> None:
    given = {"c": 0.1, "skip_nonfinite": True, **path, **options}
    optimizer, found = steps_without({0, 2, 5}, lambda params: kind(params, **given))
    if not given["skip_nonfinite"]:
        assert any(p.isnan().any() for p in found[0])
        assert "skipped" not in optimizer.state_dict()["param_groups"][0]
        return
    params = parameters()
    twin = kind(params, **given)
    for step in (1, 3, 4, 6, 7):
        drive(twin, params, range(step, step + 1))
    torch.testing.assert_close(found, [params, [twin.state[p] for p in params]], rtol=0, atol=0)
    assert optimizer.skipped() == 3
    assert twin.skipped() == 0
    saved = saved_and_loaded(optimizer.state_dict())
    twin.load_state_dict(saved)
    assert twin.skipped() == saved["param_groups"][0]["skipped"] == 3
    assert twin.param_groups[0]["skip_nonfinite"]
    saved["param_groups"][0]["skipped"] = -1
    with pytest.raises(ValueError, match="skipped=-1 in group 0"):
        twin.load_state_dict(saved)


def test_skipped_steps_are_said_when_their_number_has_doubled() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = GRDA([weight], lr=0.1, skip_nonfinite=True)
    weight.grad = torch.full((2,), math.nan)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(7):
            optimizer.step()
    told = [str(each.message).partition(" skipped")[0] for each in said]
    assert told == ["1 step was", "2 steps were", "4 steps were"]
    assert weight.tolist() == [1.0, 1.0]


def test_sparse_gradients_that_are_not_finite_are_seen() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = GRDA(table.parameters(), lr=0.1, skip_nonfinite=True)
    (table(torch.tensor([1, 1])) * math.inf).sum().backward()
    with pytest.warns(UserWarning, match="1 step was skipped"):
        optimizer.step()
    assert table.weight.isfinite().all()


SPOILT = int(os.environ.get("SPOILT_STATES", "150"))
JUNK: list[Any] = [
    None,
    "x",
    -1,
    math.nan,
    math.inf,
    10**400,
    [],
    {},
    (),
    1j,
    b"",
    object(),
    torch.ones(3, 3),
    torch.tensor(1j),
    torch.tensor(1e308, dtype=torch.float64),
    torch.zeros((), device="meta"),
    torch.zeros(2, 3, device="meta"),
    torch.ones(2, 3).to_sparse(),
]


@pytest.mark.parametrize("rate", [0.1, 2.0, -1e-13])
@pytest.mark.parametrize("counted", [False, True])
def test_thresholds_grow_alike_whether_the_host_knows_steps_and_rates_or_not(rate: float, counted: bool) -> None:
    n = 3 if counted else 4
    grown = 0.01 * (max(rate, 0.0) / (1 - 0.9)) ** 1.1 * (n**0.6 - (n - 1) ** 0.6)
    for lr in (rate, torch.tensor(rate, dtype=torch.float64)):
        for step in (scalar(3.0), nn.Parameter(scalar(3.0), requires_grad=False)):  # the second as a tensor elsewhere
            steps, taus = [step, scalar(3.0)], [scalar(0.5), scalar(0.0)]
            grow_thresholds(steps, taus, lr, c=0.01, mu=0.6, momentum=0.9, counted=counted)
            assert [float(each) for each in steps] == [n, n]
            assert [float(tau) for tau in taus] == pytest.approx([0.5 + grown, grown])


def test_what_is_made_at_the_import_lies_on_the_cpu() -> None:
    spec = importlib.util.find_spec("dirprune.optim.threshold")
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with torch.device("meta"):
        spec.loader.exec_module(again)
    assert again.ZERO.is_cpu


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_which_something_is_spoilt_is_refused_by_a_value_error(kind: Kind) -> None:
    """States with one entry replaced by junk load or are refused, and change nothing if they are."""
    chance = random.Random(0)
    params = [nn.Parameter(torch.randn(2, 3)) for _ in range(2)]
    refused = 0
    for options in ({"c": 0.1}, {"target": 0.5, "steps": 3, "c": None, "skip_nonfinite": True}):
        optimizer = kind(params, lr=0.1, momentum=0.5, **options)
        drive(optimizer, params, range(2))
        saved = optimizer.state_dict()
        for _ in range(SPOILT):
            spoilt: Any = copy.deepcopy(saved)
            place: Any = spoilt
            while True:
                keys = list(place) if isinstance(place, dict) else range(len(place))
                key = chance.choice(keys)
                if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.1:
                    break
                place = place[key]
            place[key] = chance.choice(JUNK)
            before = repr(optimizer.state_dict())
            try:
                optimizer.load_state_dict(spoilt)
            except ValueError:
                refused += 1
                assert repr(optimizer.state_dict()) == before
            else:
                drive(optimizer, params, range(1))
                optimizer.load_state_dict(saved)
    assert refused > SPOILT // 2


def steps_with(c: float, count: int = 301, **options: Any) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(0.05 * torch.randn(50, 40)), nn.Parameter(torch.randn(10))]
    optimizer = GRDA([{"params": params[:1]}, {"params": params[1:], "c": 0.0}], lr=1e-3, momentum=0.9, c=c, **options)
    for _ in range(count):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()


def test_a_c_that_prunes_nothing_or_everything_is_said_once_and_early() -> None:
    with pytest.warns(UserWarning, match=r"c=1e-06 prunes next to nothing.*target=") as said:
        steps_with(1e-6, 700)
    assert len(said) == 1
    with pytest.warns(UserWarning, match=r"1 of 1 tensors that are pruned are entirely zero.*\(50, 40\).*smaller c"):
        steps_with(10.0)
    steps_with(0.05)  # warnings are errors in these tests
    steps_with(0.0)
    steps_with(10.0, 299)
