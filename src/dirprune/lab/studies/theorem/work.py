"""Measure the theorem on problems small enough to solve exactly: rows for the table, and what the figures need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch

from dirprune.lab.records.provenance import environment
from dirprune.lab.studies.theorem.limit_law import LimitPath, LimitRow, limit_moments, limit_rows, simulated_moments
from dirprune.lab.studies.theorem.problems import LeastSquares, TheoremRow, least_squares, theorem_rows, tiny_network
from dirprune.lab.studies.theorem.trajectory import Trajectory, TrajectoryRow, compared, trajectories
from dirprune.lab.studies.theorem.valley import Valley, valley

LEAST_SQUARES, NETWORK, LIMIT, TRAJECTORY = "least squares", "network", "limit law", "trajectory"
GAMMAS = (0.1, 0.03, 0.01, 0.003, 0.001)
LIMIT_GAMMAS = (0.03, 0.01, 0.003, 0.001)
TRAJECTORY_GAMMAS = (0.01, 0.001, 0.0001)
PATH_GAMMA = 0.001
SPARE = ("last sign change", "their lag", "their cosine with flat", "c", "μ")
"""Columns that are dropped on a narrow terminal, in this order."""
PATH_TIMES = (0.06, 0.12, 0.24, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


@dataclass(frozen=True)
class Finding:
    """The result of one part of the study at one learning rate."""

    part: str
    row: TheoremRow | LimitRow | TrajectoryRow


Event: TypeAlias = Finding | LimitPath | Trajectory | Valley
"""What `study` yields."""


@dataclass(frozen=True)
class TheoryValue:
    """One line of theory.csv: a quantity of a row, with seed, command, commit and hardware."""

    part: str
    gamma: float
    t: float
    quantity: str
    value: float
    seed: int
    command: str
    commit: str
    hardware: str


FINDINGS = 2 * len(GAMMAS) + len(LIMIT_GAMMAS) + len(TRAJECTORY_GAMMAS)
"""The number of findings that `study` yields."""


def values(findings: Sequence[Finding], *, seed: int) -> list[TheoryValue]:
    """Return the lines of theory.csv."""
    here = environment(torch.device("cpu"))
    made = (seed, here.command, here.commit, here.device)
    return [
        TheoryValue(found.part, found.row.gamma, found.row.t, quantity, float(value), *made)
        for found in findings
        for quantity, value in asdict(found.row).items()
        if quantity not in ("gamma", "t") and value is not None
    ]


def study(*, problems: int = 20, runs: int = 4000, seed: int = 0) -> Iterator[Event]:
    """Yield the parts of the study, row by row: least squares, the limit law, trajectories, a small network.

    Between the rows come what only the figures need: the limit law's path, pairs of runs, and the valley at the end.

    Args:
        problems: number of random problems of each kind; a row is a mean over them.
        runs: number of simulated gRDA runs with which the limit law is compared.
    """
    for row in theorem_rows(least_squares(problems, seed=seed), GAMMAS, seed=seed):
        yield Finding(LEAST_SQUARES, row)
    noisy = noisy_problem(seed)
    for limit in limit_rows(noisy, LIMIT_GAMMAS, c=0.5, mu=0.6, runs=runs, seed=seed):
        yield Finding(LIMIT, limit)
    simulated = simulated_moments(noisy, PATH_TIMES, gamma=PATH_GAMMA, c=0.5, mu=0.6, runs=runs, seed=seed)
    yield LimitPath(limit_moments(noisy, PATH_TIMES, c=0.5, mu=0.6), simulated, PATH_GAMMA, runs)
    for pair in trajectories(TRAJECTORY_GAMMAS, seed=seed):
        yield Finding(TRAJECTORY, compared(pair))
        yield pair
    for row in theorem_rows(tiny_network(problems, seed=seed), GAMMAS, c=0.02, t=40.0, seed=seed):
        yield Finding(NETWORK, row)
    yield valley(seed=seed)


def noisy_problem(seed: int) -> LeastSquares:
    """Draw a problem that cannot be interpolated, so that SGD's noise does not vanish; 4 of 10 directions are flat."""
    return least_squares(1, dimension=10, examples=40, rank=6, noise=1.0, seed=seed)
