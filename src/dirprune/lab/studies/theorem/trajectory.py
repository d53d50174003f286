"""gRDA's path around the gradient flow as γ → 0: the drift δ(t) by which it leaves SGD's, and simulated runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dirprune.lab.records.columns import Column
from dirprune.lab.studies.theorem.limit_law import gradient_flow
from dirprune.lab.studies.theorem.problems import (
    LeastSquares,
    count_steps,
    grda_steps,
    least_squares,
    stochastic_gradient,
)


@dataclass(frozen=True)
class Trajectory:
    """A run of SGD and one of gRDA on the same examples, and their limit as γ → 0, at the same times.

    Attributes:
        times: [n].
        sgd, grda: the weights, [n, d].
        flow: the gradient flow w(t), [n, d].
        drift: δ(t), [n, d].
        flat: Π₀ sgn(w) at the last time, [d]: the limit of δ(t)/(c t^μ).
    """

    gamma: float
    c: float
    mu: float
    times: Tensor
    sgd: Tensor
    grda: Tensor
    flow: Tensor
    drift: Tensor
    flat: Tensor


@dataclass(frozen=True)
class TrajectoryRow:
    """How far a pair of runs is from the limit.

    Attributes:
        flow_error: the greatest ‖w_gRDA − w(s)‖ over the times s ≤ t, relative to ‖w(0) − w(t)‖.
        drift_error: ‖(w_SGD − w_gRDA)/√γ − δ(t)‖ / ‖δ(t)‖.
        flat_error: ‖δ(t) − c t^μ Π₀ sgn w(t)‖ / ‖δ(t)‖, which falls with t and not with γ.
    """

    gamma: Annotated[float, Column("γ", ".4g")]
    c: Annotated[float, Column("c", ".4g")]
    mu: Annotated[float, Column("μ", ".4g")]
    t: Annotated[float, Column("t", ".4g")]
    flow_error: Annotated[float, Column("distance to flow", ".4g")]
    drift_error: Annotated[float, Column("error of δ", ".4g")]
    flat_error: Annotated[float, Column("δ outside flat", ".4g")]


def trajectories(
    gammas: Sequence[float], *, c: float = 0.3, mu: float = 0.6, t: float = 20.0, points: int = 200, seed: int = 0
) -> Iterator[Trajectory]:
    """Yield a pair of runs for each γ, on a problem in which a sign of w(t) changes late, at t = 5.

    >>> found, = trajectories([0.01], t=6.0)
    >>> found.flow[:, 8].sign().unique().tolist()
    [-1.0, 1.0]
    """
    problem = least_squares(1, dimension=10, examples=6, seed=3)
    curvatures, vectors = torch.linalg.eigh(problem.hessian(0, problem.start[0]).matrix)
    kernel = vectors[:, curvatures < 1e-9]
    switch = torch.tensor([0.0, c], dtype=torch.float64).reshape(2, 1, 1)
    for gamma in gammas:
        every = max(1, count_steps(t, gamma) // points)
        gradient = stochastic_gradient(problem, torch.Generator().manual_seed(seed))
        path = grda_steps(problem.start.expand(2, -1, -1), gradient, gamma=gamma, c=switch, mu=mu)
        kept = itertools.islice(path, every - 1, count_steps(t, gamma), every)
        weights = torch.stack([w for _, w in kept])[:, :, 0]  # [n, 2 optimizers, d]
        times = torch.arange(1, len(weights) + 1, dtype=torch.float64) * (every * gamma)
        flow = gradient_flow(problem, times)
        flat = kernel @ (kernel.T @ flow[-1].sign())
        delta = drift(problem, times, c=c, mu=mu)
        yield Trajectory(gamma, c, mu, times, weights[:, 0], weights[:, 1], flow, delta, flat)


def compared(found: Trajectory) -> TrajectoryRow:
    """Return how far a pair of runs is from the limit."""
    t, delta = float(found.times[-1]), found.drift[-1]
    moved = (found.sgd[-1] - found.grda[-1]) / math.sqrt(found.gamma)
    return TrajectoryRow(
        found.gamma,
        found.c,
        found.mu,
        t,
        float((found.grda - found.flow).norm(dim=1).max() / (found.flow[0] - found.flow[-1]).norm()),
        float((moved - delta).norm() / delta.norm()),
        float((delta - found.c * t**found.mu * found.flat).norm() / delta.norm()),
    )


def drift(problem: LeastSquares, times: Tensor, *, c: float, mu: float, points: int = 4000) -> Tensor:
    """Return δ at the given times, [times, d]: as γ → 0, gRDA is at w_SGD(t) − √γ δ(t) where that keeps the sign.

        δ(t) = cμ ∫₀ᵗ s^(μ−1) Φ(t,s) sgn w(s) ds + c Σ_k T_k^μ Φ(t,T_k) {sgn w(T_k⁺) − sgn w(T_k⁻)}

    with w(t) the gradient flow, T_k the times at which its signs change, and Φ(t,s) = e^(−H(t−s)).

    Reference: the theorem on distributional dynamics, appendix B of the paper.
    """
    curvatures, vectors = torch.linalg.eigh(problem.hessian(0, problem.start[0]).matrix)
    found = []
    for t in times.tolist():
        # With p = s^μ the integrand is smooth, and its midpoints lie between the edges where a sign may change.
        edges = torch.linspace(0, t**mu, points + 1, dtype=times.dtype) ** (1 / mu)
        middles = ((torch.arange(points) + 0.5) / points * t**mu) ** (1 / mu)
        signs = gradient_flow(problem, middles).sign() @ vectors  # [points, d], in the eigenbasis
        pushed = t**mu * (torch.exp(-(t - middles)[:, None] * curvatures) * signs).mean(0)
        inner = edges[1:-1, None]
        jumped = (inner**mu * torch.exp(-(t - inner) * curvatures) * signs.diff(dim=0)).sum(0)
        found.append(c * (pushed + jumped) @ vectors.T)
    return torch.stack(found)
