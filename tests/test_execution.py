"""Compare fast ways to take a step with the plain one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import GPU
from test_train import OPTIMIZERS, digits, make_grda, make_sgd, noisy, numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import SGD, Optimizer

from dirprune import GRDA, AdamGRDA, sparsity
from dirprune._support.graphs import Kept, record, states
from dirprune._support.rates import set_lr
from dirprune.lab import data
from dirprune.lab.models import wide_resnet
from dirprune.lab.training.execution import (
    CapturedStep,
    Execution,
    PlainScoring,
    PlainStep,
    Tally,
    make_scoring,
    make_step,
)
from dirprune.lab.training.lean import Lean
from dirprune.lab.training.loop import EpochRecord, evaluate, recalibrate_batchnorm, train
from dirprune.lab.training.schedules import Schedule
from dirprune.optim.base import Thresholded

CPU = torch.device("cpu")


def run(model: nn.Module, optimizer: Optimizer, execution: Execution, loaders: data.Loaders) -> list[EpochRecord]:
    options: dict[str, Any] = {"epochs": 3, "lr": 0.1, "schedule": Schedule(), "seed": 0}
    return list(train(model, optimizer, loaders.train, loaders.test, execution=execution, **options))


def colour(seed: int = 0) -> nn.Sequential:
    """Return a network whose inputs have several channels: only then do memory formats differ."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))


def colour_batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bfloat16_and_channels_last_agree_with_float32(make: Callable[[nn.Module], Optimizer]) -> None:
    loaders, plain, fast = digits(100), noisy(), noisy()
    execution = Execution(precision="bfloat16", channels_last=True)
    fast = execution.place(fast, CPU)
    expected = run(plain, make(plain), Execution(), loaders)[-1]
    found = run(fast, make(fast), execution, loaders)[-1]
    assert expected.test_accuracy > 80
    assert found.test_accuracy == pytest.approx(expected.test_accuracy, abs=3)
    assert found.train_loss == pytest.approx(expected.train_loss, rel=0.1)
    assert found.train_loss != expected.train_loss
    assert found.sparsity == pytest.approx(expected.sparsity, abs=0.02)
    assert all(p.dtype == torch.float32 for p in fast.parameters())


def test_every_forward_pass_runs_in_the_chosen_precision_and_format() -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((output.dtype, inputs[0].is_contiguous(memory_format=torch.channels_last)))

    loaders = data.load(
        "synthetic", batch_size=4, seed=0, synthetic=data.Synthetic(shape=(3, 8, 8), classes=10, examples=4)
    )
    for execution, expected in (
        (Execution(), (torch.float32, False)),
        (Execution(precision="bfloat16", channels_last=True), (torch.bfloat16, True)),
    ):
        model = execution.place(nn.Sequential(nn.BatchNorm2d(3), *colour()), CPU)
        model[1].register_forward_hook(note)
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last) == expected[1]
        PlainStep(model, make_sgd(model), Tally(1, CPU), execution)(*next(loaders.train.epoch(1)))
        evaluate(model, loaders.test, execution=execution)
        recalibrate_batchnorm(model, loaders.test, execution=execution)
        assert seen == [expected] * 3
        seen.clear()


def test_a_compiled_step_agrees_with_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    compile_ = torch.compile

    def quickly(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
        compiled.append(model)
        return compile_(model, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", quickly)
    loaders, plain, fast = digits(400), noisy(), noisy()
    for model in (plain, fast):
        model[3].p = 0.0  # no dropout, because a compiled graph draws random numbers in its own order
    expected = run(plain, make_grda(plain), Execution(), loaders)
    assert compiled == []
    found = run(fast, make_grda(fast), Execution(compile=True), loaders)
    assert compiled == [fast, fast]  # once for training and once for evaluation
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(fast.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_shares_weighed_by_their_scale_give_the_gradient_of_the_batch() -> None:
    """DDP averages over processes; here two of them share a batch of 5 as 4 and 1, or as 5 and 0."""
    inputs, targets = colour_batch(5)
    model = colour()
    cross_entropy(model(inputs), targets).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for first in (4, 5):
        means = [torch.zeros_like(gradient) for gradient in expected]
        for share in (slice(0, first), slice(first, 5)):
            model = colour()
            tally = Tally(1, CPU)
            step = PlainStep(model, SGD(model.parameters(), lr=0.0), tally, Execution())
            step(inputs[share], targets[share], scale=len(targets[share]) * 2 / 5)
            for mean, p in zip(means, model.parameters(), strict=True):
                assert p.grad is not None
                mean += p.grad / 2
            assert math.isfinite(tally.losses.item())
        torch.testing.assert_close(means, expected)


def test_the_tally_keeps_every_step_and_starts_again() -> None:
    tally = Tally(3, CPU)
    logits = torch.eye(4)
    for targets, loss in (([0, 1, 2, 3], 1.5), ([0, 0, 0, 0], 2.5)):
        tally.add(torch.tensor(loss), logits, torch.tensor(targets))
    assert tally.losses.tolist() == [1.5, 2.5, 0.0]
    assert tally.correct.tolist() == [4.0, 1.0, 0.0]
    tally.reset()
    tally.add(torch.tensor(3.5), logits, torch.tensor([0, 1, 0, 0]))
    assert tally.losses.tolist() == [3.5, 0.0, 0.0]
    assert tally.correct.tolist() == [2.0, 0.0, 0.0]


def test_without_cuda_what_would_be_captured_is_plain() -> None:
    model, execution = colour(), Execution(capture=True)
    step = make_step(model, model, make_sgd(model), Tally(1, CPU), execution, [colour_batch(2)], [2])
    assert type(step) is PlainStep
    assert type(make_scoring(model, model, execution, CPU)) is PlainScoring


def test_a_batch_scores_the_sum_of_its_losses_and_its_right_answers() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    loss, right = PlainScoring(nn.Identity(), Execution())(logits.view(3, 2, 1, 1).flatten(1), torch.tensor([0, 1, 1]))
    assert right == 2
    assert loss.item() == pytest.approx(math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + math.log1p(math.exp(3)))


def test_a_learning_rate_in_a_tensor_keeps_its_tensor() -> None:
    rate = torch.tensor(0.5)
    model = colour()
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.1}], lr=rate)
    set_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert optimizer.param_groups[1]["lr"] == 0.25


def test_what_a_rehearsal_makes_is_put_back_too() -> None:
    """The accumulators exist before the first step, and momentum buffers do not."""
    model = nn.Linear(3, 2)
    optimizer = GRDA(model.parameters(), lr=0.1, c=0.01, momentum=0.9)
    for p in model.parameters():
        optimizer.begin(p, optimizer.param_groups[0])
    before = copy.deepcopy(model.state_dict())
    kept = Kept(lambda: [*model.parameters(), *states(optimizer)])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept.put_back()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert torch.equal(optimizer.state[p]["accumulator"], before[name])
        assert float(optimizer.state[p]["step"]) == float(optimizer.state[p]["threshold"]) == 0
        assert not optimizer.state[p]["momentum_buffer"].any()


def stand_in(model: nn.Module, optimizer: Optimizer) -> Callable[..., tuple[Any, object]]:
    """Return a substitute for `record` that needs no GPU: it undoes the work that it records; a replay repeats it."""

    def recorded(work: Callable[[], object], *, rehearse: Callable[[], object], pool: Any) -> tuple[Any, object]:
        for _ in range(3):
            rehearse()
        kept = Kept(lambda: [*model.parameters(), *states(optimizer)])
        result = work()
        kept.put_back()
        places = [(p, p.grad) for p in model.parameters()]

        def replay() -> None:
            before = [p.grad for p in model.parameters()]
            work()
            for (p, place), own in zip(places, before, strict=True):
                assert place is not None
                assert p.grad is not None
                place.copy_(p.grad)  # a graph writes gradients to the tensors that they had when it was recorded,
                p.grad = own  # and does not set the attribute

        return SimpleNamespace(replay=replay, pool=lambda: None), result

    return recorded


TARGET: dict[str, Any] = {"target": 0.8, "steps": 6, "prune_from": 0.2}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("lean", "make"),
    [
        *((lean, partial(GRDA, lr=0.05, c=0.02, mu=0.6, momentum=m)) for lean in (False, True) for m in (0.0, 0.9)),
        *((lean, partial(GRDA, lr=0.05, momentum=0.9, **TARGET)) for lean in (False, True)),
        *((False, partial(AdamGRDA, lr=0.01, power=power, prune_until=0.7, **TARGET)) for power in (0.0, 0.5)),
    ],
)
def test_steps_that_are_rehearsed_and_replayed_are_the_plain_ones(
    make: Callable[..., Thresholded], lean: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with batches of two sizes: restored or rounded weights are not taken for a user's changes."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    low, results = Execution(precision="bfloat16"), []
    for replayed in (False, True):
        model, tally = colour(), Tally(6, CPU)
        optimizer = make(model.parameters(), capturable=True)
        plain = PlainStep(model, optimizer, tally, low)
        if used:
            plain(*colour_batch(8))
        tally.reset()
        step: PlainStep | CapturedStep = plain
        with Lean(model, optimizer) if lean and replayed else nullcontext():
            if replayed:
                monkeypatch.setattr("dirprune._support.graphs.record", stand_in(model, optimizer))
                step = CapturedStep(model, optimizer, tally, low)
                step.prepare(*colour_batch(8), [8, 3])
                starts = [(optimizer.state[p]["accumulator"], p.detach()) for p in model.parameters()]
                assert used or lean or all(torch.equal(*start) for start in starts)  # accumulators start at the weights
            gradients = []
            for size in (8, 3, 8, 8, 3, 8):
                step(*colour_batch(size))
                gradients.append(
                    [p.grad.to(torch.float32, copy=True) for p in model.parameters() if p.grad is not None]
                )
        state = {key: [optimizer.state[p][key] for p in model.parameters()] for key in ("accumulator", "threshold")}
        if plan := optimizer.defaults["plan"]:
            assert (plan.step, plan.is_fixed) == (6 + used, True)
            assert optimizer.progress().zeros == round(0.8 * optimizer.progress().weights)
        results.append((tally.losses, dict(model.state_dict()), state, gradients))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert 0 < sparsity(model).fraction < 1


CUDA = torch.device("cuda")


def captured_grda(model: nn.Module) -> Optimizer:
    return GRDA(model.parameters(), lr=0.05, c=0.02, mu=0.6, momentum=0.5, capturable=True)


def captured_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=torch.tensor(0.05, device=CUDA), momentum=0.9, fused=True)


def on_cuda(dropout: float) -> nn.Sequential:
    model = noisy().to(CUDA)
    model[3].p = dropout
    return model


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of consecutive digits."""
    inputs, targets = next(iter(data.load("digits", batch_size=1438, seed=0, device=CUDA).train))
    starts = [sum(sizes[:i]) % 1000 for i in range(len(sizes))]
    return [(inputs[s : s + n].contiguous(), targets[s : s + n]) for s, n in zip(starts, sizes, strict=True)]


def losses(step: PlainStep | CapturedStep, work: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Take one step per batch, with a learning rate that changes every ten steps, as in a schedule."""
    torch.manual_seed(11)
    step.tally.reset()
    for number, (inputs, targets) in enumerate(work):
        if number % 10 == 0:
            set_lr(step.optimizer, 0.05 * 0.7 ** (number // 10))
        step(inputs, targets)
    return step.tally.losses.cpu()


@GPU
@pytest.mark.filterwarnings("ignore")  # the compiler's advice on performance
@pytest.mark.parametrize("make", [captured_grda, captured_sgd])
@pytest.mark.parametrize(
    "execution",
    [Execution(capture=True), Execution(precision="bfloat16", channels_last=True, compile=True, capture=True)],
    ids=["float32", "fast"],
)
def test_captured_steps_equal_plain_ones(make: Callable[[nn.Module], Optimizer], execution: Execution) -> None:
    sizes = ([64] * 9 + [23]) * 5  # fifty steps, every tenth batch short
    work, results = batches(sizes), []
    for captures in (False, True):
        model = execution.place(on_cuda(dropout=0.0), CUDA)
        optimizer, tally = make(model), Tally(len(work), CUDA)
        plain = PlainStep(model, optimizer, tally, execution)
        step = make_step(model, model, optimizer, tally, execution, work, [64, 23]) if captures else plain
        assert type(step) is (CapturedStep if captures else PlainStep)
        found = losses(step, work)
        results.append((found, sparsity(model).fraction, model.state_dict()))
    (found, zeros, state), (expected, expected_zeros, expected_state) = results
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # bfloat16 alone causes 0.01
    assert expected[-10:].mean() < 0.8 * expected[:10].mean()  # it learned, so a lost update would show
    assert zeros == pytest.approx(expected_zeros, abs=0.01)
    torch.testing.assert_close(state["1.running_mean"], expected_state["1.running_mean"], rtol=0, atol=0.03)
    assert state["1.num_batches_tracked"] == expected_state["1.num_batches_tracked"] == 50


@GPU
@pytest.mark.filterwarnings("ignore")  # the compiler's advice on performance
@pytest.mark.parametrize("make", [captured_grda, captured_sgd])
def test_captured_wide_resnets_train_as_plain_ones(make: Callable[[nn.Module], Optimizer]) -> None:
    execution = Execution(precision="bfloat16", channels_last=True, compile=True, capture=True)
    work = [(interpolate(x.expand(-1, 3, -1, -1), scale_factor=4.0), y) for x, y in batches([64] * 50)]
    results = []
    for captures in (False, True):
        torch.manual_seed(0)
        model = execution.place(wide_resnet(depth=10, width=1), CUDA).train()
        optimizer, tally = make(model), Tally(len(work), CUDA)
        plain = PlainStep(model, optimizer, tally, execution)
        step = make_step(model, model, optimizer, tally, execution, work, [64]) if captures else plain
        results.append((losses(step, work), sparsity(model).fraction, model.state_dict()))
    (expected, expected_zeros, expected_state), (found, zeros, state) = results
    assert expected[-10:].mean() < 0.9 * expected[:10].mean()
    torch.testing.assert_close(found[:5], expected[:5], rtol=0.02, atol=0.02)
    assert found[-10:].mean().item() == pytest.approx(expected[-10:].mean().item(), rel=0.1)
    assert zeros == pytest.approx(expected_zeros, abs=0.01)
    assert state["layer2.0.bn2.num_batches_tracked"] == 50
    name = "layer2.0.bn2.running_mean"
    torch.testing.assert_close(state[name], expected_state[name], rtol=0, atol=0.1)


@GPU
@pytest.mark.parametrize("make", [captured_grda, captured_sgd])
def test_captured_dropout_draws_anew_at_every_step_and_follows_the_seed(
    make: Callable[[nn.Module], Optimizer],
) -> None:
    model = on_cuda(dropout=0.5)
    optimizer, tally, work = make(model), Tally(5, CUDA), batches([64]) * 5
    step = CapturedStep(model, optimizer, tally, Execution(capture=True))
    step.prepare(*work[0], [64])
    start = copy.deepcopy(model.state_dict())
    set_lr(optimizer, 0.0)  # neither weights nor thresholds move

    def draw(seed: int) -> list[float]:
        model.load_state_dict(start)
        tally.reset()
        torch.manual_seed(seed)
        for inputs, targets in work:
            step(inputs, targets)
        return [round(loss, 5) for loss in tally.losses.tolist()]

    first = draw(1)
    assert len(set(first)) == 5  # the five steps differ only in their dropout
    assert draw(1) == first
    assert draw(2) != first


@GPU
@pytest.mark.parametrize("make", [captured_grda, captured_sgd])
@pytest.mark.parametrize("used", [False, True])
def test_preparing_changes_nothing(make: Callable[[nn.Module], Optimizer], used: bool) -> None:
    model = on_cuda(dropout=0.5)
    optimizer, tally = make(model), Tally(4, CUDA)
    work = batches([64, 23])
    if used:
        for batch in work:
            PlainStep(model, optimizer, tally, Execution())(*batch)
    state, optimizer_state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    random = torch.cuda.get_rng_state()
    CapturedStep(model, optimizer, tally, Execution(capture=True)).prepare(*work[0], [64, 23])
    assert torch.equal(torch.cuda.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert tally.losses.tolist() == [0.0] * 4
    if used:
        torch.testing.assert_close(optimizer.state_dict()["state"], optimizer_state, rtol=0, atol=0)
    else:  # what a first step would have made: accumulators at the weights, all else zero
        for p, values in optimizer.state.items():
            for key, value in values.items():
                expected = p if key == "accumulator" else torch.zeros_like(value)
                torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0)


@GPU
def test_training_on_a_gpu_leaves_the_callers_random_state_alone() -> None:
    loaders = data.load("digits", batch_size=400, seed=0, device=CUDA)
    model = on_cuda(dropout=0.5)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    run(model, captured_sgd(model), Execution(capture=True), loaders)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


@GPU
@pytest.mark.filterwarnings("ignore")  # the compiler's advice on performance
@pytest.mark.parametrize(
    ("fast", "rel"),
    [
        (Execution(capture=True), 1e-4),
        (Execution(capture=True, compile=True), 1e-4),
        (Execution(capture=True, precision="bfloat16", channels_last=True), 1e-4),
        (Execution(capture=True, compile=True, precision="bfloat16", channels_last=True), 0.02),
    ],
)
def test_a_captured_score_is_the_plain_one_and_sees_new_weights(fast: Execution, rel: float) -> None:
    loaders = data.load("digits", batch_size=400, seed=0, device=CUDA)
    model = fast.place(on_cuda(dropout=0.5), CUDA)
    plain = replace(fast, capture=False, compile=False)
    scoring = make_scoring(model, model, fast, CUDA)
    for _ in range(2):
        found = evaluate(model, loaders.test, scoring=scoring)
        expected = evaluate(model, loaders.test, execution=plain)
        assert found.loss == pytest.approx(expected.loss, rel=rel)
        assert found.accuracy == pytest.approx(expected.accuracy, abs=2)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)


@GPU
def test_graphs_do_not_each_keep_a_workspace() -> None:
    a = torch.randn(256, 256, device=CUDA)

    def taken() -> int:
        record(lambda: a @ a)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    taken()
    assert taken() == taken()
