"""Directional pruning in the plane: two weights in a valley, where every path can be seen."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dirprune.direction import directional_prune, directional_score
from dirprune.lab.studies.theorem.problems import LeastSquares, count_steps, grda_steps, stochastic_gradient

ACROSS = torch.tensor([2.0, 1.0], dtype=torch.float64) / math.sqrt(5)
"""The direction in which the loss is curved; across it, along (1, −2), the loss is flat."""


@dataclass(frozen=True)
class Valley:
    """Training of two weights, step by step.

    Attributes:
        problem: least squares whose examples all lie along `ACROSS`.
        sgd, grda: the weights after every step from 0 on the same examples, [steps + 1, 2].
        pruned: Definition 1 at SGD's last weights, for λ from 0 to that of the last step, [points, 2].
    """

    problem: LeastSquares
    sgd: Tensor
    grda: Tensor
    pruned: Tensor


def valley(
    *, gamma: float = 0.05, c: float = 0.5, mu: float = 0.6, t: float = 400.0, noise: float = 0.1, seed: int = 0
) -> Valley:
    """Train two weights with SGD and gRDA, and prune SGD's by direction.

    >>> found = valley()
    >>> (found.sgd[-1] == 0).tolist(), (found.grda[-1] == 0).tolist()
    ([False, False], [False, True])
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 1, generator=generator, dtype=torch.float64) * ACROSS  # [N, 2]
    bottom = torch.tensor([0.7, 1.1], dtype=torch.float64)
    y = x @ bottom + noise * torch.randn(20, generator=generator, dtype=torch.float64)
    problem = LeastSquares(x[None], y[None], (bottom - 0.45 * ACROSS)[None])

    steps, switch = count_steps(t, gamma), torch.tensor([0.0, c], dtype=torch.float64).reshape(2, 1, 1)
    both = problem.start.expand(2, -1, -1)
    path = grda_steps(both, stochastic_gradient(problem, generator), gamma=gamma, c=switch, mu=mu)
    weights = torch.stack([both, *(w for _, w in itertools.islice(path, steps))])  # [steps + 1, 2 optimizers, 1, 2]
    sgd, grda = weights[:, :, 0].unbind(1)

    score = directional_score(sgd[-1], ACROSS.unsqueeze(1))
    lams = torch.linspace(0, c * math.sqrt(gamma) * t**mu, 200, dtype=torch.float64).tolist()
    return Valley(problem, sgd, grda, torch.stack([directional_prune(sgd[-1], score, lam) for lam in lams]))
