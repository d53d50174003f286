"""The training loop compared with one written by hand, and what its callers rely on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import update_bn

from dirprune import GRDA
from dirprune.lab import data
from dirprune.lab.data.loader import Batch, Batching, Normalization
from dirprune.lab.data.resident import ResidentLoader
from dirprune.lab.training.loop import (
    Divergence,
    EpochRecord,
    Extinct,
    evaluate,
    norm_ratio,
    recalibrate_batchnorm,
    train,
)
from dirprune.lab.training.processes import Process
from dirprune.lab.training.schedules import Schedule

SEED = 5


def noisy() -> nn.Sequential:
    """Return a network for digits with dropout and BatchNorm."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, 10),
    )


def digits(batch_size: int = 400) -> data.Loaders:
    """Load digits: 1438 training examples, which are three full batches of 400 and a short one."""
    return data.load("digits", batch_size=batch_size, seed=SEED)


def crafted(examples: int, batch_size: int) -> ResidentLoader:
    """Return a loader of random images, so that every batch has statistics of its own."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(256, (examples, 1, 8, 8), dtype=torch.uint8, generator=generator)
    targets = torch.randint(10, (examples,), generator=generator)
    return ResidentLoader(images, targets, Batching(batch_size, SEED), Normalization((0.5,), (0.3,)))


def make_grda(model: nn.Module) -> Optimizer:
    return GRDA(model.parameters(), lr=1.0, c=0.01, mu=0.6)


def make_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1.0, momentum=0.9)


OPTIMIZERS = [make_grda, make_sgd]


def by_hand(model: nn.Module, optimizer: Optimizer, train_set: data.Loader, rates: list[float]) -> list[list[float]]:
    """Train with one learning rate per epoch; return mean loss and accuracy in percent of each epoch."""
    results = []
    for epoch, rate in enumerate(rates, start=1):
        digest = hashlib.sha256(f"step/{SEED}/{epoch}/0".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") // 2)
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum, right = 0.0, 0
        for inputs, targets in train_set.epoch(epoch):
            optimizer.zero_grad()
            logits = model(inputs)
            loss = cross_entropy(logits, targets, reduction="sum") / len(targets)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(targets)
            right += int((logits.argmax(1) == targets).sum())
        results.append([loss_sum / train_set.examples, 100 * right / train_set.examples])
    return results


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    a, b = one.state_dict(), other.state_dict()
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)
    for here, there in zip(a["param_groups"], b["param_groups"], strict=True):
        assert here | there == there | here  # torch adds options of its own to what is loaded


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_equals_a_loop_written_by_hand_bit_for_bit(make: Callable[[nn.Module], Optimizer]) -> None:
    loaders, schedule = digits(), Schedule("constant-linear-constant")
    model, twin = noisy(), noisy()
    optimizer, twin_optimizer = make(model), make(twin)
    records = list(train(model, optimizer, loaders.train, loaders.test, epochs=3, lr=0.1, schedule=schedule, seed=SEED))
    rates = [0.1 * schedule.factor(epoch, 3) for epoch in (1, 2, 3)]
    expected = by_hand(twin, twin_optimizer, loaders.train, rates)

    assert [record.epoch for record in records] == [1, 2, 3]
    assert [record.lr for record in records] == rates
    for record, (loss, accuracy) in zip(records, expected, strict=True):
        assert record.train_loss == pytest.approx(loss, rel=1e-12)
        assert record.train_accuracy == pytest.approx(accuracy, rel=1e-12)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert_same_state(optimizer, twin_optimizer)

    last, flat = records[-1], torch.cat([p.detach().flatten() for p in twin.parameters()]).double()
    assert last.sparsity == (flat == 0).double().mean().item()
    assert last.norm_ratio == pytest.approx((flat.norm() / flat.abs().sum()).item(), rel=1e-6)
    weights = torch.cat([p.detach().flatten() for p in twin.parameters() if p.dim() > 1])
    assert last.weight_sparsity == pytest.approx((weights == 0).double().mean().item(), rel=1e-12)
    twin.eval()
    inputs, targets = next(iter(loaders.test))
    logits = twin(inputs)
    assert len(targets) == loaders.test.examples
    assert last.test_loss == pytest.approx(cross_entropy(logits, targets).item(), rel=1e-6)
    assert last.test_accuracy == pytest.approx(100 * (logits.argmax(1) == targets).double().mean().item())
    assert min(last.train_seconds, last.test_seconds) > 0


def test_cosine_sets_the_rate_of_every_step() -> None:
    class Recorder(SGD):
        """An optimizer that records its learning rate."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=1.0)
            self.rates: list[float] = []

        def step(self, closure: None = None) -> None:
            self.rates.append(self.param_groups[0]["lr"])
            super().step()

    loaders, model = digits(), noisy()
    optimizer, schedule = Recorder(model), Schedule("cosine", warmup=1)
    list(train(model, optimizer, loaders.train, loaders.test, epochs=2, lr=0.1, schedule=schedule, seed=0))
    warmup, decay = [0.1 * i / 4 for i in range(4)], [0.05 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert optimizer.rates == pytest.approx(warmup + decay)


def run(model: nn.Module, optimizer: Optimizer, *, epochs: int, done: int = 0) -> list[EpochRecord]:
    loaders = digits()
    schedule = Schedule("constant-linear-constant")
    records = train(
        model, optimizer, loaders.train, loaders.test, epochs=4, lr=0.1, schedule=schedule, seed=SEED, done=done
    )
    return [next(records) for _ in range(epochs)]


def numbers(records: list[EpochRecord]) -> list[dict[str, float]]:
    """Return the records without their times."""
    return [{key: value for key, value in asdict(r).items() if not key.endswith("_seconds")} for r in records]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_signs_are_compared_with_those_of_the_epoch_before(make: Callable[[nn.Module], Optimizer]) -> None:
    def flat() -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model, loaders = noisy(), digits()
    before, shares = flat(), []
    schedule = Schedule("constant-linear-constant")
    for record in train(
        model, make(model), loaders.train, loaders.test, epochs=3, lr=0.1, schedule=schedule, seed=SEED
    ):
        now = flat()
        same = [(a > 0) == (b > 0) and (a < 0) == (b < 0) for a, b in zip(before, now, strict=True)]
        assert record.signs_kept == pytest.approx(sum(map(bool, same)) / len(same))
        before, shares = now, [*shares, record.signs_kept]
    assert 0 < min(shares) < 1


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_stopping_and_going_on_changes_nothing(make: Callable[[nn.Module], Optimizer]) -> None:
    model = noisy()
    optimizer = make(model)
    whole = run(model, optimizer, epochs=4)

    first = noisy()
    first_optimizer = make(first)
    records = run(first, first_optimizer, epochs=2)
    second = noisy()
    second.load_state_dict(first.state_dict())
    second_optimizer = make(second)
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    torch.manual_seed(99)  # whatever else the second session did before
    records += run(second, second_optimizer, epochs=2, done=2)

    assert numbers(records) == numbers(whole)
    torch.testing.assert_close(second.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_same_state(second_optimizer, optimizer)


def test_the_callers_random_state_is_left_alone() -> None:
    model = noisy()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run(model, make_grda(model), epochs=2)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_the_seed_decides_the_dropout() -> None:
    weights = []
    for seed in (0, 1, 0):
        loaders, model = digits(), noisy()
        optimizer = make_sgd(model)
        list(train(model, optimizer, loaders.train, loaders.test, epochs=1, lr=0.1, schedule=Schedule(), seed=seed))
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_evaluate_weighs_every_example_alike() -> None:
    model, loader = noisy(), crafted(examples=11, batch_size=4)
    score = evaluate(model, loader)
    inputs, targets = next(iter(crafted(examples=11, batch_size=11)))
    model.eval()
    logits = model(inputs)
    assert score.loss == pytest.approx(cross_entropy(logits, targets).item(), rel=1e-6)
    assert score.accuracy == pytest.approx(100 * (logits.argmax(1) == targets).double().mean().item())


class Recording(nn.Module):
    """A layer that records the mode in which it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.training)
        return inputs


def test_evaluate_leaves_the_model_as_it_was() -> None:
    model = noisy().append(recording := Recording())
    model.train()
    model[1].eval()  # a user may freeze a layer's statistics
    modes, state = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    loader = crafted(examples=9, batch_size=4)
    random = torch.get_rng_state()
    evaluate(model, loader)
    assert recording.modes == [False] * 3
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())

    model.append(nn.Linear(3, 3))  # does not fit, so that the evaluation fails
    modes.append(True)
    with pytest.raises(RuntimeError):
        evaluate(model, loader)
    assert [m.training for m in model.modules()] == modes


def test_recalibration_is_that_of_torch_for_equal_batches() -> None:
    model, twin = noisy(), noisy()
    for network in (model, twin):  # without dropout, which torch's function leaves on and ours turns off
        network[3].p = 0.0
        network[1].running_mean += 3.0
    model.eval()
    model[0].train()
    modes = [m.training for m in model.modules()]
    loader = crafted(examples=12, batch_size=4)
    recalibrate_batchnorm(model, loader)
    update_bn(loader, twin)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-7)
    assert [m.training for m in model.modules()] == modes
    assert model[1].momentum == 0.1


def test_recalibration_does_not_depend_on_dropout_nor_on_the_random_state() -> None:
    statistics = []
    for seed in (0, 1):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 10))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        recalibrate_batchnorm(model, crafted(examples=12, batch_size=4))
        assert torch.equal(torch.get_rng_state(), before)
        statistics.append(model[2].running_var.clone())
    assert torch.equal(*statistics)


def test_recalibration_of_a_model_without_batchnorm_reads_no_data() -> None:
    class Unreadable(ResidentLoader):
        def __iter__(self) -> Iterator[Batch]:
            raise AssertionError("no need to read")

    plain = crafted(examples=4, batch_size=2)
    loader = Unreadable(plain.images, plain.targets, plain.batching, plain.normalization)
    model = nn.Linear(1, 1)
    recalibrate_batchnorm(model, loader)
    assert model.training


def test_norm_ratio_lies_between_its_bounds() -> None:
    model = nn.Linear(8, 2)  # 18 parameters
    for p in model.parameters():
        nn.init.constant_(p, -0.3)
    assert norm_ratio(model) == pytest.approx(18**-0.5)
    for p in model.parameters():
        nn.init.zeros_(p)
    with torch.no_grad():
        model.bias[1] = -4.0
        assert norm_ratio(model) == pytest.approx(1.0)
        model.weight[0, 0] = 3.0
    assert norm_ratio(model) == pytest.approx(5 / 7)


def test_norm_ratio_of_millions_of_weights_keeps_its_digits() -> None:
    assert norm_ratio([torch.full((4_000_000,), 0.01)]) == pytest.approx(1 / 2000, rel=1e-6)


class Breaking(nn.Module):
    """A linear classifier whose outputs are multiplied by ``value`` (NaN, inf) in the given training step."""

    def __init__(self, step: int, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.step, self.value, self.steps = step, value, 0

    def forward(self, inputs: Tensor) -> Tensor:
        tried_out = len(inputs) == 2 and not inputs.any()  # the trial pass of a run before its first step
        self.steps += self.training and not tried_out
        logits: Tensor = self.linear(inputs.flatten(1))
        return logits * self.value if self.training and self.steps == self.step else logits


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_names_the_step_and_stops(value: float) -> None:
    loaders, model = digits(), Breaking(step=6, value=value)  # the second of four steps in epoch 2
    records = train(model, make_sgd(model), loaders.train, loaders.test, epochs=3, lr=0.01, schedule=Schedule(), seed=0)
    assert next(records).epoch == 1
    with pytest.raises(Divergence, match=r"training loss became (nan|inf) in step 2 of epoch 2") as caught:
        next(records)
    assert (caught.value.epoch, caught.value.step) == (2, 2)
    assert list(records) == []


def test_divergence_is_seen_before_the_epoch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dirprune.lab.training.loop.CHECK_EVERY", 2)
    loaders, model = digits(batch_size=100), Breaking(step=3, value=math.nan)
    with pytest.raises(Divergence, match="in step 3 of epoch 1"):
        list(train(model, make_sgd(model), loaders.train, loaders.test, epochs=1, lr=0.1, schedule=Schedule(), seed=0))
    assert model.steps == 4  # of 15: it stops at the next check


def test_weights_broken_by_the_last_update_of_an_epoch_are_not_handed_out() -> None:
    """The training loss is finite until the next epoch; a checkpoint of such weights would pass for a good one."""
    loaders, model = digits(batch_size=1438), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # one step an epoch
    optimizer = make_sgd(model)
    with pytest.raises(Divergence, match="test loss became nan in step 1 of epoch 1"):
        list(train(model, optimizer, loaders.train, loaders.test, epochs=2, lr=math.inf, schedule=Schedule(), seed=0))


def pruned(model: nn.Module, c: float, mu: float, *, keep_going: bool) -> Iterator[EpochRecord]:
    loaders = digits()
    optimizer = GRDA(model.parameters(), lr=0.1, c=c, mu=mu, momentum=0.9)
    options = {"lr": 0.1, "schedule": Schedule(), "seed": SEED, "keep_going": keep_going}
    return train(model, optimizer, loaders.train, loaders.test, epochs=20, **options)


def test_training_ends_where_no_weight_can_come_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    records = pruned(model, 100.0, 0.7, keep_going=False)
    assert [next(records).weight_sparsity for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(Extinct, match="since epoch 1 every weight is zero") as caught:
        next(records)
    assert caught.value.epoch == 2
    records = pruned(model, 100.0, 0.7, keep_going=True)
    assert [next(records).weight_sparsity for _ in range(4)] == [1.0] * 4


def test_training_goes_on_where_weights_are_zero_but_can_come_back() -> None:
    """The gradient of a single layer does not pass through its weights: it outgrows a threshold that grows slowly."""
    torch.manual_seed(0)
    found = [
        r.weight_sparsity for r in pruned(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 4.0, 0.1, keep_going=False)
    ]
    assert found[:2] == [1.0, 1.0]
    assert found[-1] < 0.95


def test_buffers_are_shared_between_processes_before_they_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    from dirprune.lab.training import loop

    order: list[str] = []
    monkeypatch.setattr(Process, "share_buffers", lambda self, model: order.append("share"))
    evaluate_ = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: (order.append("evaluate"), evaluate_(*a, **k))[1])
    loaders = data.load("digits", batch_size=500, seed=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"epochs": 2, "lr": 0.1, "schedule": Schedule(), "seed": 0}
    list(loop.train(model, optimizer, loaders.train, loaders.test, **options))
    assert order == ["share", "evaluate"] * 2
