"""Problems small enough to solve exactly: gRDA compared with directional pruning of SGD's weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from dirprune.curvature import HessianOperator
from dirprune.curvature.operators import MatrixOperator, SymmetricOperator, dense
from dirprune.direction import directional_prune, directional_score
from dirprune.lab.records.columns import Column
from dirprune.weights import put, take, unflatten

# Eigenvalues below this, relative to the largest, count as zero: these problems have a wide gap around it.
FLAT = 1e-3


class Problem(Protocol):
    """A batch of b independent training problems, run side by side."""

    @property
    def start(self) -> Tensor: ...  # [b, d], initial weights
    @property
    def examples(self) -> int: ...
    def gradient(self, w: Tensor, picks: Tensor) -> Tensor:
        """Return the gradients at weights [..., b, d] of the loss of one example per problem, ``picks`` [b]."""

    def hessian(self, index: int, w: Tensor) -> SymmetricOperator:
        """Return the Hessian of the mean loss of one problem at the weights w [d]."""


@dataclass(frozen=True)
class LeastSquares:
    """Linear regression: f(w; i) = ½(x_i·w − y_i)², so H = XᵀX/N everywhere.

    Attributes:
        features: X, [b, N, d].
        targets: y, [b, N].
        start: initial weights, [b, d].
    """

    features: Tensor
    targets: Tensor
    start: Tensor

    @property
    def examples(self) -> int:
        return self.features.shape[1]

    def gradient(self, w: Tensor, picks: Tensor) -> Tensor:
        rows = torch.arange(len(picks))
        x, y = self.features[rows, picks], self.targets[rows, picks]
        return ((w * x).sum(-1) - y).unsqueeze(-1) * x

    def hessian(self, index: int, w: Tensor) -> MatrixOperator:
        x = self.features[index]
        return MatrixOperator(x.T @ x / len(x))


def least_squares(
    problems: int = 3,
    *,
    dimension: int = 100,
    examples: int = 30,
    rank: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> LeastSquares:
    """Draw least-squares problems: x Gaussian with E‖x‖² = 10, y = x·w* + noise, and w*, w₀ standard normal.

    Over-parameterised by default: 30 examples in 100 dimensions leave a flat subspace of dimension 70.

    Args:
        rank: the dimension of the random subspace that holds the features; None means the full dimension.

    >>> least_squares(2, dimension=10, examples=4).features.shape
    torch.Size([2, 4, 10])
    """
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rank = dimension if rank is None else rank
    features = normal(problems, examples, rank) * math.sqrt(10 / rank)
    if rank < dimension:
        features = features @ torch.linalg.qr(normal(problems, dimension, rank))[0].mT
    teacher = normal(problems, dimension, 1)
    targets = (features @ teacher).squeeze(-1) + noise * normal(problems, examples)
    return LeastSquares(features, targets, normal(problems, dimension))


@dataclass(frozen=True)
class TinyNetwork:
    """A network z = u·tanh(Wx + b) + β with the loss f(w; i) = ½(z(x_i) − y_i)², w = (W, b, u, β) flat.

    Attributes:
        inputs: [b, N, p].
        targets: [b, N].
        start: initial weights, [b, hidden·(p + 2) + 1].
    """

    inputs: Tensor
    targets: Tensor
    start: Tensor
    hidden: int

    @property
    def examples(self) -> int:
        return self.inputs.shape[1]

    def gradient(self, w: Tensor, picks: Tensor) -> Tensor:
        rows = torch.arange(len(picks))
        return network_gradient(w, self.inputs[rows, picks], self.targets[rows, picks])

    def hessian(self, index: int, w: Tensor) -> HessianOperator:
        x, y = self.inputs[index], self.targets[index]
        with torch.random.fork_rng(devices=[]):  # the layers draw initial values that are not used
            model = nn.Sequential(nn.Linear(x.shape[1], self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)).to(w)
        put(model, unflatten(w, take(model)))
        return HessianOperator(model, lambda z, target: (z - target).square().mean() / 2, [(x, y.unsqueeze(-1))])


def network_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of `TinyNetwork`'s loss at weights [..., d] for one example x [..., p], y [...].

    Written out because autograd costs ten times as much as the arithmetic, and this is called very often.
    """
    inputs = x.shape[-1]
    hidden = (w.shape[-1] - 1) // (inputs + 2)
    flat, b, u, beta = torch.split(w, [hidden * inputs, hidden, hidden, 1], dim=-1)
    a = torch.tanh((flat.reshape(*flat.shape[:-1], hidden, inputs) * x.unsqueeze(-2)).sum(-1) + b)
    error = (u * a).sum(-1, keepdim=True) + beta - y.unsqueeze(-1)
    back = error * u * (1 - a * a)
    return torch.cat([(back.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2), back, error * a, error], dim=-1)


def tiny_network(
    problems: int = 3,
    *,
    inputs: int = 8,
    hidden: int = 12,
    examples: int = 8,
    settle: int = 3000,
    seed: int = 0,
) -> TinyNetwork:
    """Draw over-parameterised networks: x, y standard normal, weights normal with variance 1/fan-in.

    Args:
        settle: steps of gradient descent, at rate 0.1, that lead to ``start``. The theorem needs a Hessian and signs
            that have settled. With 0 the start is the random network, and signs that change during training keep gRDA
            at a distance from Definition 1.
    """
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x, y = normal(problems, examples, inputs), normal(problems, examples)
    first, second = normal(problems, hidden * (inputs + 1)), normal(problems, hidden + 1)
    w = torch.cat([first / math.sqrt(inputs), second / math.sqrt(hidden)], dim=-1)
    for _ in range(settle):
        w = w - 0.1 * network_gradient(w.unsqueeze(1), x, y).mean(1)
    return TinyNetwork(x, y, w, hidden)


def grda_steps(
    start: Tensor, gradient: Callable[[Tensor], Tensor], *, gamma: float, c: Tensor, mu: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gRDA's accumulator and weights after each step at a constant rate; c = 0 is SGD.

        v ← v − γ g(w),    w = sign(v)·max(|v| − τ_n, 0),    τ_n = c·γ^½·(nγ)^μ

    Args:
        start: v₀ = w₀, any shape.
        c: broadcast against the weights, so that runs with several c, including SGD, use the same random examples.

    >>> steps = grda_steps(torch.tensor([1.0]), lambda w: w, gamma=0.25, c=torch.tensor(1.0), mu=0.5)
    >>> next(steps)
    (tensor([0.7500]), tensor([0.5000]))

    Reference: Algorithm 1 of the paper, with the sign of its gradient step corrected.
    """
    v = w = start
    for n in itertools.count(1):
        v = v - gamma * gradient(w)
        tau = c * (math.sqrt(gamma) * (n * gamma) ** mu)
        w = v - v.clamp(-tau, tau)
        yield v, w


@dataclass(frozen=True)
class TheoremRow:
    """gRDA compared with Definition 1 at one learning rate; means over the problems.

    Attributes:
        lam: λ = c·√γ·t^μ.
        distance_std: the standard deviation of the distance between problems.
        distance: ‖w_gRDA − û‖ / ‖w_gRDA − w_SGD‖; 0 when gRDA is directional pruning.
        lag: the distance that remains at this t as γ → 0, if nothing is pruned; see `drift_lag`.
        cosine_flat: cosine of w_gRDA − w_SGD with −Π₀ sign(w_SGD).
        cosine_sign: its cosine with −sign(w_SGD), the direction of plain magnitude pruning.
        zeros_agree: the fraction of weights that are zero in both w_gRDA and û, or in neither.
        sparsity: the fraction of w_gRDA that is zero.
        settled: the time of the last sign change in w_SGD.
        unpruned: the number of problems in which no weight of w_gRDA is zero.
        distance_unpruned, lag_unpruned, cosine_unpruned: distance, lag and cosine_flat over these, or None.
    """

    gamma: Annotated[float, Column("γ", ".4g")]
    c: Annotated[float, Column("c", ".4g")]
    mu: Annotated[float, Column("μ", ".4g")]
    t: Annotated[float, Column("t", ".4g")]
    lam: Annotated[float, Column("λ", ".4g")]
    problems: Annotated[int, Column("problems", ".4g")]
    distance_std: Annotated[float, Column("std of distance", ".4g")]
    distance: Annotated[float, Column("distance to û", ".4g")]
    lag: Annotated[float, Column("lag", ".4g")]
    cosine_flat: Annotated[float, Column("cosine with flat", ".4g")]
    cosine_sign: Annotated[float, Column("cosine with sign", ".4g")]
    zeros_agree: Annotated[float, Column("same zeros", ".4g")]
    sparsity: Annotated[float, Column("sparsity", ".4g")]
    settled: Annotated[float, Column("last sign change", ".4g")]
    unpruned: Annotated[int, Column("problems unpruned", ".4g")]
    distance_unpruned: Annotated[float | None, Column("their distance", ".4g")]
    lag_unpruned: Annotated[float | None, Column("their lag", ".4g")]
    cosine_unpruned: Annotated[float | None, Column("their cosine with flat", ".4g")]


def theorem_rows(
    problem: Problem,
    gammas: Sequence[float] = (0.1, 0.03, 0.01, 0.003, 0.001),
    *,
    c: float = 0.05,
    mu: float = 0.6,
    t: float = 60.0,
    seed: int = 0,
) -> Iterator[TheoremRow]:
    """Yield, for each γ, how close gRDA at time t = nγ is to directional pruning of SGD's weights.

        w_gRDA(t) ≈ û = argmin_u ½‖w_SGD(t) − u‖² + λ Σ_j s_j|u_j|,    λ = c√γ t^μ,    as γ → 0

    SGD and gRDA start from the same weights and see the same examples; Π₀ is exact. The signs of w must have settled,
    and t must be large compared with the inverse curvatures.

    >>> row, = theorem_rows(least_squares(1, dimension=20, examples=5), [0.01], t=10.0)
    >>> row.cosine_flat > row.cosine_sign
    True

    Reference: the paper's theorem on the asymptotic directional pruning of gRDA, §3.
    """
    switch = torch.tensor([0.0, c], dtype=problem.start.dtype).reshape(2, 1, 1)
    for gamma in gammas:
        steps = count_steps(t, gamma)
        generator = torch.Generator().manual_seed(seed)
        both = problem.start.expand(2, -1, -1)
        path = grda_steps(both, stochastic_gradient(problem, generator), gamma=gamma, c=switch, mu=mu)
        signs, settled = problem.start.sign(), torch.zeros(len(problem.start), dtype=problem.start.dtype)
        for n, (_, weights) in enumerate(itertools.islice(path, steps), start=1):
            before, signs = signs, weights[0].sign()
            settled.masked_fill_((signs != before).any(1), n * gamma)
        sgd, grda = weights
        lam = c * math.sqrt(gamma) * (steps * gamma) ** mu
        figures = torch.stack(
            [_compare(w, g, problem.hessian(i, w), lam, t, mu) for i, (w, g) in enumerate(zip(sgd, grda, strict=True))]
        )
        deviation = float(figures[:, 0].std()) if len(figures) > 1 else 0.0
        unpruned = figures[(grda != 0).all(1)]
        among = unpruned.mean(0).tolist()[:3] if len(unpruned) else [None] * 3
        numbers = (*figures.mean(0).tolist(), float(settled.mean()), len(unpruned), *among)
        yield TheoremRow(gamma, c, mu, t, lam, len(figures), deviation, *numbers)


def stochastic_gradient(problem: Problem, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the gradient of a random example, a new one at each call."""
    shape = (problem.start.shape[0],)
    return lambda w: problem.gradient(w, torch.randint(problem.examples, shape, generator=generator))


def _compare(sgd: Tensor, grda: Tensor, op: SymmetricOperator, lam: float, t: float, mu: float) -> Tensor:
    """Return the figures of a `TheoremRow` from distance to sparsity."""
    values, vectors = torch.linalg.eigh(dense(op))
    curved = values.abs() > FLAT * values.abs().max()
    nonflat, sign = vectors[:, curved], sgd.sign()
    score = directional_score(sgd, nonflat)
    pruned = directional_prune(sgd, score, lam)
    difference = grda - sgd
    return torch.stack(
        [
            (grda - pruned).norm() / difference.norm(),
            (drift_lag(values[curved], t, mu) * (nonflat.T @ sign)).norm() / score.norm(),
            cosine_similarity(difference, -sign * score, dim=0),
            cosine_similarity(difference, -sign, dim=0),
            ((grda == 0) == (pruned == 0)).double().mean(),
            (grda == 0).double().mean(),
        ]
    )


def drift_lag(curvatures: Tensor, t: float, mu: float) -> Tensor:
    """Return how far the threshold still pushes gRDA along eigenvectors of these curvatures, relative to a flat one.

        ℓ(λ) = μ t^−μ ∫₀ᵗ s^(μ−1) e^(−λ(t−s)) ds = ∫₀¹ exp(−λt(1 − p^(1/μ))) dp,    about μ/(λt) for large λt

    The threshold keeps growing, and the gradient pulls back only as fast as the curvature allows. At a finite t, this
    much of the difference to SGD lies outside the flat subspace, however small γ is.

    >>> drift_lag(torch.tensor([0.0, 1.0]), t=60.0, mu=0.6)
    tensor([1.0000, 0.0101])
    """
    # Midpoint rule in u, with p = 1 − u⁴: if λt is large, the whole integral lies close to p = 1.
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    decay = -torch.expm1(torch.log1p(-(u**4)) / mu)  # 1 − p^(1/μ)
    rates = curvatures.double().clamp(min=0).unsqueeze(-1) * t
    return (torch.exp(-rates * decay) * 4 * u**3).mean(-1).to(curvatures.dtype)


def count_steps(t: float, gamma: float) -> int:
    """Return the number of steps that take time t."""
    if not (gamma > 0 and t >= gamma):
        raise ValueError(f"gamma is {gamma} and t {t}; both must be positive, and t at least gamma")
    return round(t / gamma)
