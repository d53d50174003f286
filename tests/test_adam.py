"""AdamGRDA: AdamW around the accumulator, its metric, its target, and what it shares with GRDA."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_optim import PATHS, assert_same, drive, gradients, parameters, saved_and_loaded
from test_target import RATES, STEPS, groups, network, prunable, train, zeros
from torch import Tensor, nn
from torch.optim import AdamW

from dirprune import GRDA, AdamGRDA, prunable_groups

ADAM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"weight_decay": 0.0, "maximize": True},
]


@pytest.mark.parametrize("path", [*PATHS, {"fused": True}])
@pytest.mark.parametrize("options", ADAM_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c_zero_is_adamw_bit_for_bit(path: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = AdamGRDA(ours, lr=0.02, c=0.0, **options, **path)
    plain = AdamW(theirs, lr=0.02, **options, **{k: v for k, v in path.items() if k != "capturable"})
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda n: math.cos(n / 30) ** 2) for each in (optimizer, plain)
    ]
    for step in range(40):
        drive(optimizer, ours, range(step, step + 1))
        drive(plain, theirs, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    if path.get("fused") or path.get("capturable"):  # device scalars and the kernel round in their own order
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    else:
        assert_same(ours, theirs)


def reference(params: list[Tensor], steps: int, *, lr: float, c: float, mu: float, power: float, shape: str) -> None:
    """The definition, in float64, one element of all tensors at a time."""
    v = [p.detach().double().clone() for p in params]
    m, s = [torch.zeros_like(x) for x in v], [torch.zeros_like(x) for x in v]
    beta1, beta2, decay, tau = 0.9, 0.99, 0.05, 0.0
    for n in range(1, steps + 1):
        for i, grad in enumerate(gradients(n - 1, params)):  # type: ignore[arg-type]
            m[i] = beta1 * m[i] + (1 - beta1) * grad
            s[i] = beta2 * s[i] + (1 - beta2) * grad**2
            step = lr * (m[i] / (1 - beta1**n)) / ((s[i] / (1 - beta2**n)).sqrt() + 1e-8)
            v[i] = v[i] * (1 - lr * decay) - step
        tau += c * lr ** (mu + 0.5) * (n**mu - (n - 1) ** mu)
        d = torch.cat([(x / (1 - beta2**n)).flatten() for x in s]) ** (power / 2)
        q = 1 / (d + 0.01 * d.mean())
        q = (q / q.mean()).split([x.numel() for x in v])
        for p, x, scale in zip(params, v, q, strict=True):
            bound = tau * scale.view(x.shape)
            left = {"soft": x - x.sign() * bound, "garrote": x - bound**2 / x, "hard": x}[shape]
            p.data = torch.where(x.abs() > bound, left, torch.zeros_like(x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", ["soft", "garrote", "hard"])
def test_a_step_is_the_definition(path: dict[str, Any], power: float, shape: str) -> None:
    ours, expected = parameters(torch.float64), parameters(torch.float64)
    options = {"lr": 0.02, "c": 0.5, "mu": 0.6, "power": power, "shape": shape}
    drive(AdamGRDA(ours, betas=(0.9, 0.99), weight_decay=0.05, **options, **path), ours, range(30))  # type: ignore[arg-type]
    reference(expected, 30, **options)  # type: ignore[arg-type]
    for p, q in zip(ours, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    assert any((p == 0).any() and p.any() for p in ours)


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_mu_one_is_pat_with_adamw() -> None:
    """torchao's threshold is λ Σγ, and ours c √γ Σγ for μ = 1 and a constant rate."""
    from torchao.prototype.pat.optim import PruneOptimizer

    ours, theirs = network().double(), network().double()
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.05}
    optimizer = AdamGRDA(groups(ours), c=0.3 / math.sqrt(0.01), mu=1.0, **options)
    pruned = {"prox_type": "ProxLasso", "group_type": "ElemGrouper", "reg_lambda": 0.3}
    parts = [{"params": prunable(theirs), **pruned}, {"params": [p for p in theirs.parameters() if p.dim() == 1]}]
    pat = PruneOptimizer(AdamW(parts, **options))
    for model, each in ((ours, optimizer), (theirs, pat)):
        for step in range(60):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(16, 12, dtype=torch.float64, generator=generator)
            each.zero_grad()
            model(inputs).square().mean().backward()
            each.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # torchao holds its threshold in float32
    assert 0.1 < zeros(ours) / 736 < 0.9


@pytest.mark.parametrize("options", [{}, {"power": 0.5, "shape": "hard"}, {"power": 1.0}, {"fused": True}])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_a_target_is_met_to_the_weight(target: float, rate: str, options: dict[str, Any]) -> None:
    model = network()
    optimizer = AdamGRDA(groups(model), lr=0.01, target=target, steps=STEPS, **options)
    train(model, optimizer, range(STEPS), RATES[rate])  # type: ignore[arg-type]
    assert zeros(model) == round(target * 736)
    assert not any(torch.signbit(p[p == 0]).any() for p in prunable(model))
    assert all((p != 0).all() for p in model.parameters() if p.dim() == 1)
    train(model, optimizer, range(STEPS, STEPS + 5))  # type: ignore[arg-type]
    assert zeros(model) == round(target * 736)


def test_zeros_come_early_move_and_are_fixed_late() -> None:
    model = network()
    optimizer = AdamGRDA(groups(model), lr=0.005, target=0.8, steps=STEPS, power=0.5)
    train(model, optimizer, range(42))  # type: ignore[arg-type]
    early = torch.cat([(p == 0).flatten() for p in prunable(model)])
    assert 0.7 < early.double().mean() < 0.9
    train(model, optimizer, range(42, 80))  # type: ignore[arg-type]
    fixed = torch.cat([(p == 0).flatten() for p in prunable(model)])
    assert (early & ~fixed).any()
    train(model, optimizer, range(80, STEPS))  # type: ignore[arg-type]
    assert torch.equal(fixed, torch.cat([(p == 0).flatten() for p in prunable(model)]))


def test_steps_without_thresholds_need_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the phase in which zeros come, every weight is its accumulator, whatever the metric."""
    models = [network(), network()]
    for model, patched in zip(models, (False, True), strict=True):
        asked = []
        with monkeypatch.context() as patch:
            plain = AdamGRDA._scales
            patch.setattr(AdamGRDA, "_scales", lambda self, plain=plain, asked=asked: asked.append(1) or plain(self))
            if patched:
                patch.setattr(AdamGRDA, "_is_without_thresholds", False)
            train(
                model, AdamGRDA(groups(model), lr=0.01, target=0.8, steps=STEPS, power=0.5, shape="hard"), range(STEPS)
            )
        assert (len(asked) >= STEPS) is patched
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize(("path", "other"), list(pairwise([*PATHS, PATHS[0]])) + [(path, path) for path in PATHS])
@pytest.mark.parametrize(("at", "power"), [(5, 0.0), (33, 0.5), (80, 0.5), (90, 0.0)])
def test_a_saved_state_goes_on_in_any_phase(at: int, power: float, path: dict[str, Any], other: dict[str, Any]) -> None:
    model = network()
    optimizer = AdamGRDA(groups(model), lr=0.01, target=0.9, steps=STEPS, power=power, **path)
    train(model, optimizer, range(at))  # type: ignore[arg-type]
    saved = copy.deepcopy(saved_and_loaded(optimizer.state_dict()))
    twin = network(1)
    twin.load_state_dict(model.state_dict())
    resumed = AdamGRDA(groups(twin), lr=0.5, target=0.5, steps=7, **other)
    resumed.load_state_dict(saved)
    train(model, optimizer, range(at, STEPS))  # type: ignore[arg-type]
    train(twin, resumed, range(at, STEPS))  # type: ignore[arg-type]
    exact = path == other
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4)
    assert zeros(twin) == zeros(model) == round(0.9 * 736)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("power", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_others_write_are_where_the_next_step_starts(
    path: dict[str, Any], power: float, dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = AdamGRDA(params, lr=0.02, c=0.5, mu=0.6, power=power, **path)
    drive(optimizer, params, range(10))
    with torch.no_grad():
        for p in params:
            p.clamp_(-0.5, 0.5)
    held = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
        if p.numel():
            optimizer.state[p]["exp_avg"].zero_()
    for group in optimizer.param_groups:
        group["c"], group["weight_decay"] = 0.0, 0.0
    optimizer.step()
    if power == 0:  # the metric moves with the moments, and the weights near the threshold with it
        for p, before in zip(params, held, strict=True):
            torch.testing.assert_close(p, before, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert all((p.abs() <= 0.52).all() for p in params)


def test_low_precision_weights_train_in_float32() -> None:
    params, wide = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    drive(AdamGRDA(params, lr=1e-3, c=0.3), params, range(50))
    optimizer = AdamGRDA(wide, lr=1e-3, c=0.3)
    for step in range(50):
        for p, grad in zip(wide, gradients(step, params), strict=True):
            p.grad = grad.float()
        optimizer.step()
    for p, q in zip(params, wide, strict=True):
        assert torch.equal(p, q.bfloat16())


def test_a_group_may_be_plainly_adamws_beside_one_that_is_pruned() -> None:
    model, twin = network(), network()
    optimizer = AdamGRDA(prunable_groups(model), lr=0.01, target=0.7, steps=50, weight_decay=0.02)
    for group in optimizer.param_groups:
        assert (group["c"] == 0) == all(p.dim() == 1 for p in group["params"])
    plain = AdamW(twin.parameters(), lr=0.01, weight_decay=0.02)
    for step in range(50):
        random = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=random)
            q.grad = p.grad.clone()
        optimizer.step()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if p.dim() == 1:
            assert torch.equal(p, q)
    assert zeros(model) == round(0.7 * 736)


def test_the_relative_threshold_predicts_the_zeros_of_gaussian_weights() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(0.02 * torch.randn(200, 200))
    optimizer = AdamGRDA([p], lr=1e-3, c=1.0, mu=1.0, weight_decay=0.0)
    for _ in range(400):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    expected = math.erf(optimizer.relative_threshold() / math.sqrt(2))
    assert expected == pytest.approx(float((p == 0).float().mean()), abs=0.01)


@pytest.mark.filterwarnings("ignore")  # the compiler's warnings about other code
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_a_compiled_step(power: float) -> None:
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        params = parameters()
        optimizer = AdamGRDA(params, lr=torch.tensor(0.02), c=0.5, power=power)
        drive(optimizer, params, range(2))  # the state is made outside
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for n in range(2, 8):
            for p, grad in zip(params, gradients(n, params), strict=True):
                p.grad = grad
            optimizer.param_groups[0]["lr"].fill_(0.02 / n)
            step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_count_as_dense_ones() -> None:
    table, twin = (nn.Embedding(6, 3, sparse=sparse) for sparse in (True, False))
    twin.load_state_dict(table.state_dict())
    for net in (table, twin):
        optimizer = AdamGRDA(net.parameters(), lr=0.01, c=0.1)
        for step in range(5):
            optimizer.zero_grad()
            net(torch.tensor([step, 1])).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(table.weight, twin.weight)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "give target=… and steps=…"),
        ({"c": 0.1, "target": 0.9, "steps": 10}, "exclude each other"),
        ({"c": 0.1, "betas": (0.9,)}, "betas"),
        ({"c": 0.1, "betas": (0.9, 1.0)}, "betas"),
        ({"c": 0.1, "eps": -1.0}, "eps=-1.0"),
        ({"c": 0.1, "power": 1.5}, "power=1.5"),
        ({"c": 0.1, "power": "half"}, "power='half' is not a number"),
        ({"target": 0.9, "steps": 10, "fix_at": 0.1}, "fix_at=0.1"),
        ({"c": 0.1, "shape": "square"}, "shape='square'"),
        ({"c": 0.1, "foreach": True, "fused": True}, "exclude each other"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AdamGRDA(parameters(), **options)


def test_states_of_other_optimizers_are_refused_and_change_nothing() -> None:
    params = parameters()
    optimizer = AdamGRDA(params, lr=0.01, c=0.1)
    drive(optimizer, params, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    others: list[torch.optim.Optimizer] = [GRDA(parameters()), AdamW(parameters())]
    for other in others:
        drive(other, other.param_groups[0]["params"], range(2))
        with pytest.raises(ValueError, match="not one of AdamGRDA's"):
            optimizer.load_state_dict(other.state_dict())
    broken = copy.deepcopy(before)
    del broken["state"][0]["exp_avg_sq"]
    with pytest.raises(ValueError, match="no exp_avg_sq"):
        optimizer.load_state_dict(broken)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
