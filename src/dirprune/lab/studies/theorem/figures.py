"""Figures of the theorem: gRDA compared with directional pruning as γ falls, and with its limit law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

from dirprune.lab.plots import GREY, Axis, add_legend, colour, panels, styled
from dirprune.lab.studies.theorem.limit_law import LimitPath, LimitRow, Moments
from dirprune.lab.studies.theorem.problems import TheoremRow
from dirprune.lab.studies.theorem.trajectory import Trajectory, compared
from dirprune.lab.studies.theorem.valley import Valley
from dirprune.lab.studies.theorem.work import Event, Finding

GAMMA = "learning rate γ"
MARKERS = ("o", "s", "^")


def figures(events: Sequence[Event]) -> dict[str, Figure]:
    """Return the figures of a study by name, from all that it yielded."""
    findings = [event for event in events if isinstance(event, Finding)]
    parts: dict[str, list[TheoremRow]] = {}
    for finding in findings:
        if isinstance(finding.row, TheoremRow):
            parts.setdefault(finding.part, []).append(finding.row)
    drawn = {"theorem": theorem_figure(parts)}
    for event in events:
        if isinstance(event, Valley):
            drawn["valley"] = valley_figure(event)
        elif isinstance(event, LimitPath):
            drawn["limit"] = limit_figure([f.row for f in findings if isinstance(f.row, LimitRow)], event)
    if pairs := [event for event in events if isinstance(event, Trajectory)]:
        drawn["trajectory"] = trajectory_figure(pairs)
    return drawn


@styled
def theorem_figure(parts: Mapping[str, Sequence[TheoremRow]]) -> Figure:
    """Draw distance, direction and zero patterns against γ, one colour per kind of problem."""
    figure, (distance, direction, zeros) = panels(3, columns=3, size=(2.5, 2.6))
    for index, (part, rows) in enumerate(parts.items()):
        gammas = [row.gamma for row in rows]
        style: dict[str, Any] = {"color": colour(index), "marker": MARKERS[index], "markersize": 3.5}
        distance.errorbar(
            gammas,
            [row.distance for row in rows],
            yerr=[row.distance_std / np.sqrt(row.problems) for row in rows],
            capsize=2,
            label=part,
            **style,
        )
        distance.plot(
            gammas, [row.lag for row in rows], linestyle=":", color=colour(index), label=f"{part}, lag at finite t"
        )
        direction.plot(gammas, [row.cosine_flat for row in rows], **style)
        direction.plot(gammas, [row.cosine_sign for row in rows], linestyle="--", fillstyle="none", **style)
        zeros.plot(gammas, [100 * (1 - row.zeros_agree) for row in rows], **style)
    distance.set(ylabel="‖w$_{gRDA}$ − û‖ / ‖w$_{gRDA}$ − w$_{SGD}$‖", yscale="log")
    direction.set(ylabel="cosine with w$_{gRDA}$ − w$_{SGD}$", ylim=(0.7, 1.01))
    solid = Line2D([], [], color=GREY, label="−Π$_0$ sign(w)")
    dashed = Line2D([], [], color=GREY, linestyle="--", label="−sign(w)")
    direction.legend(handles=[solid, dashed], loc="lower left")
    zeros.set(ylabel="zero in only one of w$_{gRDA}$, û (%)", ylim=(0, None))
    for axes in (distance, direction, zeros):
        axes.set(xlabel=GAMMA, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
    distance.yaxis.set_major_locator(FixedLocator([0.02, 0.05, 0.1, 0.2]))
    distance.yaxis.set_major_formatter(ScalarFormatter())
    distance.yaxis.set_minor_formatter(NullFormatter())
    add_legend(figure)
    return figure


@styled
def limit_figure(rows: Sequence[LimitRow], path: LimitPath) -> Figure:
    """Draw mean and spread of the accumulator over time with the limit law, and the errors of both against γ."""
    figure, (means, spreads, errors) = panels(3, columns=3, size=(2.5, 2.6))
    far = path.limit[-1].mean.abs().argsort(descending=True)
    for index, coordinate in enumerate(far[[0, 2, 5]].tolist()):
        _draw_moments(means, spreads, path, coordinate, index)
    means.set(xlabel="time t = nγ", ylabel="mean of V$_j$ = (v$_j$ − w$_j$(t)) / √γ")
    spreads.set(xlabel="time t = nγ", ylabel="standard deviation of V$_j$", ylim=(0, None))
    gammas = [row.gamma for row in rows]
    for index, (name, noise, label) in enumerate(
        (("mean_error", "mean_noise", "mean"), ("spread_error", "spread_noise", "covariance"))
    ):
        style: dict[str, Any] = {"color": colour(index + 3)}
        errors.plot(
            gammas, [getattr(r, name) for r in rows], marker=MARKERS[index], markersize=3.5, label=label, **style
        )
        errors.plot(
            gammas, [getattr(r, noise) for r in rows], linestyle=":", label=f"noise of {path.runs} runs", **style
        )
    _scale_errors(errors)
    errors.legend(fontsize=7, labelspacing=0.2)
    handles, labels = means.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


def _scale_errors(axes: Axes) -> None:
    """Make both axes logarithmic, with plain numbers at their ticks."""
    axes.set(xlabel=GAMMA, xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    Axis("relative error of the limit", log=True).fit(
        axes, np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()])
    )


def _draw_moments(means: Axes, spreads: Axes, path: LimitPath, j: int, index: int) -> None:
    """Draw a coordinate's mean and standard deviation: the limit as a line, the runs as points."""

    def moments(source: Sequence[Moments]) -> tuple[list[float], list[float], list[float]]:
        found = [(m.t, float(m.mean[j]), float(m.covariance[j, j]) ** 0.5) for m in source]
        return [t for t, _, _ in found], [mean for _, mean, _ in found], [std for _, _, std in found]

    times, mean, std = moments(path.limit)
    means.plot([0, *times], [0, *mean], color=colour(index), label=f"limit law, coordinate {j}")
    spreads.plot([0, *times], [0, *std], color=colour(index))
    times, mean, std = moments(path.simulated)
    style: dict[str, Any] = {"color": colour(index), "marker": MARKERS[index], "markersize": 3, "linestyle": "none"}
    bars = [s / path.runs**0.5 for s in std]
    label = "" if index else f"points: {path.runs} runs at γ = {path.gamma:g}"
    means.errorbar(times, mean, yerr=bars, label=label, **style)
    spreads.plot(times, std, **style)


@styled
def trajectory_figure(pairs: Sequence[Trajectory], coordinates: Sequence[int] = (8, 0, 3)) -> Figure:
    """Draw weights over time around the gradient flow, their drift from SGD's, and the errors of the limit."""
    figure, (weights, drifts, errors) = panels(3, columns=3, size=(2.5, 2.6))
    limit = pairs[-1]
    for index, j in enumerate(coordinates):
        weights.plot(limit.times, limit.flow[:, j], color=colour(index))
        push = limit.c * limit.times**limit.mu
        drifts.plot(limit.times, limit.drift[:, j] / push, color=colour(index), label=f"limit, coordinate {j}")
        drifts.axhline(float(limit.flat[j]), color=colour(index), linestyle=":", linewidth=1.0)
        for marker, pair in zip(MARKERS, (pairs[0], limit), strict=False):
            some = slice(None, None, max(1, len(pair.times) // 40))
            times, sgd, grda = pair.times[some], pair.sgd[some, j], pair.grda[some, j]
            style: dict[str, Any] = {"color": colour(index), "marker": marker, "markersize": 2.5, "linestyle": "none"}
            weights.plot(times, grda, fillstyle="none", markeredgewidth=0.6, **style)
            moved = (sgd - grda) / (pair.gamma**0.5 * pair.c * times**pair.mu)
            drifts.plot(times, moved, fillstyle="none", markeredgewidth=0.6, **style)
    weights.set(xlabel="time t = nγ", ylabel="w$_j$: gradient flow and gRDA")
    drifts.set(xlabel="time t = nγ", ylabel="δ$_j$(t) / c t$^μ$")
    rows = [compared(pair) for pair in pairs]
    for index, (name, label) in enumerate((("flow_error", "distance to flow"), ("drift_error", "error of δ(t)"))):
        values = [getattr(row, name) for row in rows]
        style = {"color": colour(index + 3), "marker": MARKERS[index], "markersize": 3.5}
        errors.plot([row.gamma for row in rows], values, label=label, **style)
    _scale_errors(errors)
    errors.legend()
    handles, labels = drifts.get_legend_handles_labels()
    for marker, pair in zip(MARKERS, (pairs[0], limit), strict=False):
        handles.append(Line2D([], [], color=GREY, marker=marker, markersize=2.5, fillstyle="none", linestyle="none"))
        labels.append(f"γ = {pair.gamma:g}")
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure


@styled
def valley_figure(found: Valley) -> Figure:
    """Draw the paths of two weights over the loss: SGD's, gRDA's, and that of Definition 1 as λ grows."""
    figure, [axes] = panels(1, size=(4.4, 3.4))
    (x,), (y,) = found.problem.features.numpy(), found.problem.targets.numpy()
    first, second = np.meshgrid(np.linspace(0, 1.95, 200), np.linspace(0, 1.4, 200))
    errors = x[:, :1, None] * first + x[:, 1:, None] * second - y[:, None, None]  # [N, 200, 200]
    loss = np.mean(errors**2, axis=0) / 2
    levels = loss.min() + (loss.max() - loss.min()) * np.linspace(0, 1, 12) ** 2
    axes.contourf(first, second, loss, levels=levels, cmap="Greys", alpha=0.55)
    start, w, end = (weights.numpy() for weights in (found.sgd[0], found.sgd[-1], found.grda[-1]))
    axes.fill([0, w[0], w[0], 0], [0, 0, w[1], w[1]], color=colour(6), alpha=0.3, linewidth=0)
    axes.plot(*found.grda.T.numpy(), color=colour(1), linewidth=0.6)
    axes.plot(*found.sgd.T.numpy(), color=colour(0), linewidth=1.0)
    axes.plot(*found.pruned.T.numpy(), color="black", linestyle=(0, (4, 2)), linewidth=1.0)
    for point, dot in ((start, "black"), (w, colour(0)), (end, colour(1))):
        axes.plot(*point, "o", color=dot, markersize=4.5, clip_on=False, zorder=3)
    for text, place, ink in (
        ("start", (0.17, 0.95), "black"),
        ("SGD", (0.84, 1.13), colour(0)),
        ("gRDA ends in the valley\nwith w$_2$ = 0", (1.34, 0.07), colour(1)),
        ("directional pruning of\nSGD's weights, as λ grows", (1.06, 0.66), "black"),
        ("the valley: along it\nthe loss is flat", (0.86, 1.25), GREY),
        ("shrinking w$_1$ and w$_2$ alone\ncannot stay in the valley", (0.04, 0.05), "#8A5A00"),
    ):
        axes.annotate(text, place, color=ink, fontsize=7)
    axes.set(xlabel="w$_1$", ylabel="w$_2$", aspect="equal", xlim=(0, 1.95), ylim=(0, 1.4))
    axes.grid(False)
    return figure
