"""What the training loop requires of every method: learning, exact zeros, resuming, and a plain model at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from marks import GPU
from test_train import SEED, digits, noisy, numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from dirprune import sparsity
from dirprune.lab import data, methods, models
from dirprune.lab.methods import (
    Acdc,
    Amc,
    Ham,
    LinBreg,
    Magnitude,
    Method,
    MethodSpec,
    Narrow,
    Pat,
    RandomMask,
    RigL,
    Str,
    VariationalDropout,
)
from dirprune.lab.training.execution import CapturedStep, Execution, PlainStep, Tally, make_step
from dirprune.lab.training.loop import EpochRecord, evaluate, train
from dirprune.lab.training.optimizers import Grda, Rda
from dirprune.lab.training.schedules import Schedule

CPU = torch.device("cpu")
Make = Callable[[], Method]


def size_of_the_first_layer(model: nn.Module) -> float:
    """Return a reward for AMC that needs no data."""
    return float(next(model.parameters()).detach().abs().sum())


# Options with which every method acts several times in sixteen steps.
METHODS: dict[str, Make] = {
    "sgd": Method,
    "magnitude": partial(Magnitude, sparsity=0.8, every=3),
    "magnitude-global": partial(Magnitude, sparsity=0.8, allocation="global", every=3),
    "rigl": partial(RigL, sparsity=0.8, every=3),
    "str": partial(Str, decay=0.5, start=-4.0),
    "variational-dropout": partial(VariationalDropout, start=-5.0, pace=1.0),
    "amc": partial(Amc, sparsity=0.8, reward=size_of_the_first_layer, warmup=2, episodes=2),
    "pat": partial(Pat, sparsity=0.8),
    "acdc": partial(Acdc, sparsity=0.8, phase=0.15, dense=0.5, end=0.7),
    "ham": partial(Ham, sparsity=0.8, alpha=1.0, phase=0.15, dense=0.5, end=0.7),
    "linbreg": partial(LinBreg, lam=0.01, density=0.2),
    "random": partial(RandomMask, sparsity=0.8),
}


def make_optimizer(model: nn.Module, lr: float = 0.05) -> Optimizer:
    return SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-3)


def attached(make: Make, model: nn.Module, loaders: data.Loaders, epochs: int) -> tuple[Method, Optimizer]:
    method = make()
    optimizer = make_optimizer(model)
    method.attach(model, optimizer, steps=epochs * len(loaders.train), examples=loaders.train.examples)
    return method, optimizer


def run(
    model: nn.Module,
    optimizer: Optimizer,
    method: Method | None,
    loaders: data.Loaders,
    *,
    stop: int | None = None,
    **options: Any,
) -> list[EpochRecord]:
    """Train for four epochs, or for the first ``stop`` of them."""
    settings = {"epochs": 4, "lr": 0.05, "schedule": Schedule("cosine", warmup=0.5), "seed": SEED, **options}
    records = train(model, optimizer, loaders.train, loaders.test, method=method, **settings)
    return list(islice(records, stop))


def test_every_method_is_known_by_its_name() -> None:
    kinds = {type(make()) for make in METHODS.values()}
    assert {variant.kind for variant in methods.METHODS.values()} - {Narrow} == kinds - {Method}
    with pytest.raises(ValueError, match="Did you mean 'magnitude'"):
        MethodSpec.of("magnitud")


USUAL = {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-3}
# Of each method: how to make it, the test accuracy (%) it must exceed, and bounds on its sparsity.
LEARNS: dict[str, tuple[Make, float, tuple[float, float]]] = {
    "sgd": (Method, 95, (0, 0)),
    "grda": (Method, 85, (0.85, 1)),
    "rda": (Method, 85, (0.8, 1)),
    "magnitude": (partial(Magnitude, sparsity=0.9, every=10), 85, (0.9, 0.9)),
    "magnitude-global": (partial(Magnitude, sparsity=0.9, allocation="global", every=10), 88, (0.9, 0.9)),
    "magnitude-one-shot": (partial(Magnitude, sparsity=0.9, start=0.5, end=0.5), 75, (0.9, 0.9)),
    "rigl": (partial(RigL, sparsity=0.9, every=20), 80, (0.9, 0.9)),
    "str": (partial(Str, decay=0.15, start=-8.0), 85, (0.75, 1)),
    "variational-dropout": (VariationalDropout, 88, (0.75, 1)),
    "pat": (partial(Pat, sparsity=0.9), 88, (0.9, 0.9)),
    "acdc": (partial(Acdc, sparsity=0.9), 88, (0.9, 0.9)),
    "ham": (partial(Ham, sparsity=0.9, alpha=10.0), 88, (0.9, 0.9)),
    "linbreg": (partial(LinBreg, lam=0.05), 80, (0.7, 1)),
}


PRUNING = {"grda": Grda(c=0.08, mu=0.6, **USUAL), "rda": Rda(lam=0.008, **USUAL)}


@pytest.mark.parametrize("name", LEARNS)
def test_learns_digits_at_the_wanted_sparsity(name: str) -> None:
    make, accuracy, (least, most) = LEARNS[name]
    loaders = data.load("digits", batch_size=32, seed=SEED)
    torch.manual_seed(0)
    model = models.build("small", 10)
    method = make()
    optimizer = PRUNING[name].make(model) if name in PRUNING else make_optimizer(model, lr=0.03)
    method.attach(model, optimizer, steps=4 * len(loaders.train), examples=loaders.train.examples)
    last = run(model, optimizer, method, loaders, lr=0.03)[-1]
    assert last.test_accuracy > accuracy
    assert least - 1e-4 <= last.weight_sparsity <= most + 1e-4
    method.finish()
    assert evaluate(model, loaders.test).accuracy == last.test_accuracy


def test_amc_learns_digits_with_a_search_on_held_out_data() -> None:
    loaders = data.load("digits", batch_size=32, seed=SEED, validation=0.2)
    held_out = loaders.validation
    assert held_out is not None
    torch.manual_seed(0)
    model = models.build("small", 10)
    method = Amc(sparsity=0.9, reward=lambda m: -evaluate(m, held_out).loss, warmup=10, episodes=20)
    optimizer = make_optimizer(model, lr=0.03)
    method.attach(model, optimizer, steps=4 * len(loaders.train), examples=loaders.train.examples)
    records = run(model, optimizer, method, loaders, lr=0.03)
    found = [round(record.weight_sparsity, 3) for record in records]
    assert found == [0.0, 0.438, 0.9, 0.9]  # the first of AMC's four stages is at half time: the end of epoch 2
    assert records[-1].test_accuracy > 85


@pytest.mark.parametrize("name", METHODS)
def test_two_epochs_and_two_more_equal_four(name: str) -> None:
    """Model, optimizer and method, saved and loaded into new ones, continue bit for bit."""
    loaders = digits()
    whole = noisy()
    method, optimizer = attached(METHODS[name], whole, loaders, 4)
    records = run(whole, optimizer, method, loaders)

    first = noisy()
    half, half_optimizer = attached(METHODS[name], first, loaders, 4)
    early = run(first, half_optimizer, half, loaders, stop=2)
    saved = copy.deepcopy((first.state_dict(), half_optimizer.state_dict(), half.state_dict()))
    second = noisy()
    rest, rest_optimizer = attached(METHODS[name], second, loaders, 4)
    second.load_state_dict(saved[0])
    rest_optimizer.load_state_dict(saved[1])
    rest.load_state_dict(saved[2])
    late = run(second, rest_optimizer, rest, loaders, done=2)
    assert numbers(early + late) == numbers(records)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(rest.state_dict(), method.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(rest_optimizer.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


def test_a_state_of_another_method_is_refused() -> None:
    loaders = digits()
    method, _ = attached(METHODS["rigl"], noisy(), loaders, 4)
    with pytest.raises(ValueError, match="share"):
        method.load_state_dict({"share": torch.zeros(())})


@pytest.mark.parametrize("name", METHODS)
def test_the_end_is_a_plain_model_that_computes_the_same(name: str) -> None:
    loaders, model, plain = digits(), noisy(), noisy()
    method, optimizer = attached(METHODS[name], model, loaders, 4)
    last = run(model, optimizer, method, loaders)[-1]
    report = method.sparsity()
    inputs, targets = next(iter(loaders.test))
    model.eval()
    logits = model(inputs).detach()
    method.finish()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert sorted(model.state_dict()) == sorted(plain.state_dict())
    torch.testing.assert_close(model(inputs), logits, rtol=0, atol=0)
    zeros = {layer.name: layer.zeros for layer in sparsity(model).layers}
    assert zeros == {layer.name: layer.zeros for layer in report.layers}
    assert last.sparsity == sparsity(model).fraction
    if name != "sgd":
        assert last.weight_sparsity > 0.1
    cross_entropy(model(inputs), targets).backward()
    for _ in range(2):  # once the method has finished, nothing keeps the weights at zero
        optimizer.step()
    if name not in ("sgd", "grda", "rda"):
        assert sparsity(model).zeros < report.zeros


class Ridge(Method):
    """A method whose penalty is the same as SGD's weight_decay=0.03."""

    def penalty(self) -> Tensor:
        return 0.5 * 0.03 * torch.stack([p.square().sum() for p in self.model.parameters()]).sum()


def test_a_penalty_is_part_of_the_objective_and_not_of_the_recorded_loss() -> None:
    loaders, model, twin = digits(), noisy(), noisy()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = Ridge()
    method.attach(model, optimizer, steps=16, examples=loaders.train.examples)
    found = run(model, optimizer, method, loaders)
    expected = run(twin, SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.03), None, loaders)
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-3, atol=1e-5)


class Diary(Method):
    """Records the step of each call, and the gradient of the first weight at that time."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, Tensor]] = []

    def after_step(self, step: int) -> None:
        gradient = next(self.model.parameters()).grad
        assert gradient is not None
        self.pages.append((step, gradient.clone()))


def test_a_method_is_asked_after_every_step_and_sees_its_gradient() -> None:
    loaders, model, twin = digits(), noisy(), noisy()
    model[3].p = twin[3].p = 0.0
    optimizer, diary = SGD(model.parameters(), lr=0.05), Diary()
    diary.attach(model, optimizer, steps=16, examples=loaders.train.examples)
    run(model, optimizer, diary, loaders, done=2, epochs=4, schedule=Schedule())
    assert [step for step, _ in diary.pages] == list(range(9, 17))
    inputs, targets = next(loaders.train.epoch(3))
    cross_entropy(twin.train()(inputs), targets).backward()
    torch.testing.assert_close(diary.pages[0][1], twin[0].weight.grad)


@pytest.mark.parametrize("name", ["str", "variational-dropout", "rigl"])
def test_a_compiled_model_trains_as_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="aot_eager", **options))
    # A compiled graph draws random numbers in its own order, so the noise is made too small to matter.
    make = partial(VariationalDropout, start=-20.0) if name == "variational-dropout" else METHODS[name]
    loaders, results = digits(), []
    for execution in (Execution(), Execution(compile=True)):
        model = noisy()
        model[3].p = 0.0
        method, optimizer = attached(make, model, loaders, 1)
        record = run(model, optimizer, method, loaders, execution=execution, epochs=1)[-1]
        results.append((record.train_loss, record.test_loss, record.weight_sparsity))
    assert results[1] == pytest.approx(results[0], rel=1e-3)


def test_a_method_that_is_not_attached_is_refused() -> None:
    loaders, model, method = digits(), noisy(), RigL(sparsity=0.5)
    with pytest.raises(ValueError, match="method=rigl is not attached"):
        run(model, SGD(model.parameters(), lr=0.1), method, loaders)


@pytest.mark.parametrize("steps", [0, -1])
def test_training_of_no_length_is_refused(steps: int) -> None:
    model = noisy()
    with pytest.raises(ValueError, match=f"steps={steps}"):
        Method().attach(model, SGD(model.parameters(), lr=0.1), steps=steps, examples=1)


def test_a_model_without_layers_to_prune_is_refused() -> None:
    model = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="nothing to prune"):
        RigL(sparsity=0.5).attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)


CUDA = torch.device("cuda")


def captured_optimizer(model: nn.Module) -> Optimizer:
    rate = torch.tensor(0.05, device=CUDA)
    return SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-3, fused=True)


@GPU
@pytest.mark.parametrize("name", METHODS)
def test_captured_steps_prune_as_plain_ones(name: str) -> None:
    make = partial(VariationalDropout, start=-20.0) if name == "variational-dropout" else METHODS[name]
    loaders, results = data.load("digits", batch_size=400, seed=SEED, device=CUDA), []
    for capture in (False, True):
        model = noisy().to(CUDA)
        model[3].p = 0.0
        method = make()
        optimizer = captured_optimizer(model)
        method.attach(model, optimizer, steps=16, examples=loaders.train.examples)
        record = run(model, optimizer, method, loaders, execution=Execution(capture=capture))[-1]
        results.append((record.train_loss, record.test_loss, record.weight_sparsity))
    assert results[1] == pytest.approx(results[0], rel=0.02, abs=0.02)


@GPU
def test_after_a_captured_step_of_any_size_gradients_are_those_of_the_plain_one() -> None:
    loaders = data.load("digits", batch_size=400, seed=SEED, device=CUDA)
    model, twin = noisy().to(CUDA), noisy().to(CUDA)
    model[3].p = twin[3].p = 0.0
    optimizer, tally = captured_optimizer(model), Tally(8, CUDA)
    step = make_step(model, model, optimizer, tally, Execution(capture=True), loaders.train, [400, 238])
    assert isinstance(step, CapturedStep)
    plain = PlainStep(twin, captured_optimizer(twin), Tally(8, CUDA), Execution())
    for epoch in (1, 2):
        for batch in loaders.train.epoch(epoch):
            step(*batch)
            plain(*batch)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-3)
