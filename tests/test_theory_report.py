"""The report on the theorem: its rows, its files, its figures."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.studies.theorem import work as theory_report
from dirprune.lab.studies.theorem.figures import (
    figures,
    limit_figure,
    theorem_figure,
    trajectory_figure,
    valley_figure,
)
from dirprune.lab.studies.theorem.limit_law import LimitPath, LimitRow, Moments, gradient_flow, limit_moments
from dirprune.lab.studies.theorem.problems import TheoremRow, least_squares, tiny_network
from dirprune.lab.studies.theorem.trajectory import compared, drift, trajectories
from dirprune.lab.studies.theorem.valley import ACROSS, valley
from dirprune.lab.studies.theorem.work import Finding, TheoryValue, study, values

ROW = TheoremRow(0.1, 0.05, 0.6, 60.0, 0.18, 4, 0.02, 0.15, 0.03, 0.96, 0.83, 0.99, 0.1, 20.0, 1, 0.03, 0.03, 0.99)
LIMIT = LimitRow(0.03, 4.0, 100, 0.2, 0.3, 0.1, 0.15)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use settings with which the study takes a second, not a minute."""
    monkeypatch.setattr(theory_report, "GAMMAS", (0.1, 0.03))
    monkeypatch.setattr(theory_report, "LIMIT_GAMMAS", (0.03, 0.02))
    monkeypatch.setattr(theory_report, "TRAJECTORY_GAMMAS", (0.02,))
    monkeypatch.setattr(theory_report, "PATH_GAMMA", 0.02)
    monkeypatch.setattr(theory_report, "tiny_network", partial(tiny_network, settle=100))


@pytest.mark.usefixtures("coarse")
def test_the_study_yields_all_parts_and_its_table_and_figures_show_them(tmp_path: Path) -> None:
    events = list(study(problems=2, runs=50))
    findings = [event for event in events if isinstance(event, Finding)]
    assert [(f.part, f.row.gamma) for f in findings] == [
        ("least squares", 0.1),
        ("least squares", 0.03),
        ("limit law", 0.03),
        ("limit law", 0.02),
        ("trajectory", 0.02),
        ("network", 0.1),
        ("network", 0.03),
    ]
    assert set(figures(events)) == {"valley", "theorem", "limit", "trajectory"}
    write_rows(tmp_path / "theory.csv", TheoryValue, values(findings, seed=0))
    lines = read_rows(tmp_path / "theory.csv", TheoryValue)
    for found in findings:
        written = {v.quantity: v.value for v in lines if (v.part, v.gamma) == (found.part, found.row.gamma)}
        assert written
        assert all(value == getattr(found.row, quantity) for quantity, value in written.items())
    assert {line.seed for line in lines} == {0}
    assert all(line.command.startswith("dirprune") and line.hardware for line in lines)


@pytest.mark.usefixtures("coarse")
def test_the_seed_decides_the_numbers() -> None:
    first, again, other = (next(study(problems=1, runs=20, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_theorem_figure_draws_the_rows() -> None:
    figure = theorem_figure({"least squares": [ROW], "network": [ROW]})
    distance, direction, zeros = figure.axes
    assert {len(axes.get_lines()) for axes in (direction, zeros)} == {2, 4}
    assert [line.get_ydata()[0] for line in direction.get_lines()] == [0.96, 0.83, 0.96, 0.83]
    assert zeros.get_lines()[0].get_ydata()[0] == pytest.approx(1.0)
    assert distance.get_xscale() == distance.get_yscale() == "log"


def test_limit_figure_draws_the_moments() -> None:
    moments = [Moments(t, torch.arange(6.0) * t, torch.eye(6) * t * t) for t in (1.0, 2.0)]
    figure = limit_figure([LIMIT], LimitPath(moments, moments, 0.01, 100))
    means, spreads, errors = figure.axes
    assert list(means.get_lines()[0].get_ydata()) == [0, 5, 10]  # the coordinate that moved farthest
    assert list(spreads.get_lines()[0].get_ydata()) == [0, 1, 2]
    assert errors.get_lines()[0].get_ydata()[0] == 0.2
    assert math.isclose(errors.get_lines()[3].get_ydata()[0], 0.15)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_the_valley_grda_ends_sparse_at_the_loss_of_sgd(seed: int) -> None:
    found = valley(seed=seed)
    sgd, grda = found.sgd[-1], found.grda[-1]
    assert torch.equal(found.sgd[0], found.grda[0])
    assert grda[0] > sgd[0] > 0  # it grows to make up for the other
    assert grda[1] == 0 < sgd[1]
    # The only minimiser with w₂ = 0 has w₁ = (x·y)/(x·x); SGD's noise is what keeps both away from the minimum.
    x, y = found.problem.features[0], found.problem.targets[0]
    assert grda[0] == pytest.approx(float(x[:, 0] @ y / (x[:, 0] @ x[:, 0])), abs=0.05)
    along = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert float(along @ ACROSS) == pytest.approx(0)
    # Definition 1 leaves SGD's weights along the valley until w₂ is zero, and its λ is large enough to overshoot.
    moves = found.pruned - sgd
    inside = found.pruned[:, 1] > 0
    torch.testing.assert_close(moves[inside] @ ACROSS, torch.zeros_like(moves[inside, 0]), rtol=0, atol=1e-12)
    assert 0 < inside.sum() < len(inside)
    # Until then gRDA goes the same way.
    near = found.grda[len(found.grda) // 2] - found.sgd[len(found.grda) // 2]
    assert torch.nn.functional.cosine_similarity(near, along, dim=0) > 0.97


def test_valley_figure_draws_the_paths() -> None:
    found = valley(t=20.0)
    axes = valley_figure(found).axes[0]
    lines = [torch.from_numpy(line.get_xydata()) for line in axes.get_lines()[:3]]
    for line, path in zip(lines, (found.grda, found.sgd, found.pruned), strict=True):
        assert torch.equal(line, path)


def test_the_drift_is_what_the_mean_of_the_limit_law_lacks() -> None:
    """E[V] = c t^μ sgn(w) − δ, and `limit_moments` integrates E[V] step by step, without knowing of any jump."""
    problem = least_squares(1, dimension=10, examples=6, seed=3)
    times = [0.5, 4.0, 5.2, 20.0]  # signs change at .05, .5, .96, 1.08 and 4.98
    moments = limit_moments(problem, times, c=0.3, mu=0.6, steps=5000)
    for moment, found in zip(moments, drift(problem, torch.tensor(times), c=0.3, mu=0.6), strict=True):
        expected = 0.3 * moment.t**0.6 * gradient_flow(problem, moment.t).sign() - moment.mean
        assert float((found - expected).norm() / expected.norm()) < 2e-3


def test_grda_leaves_sgd_by_the_drift_and_jumps_with_it() -> None:
    coarse, fine = trajectories((0.01, 0.001), t=20.0)
    before, after = compared(coarse), compared(fine)
    assert after.drift_error < min(0.005, before.drift_error / 2)
    assert after.flow_error < min(0.08, before.flow_error / 2)
    assert after.flat_error == pytest.approx(before.flat_error)
    # Weight 8 changes its sign at t = 5: δ jumps by 2 c t^μ there, and so does gRDA, a little later.
    jump = 2 * 0.3 * 5**0.6
    for path in (fine.drift[:, 8], (fine.sgd - fine.grda)[:, 8] / math.sqrt(0.001)):
        moved = path[fine.times > 4]
        assert 0.6 * jump < float(moved[0] - moved.min()) < 1.2 * jump
    (later,) = trajectories([0.01], t=80.0)
    assert compared(later).flat_error < before.flat_error / 3  # δ(t) → c t^μ Π₀ sgn(w)


def test_trajectory_figure_draws_limit_and_runs() -> None:
    (pair,) = trajectories([0.05], t=8.0)
    weights, drifts, errors = trajectory_figure([pair]).axes
    assert torch.equal(torch.from_numpy(weights.get_lines()[0].get_ydata()), pair.flow[:, 8])
    assert drifts.get_lines()[1].get_ydata()[0] == pair.flat[8]
    assert errors.get_lines()[0].get_ydata()[0] == compared(pair).flow_error
