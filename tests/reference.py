"""Slow, obviously correct versions of what the library computes fast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def thresholds(rates: Iterable[float], c: float, mu: float, momentum: float = 0.0) -> list[float]:
    """Return the thresholds τ₁, τ₂, … for the learning rates γ₁, γ₂, …"""
    tau, taus = 0.0, []
    for n, rate in enumerate(rates, start=1):
        effective = rate / (1 - momentum)
        tau += c * effective ** (mu + 0.5) * (n**mu - (n - 1) ** mu)
        taus.append(tau)
    return taus


def grda(
    start: Sequence[float],
    gradients: Sequence[Sequence[float]],
    rates: Sequence[float],
    *,
    c: float,
    mu: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> list[float]:
    """Return the weights after one gRDA step per row of ``gradients``, coordinate by coordinate, in Python floats."""
    taus = thresholds(rates, c, mu, momentum)
    weights = []
    for j, w in enumerate(start):
        v, buffer = w, 0.0
        for row, rate, tau in zip(gradients, rates, taus, strict=True):
            g = -row[j] if maximize else row[j]
            g += weight_decay * w
            if momentum:
                buffer = momentum * buffer + g
                g = g + momentum * buffer if nesterov else buffer
            v -= rate * g
            w = math.copysign(max(abs(v) - tau, 0.0), v)
        weights.append(w)
    return weights
