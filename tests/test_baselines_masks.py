"""Masks and magnitude pruning: exact zeros at every step, exact counts, and the cubic schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from test_train import noisy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Optimizer

from dirprune import GRDA
from dirprune.lab import models
from dirprune.lab.methods import MethodSpec
from dirprune.lab.methods.magnitude import Magnitude, cubic_sparsity, global_masks, layer_masks
from dirprune.lab.methods.masks import Masked, keep_largest, whole_counts
from dirprune.lab.methods.rigl import RigL
from dirprune.lab.models.weights import prunable

METHODS: list[Callable[[], Masked]] = [
    lambda: Magnitude(sparsity=0.7, every=2),
    lambda: Magnitude(sparsity=0.7, allocation="global", every=2),
    lambda: Magnitude(sparsity=0.7, start=0.3, end=0.3),
    lambda: RigL(sparsity=0.7, every=3),
]
OPTIMIZERS: list[Callable[[nn.Module], Optimizer]] = [
    lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.01),
    lambda m: GRDA(m.parameters(), lr=0.1, c=1e-3, momentum=0.9, weight_decay=0.01),
]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 1, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator)


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    inputs, targets = batch(seed)
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", METHODS)
def test_masks_hold_exactly_after_every_step(
    make: Callable[[], Masked], make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    model, method = noisy(), make()
    optimizer = make_optimizer(model)
    method.attach(model, optimizer, steps=20, examples=16)
    ever_masked = 0
    for number in range(1, 21):
        step(model, optimizer, number)
        method.after_step(number)
        for name, layer in (("0", model[0]), ("5", model[5])):
            masked = ~method.masks[name]
            ever_masked += int(masked.sum())
            assert (layer.weight[masked] == 0).all()
            for value in optimizer.state[layer.weight].values():
                if isinstance(value, Tensor) and value.shape == layer.weight.shape:
                    assert (value[masked] == 0).all()
            assert layer.weight.grad is not None
            assert masked.sum() < 10 or (layer.weight.grad[masked] != 0).any()  # gradients stay dense
    assert ever_masked > 0
    total = model[0].weight.numel() + model[5].weight.numel()
    assert sum(int((~mask).sum()) for mask in method.masks.values()) == total - round(0.3 * total)


def test_weights_outside_the_mask_move_as_without_it() -> None:
    """Outputs of one linear layer do not depend on each other: rows that keep all weights train as without masks."""
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 4), nn.Linear(6, 4)
    twin.load_state_dict(model.state_dict())
    optimizer, twin_optimizer = (SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in (model, twin))
    method = Magnitude(sparsity=0.5, start=1.0, end=1.0)
    method.attach(model, optimizer, steps=100, examples=1)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1:] = False
    method.set_masks({"": mask})
    for seed in range(5):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        for m, o in ((model, optimizer), (twin, twin_optimizer)):
            o.zero_grad()
            (m(inputs) - 1).square().sum().backward()
            o.step()
    torch.testing.assert_close(model.weight[0], twin.weight[0], rtol=0, atol=0)
    assert (model.weight[1:] == 0).all()


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_the_largest_are_kept(format_: torch.memory_format) -> None:
    scores = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(memory_format=format_)
    mask = keep_largest(scores, 37)
    threshold = sorted(scores.flatten().tolist())[-37]
    assert torch.equal(mask, scores >= threshold)
    assert keep_largest(torch.zeros(7), 3).tolist() == [True] * 3 + [False] * 4


@pytest.mark.parametrize("density", [0.02, 0.1, 1 / 3, 0.5, 0.999, 1.0])
def test_whole_counts_add_up_and_lie_next_to_their_shares(density: float) -> None:
    sizes = [1, 3, 7, 50, 999, 1234]
    counts = whole_counts(sizes, [density] * len(sizes))
    assert sum(counts) == round(density * sum(sizes))
    for count, size in zip(counts, sizes, strict=True):
        assert math.floor(size * density) <= count <= min(size, math.floor(size * density) + 1)


def test_the_cubic_schedule_against_its_formula() -> None:
    """Zhu & Gupta's s_f + (s_i − s_f)(1 − (t − t₀)/(nΔt))³ with s_i = 0."""
    start, end, final = 20, 120, 0.87
    for t in range(start, end + 1):
        expected = final + (0 - final) * (1 - (t - start) / (end - start)) ** 3
        assert cubic_sparsity(t, start=start, end=end, final=final) == pytest.approx(expected, abs=1e-12)
    assert [cubic_sparsity(t, start=start, end=end, final=final) for t in (0, 19, 121, 999)] == [0, 0, final, final]
    assert [cubic_sparsity(t, start=5, end=5, final=final) for t in (4, 5, 6)] == [0, final, final]


def test_gradual_pruning_follows_the_schedule() -> None:
    model = noisy()
    method = Magnitude(sparsity=0.9, start=0.1, end=0.75, every=10)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=100, examples=1)
    total = sum(mask.numel() for mask in method.masks.values())
    for t in range(101):
        method.after_step(t)
        last = 75 if t >= 75 else max(10, t // 10 * 10)
        wanted = cubic_sparsity(last, start=10, end=75, final=0.9)
        zeros = sum(int((~mask).sum()) for mask in method.masks.values())
        assert zeros == total - round(total * (1 - wanted))


def test_allocations_keep_what_they_say() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(40, 10), "b": 0.1 * torch.randn(20, 10), "c": torch.randn(3, 3)}
    uniform = layer_masks(weights, dict.fromkeys(weights, 0.8))
    assert [int(mask.sum()) for mask in uniform.values()] == [80, 40, 2]
    own = layer_masks(weights, {"a": 0.5, "b": 0.9, "c": 0.0})
    assert [int(mask.sum()) for mask in own.values()] == [200, 20, 9]
    for name, mask in [*uniform.items(), *own.items()]:
        if not mask.all():
            assert weights[name][mask].abs().min() > weights[name][~mask].abs().max()
    everywhere = global_masks(weights, 0.8)
    kept = torch.cat([weights[name][mask].abs() for name, mask in everywhere.items()])
    gone = torch.cat([weights[name][~mask].abs() for name, mask in everywhere.items()])
    assert len(kept) == round(0.2 * 609)
    assert kept.min() > gone.max()
    assert everywhere["b"].sum() < uniform["b"].sum()


@pytest.mark.parametrize("name", ["magnitude", "magnitude-global"])
def test_each_method_prunes_the_weights_that_torchs_own_pruning_does(name: str) -> None:
    torch.manual_seed(0)
    model = models.build("small", 10)
    with torch.no_grad():
        model.conv2.weight.mul_(0.1)  # so that one threshold for all is far from one for each
    method = MethodSpec.of(name, sparsity=0.8, start=0.0, end=0.0).make(seed=0, reward=lambda model: 0.0)
    assert isinstance(method, Masked)
    other = copy.deepcopy(model)
    layers = {name: module for name, module in other.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
    if name == "magnitude-global":
        every = [(layer, "weight") for layer in layers.values()]
        prune.global_unstructured(every, pruning_method=prune.L1Unstructured, amount=0.8)
    else:
        for layer in layers.values():
            prune.l1_unstructured(layer, "weight", amount=0.8)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    differ = {name: int((method.masks[name] != layer.weight_mask.bool()).sum()) for name, layer in layers.items()}
    assert max(differ.values()) <= 1  # where a share of a layer is not a whole number, one of two next to each other


def test_a_sparsity_for_every_layer_by_name() -> None:
    torch.manual_seed(0)
    model = models.build("small", 10)
    wanted = {"conv1": 0.0, "conv2": 0.5, "conv3": 0.9, "fc1": 0.95, "fc2": 0.25}
    method = Magnitude(sparsity=wanted, start=0.0, end=0.0)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    found = {layer.name: layer.fraction for layer in method.sparsity().layers if layer.is_weight}
    assert found == pytest.approx({f"{name}.weight": s for name, s in wanted.items()}, abs=1e-3)
    wrong = Magnitude(sparsity={"conv1": 0.5})
    with pytest.raises(ValueError, match="give one for each of conv1, conv2, conv3, fc1, fc2"):
        wrong.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": {"a": -0.1}}, "sparsity=-0.1"),
        ({"sparsity": 0.5, "allocation": "fair"}, "allocation='fair'"),
        ({"sparsity": 0.5, "start": 0.8, "end": 0.2}, "start=0.8"),
        ({"sparsity": 0.5, "end": 1.5}, "end=1.5"),
        ({"sparsity": 0.5, "start": -0.5}, "start=-0.5"),
        ({"sparsity": 0.5, "every": 0}, "every=0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Magnitude(**options)


def attached(method: Magnitude, steps: int) -> Magnitude:
    model = nn.Linear(10, 10)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=steps, examples=1)
    return method


@pytest.mark.parametrize("options", [{"sparsity": 0.8, "allocation": "global"}, {"sparsity": {"": 0.8}}])
def test_however_it_is_divided_sparsity_grows_by_the_cubic_schedule(options: dict[str, object]) -> None:
    method = attached(Magnitude(**options, start=0.0, end=1.0, every=1), steps=4)
    method.after_step(2)
    assert method.sparsity().weight_fraction == pytest.approx(0.8 * (1 - 0.5**3))


def test_masks_are_set_from_the_start_on_every_so_many_steps_and_at_the_end() -> None:
    method = attached(Magnitude(sparsity=0.8, start=0.25, end=1.0, every=4), steps=20)
    changed = []
    for number in range(1, 21):
        before = int(method.masks[""].sum())
        method.after_step(number)
        if int(method.masks[""].sum()) != before:
            changed.append(number)
    assert changed == [9, 13, 17, 20]


@pytest.mark.parametrize(("steps", "expected"), [(30, range(12, 31, 2)), (3000, range(1100, 3001, 100))])
def test_by_default_masks_are_set_every_hundred_steps_or_ten_times(
    steps: int, expected: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = attached(Magnitude(sparsity=0.9, start=1 / 3, end=1.0), steps=steps)
    seen: list[int] = []
    monkeypatch.setattr(method, "set_masks", lambda masks: seen.append(number))
    for number in range(1, steps + 1):
        method.after_step(number)
    assert seen == list(expected)


def test_masks_stay_where_a_recorded_step_reads_them() -> None:
    method = attached(Magnitude(sparsity=0.8, start=0.0, end=1.0, every=1), steps=4)
    mask = method.masks[""]
    method.after_step(2)
    assert method.masks[""] is mask


@pytest.mark.parametrize("count", [100, 1000, 100_000])
def test_of_equal_weights_the_first_are_kept(count: int) -> None:
    assert keep_largest(torch.zeros(count), count // 2)[: count // 2].all()


def test_layers_that_share_their_weight_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(prunable(model)) == ["0"]


def test_scaled_scores_are_those_of_adam_s_mean_squared_gradients() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 6), nn.Linear(6, 4)
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    method = Magnitude(sparsity=0.75, allocation="global", score="scaled", start=0.5, end=1.0)
    method.attach(model, optimizer, steps=4, examples=1)
    weights = (first.weight, second.weight)
    squares = [torch.zeros_like(w) for w in weights]
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        gradients = [w.grad for w in weights if w.grad is not None]
        squares = [0.95 * square + 0.05 * g**2 for square, g in zip(squares, gradients, strict=True)]
        optimizer.step()
        if step == 4:  # with the bias correction, which the method leaves out
            corrected = [square / (1 - 0.95**4) for square in squares]
            scores = torch.cat(
                [(w.detach().abs() * s**0.25).flatten() for w, s in zip(weights, corrected, strict=True)]
            )
            kept = {int(i) for i in scores.topk(round(0.25 * 72)).indices}
        method.after_step(step)
    left = torch.cat([w.flatten() for w in weights]) != 0
    assert {int(i) for i in left.nonzero()} == kept


def test_scaled_scores_need_adam_and_global_pruning() -> None:
    with pytest.raises(ValueError, match="score"):
        Magnitude(sparsity=0.5, score="scaled")
    model = nn.Linear(4, 4)
    method = Magnitude(sparsity=0.5, allocation="global", score="scaled", start=0.0, end=0.0)
    with pytest.raises(ValueError, match="optimizer of Adam's kind, and there are none of ''; train with adamw"):
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, examples=1)
