"""The law that gRDA's accumulator follows as γ → 0, and the moments of many simulated runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dirprune.lab.records.columns import Column
from dirprune.lab.studies.theorem.problems import LeastSquares, count_steps, grda_steps, stochastic_gradient

_State = tuple[Tensor, Tensor, Tensor]  # the flow w, and the mean and covariance of V around it


@dataclass(frozen=True)
class Moments:
    """The mean [d] and covariance [d, d] of V = (v − w(t))/√γ at time t."""

    t: float
    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class LimitPath:
    """The accumulator over time: moments of the limit law, and of ``runs`` simulated runs at γ, at the same times."""

    limit: Sequence[Moments]
    simulated: Sequence[Moments]
    gamma: float
    runs: int


def limit_moments(
    problem: LeastSquares, times: Sequence[float], *, c: float = 0.5, mu: float = 0.6, steps: int = 2000
) -> list[Moments]:
    """Return the moments of the limit law of gRDA's accumulator around the gradient flow w(t).

        dw = −∇F(w) dt
        dV = −H[V − sign(w) c t^μ] dt + Σ(w)^½ dB
        m' = −H(m − sign(w) c t^μ),    C' = −HC − CH + Σ(w),    m(0) = 0, C(0) = 0

    with Σ the covariance of one example's gradient. Solved by Runge-Kutta, with ``steps`` steps up to the last of the
    ``times``, which must increase. The problem must be a single one (b = 1).

    Reference: the stochastic differential equation in the proof of the paper's theorem, after Chao and Cheng (2019).
    """
    x, y = _single(problem)
    h = x.T @ x / len(x)

    def slope(t: float, state: _State) -> _State:
        w, mean, covariance = state
        gradients = (x @ w - y).unsqueeze(-1) * x
        force = gradients.mean(0)
        noise = gradients.T @ gradients / len(x) - torch.outer(force, force)
        shrink = h @ covariance
        return -force, -h @ (mean - w.sign() * c * t**mu), noise - shrink - shrink.T

    w = problem.start[0]
    state = (w, torch.zeros_like(w), torch.zeros_like(h))
    found, now = [], 0.0
    for t in times:
        count = max(1, round(steps * (t - now) / times[-1]))
        for i in range(count):
            state = _runge_kutta(slope, now + i * (t - now) / count, (t - now) / count, state)
        now = t
        found.append(Moments(t, state[1], state[2]))
    return found


def _runge_kutta(slope: Callable[[float, _State], _State], t: float, dt: float, state: _State) -> _State:
    def ahead(step: float, k: _State) -> _State:
        return (state[0] + step * k[0], state[1] + step * k[1], state[2] + step * k[2])

    k1 = slope(t, state)
    k2 = slope(t + dt / 2, ahead(dt / 2, k1))
    k3 = slope(t + dt / 2, ahead(dt / 2, k2))
    k4 = slope(t + dt, ahead(dt, k3))
    a, b, e = ((p + 2 * q + 2 * r + s) / 6 for p, q, r, s in zip(k1, k2, k3, k4, strict=True))
    return ahead(dt, (a, b, e))


def simulated_moments(
    problem: LeastSquares,
    times: Sequence[float],
    *,
    gamma: float,
    c: float = 0.5,
    mu: float = 0.6,
    runs: int = 2000,
    seed: int = 0,
) -> list[Moments]:
    """Return the same moments as `limit_moments`, measured on many runs of gRDA at a learning rate γ."""
    x, y = _single(problem)
    crowd = LeastSquares(x.expand(runs, -1, -1), y.expand(runs, -1), problem.start.expand(runs, -1))
    gradient = stochastic_gradient(crowd, torch.Generator().manual_seed(seed))
    path = grda_steps(crowd.start, gradient, gamma=gamma, c=torch.tensor(c, dtype=x.dtype), mu=mu)
    found, done = [], 0
    for t in times:
        v, _ = next(itertools.islice(path, count_steps(t, gamma) - done - 1, None))
        done = count_steps(t, gamma)
        # At the time of the runs, which t may miss by half a step: γ/2 of the gradient, and √γ/2 of it in V.
        scaled = (v - gradient_flow(problem, done * gamma)) / math.sqrt(gamma)
        found.append(Moments(t, scaled.mean(0), torch.cov(scaled.T)))
    return found


def gradient_flow(problem: LeastSquares, t: float | Tensor) -> Tensor:
    """Return the exact solution w(t), [..., d], of dw = −∇F(w) dt for a single problem, at times t [...]."""
    x, y = _single(problem)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    gradient = x.T @ (x @ problem.start[0] - y) / len(x)
    t = torch.as_tensor(t, dtype=x.dtype).unsqueeze(-1)
    # (1 − e^(−λt))/λ, which is t where λ = 0
    time = torch.where(values > 1e-12, -torch.expm1(-values * t) / values.clamp(min=1e-12), t)
    return torch.sub(problem.start[0], (time * (vectors.T @ gradient)) @ vectors.T)


def _single(problem: LeastSquares) -> tuple[Tensor, Tensor]:
    if len(problem.start) != 1:
        raise ValueError(f"problem is a batch of {len(problem.start)}; the limit law is that of one: least_squares(1)")
    return problem.features[0], problem.targets[0]


@dataclass(frozen=True)
class LimitRow:
    """Simulated gRDA compared with its limit law at one learning rate and time.

    Attributes:
        mean_error: ‖simulated mean − limit mean‖ / ‖limit mean‖.
        spread_error: the same for the covariances, in Frobenius norm.
        mean_noise, spread_noise: the errors expected from so few runs if the limit were exact.
    """

    gamma: Annotated[float, Column("γ", ".4g")]
    t: Annotated[float, Column("t", ".4g")]
    runs: Annotated[int, Column("runs", ".4g")]
    mean_error: Annotated[float, Column("error of mean", ".4g")]
    spread_error: Annotated[float, Column("error of spread", ".4g")]
    mean_noise: Annotated[float, Column("noise of mean", ".4g")]
    spread_noise: Annotated[float, Column("noise of spread", ".4g")]


def limit_rows(
    problem: LeastSquares,
    gammas: Sequence[float] = (0.03, 0.01, 0.003, 0.001),
    *,
    c: float = 0.5,
    mu: float = 0.6,
    t: float = 4.0,
    runs: int = 2000,
    seed: int = 0,
) -> Iterator[LimitRow]:
    """Yield, for each γ, how far the moments of simulated runs are from those of the limit law.

    >>> from dirprune.lab.studies.theorem.problems import least_squares
    >>> problem = least_squares(1, dimension=6, examples=20, rank=4, noise=1.0)
    >>> row, = limit_rows(problem, [0.01], t=1.0, runs=200)
    >>> row.mean_error < 0.5
    True
    """
    (limit,) = limit_moments(problem, [t], c=c, mu=mu)
    length, spread, trace = (float(x) for x in (limit.mean.norm(), limit.covariance.norm(), limit.covariance.trace()))
    for gamma in gammas:
        (seen,) = simulated_moments(problem, [t], gamma=gamma, c=c, mu=mu, runs=runs, seed=seed)
        yield LimitRow(
            gamma,
            t,
            runs,
            float((seen.mean - limit.mean).norm()) / length,
            float((seen.covariance - limit.covariance).norm()) / spread,
            math.sqrt(trace / runs) / length,
            math.sqrt((1 + (trace / spread) ** 2) / runs),  # for Gaussian samples
        )
