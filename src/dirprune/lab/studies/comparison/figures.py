"""Figures of a comparison of pruning methods: accuracy against sparsity, and sparsity layer by layer (Figure 4).

A method has the same colour in every figure; settings of one method differ in their line style.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from dirprune.lab import plots
from dirprune.lab.plots import GREY, Array
from dirprune.lab.studies.comparison.tradeoff import APART, SHORTCUT, STEM, Curve, LayerBar, distance
from dirprune.lab.tasks.measure import ACCURACY

PALE = "#CFCFCF"
_KINDS = {STEM: "D", "conv 3×3": "s", "conv 1×1": "o", SHORTCUT: "^", "linear": "P"}
_OPEN = {"conv 1×1"}  # at this size, filled circles look like squares
_OTHER_KINDS = "v<>Xp*hd"
_TICKS = (0, 50, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)
OF_WEIGHTS = "sparsity of the weights"
_FAR = 20.0  # a larger range of accuracies gets a second panel for the best
_SIDE = 0.03  # distance of error bars side by side, in log(1 − sparsity)
_NEAR = 10.0  # points below the best that the second panel shows


@plots.styled
def tradeoff(
    curves: Sequence[Curve], *, title: str = "", counted: str = OF_WEIGHTS, measured: str = ACCURACY.title
) -> Figure:
    """Draw accuracy against sparsity: a line per method, error bars where a spread is known (Figure 4, left).

    The sparsity axis is logarithmic in 1 − sparsity, which separates 90, 95 and 98 %. A dense network is a horizontal
    line. If accuracies differ a lot, a second panel zooms in on the best. Points too far `APART` to be interpolated are
    not joined. Error bars that would overlap are drawn side by side.

    Args:
        curves: at least one, with different labels; earlier ones are drawn on top.
        title: printed above the panels.
        counted: the label of the sparsity axis.
        measured: the label of the other one.

    Example:
        >>> figure = tradeoff([Curve("gRDA", [0.9, 0.95], [93.6, 93.5]), Curve("dense", [0], [93.7])])
        >>> figure.axes[0].get_ylabel()
        'test accuracy (%)'
    """
    _check_labels(curves)
    accuracies = [value for curve in curves for value in curve.accuracy]
    best, worst = max(accuracies), min(accuracies)
    floors = [worst, best - _NEAR] if best - worst > _FAR else [worst]
    figure, every = plots.panels(len(floors), size=(3.4, 3.2) if len(floors) > 1 else (4.6, 3.4))
    spread = any(_spread(curve).any() for curve in curves)
    variants = _variants(curve.label for curve in curves)
    curves = _side_by_side(curves)
    for axes, floor in zip(every, floors, strict=True):
        for rank, curve in enumerate(curves):
            _draw_curve(axes, curve, variants[rank], zorder=3 - rank / len(curves))
        _fit(axes, curves, floor)
        axes.set(xlabel=f"{counted} (%)", ylabel=f"{measured}, ± std over seeds" if spread else measured)
    if len(floors) > 1:
        every[0].set_title("all")
        every[1].set(title=f"within {_NEAR:g} points of the best", ylabel="")
    _add_legend(figure, title)
    return figure


@plots.styled
def layerwise(layers: Sequence[LayerBar], *, title: str = "") -> Figure:
    """Draw the sparsity of every layer in network order, one strip per method (Figure 4, right).

    The shape of a marker shows the kind of its layer. The pale lines are the other methods. If layers are nearly empty,
    the axis is logarithmic in 1 − sparsity, which separates 97 and 99.9 %; sparser layers are drawn at its top.

    Args:
        layers: in network order; the same layers for every method.
        title: printed above the strips.
    """
    by_method: dict[str, list[LayerBar]] = {}
    for bar in layers:
        by_method.setdefault(bar.method, []).append(bar)
    names = _shared_names(by_method)
    figure, every = plots.panels(len(by_method), columns=1, size=(2 * plots.PANEL[0], 0.85 + 1.5 / len(by_method)))
    floor, top = _range(_percent(bar.sparsity for bar in layers))
    heights = {label: np.minimum(_percent(bar.sparsity for bar in bars), top) for label, bars in by_method.items()}
    for axes, (label, bars) in zip(every, by_method.items(), strict=True):
        for other in heights.values():
            axes.plot(other, color=PALE, linewidth=0.5, zorder=1)
        _draw_strip(axes, label, bars, heights[label], _markers(layers))
        axes.set_xlim(-0.7, len(names) - 0.3)
        _scale_strip(axes, floor, top, cut=max(_percent(bar.sparsity for bar in layers)) > top)
        axes.set_xticks(range(len(names)), [])
        axes.tick_params(axis="x", length=0)
    every[-1].set_xticks(range(len(names)), names, rotation=90, fontsize=6 if len(names) < 60 else 4)
    figure.supylabel("sparsity (%)", fontsize=plots.STYLE["axes.labelsize"])
    _add_legend(figure, title, colour=GREY)  # grey, because a shape means the same in every colour
    return figure


def _side_by_side(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with points moved slightly apart in log(1 − sparsity) if their error bars overlap."""
    places: defaultdict[int, list[int]] = defaultdict(list)

    def sharing_with(sparsity: float) -> list[int]:
        return places[round(distance(0.0, sparsity) / _SIDE)]

    for i, curve in enumerate(curves):
        for sparsity, spread in zip(curve.sparsity, _spread(curve), strict=True):
            if spread > 0 and not curve.is_dense and i not in sharing_with(sparsity):
                sharing_with(sparsity).append(i)

    def moved(i: int, sparsity: float) -> float:
        sharing = sharing_with(sparsity)
        place = sharing.index(i) - (len(sharing) - 1) / 2 if i in sharing else 0.0
        aside = 1 - (1 - sparsity) * np.exp(-_SIDE * place)
        return float(max(aside, sparsity / 2))  # keep the sparsity positive

    return [replace(curve, sparsity=[moved(i, s) for s in curve.sparsity]) for i, curve in enumerate(curves)]


def _variants(labels: Iterable[str]) -> list[int]:
    """Return for each label how many earlier labels belong to the same method."""
    methods = [plots.method_of(label) for label in labels]
    return [methods[:i].count(name) for i, name in enumerate(methods)]


def _draw_curve(axes: Axes, curve: Curve, variant: int, zorder: float) -> None:
    shade, marker = plots.method_style(curve.label)
    line = (0, (4, 2)) if curve.dashed else plots.line_style(variant * len(plots.PALETTE))
    order = np.argsort(curve.sparsity, kind="stable")
    x, y = _percent(curve.sparsity)[order], np.asarray(curve.accuracy, dtype=np.float64)[order]
    spread = _spread(curve)[order]
    if curve.is_dense:
        axes.axhline(y[0], color=shade, linestyle=line, linewidth=1.0, label=curve.label, zorder=1.5)
        axes.axhspan(y[0] - spread[0], y[0] + spread[0], color=shade, alpha=0.1, linewidth=0)
        return
    if (known := spread > 0).any():
        bars = x[known], y[known], spread[known]
        axes.errorbar(*bars, fmt="none", ecolor=shade, elinewidth=0.8, capsize=2, capthick=0.8, zorder=zorder)
    gaps = [i for i in range(1, len(x)) if distance(x[i - 1] / 100, x[i] / 100) > APART]
    axes.plot(
        np.insert(x, gaps, np.nan),
        np.insert(y, gaps, np.nan),
        color=shade,
        linestyle=line,
        linewidth=1.1,
        marker=marker,
        markersize=3.5,
        markerfacecolor="white" if variant else shade,
        fillstyle="full" if variant < 2 else "bottom",
        markerfacecoloralt=shade,
        label=curve.label,
        zorder=zorder,
    )


def _draw_strip(axes: Axes, label: str, bars: Sequence[LayerBar], values: Array, markers: Mapping[str, str]) -> None:
    """Draw one method's line through all layers, with markers for their kinds."""
    shade, _ = plots.method_style(label)
    axes.plot(values, color=shade, linewidth=0.9, label="_" + label)  # the title names it, so the legend leaves it out
    for kind, marker in markers.items():
        own = [i for i, bar in enumerate(bars) if bar.kind == kind]
        face = "white" if kind in _OPEN else "auto"
        axes.plot(own, values[own], marker, color=shade, mfc=face, ms=3.2, mew=0.8, label=kind, clip_on=False, zorder=3)
    axes.set_title(label, loc="left", color=shade, pad=3)


def _fit(axes: Axes, curves: Sequence[Curve], floor: float) -> None:
    """Fit the axes to points at or above ``floor`` and their error bars; a dense network affects only y."""
    heights: list[float] = []
    pruned: list[float] = []
    for curve in curves:
        for sparsity, accuracy, spread in zip(curve.sparsity, curve.accuracy, _spread(curve), strict=True):
            if accuracy >= floor:
                heights += [accuracy - spread, accuracy + spread]
                pruned += [] if curve.is_dense else [100 * sparsity]
    extent = max(heights) - min(heights)
    margin = max(0.06 * extent, min(0.25, extent or 1.0))  # a quarter of a point of accuracy, less of small losses
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=(1, 2, 2.5, 5, 10)))  # else also eighths: 97.6, 98.4
    _scale_sparsity(axes, min(pruned, default=0.0), max(pruned, default=100.0))


def _scale_sparsity(axes: Axes, low: float, high: float) -> None:
    """Make x logarithmic in 1 − sparsity if at least three ticks lie between ``low`` and ``high`` percent."""
    if high == 100 or sum(low <= tick <= high for tick in _TICKS) < 3:
        margin = max(0.05 * (high - low), 2.0)
        axes.set_xlim(low - margin, high + margin)
        return
    start, stop = _from_percent(np.array([low, high]))
    margin = 0.04 * (stop - start)
    left, right = _to_percent(np.array([start - margin, stop + margin]))
    ticks = [tick for tick in _TICKS if left <= tick <= right]
    axes.set_xscale("function", functions=(_from_percent, _to_percent))
    axes.set_xlim(left, right)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _range(values: Array) -> tuple[int, float]:
    """Return the limits of a strip's axis: 0 or 50%, and 100% or less if a layer is sparser than 97%."""
    emptiest = max(values[values < 100], default=0.0)
    return 50 if min(values) >= 50 else 0, 100 if emptiest <= 97 else 99.0 if emptiest <= 99 else 99.9


def _scale_strip(axes: Axes, floor: int, top: float, *, cut: bool) -> None:
    """Set the limits of y, which is logarithmic in 1 − sparsity if they end below 100%; its top says if it is cut."""
    ticks = [floor, (floor + 100) // 2, 100] if top == 100 else [t for t in (floor, 90.0, 99.0, 99.9) if t <= top]
    if top < 100:
        axes.set_yscale("function", functions=(_from_percent, _to_percent))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(floor, top)
    axes.set_yticks(ticks, [f"{'≥ ' if cut and tick == top else ''}{tick:g}" for tick in ticks])


def _spread(curve: Curve) -> Array:
    """Return half the length of every error bar, 0 if it is not known."""
    known = np.zeros(len(curve.accuracy)) if curve.spread is None else np.asarray(curve.spread, dtype=np.float64)
    return np.where(np.isfinite(known), known, 0.0)


def _from_percent(sparsity: Array) -> Array:
    # The transform must be finite beyond what is drawn, also at 100%.
    return -np.log(np.maximum(100 - np.asarray(sparsity), 1e-9))


def _to_percent(place: Array) -> Array:
    return 100 - np.exp(-np.asarray(place))


def _percent(fractions: Iterable[float]) -> Array:
    return 100 * np.array(list(fractions), dtype=np.float64)


def _markers(layers: Sequence[LayerBar]) -> dict[str, str]:
    """Return the marker of each kind of layer, in the order of the network."""
    kinds = list(dict.fromkeys(bar.kind for bar in layers))
    others = [kind for kind in kinds if kind not in _KINDS]
    return {kind: _KINDS.get(kind) or _OTHER_KINDS[others.index(kind) % len(_OTHER_KINDS)] for kind in kinds}


def _add_legend(figure: Figure, title: str, *, colour: str | None = None) -> None:
    """Add the legend above all panels, with the title as its heading, because the two would overlap otherwise."""
    plots.add_legend(figure)
    [legend] = figure.legends
    legend.set_title(title)
    if colour is not None:
        for line in legend.get_lines():
            line.set_color(colour)


def _check_labels(curves: Sequence[Curve]) -> None:
    if not any(len(curve.accuracy) for curve in curves):
        raise ValueError("curves holds no point; give at least one curve with one")
    labels = [curve.label for curve in curves]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"curves holds the label {min(twice)!r} twice; give every curve a name of its own")


def _shared_names(by_method: dict[str, list[LayerBar]]) -> list[str]:
    """Return the names of the layers; raise unless they are the same for every method."""
    if not by_method:
        raise ValueError("layers is empty; give at least one LayerBar")
    every = {label: [bar.layer for bar in bars] for label, bars in by_method.items()}
    first, names = next(iter(every.items()))
    for label, others in every.items():
        if others != names:
            raise ValueError(f"layers of {label!r} and {first!r} differ; draw one figure for each network")
    if len(set(names)) < len(names):
        raise ValueError(f"layers holds a layer of {first!r} twice; give one setting per method, or name them")
    return names
