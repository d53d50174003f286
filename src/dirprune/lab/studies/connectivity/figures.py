"""Figures of mode connectivity: the plane through two solutions and the bend, and the profiles between them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from dirprune.connect import CurveProfile
from dirprune.lab import plots
from dirprune.lab.plots import Array, Axis
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.connectivity.folder import Mapped, Placed, coarseness, profiles, published_curve

LEVELS = 15
FLOOR = 1e-6
"""The value that a logarithmic axis shows for a loss of 0."""
FLAT = 0.15
"""A plane flatter than this is not drawn to scale, because the strip would be too low to read."""
CEILING = 10.0
"""The highest contour level of the loss: far from the valley, losses of 1e6 are common and of no interest."""
_AXES = {
    "train_loss": Axis("train loss", floor=FLOOR),
    "train_error": Axis("train error (%)", from_zero=True, floor=0.01),
    "test_loss": Axis("test loss", floor=FLOOR),
    "test_error": Axis("test error (%)", from_zero=True, floor=0.01),
}
_PATHS = {"curve": ("fitted curve", 2, "-"), "line": ("straight line", 6, ":")}
Point = tuple[str, float, float]
"""The name of a point of the plane ("start", "end", "bend" or "curve"), and its coordinates."""
_Map = tuple[Sequence[Mapping[str, float]], Sequence[Point]]


def draw(out: Path) -> None:
    """Draw the figures of a finished job from its tables."""
    config = json.loads((out / "config.json").read_text())
    names = config["network_a"], config["network_b"]
    theirs = published_curve(config)
    figures = {"profile": profile(profiles(out), names, theirs.profile if theirs else None)}
    if config["fit"]:
        rows = [asdict(row) for row in read_rows(out / "plane.csv", Mapped)]
        points = [(row.name, row.x, row.y) for row in read_rows(out / "points.csv", Placed)]
        other = (theirs.plane.rows, theirs.plane.corners) if theirs else None
        figures["plane"] = plane(rows, points, names, other, note=coarseness(out))
    for name, figure in figures.items():
        for suffix in (".png", ".pdf"):
            plots.save(figure, out / "figures" / f"{name}{suffix}")


@plots.styled
def profile(profiles: Mapping[str, CurveProfile], names: tuple[str, str], published: CurveProfile | None) -> Figure:
    """Draw loss and error over t, on training and test data: the curve, the straight line, the published curve.

    Args:
        profiles: profiles by path, "curve" and "line".
        names: names of the networks at t = 0 and t = 1.
        published: the authors' curve between such networks, drawn dashed.
    """
    figure, every = plots.panels(4)
    for axes, (score, axis) in zip(every, _AXES.items(), strict=True):
        drawn = {**profiles, **({} if published is None else {"published": published})}
        values = {path: np.array([getattr(p, score) for p in each.points]) for path, each in drawn.items()}
        ours = np.concatenate([values[path] for path in profiles])
        axis = replace(axis, log=_spans_decades(ours, is_loss=score.endswith("loss")))
        for path, measured in drawn.items():
            line = [p.place[0] for p in measured.points], axis.shown(values[path])
            if path == "published":
                plots.draw_published(axes, line, label="published curve", index=2)
            else:
                name, index, style = _PATHS[path]
                axes.plot(*line, color=plots.colour(index), linestyle=style, label=name)
        axis.fit(axes, ours)
        axes.set(xlabel=f"t  (0: {names[0]}; 1: {names[1]})", xlim=(0, 1))
    plots.add_legend(figure)
    return figure


@plots.styled
def plane(
    rows: Sequence[Mapping[str, float]],
    points: Sequence[Point],
    names: tuple[str, str],
    published: _Map | None = None,
    *,
    note: str = "",
) -> Figure:
    """Draw train loss and test error as contours over the plane, with the solutions, the bend and the curve.

    Args:
        rows: x, y and the scores of a full grid.
        points: see `Point`; the axes are distances from the start, in the units of the weights.
        names: names of the networks at the start and the end.
        published: rows and points of the authors' plane between such networks, drawn below on the same axes.
        note: told below the panels.
    """
    maps = [(rows, points), *([] if published is None else [published])]
    x, y = (np.array([row[axis] for grid, _ in maps for row in grid]) for axis in ("x", "y"))
    # The panels are stacked if the plane is wide and low, and side by side otherwise.
    slope = float(np.ptp(y) / np.ptp(x))
    columns = 2 if slope > 0.5 else 1
    width = plots.PANEL[0] * 2 / columns
    height = min(max((width - 1.1) * slope, 1.6 if slope < FLAT else 0.8), 1.5 * width) + 0.8
    figure, every = plots.panels(2 * len(maps), columns=columns, size=(width, height))
    scale = " (not to scale)" if slope < FLAT else ""
    for axes, (score, (grid, marks)) in zip(every, _in_panels(maps, columns), strict=True):
        among = np.array([row[score] for each, _ in maps for row in each])
        if score == "train_loss":
            _contours(axes, grid, score, among, floor=FLOOR, ceiling=CEILING)
        else:  # an error counts examples, so half the smallest nonzero one can stand for 0
            _contours(axes, grid, score, among, floor=min(among[among > 0], default=2.0) / 2, ceiling=100.0)
        _marks(axes, marks, names)
        whose = "" if published is None else "published " if grid is published[0] else "our "
        axes.set(aspect="auto" if slope < FLAT else "equal", title=whose + _AXES[score].label)
        axes.set(xlim=(x.min(), x.max()), ylim=(y.min(), y.max()))
        axes.set(xlabel="ℓ₂ distance along the line", ylabel=f"ℓ₂ distance from it{scale}")
    if note:
        figure.supxlabel(fill(note, 110 if columns == 2 else 90), fontsize=7)
    plots.add_legend(figure)
    return figure


def _in_panels(maps: Sequence[_Map], columns: int) -> list[tuple[str, _Map]]:
    """Return score and map of each panel: a row for each map, or with one column a score after the other."""
    scores = ("train_loss", "test_error")
    if columns == 2:
        return [(score, each) for each in maps for score in scores]
    return [(score, each) for score in scores for each in maps]


def _spans_decades(values: Array, *, is_loss: bool) -> bool:
    """Return whether a linear axis would hide the small values: of losses below a tenth, of errors beside a fifth."""
    values = values[np.isfinite(values)]
    return bool(values.max() > (10 * max(values.min(), FLOOR) if is_loss else 20))


def _contours(
    axes: Axes, rows: Sequence[Mapping[str, float]], score: str, among: Array, floor: float, ceiling: float
) -> None:
    """Draw filled contours at geometrically spaced levels within ``floor`` and ``ceiling``, and a colour bar.

    The levels span all values ``among`` which the score has, so that several planes can share them.
    """
    x, y = (np.unique([row[axis] for row in rows]) for axis in ("x", "y"))
    by_place = {(row["x"], row["y"]): row[score] for row in rows}
    values = np.array([[by_place[a, b] for a in x] for b in y])
    finite = among[np.isfinite(among)]
    low = max(float(finite.min()), floor)
    high = max(min(float(finite.max()), ceiling), 1.1 * low)
    shown = np.clip(np.nan_to_num(values, nan=np.inf, posinf=np.inf), low, 2 * high)
    levels = np.geomspace(low, high, LEVELS + 1)
    # The valley is dark; cividis looks the same to colour-blind readers and prints well in grey.
    filled = axes.contourf(
        x,
        y,
        shown,
        levels=levels,
        norm=LogNorm(low, high),
        cmap="cividis",
        extend="max" if shown.max() > high else "neither",
    )
    filled.set_edgecolor("face")  # otherwise a PDF shows seams
    axes.contour(x, y, shown, levels=levels[1:-1], colors="#FFFFFF", linewidths=0.3, alpha=0.6)
    # An inset follows the height of the axes, which depends on the equal aspect.
    bar = axes.figure.colorbar(filled, cax=axes.inset_axes((1.03, 0, 0.045, 1)))
    ticks = _round_numbers(low, high)
    lowest = "≤ " if finite.min() < low else ""  # the darkest colour then also covers all values below
    bar.set_ticks(ticks, labels=[f"{lowest if tick == low else ''}{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    axes.grid(False)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return up to six round numbers between the two: powers of ten, else also 2 and 5 times those, else two digits.

    >>> _round_numbers(1e-3, 0.3), _round_numbers(0.6, 11.0), _round_numbers(1.67, 4.2)
    ([0.001, 0.01, 0.1], [1.0, 2.0, 5.0, 10.0], [1.7, 2.0, 2.4, 2.9, 3.5, 4.2])
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        numbers = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        inside = [number for number in numbers if low <= number <= high * (1 + 1e-9)]
        if len(inside) > 2:
            return inside[:: -(-len(inside) // 6)]
    rounded = sorted({float(f"{number:.2g}") for number in np.geomspace(low, high, 6)})
    return [number for number in rounded if low <= number <= high]


def _marks(axes: Axes, points: Sequence[Point], names: tuple[str, str]) -> None:
    """Draw the solutions, the bend and the curve, with a dark rim that stands out on every colour."""
    corner = {name: np.array([x, y]) for name, x, y in points if name != "curve"}
    t = np.linspace(0, 1, 101)[:, None]
    along = (1 - t) ** 2 * corner["start"] + 2 * t * (1 - t) * corner["bend"] + t**2 * corner["end"]
    rim = [withStroke(linewidth=3, foreground="#000000")]
    axes.plot(*along.T, color="#FFFFFF", linewidth=1.4, path_effects=rim, label="fitted curve")
    faces = [plots.method_style(name)[0] for name in names]
    style = {"start": ("o", names[0], faces[0]), "end": ("s", names[1], faces[1]), "bend": ("^", "bend", "#FFFFFF")}
    for name, x, y in points:
        if name in style:
            marker, label, face = style[name]
            edge = "#FFFFFF" if face == plots.PALETTE[0] else "#000000"
            axes.plot([x], [y], marker, color=face, markeredgecolor=edge, markersize=6, label=label, zorder=3)
