"""A target of zeros, met to the weight."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_optim import saved_and_loaded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dirprune import GRDA, AdamGRDA, macs, prunable_groups, sparsity
from dirprune.optim.outlook import Outlook
from dirprune.optim.target import Plan
from dirprune.optim.threshold import shrink

STEPS = 100
RATES: dict[str, Callable[[int], float]] = {
    "constant": lambda n: 1.0,
    "cosine": lambda n: 0.5 * (1 + math.cos(math.pi * n / STEPS)),
    "one-cycle": lambda n: n / (0.3 * STEPS) if n < 0.3 * STEPS else 0.5 * (1 + math.cos(math.pi * n / STEPS)),
}
MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))


def prunable(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() > 1]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 12, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


def train(model: nn.Module, optimizer: GRDA, steps: range, rate: Callable[[int], float] | None = None) -> list[float]:
    """Train, and return the threshold after each step."""
    base = optimizer.param_groups[0].setdefault("base", float(optimizer.param_groups[0]["lr"]))
    taus = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = base * (rate(step) if rate else 1.0)
        optimizer.zero_grad()
        inputs, targets = batch(step)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        taus.append(float(optimizer.defaults["plan"].threshold))
    return taus


def zeros(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for p in prunable(model))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = prunable(model)
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1], "c": 0.0}]


@pytest.mark.parametrize("options", [{}, MOMENTUM], ids=["plain", "momentum"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("target", [0.5, 0.8, 0.9, 0.95, 0.98, 0.99])
def test_a_target_is_met_to_the_weight(target: float, rate: str, options: dict[str, Any]) -> None:
    model = network()
    optimizer = GRDA(groups(model), lr=0.02 if options else 0.2, target=target, steps=STEPS, **options)
    taus = train(model, optimizer, range(STEPS), RATES[rate])
    count = sum(p.numel() for p in prunable(model))
    assert zeros(model) == round(target * count)
    assert taus == sorted(taus)
    assert all(p.any() for p in prunable(model))
    assert not any(torch.signbit(p[p == 0]).any() for p in prunable(model))
    assert all((p != 0).all() for p in model.parameters() if p.dim() == 1)
    progress = optimizer.progress()
    assert (progress.step, progress.zeros, progress.weights) == (STEPS, zeros(model), count)
    train(model, optimizer, range(STEPS, STEPS + 5))
    assert zeros(model) == round(target * count)


@pytest.mark.parametrize("shape", ["garrote", "hard"])
def test_other_shapes_meet_it_too_and_shrink_less(shape: str) -> None:
    models = {}
    for kind in ("soft", shape):
        models[kind] = network()
        optimizer = GRDA(groups(models[kind]), lr=0.2, target=0.8, steps=STEPS, shape=kind)
        train(models[kind], optimizer, range(69))
        [tau] = {float(optimizer.state[p]["threshold"]) for p in prunable(models[kind])}
        for p in prunable(models[kind]):
            v = optimizer.state[p]["accumulator"]
            left = {"soft": v - v.sign() * tau, "garrote": v - tau**2 / v, "hard": v}[kind]
            torch.testing.assert_close(p.detach(), torch.where(v.abs() > tau, left, 0.0))
        train(models[kind], optimizer, range(69, STEPS))
        assert zeros(models[kind]) == round(0.8 * sum(p.numel() for p in prunable(models[kind])))


PATHS: list[dict[str, Any]] = [{"foreach": False, "fused": False}, {"foreach": True}, {"capturable": True}]


@pytest.mark.parametrize("other", PATHS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at", [5, 33, 69, 70, 85])
def test_a_saved_state_goes_on_in_any_phase(at: int, path: dict[str, Any], other: dict[str, Any]) -> None:
    model = network()
    optimizer = GRDA(groups(model), lr=0.02, target=0.9, steps=STEPS, **MOMENTUM, **path)
    train(model, optimizer, range(at))
    saved = copy.deepcopy(saved_and_loaded(optimizer.state_dict()))
    plan = saved["param_groups"][0]["plan"]
    assert (plan["step"], plan["steps"], plan["zeros"]) == (at, STEPS, zeros(model))
    twin = network(1)
    twin.load_state_dict(model.state_dict())
    resumed = GRDA(groups(twin), lr=0.5, target=0.5, steps=7, **other)
    resumed.load_state_dict(saved)
    assert str(resumed.progress()) == str(optimizer.progress())
    copied = copy.deepcopy(optimizer), copy.deepcopy(model)
    train(model, optimizer, range(at, STEPS))
    assert resumed.progress().step == at  # they share nothing
    train(twin, resumed, range(at, STEPS))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0 if path == other else 1e-4, atol=0 if path == other else 1e-5)
    assert zeros(twin) == zeros(model) == round(0.9 * 736)
    assert copied[0].progress().step == at


def test_what_happens_to_the_weights_between_the_phases() -> None:
    model, dense = network(), network()
    optimizer = GRDA(groups(model), lr=0.1, target=0.9, steps=STEPS, prune_from=0.2, prune_until=0.6)
    sgd = torch.optim.SGD(dense.parameters(), lr=0.1)
    for step in range(20):  # without a threshold, it is SGD
        train(model, optimizer, range(step, step + 1))
        sgd.zero_grad()
        cross_entropy(dense(batch(step)[0]), batch(step)[1]).backward()
        sgd.step()
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(p, q)
    train(model, optimizer, range(20, 40))
    planned = 1 - 0.1 ** (1 - 0.5**2)
    assert optimizer.progress().share == pytest.approx(planned, abs=0.05)
    assert not optimizer.progress().is_fixed
    train(model, optimizer, range(40, 60))
    assert optimizer.progress().is_fixed
    fixed = [p == 0 for p in prunable(model)]
    for p in prunable(model):  # what is left is the accumulator, and no threshold pulls at it
        assert torch.equal(optimizer.state[p]["accumulator"], p)
        assert float(optimizer.state[p]["threshold"]) == 0
    train(model, optimizer, range(60, STEPS))
    assert all(torch.equal(p == 0, mask) for p, mask in zip(prunable(model), fixed, strict=True))


def test_the_smallest_weights_are_the_zeros_whatever_their_size_and_ties() -> None:
    from dirprune.optim.selection import Member, smallest

    generator = torch.Generator().manual_seed(0)
    for trial in range(30):
        tensors = [torch.randint(-6, 7, (n,), generator=generator) * 10.0 ** (trial % 5 - 2) for n in (1, 40, 0, 25)]
        members = [Member(nn.Parameter(t), t, scale) for t, scale in zip(tensors, (1.0, 2.0, 1.0, 0.5), strict=True)]
        goal = int(torch.randint(0, 67, (), generator=generator))
        zeros = smallest(members, goal, [0, 0, 0, 0])
        sizes = torch.cat([t.abs() / m.scale for t, m in zip(tensors, members, strict=True)])
        expected = torch.zeros(66, dtype=torch.bool)
        expected[sizes.sort(stable=True).indices[:goal]] = True
        assert torch.equal(torch.cat(zeros.masks), expected)


def test_no_tensor_is_left_without_weights() -> None:
    weak = nn.Parameter(1e-4 * torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))
    strong = nn.Parameter(torch.randn(40, 40, generator=torch.Generator().manual_seed(1)))
    optimizer = GRDA([weak, strong], lr=0.1, target=0.9, steps=10)
    for _ in range(10):
        weak.grad, strong.grad = torch.zeros_like(weak), torch.zeros_like(strong)
        optimizer.step()
    assert int((weak != 0).sum()) == 4  # a tenth of the average density, 10%
    assert int((weak == 0).sum() + (strong == 0).sum()) == 1800
    kept = weak.detach().abs().flatten().topk(4).indices
    assert set(kept.tolist()) == set(optimizer.state[weak]["accumulator"].abs().flatten().topk(4).indices.tolist())


def test_weights_that_the_network_itself_holds_at_zero_do_not_count_twice() -> None:
    p = nn.Parameter(torch.cat([torch.zeros(60), torch.ones(40)]))
    optimizer = GRDA([p], lr=0.1, target=0.5, steps=4)
    for _ in range(4):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert int((p == 0).sum()) == 50
    assert float(p.detach().abs()[:60].max()) < 1e-37


def test_groups_that_come_late_are_counted_and_after_the_zeros_are_fixed_refused() -> None:
    model, late = network(), nn.Parameter(torch.randn(30, 30, generator=torch.Generator().manual_seed(3)))
    optimizer = GRDA(groups(model), lr=0.1, target=0.9, steps=STEPS)
    train(model, optimizer, range(30))
    optimizer.add_param_group({"params": [late]})
    for step in range(30, STEPS):
        late.grad = torch.zeros_like(late)
        train(model, optimizer, range(step, step + 1))
        assert optimizer.progress().weights == 736 + 900
    assert zeros(model) + int((late == 0).sum()) == round(0.9 * (736 + 900))
    with pytest.raises(ValueError, match=r"fixed after step 70.*c=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "c": 0.0})


def test_steps_that_the_grad_scaler_skips_do_not_count_and_the_target_is_met() -> None:
    model = network()
    optimizer = GRDA(groups(model), lr=0.1, target=0.9, steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss * (math.inf if step % 10 == 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    progress = optimizer.progress()
    assert (progress.step, progress.steps, progress.zeros) == (90, 100, round(0.9 * 736))
    assert "step 90 of 100" in str(progress)


def test_low_precision_weights_meet_it_too() -> None:
    model = network().to(torch.bfloat16)
    optimizer = GRDA(groups(model), lr=0.1, target=0.9, steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        cross_entropy(model(inputs.to(torch.bfloat16)), targets).backward()
        optimizer.step()
    assert zeros(model) == round(0.9 * 736)


def test_steps_may_be_given_late() -> None:
    model = network()
    optimizer = GRDA(groups(model), lr=0.1, target=0.9)
    with pytest.raises(ValueError, match=r"target=0\.9 needs the number of .*steps.*optimizer\.plan\(steps=…\)"):
        train(model, optimizer, range(1))
    optimizer.plan(steps=STEPS)
    train(model, optimizer, range(STEPS))
    assert zeros(model) == round(0.9 * 736)
    with pytest.raises(ValueError, match="steps=5 comes after 100 of 100 steps"):
        optimizer.plan(steps=5)


def made(**options: Any) -> GRDA:
    return GRDA([nn.Parameter(torch.ones(10))], lr=0.1, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(target=1.0, steps=5), r"target=1\.0 is not a share; give a number between 0 and 1"),
        (lambda: made(target=95, steps=5), "target=95 is not a share"),
        (lambda: made(target=math.nan, steps=5), "target=nan is not a share"),
        (lambda: made(target="a", steps=5), "target='a' is not a share"),
        (lambda: made(target=0.5, steps=0), "steps=0 is not a number of optimizer steps"),
        (lambda: made(target=0.5, steps=1.5), r"steps=1\.5 is not a number of optimizer steps"),
        (lambda: made(steps=5), "steps=5 belongs to a target, and there is none"),
        (lambda: made(target=0.5, steps=5, c=0.1), r"c=0\.1 and target=0\.5 exclude each other"),
        (lambda: made(target=0.5, steps=5, prune_from=0.8), r"prune_from=0\.8 and prune_until=0\.7"),
        (lambda: made(target=0.5, steps=5, prune_until=1.1), r"prune_until=1\.1"),
        (lambda: made(target=0.5, steps=5, ramp="linear"), "ramp='linear' is not known; take one of geometric, cubic"),
        (lambda: made(c=0.1, decay="both"), "decay='both' is not known"),
        (lambda: made(c=0.1, rescale=True, fused=True), "fused=True knows neither rescale=True"),
        (lambda: made(c=0.1, shape="firm"), "shape='firm' is not known; take one of soft, garrote, hard"),
        (lambda: made(c=0.1).plan(steps=5), "steps=5 are planned for a target, and there is none"),
        (lambda: made(c=0.1).progress(), "progress is that of a target, and there is none"),
        (lambda: made(target=0.5).plan(steps=-1), "steps=-1 is not a number of optimizer steps"),
        (lambda: made(target=0.5).add_param_group({"params": [nn.Parameter(torch.ones(1))], "c": 0.2}), r"c=0\.2"),
        (lambda: made(target=0.5, steps=5).load_state_dict(made(c=0.1).state_dict()), "saved without a target"),
    ],
)
def test_what_cannot_be_planned_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("groups", "target", "message"),
    [
        (
            [{"params": [nn.Parameter(torch.ones(9))], "c": 0.0}],
            0.5,
            "there is no weight to prune: every group",
        ),
        ([{"params": [nn.Parameter(torch.ones(9))]}], 0.99, r"target=0\.99 cannot be met.*keeps a weight, 1 of 9"),
    ],
)
def test_what_cannot_be_met_is_said_at_the_first_step(
    groups: list[dict[str, Any]], target: float, message: str
) -> None:
    optimizer = GRDA(groups, lr=0.1, target=target, steps=5)
    before = optimizer.defaults["plan"].step
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert optimizer.defaults["plan"].step == before


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("threshold", torch.tensor(math.nan)), ("growth", -1.0), ("step", -3), ("target", 2.0), ("steps", "a")),
        *(("of", 1), ("adapts", 3), ("start", "§"), ("start", "AAA="), ("start", 2.0)),
    ],
)
def test_a_saved_plan_is_checked_and_nothing_changes(entry: str, value: Any) -> None:
    optimizer = made(target=0.5, steps=5)
    state = optimizer.state_dict()
    state["param_groups"][0]["plan"][entry] = value
    with pytest.raises(ValueError, match=entry):
        optimizer.load_state_dict(state)
    assert optimizer.defaults["plan"].step == 0


def test_an_estimate_from_a_sample_is_near_and_the_end_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dirprune.optim.selection.SAMPLE", 300)
    model = network()
    optimizer = GRDA(groups(model), lr=0.1, target=0.9, steps=STEPS)
    train(model, optimizer, range(69))
    assert optimizer.progress().share == pytest.approx(0.9, abs=0.06)
    train(model, optimizer, range(69, STEPS))
    assert zeros(model) == round(0.9 * 736)


@pytest.mark.filterwarnings("ignore")  # the compiler's warnings about other code
def test_a_compiled_step_follows_the_plan() -> None:
    torch.compiler.reset()
    plain, compiled = network(), network()
    optimizers = [GRDA(groups(model), lr=0.1, target=0.8, steps=10) for model in (plain, compiled)]
    step = torch.compile(optimizers[1].step, backend="aot_eager")
    for n in range(10):
        for model, take in ((plain, optimizers[0].step), (compiled, step)):
            model.zero_grad()
            cross_entropy(model(batch(n)[0]), batch(n)[1]).backward()
            take()
    assert zeros(compiled) == zeros(plain) == round(0.8 * 736)
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 16)
        )


def train_convolutional(model: nn.Module, optimizer: GRDA, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs.flatten(1)[:, :16]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("tilt", [0.0, 0.5, 1.0])
def test_a_target_of_the_cost_is_met_to_within_a_weight(tilt: float) -> None:
    model = Convolutional()
    cost = macs(model, torch.zeros(1, 1, 8, 8))
    optimizer = GRDA(prunable_groups(model, cost=cost, tilt=tilt), lr=0.05, target=0.8, steps=40, of="cost")
    train_convolutional(model, optimizer, 40)
    priced = [(cost[name], p) for name, p in model.named_parameters() if cost[name]]
    removed = sum(price * int((p == 0).sum()) for price, p in priced)
    total = sum(price * p.numel() for price, p in priced)
    assert 0 <= removed - 0.8 * total < max(price for price, _ in priced)
    assert optimizer.progress().share == pytest.approx(removed / total)
    report = sparsity(model, cost=cost)
    assert report.cost_left == pytest.approx(total - removed)


def test_a_tilt_makes_zeros_where_they_save() -> None:
    left = {}
    for tilt in (0.0, 0.5, 1.0):
        model = Convolutional()
        cost = macs(model, torch.zeros(1, 1, 8, 8))
        groups = prunable_groups(model, cost=cost, tilt=tilt)
        scales = {group["cost"]: group["scale"] for group in groups if "cost" in group}
        sizes = {group["cost"]: sum(p.numel() for _, p in group["params"]) for group in groups if "cost" in group}
        assert scales == pytest.approx({price: (price**tilt) * scales[1.0] for price in scales})
        assert sum(sizes[price] * math.log(scales[price]) for price in scales) == pytest.approx(0, abs=1e-9)
        optimizer = GRDA(groups, lr=0.05, target=0.5, steps=40)
        train_convolutional(model, optimizer, 40)
        assert optimizer.progress().zeros == round(0.5 * optimizer.progress().weights)
        left[tilt] = sparsity(model, cost=cost).cost_left
    assert left[0.0] > left[0.5] > left[1.0]


def test_a_fixed_c_grows_thresholds_in_proportion_to_the_scale() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = GRDA([{"params": weights[:1], "scale": 3.0}, {"params": weights[1:]}], lr=0.1, c=0.1, mu=0.6)
    for _ in range(5):
        for p in weights:
            p.grad = torch.zeros(2)
        optimizer.step()
    first, second = (float(optimizer.state[p]["threshold"]) for p in weights)
    assert first == pytest.approx(3 * second)
    assert second == pytest.approx(0.1 * 0.1**0.5 * 0.5**0.6)


@pytest.mark.parametrize(
    "make",
    [
        GRDA,
        partial(GRDA, momentum=0.9),
        *(partial(AdamGRDA, betas=(0.0, 0.999), weight_decay=0.0, power=power) for power in (0.0, 1.0)),
    ],
)
def test_c_max_is_where_the_last_weight_that_stands_still_becomes_zero(make: Callable[..., Any]) -> None:
    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for factor, expected in ((1.0 + 1e-5, 0), (1.0 - 1e-5, 1)):
        p = nn.Parameter(start.clone())
        optimizer = make([p], lr=0.01, c=1e-3, mu=0.7)
        for step in range(30):
            if step == 10:
                optimizer.param_groups[0]["c"] = optimizer.c_max(20) * factor
            p.grad = start.flip(0) if step == 0 and isinstance(optimizer, AdamGRDA) else torch.zeros(50)
            optimizer.step()
        assert int((p != 0).sum()) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": {"0.weight": 1.0}}, r"cost has None for '0\.bias'"),
        ({"cost": {"0.weight": -1.0}}, r"cost has -1\.0 for '0\.weight'"),
        ({"cost": {"0.weight": 1.0, "0.bias": 0.0}, "tilt": 2}, "tilt=2 is out of range"),
    ],
)
def test_costs_that_are_none_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prunable_groups(nn.Sequential(nn.Linear(2, 2)), **options)


@pytest.mark.parametrize("path", PATHS)
def test_with_four_options_set_it_is_st3(path: dict[str, Any]) -> None:
    """Vanderschueren and De Vleeschouwer (WACV 2023): straight-through gradients to raw weights, which decay and are
    soft-thresholded and rescaled by channel in the forward pass; zeros come by a cubic plan and are free until the end.
    """
    steps, lr, decay, momentum = 60, 0.05, 0.01, 0.9
    model, twin = Convolutional().double(), Convolutional().double()
    optimizer = GRDA(
        groups(model),
        lr=lr,
        momentum=momentum,
        weight_decay=decay,
        target=0.8,
        steps=steps,
        prune_from=0.05,
        prune_until=0.5,
        ramp="cubic",
        fix_at=1.0,
        rescale=True,
        decay="accumulator",
        **path,
    )
    raw = {p: p.detach().clone().requires_grad_() for p in twin.parameters()}
    sgd = torch.optim.SGD(raw.values(), lr=lr, momentum=momentum, weight_decay=decay)
    for step in range(steps - 1):
        inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step)).double()
        for network in (model, twin):
            network.zero_grad()
            (network(inputs) - inputs.flatten(1)[:, :16]).square().mean().backward()
        optimizer.step()
        tau = float(optimizer.state[model[0].weight]["threshold"])
        for p, v in raw.items():
            v.grad = p.grad
        sgd.step()
        with torch.no_grad():
            for p, v in raw.items():
                p.copy_(v)
                if v.dim() > 1:
                    left = v.sign() * (v.abs() - tau).clamp(min=0)
                    for channel, (kept, whole) in enumerate(zip(left, v, strict=True)):
                        p[channel] = kept * whole.abs().mean() / kept.abs().mean() if kept.any() else 0.0
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        u = min(max((step + 1 - 3) / (30 - 3), 0.0), 1.0)
        assert optimizer.defaults["plan"].share(step + 1) == pytest.approx(0.8 * (1 - (1 - u) ** 3))
    assert optimizer.progress().share == pytest.approx(0.8, abs=0.1)
    optimizer.step()
    assert optimizer.progress().zeros == round(0.8 * optimizer.progress().weights)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "options", "warns"),
    [
        (GRDA, {"lr": 0.01}, True),
        (GRDA, {"lr": 0.01, "shape": "soft"}, True),
        (GRDA, {"lr": 0.01, "shape": "hard"}, False),
        (GRDA, {"lr": 0.5, "momentum": 0.9}, False),
        (AdamGRDA, {"lr": 1e-4}, True),
        (AdamGRDA, {"lr": 0.03}, False),
    ],
)
def test_a_run_too_short_for_a_soft_threshold_is_said_halfway(
    kind: Any, options: dict[str, Any], warns: bool, path: dict[str, Any]
) -> None:
    model = network()
    optimizer = kind(
        groups(model), target=0.9, steps=60, prune_from=0.1, prune_until=0.7, fix_at=0.7, **options, **path
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer, range(60))
    assert [("halfway" in str(each.message), each.category) for each in said] == [(True, Outlook)] * warns
    becomes = options.get("shape", "hard" if warns else "soft")
    assert {group["shape"] for group in optimizer.param_groups} == {becomes}


@pytest.mark.parametrize("at", [3, 23, 24, 30])
def test_a_run_whose_threshold_becomes_hard_goes_on_as_it_was_saved(at: int) -> None:
    """Halfway between the first zeros, after step 6, and all of them, after step 42, is the look before step 27."""
    options = {"lr": 0.01, "target": 0.9, "steps": 60}
    model, twin = network(), network(1)
    whole, resumed = GRDA(groups(model), **options), GRDA(groups(twin), **options)
    train(model, whole, range(at))
    shapes = {group["shape"] for group in whole.param_groups}
    resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    twin.load_state_dict(model.state_dict())
    train(model, whole, range(at, 60))
    train(twin, resumed, range(at, 60))
    assert shapes == {"hard" if at > 26 else "soft"}
    assert {group["shape"] for group in resumed.param_groups} == {"hard"}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_channel_without_a_weight_stays_empty_when_it_is_rescaled() -> None:
    v, left = torch.tensor([[9.0, -5.0, 1.0], [0.6, 8.0, 0.4]]), torch.empty(2, 3)
    shrink(v, 9.5, rescale=True, out=left)
    assert left.tolist() == [[0.0] * 3] * 2
    shrink(v, 7.0, rescale=True, out=left)
    torch.testing.assert_close(left, torch.tensor([[15.0, 0.0, 0.0], [0.0, 9.0, 0.0]]))


def test_weights_that_others_write_are_adopted_through_the_rescaling() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 40, dtype=torch.float64))
    optimizer = GRDA([p], lr=1e-9, c=1.0, rescale=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["threshold"].fill_(0.4)
    with torch.no_grad():
        p.copy_(torch.randn(5, 40).relu() + 0.5 * (torch.rand(5, 40) > 0.5))
        written = p.clone()
    optimizer.param_groups[0]["c"] = 0.0
    optimizer.step()
    torch.testing.assert_close(p.detach(), written)


@pytest.mark.parametrize(("aim", "growth"), [(0.4, 0.02), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0)])
def test_a_threshold_does_not_aim_at_what_is_no_number_or_less(aim: float, growth: float) -> None:
    plan = Plan(0.5, 100)
    plan.aim(torch.tensor(aim))
    assert float(plan.growth) == pytest.approx(growth, rel=1e-6)  # in 20 steps
