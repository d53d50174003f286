"""Figures of directional pruning in trained networks: shares of eigenspaces over epochs, and one-shot pruning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from dirprune.lab.plots import GREY, METHODS, Axis, add_legend, colour, mark_epochs, panels, styled
from dirprune.lab.studies.direction.projection import ProjectionRow
from dirprune.lab.studies.direction.published import PublishedShares
from dirprune.lab.studies.direction.scoring import ScoreRow

_OTHERS = {
    "magnitude": ("magnitude", *METHODS["magnitude"]),
    "brain-damage": ("optimal brain damage", GREY, "^"),
    "brain-surgeon": ("optimal brain surgeon", colour(3), "<"),
}
_MARKERS = "oDvPX*"


@styled
def projection_figure(rows: Sequence[ProjectionRow], published: Sequence[PublishedShares] = ()) -> Figure:
    """Draw the share of gRDA's difference from SGD in the leading eigenspace over epochs, one colour per run.

    The title describes the eigenspace. Open circles mark epochs whose eigenpairs did not converge.

    Args:
        rows: the rows that `project` yields.
        published: the authors' values for the same network and data, drawn in grey behind ours.
    """
    if not rows:
        raise ValueError("rows is empty; there is nothing to draw before the first epoch is measured")
    figure, [axes] = panels(1, size=(4.6, 3.4))
    for index, curve in enumerate(published):
        style: dict[str, Any] = {"color": "#A0A0A0", "linewidth": 0.8, "marker": _MARKERS[index + 1], "markersize": 2.5}
        axes.plot(curve.epochs, curve.shares, label=f"published, μ = {curve.mu:g}", **style)
    ours = "ours, " if published else ""
    for index, run in enumerate(dict.fromkeys(row.run for row in rows), start=1):  # 0 is the colour of SGD
        own = [row for row in rows if row.run == run]
        shade = colour(index)
        axes.plot(
            [r.epoch for r in own],
            [r.share for r in own],
            color=shade,
            marker="o",
            markersize=3.5,
            label=ours + _name(own[0]),
        )
        if rough := [row for row in own if not row.converged]:
            axes.plot([r.epoch for r in rough], [r.share for r in rough], "o", markersize=3.5, color=shade, mfc="white")
    if not all(row.converged for row in rows):
        axes.plot([], [], "o", markersize=3.5, color=GREY, mfc="white", label="not converged")
    axes.axhline(rows[0].random_level, linestyle="--", color=GREY, linewidth=1.0, label="a random direction")
    vectors, examples = (_span([getattr(row, name) for row in rows]) for name in ("eigenvectors", "examples"))
    axes.set_title(f"k = {vectors}, Hessian of {examples} training examples")
    mark_epochs(axes)
    shares = [*(r.share for r in rows), *(share for curve in published for share in curve.shares)]
    Axis("share of the difference, ‖PΔ‖ / ‖Δ‖", log=True).fit(axes, [rows[0].random_level, *shares])
    add_legend(figure)
    return figure


def _span(numbers: Sequence[int]) -> str:
    """Return the number if all are equal, otherwise their range.

    >>> _span([10, 10]), _span([8, 1000])
    ('10', '8–1,000')
    """
    return "–".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))


def _name(row: ProjectionRow) -> str:
    return f"gRDA c = {row.c:g}, μ = {row.mu:g}"


def _directional(k: int, ks: Sequence[int]) -> tuple[str, Any, str]:
    """Return label, colour and marker for a number of eigenvectors; more eigenvectors are darker."""
    place = ks.index(k)
    shade = colormaps["plasma"](0.9 * (1 - place / max(len(ks) - 1, 1)))
    return f"directional, k = {k}", shade, _MARKERS[place % len(_MARKERS)]


@styled
def score_figure(rows: Sequence[ScoreRow]) -> Figure:
    """Draw training loss and test accuracy against sparsity, one line per method and number of eigenvectors."""
    measured = [row for row in rows if not math.isnan(row.train_loss)]
    if not measured:
        raise ValueError("rows holds no measured row; there is nothing to draw")
    figure, (loss, accuracy) = panels(2)
    ks = sorted({row.k for row in measured if row.method == "directional"})
    for method, k in dict.fromkeys((row.method, row.k) for row in measured):
        own = [row for row in measured if (row.method, row.k) == (method, k)]
        label, shade, marker = _OTHERS.get(method) or _directional(k, ks)
        x = [100 * row.sparsity for row in own]
        loss.plot(x, [row.train_loss for row in own], marker=marker, markersize=3, color=shade, label=label)
        accuracy.plot(x, [row.test_accuracy for row in own], marker=marker, markersize=3, color=shade)
    Axis("training loss (plain data)", log=True).fit(loss, [row.train_loss for row in measured])
    Axis("test accuracy (%)").fit(accuracy, [row.test_accuracy for row in measured])
    for axes in (loss, accuracy):
        axes.set_xlabel("sparsity (% of all parameters)")
    add_legend(figure)
    return figure
