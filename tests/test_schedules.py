"""The published learning rates, compared with independently written formulas."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, StepLR

from dirprune.lab.training.schedules import Schedule


def test_constant_stays_one() -> None:
    assert {Schedule().factor(epoch, 200) for epoch in range(1, 201)} == {1.0}


@pytest.mark.parametrize("epochs", [200, 600])
def test_constant_linear_constant_in_exact_arithmetic(epochs: int) -> None:
    schedule = Schedule("constant-linear-constant")
    for epoch in range(1, epochs + 1):
        progress = Fraction(epoch, epochs)
        on_the_line = 1 - Fraction(99, 100) * (progress - Fraction(1, 2)) / Fraction(4, 10)
        expected = min(Fraction(1), max(Fraction(1, 100), on_the_line))
        assert schedule.factor(epoch, epochs) == pytest.approx(float(expected), rel=1e-12)


def test_constant_linear_constant_bends_where_published() -> None:
    factors = [Schedule("constant-linear-constant").factor(epoch, 600) for epoch in range(1, 601)]
    assert factors[:300] == [1.0] * 300
    assert factors[300] < 1
    assert factors[538] > 0.0101
    assert factors[539:] == pytest.approx([0.01] * 61, rel=1e-12)


def stepped(scheduler: torch.optim.lr_scheduler.LRScheduler, epochs: int) -> list[float]:
    """Return the learning rates of a torch scheduler, epoch by epoch; the base rate is 1."""
    rates = []
    for _ in range(epochs):
        rates.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def test_drops_are_those_of_torch() -> None:
    once, every = Schedule("drop", after=(140,)), Schedule("drop", every=30)
    rates = [once.factor(epoch, 153) for epoch in range(1, 154)]
    assert rates == pytest.approx(stepped(MultiStepLR(optimizer(), [140]), 153), rel=1e-12)
    assert (rates[139], rates[140]) == pytest.approx((1.0, 0.1), rel=1e-12)
    rates = [every.factor(epoch, 120) for epoch in range(1, 121)]
    assert rates == pytest.approx(stepped(StepLR(optimizer(), 30), 120), rel=1e-12)


def test_cosine_without_warmup_is_that_of_torch() -> None:
    rates = [Schedule("cosine").factor(epoch, 20) for epoch in range(1, 21)]
    assert rates == pytest.approx(stepped(CosineAnnealingLR(optimizer(), 20), 20), abs=1e-12)


def test_cosine_warms_up_step_by_step_and_ends_at_zero() -> None:
    schedule, epochs, steps = Schedule("cosine", warmup=2), 10, 8
    rates = [schedule.factor(1 + i // steps, epochs, i % steps / steps) for i in range(epochs * steps)]
    assert rates[: 2 * steps] == pytest.approx([i / (2 * steps) for i in range(2 * steps)])
    assert rates[2 * steps] == max(rates) == 1.0
    assert all(a > b for a, b in zip(rates[2 * steps :], rates[2 * steps + 1 :], strict=False))
    assert rates[6 * steps] == pytest.approx(0.5)  # half way from the peak to the end
    assert schedule.factor(epochs, epochs, 1.0) == pytest.approx(0.0, abs=1e-15)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"schedule='linear' cannot be used; .*constant, drop, constant-lin"):
        Schedule("linear")
