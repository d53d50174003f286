"""Building blocks for the figures of the lab, in a common style.

Figures are plain `matplotlib.figure.Figure` objects, made without pyplot, so that no backend is chosen, no window
opens and no global state changes. `save` writes a figure in the format of the path's suffix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from dirprune._support.atomic import replacing
from dirprune.lab.models.weights import kind_of
from dirprune.lab.training.loop import EpochRecord
from dirprune.zeros import LayerSparsity, SparsityReport

PALETTE = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""The colours of Okabe & Ito, which colour-blind readers can distinguish; without yellow, too faint for a line."""

METHODS = {
    "grda target": ("#312D1E", "H"),
    "grda macs": ("#370039", "8"),
    "grda": (PALETTE[1], "o"),
    "magnitude": (PALETTE[2], "s"),
    "variational dropout": (PALETTE[3], "^"),
    "rigl": (PALETTE[4], "D"),
    "amc": (PALETTE[5], "P"),
    "str": (PALETTE[6], "v"),
    "sgd": (PALETTE[0], "X"),
    "dense": (PALETTE[0], "X"),
    "rda": ("#882255", "p"),
    "pat": ("#332288", "h"),
    "acdc": ("#005400", "<"),
    "ham": ("#599445", ">"),
    "linbreg": ("#8E657B", "d"),
    "adamgrda": (PALETTE[1], "o"),  # never beside gRDA: a comparison has optimizers of one kind
    "adamw": (PALETTE[0], "X"),
    "st3": ("#4F83FC", "*"),
    "random": ("#765E4A", "x"),
}
"""The colour and the marker of a method, the same in every figure; a label begins with the method's name."""

GREY = "#707070"
"""The colour of reference lines, and of methods without their own colour."""

PANEL = (3.4, 2.5)
"""Width and height of one panel in inches: two fill a printed page."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "text.usetex": False,  # which a matplotlibrc in the current folder could turn on: TeX executes what labels say
}
styled = matplotlib.rc_context(STYLE)
"""Decorator for functions that draw. `save` needs it too, because matplotlib creates the ticks only then."""

_LINE_STYLES = ("-", ":", "-.")  # dashes are for published curves
_LEGEND_CHARACTERS = 100  # number that fits in a legend line of a figure two panels wide
_NARROW = ContextVar("_NARROW", default=False)

Array = NDArray[np.float64]
Curve = tuple[Sequence[float] | Array, Sequence[float] | Array]
"""The x and y values of a line."""


@dataclass(frozen=True)
class Axis:
    """The y axis of a panel: its label, and how its range follows from the values that are drawn.

    Attributes:
        log: logarithmic, with plain numbers at its ticks.
        from_zero: begins at 0, with room for a line there; otherwise near the values.
        floor: on a logarithmic axis smaller values are drawn here, and the label says so: they would look measured.
    """

    label: str
    log: bool = False
    from_zero: bool = False
    floor: float = -math.inf

    def shown(self, values: Sequence[float] | Array) -> Array:
        """Return the values as they are drawn."""
        return np.maximum(np.asarray(values, dtype=np.float64), self.floor if self.log else -math.inf)

    def fit(self, axes: Axes, values: Sequence[float] | Array) -> None:
        """Label the axis and fit it to these values, as far as it can show them."""
        given, drawn = np.asarray(values, dtype=np.float64), self.shown(values)
        axes.set_ylabel(f"{self.label} (cut at {self.floor:g})" if (drawn > given).any() else self.label)
        drawn = drawn[np.isfinite(drawn) & (drawn > 0 if self.log else True)]
        if not len(drawn):
            return
        low, high = float(drawn.min()), float(drawn.max())
        if self.log:
            margin = max((high / low) ** 0.05, 1.05)
            axes.set(yscale="log", ylim=(low / margin, high * margin))
            every = {10.0: (1, 1.5, 2, 3, 4, 6, 8), 100.0: (1, 2, 5), math.inf: (1,)}  # ticks of a decade, by the span
            ticks = next(subs for span, subs in every.items() if high / low < span)
            axes.yaxis.set_major_locator(LogLocator(subs=ticks))
            axes.yaxis.set_major_formatter("{x:g}")  # 0.01, not 10⁻²
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            low = 0.0 if self.from_zero else low
            margin = 0.05 * (high - low) or 1.0
            axes.set_ylim(low - margin, high + margin)


@dataclass(frozen=True)
class Quantity:
    """A field of `EpochRecord`, the factor that it is drawn with, and its axis."""

    field: str
    axis: Axis
    factor: float = 1.0


TEST_ACCURACY = Quantity("test_accuracy", Axis("test accuracy (%)"))
TEST_ERROR = Axis("test error (%)", log=True, floor=0.1)
TRAIN_LOSS = Quantity("train_loss", Axis("train loss", log=True))
TEST_LOSS = Quantity("test_loss", Axis("test loss", log=True))
SPARSITY = Quantity("sparsity", Axis("sparsity (% of all parameters)", from_zero=True), factor=100)

Runs = Mapping[str, Sequence[Sequence[EpochRecord]]]
"""Label of a setting → the records of each of its seeds."""


@styled
def save(figure: Figure, path: Path) -> Path:
    """Write the figure to ``path``, in the format of its suffix (.png, .pdf, .svg), and return the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, so there is no figure", str(path)) from error
    return path


def literal(figure: Figure) -> Figure:
    """Return the figure with its texts as they stand: in names from files of others, "$" begins no formula."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
    return figure


@contextmanager
def narrow() -> Iterator[None]:
    """Within it, figures are one panel wide, for a phone."""
    before = _NARROW.set(True)
    try:
        yield
    finally:
        _NARROW.reset(before)


@styled
def panels(count: int, *, columns: int = 2, size: tuple[float, float] = PANEL) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` axes of ``size`` inches each, row by row."""
    if _NARROW.get():
        columns, size = 1, (min(size[0], PANEL[0]), size[1])
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def colour(index: int) -> str:
    """Return the colour of setting number ``index``; the palette repeats."""
    return PALETTE[index % len(PALETTE)]


def places(labels: Collection[str]) -> list[int]:
    """Return the colour indices of settings. 0 is reserved for SGD, so that gRDA never has its colour.

    >>> places(["gRDA c=0.01 μ=0.7", "SGD"]), places(["gRDA c=0.01 μ=0.7"]), places(["digits: SGD", "vgg16: SGD"])
    ([1, 0], [1], [0, 1])
    """
    dense = [label for label in labels if label.split(": ")[-1].startswith("SGD")]
    others = count(1)
    return [0 if label in dense[:1] else next(others) for label in labels]


def method_of(label: str) -> str | None:
    """Return the method that a label begins with, in lower case; None for a method without its own colour.

    >>> method_of("Variational-dropout, log α > 3"), method_of("gRDA c = 0.005"), method_of("mine")
    ('variational dropout', 'grda', None)
    """
    plain = label.lower().replace("-", " ").replace("/", "")
    return next((name for name in METHODS if plain.startswith(name)), None)


def method_style(label: str) -> tuple[str, str]:
    """Return the colour and the marker of a label's method."""
    name = method_of(label)
    return (GREY, "*") if name is None else METHODS[name]


def line_style(index: int) -> str:
    """Return the line style of setting number ``index``; it changes each time the colours repeat."""
    return _LINE_STYLES[index // len(PALETTE) % len(_LINE_STYLES)]


def mean_and_std(curves: Sequence[Curve]) -> tuple[Array, Array, Array | None]:
    """Return x, mean and standard deviation (n − 1 in the denominator) over curves, where all of them are known.

    Returns:
        The x values that all curves share, in increasing order; the mean; the deviation, or None for a single curve.

    Example:
        >>> x, mean, std = mean_and_std([([1, 2, 3], [1.0, 2.0, 3.0]), ([2, 3], [4.0, 3.0])])
        >>> x.tolist(), mean.tolist(), std.round(3).tolist()
        ([2.0, 3.0], [3.0, 3.0], [1.414, 0.0])
    """
    if not curves:
        raise ValueError("curves is empty; give at least one (x, y)")
    known = [dict(zip(map(float, x), map(float, y), strict=True)) for x, y in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in known)))
    values = np.array([[curve[x] for x in shared] for curve in known], dtype=np.float64)
    return np.array(shared), values.mean(axis=0), values.std(axis=0, ddof=1) if len(curves) > 1 else None


@styled
def draw_spread(axes: Axes, curves: Sequence[Curve], *, label: str, index: int = 0) -> None:
    """Draw one setting: a thin line per seed, their mean, and a band of one standard deviation on either side.

    A single curve is drawn without a band.

    Args:
        axes: where to draw.
        curves: one per seed; the mean covers the x values that all share, so an unfinished seed does not distort it.
        label: the label of the setting in the legend.
        index: the number of the setting, which decides colour and line style.
    """
    x, mean, std = mean_and_std(curves)
    if std is not None:
        for curve in curves:
            axes.plot(*curve, color=colour(index), linewidth=0.5, alpha=0.5)
        axes.fill_between(x, mean - std, mean + std, color=colour(index), alpha=0.18, linewidth=0)
    # A single point needs a marker to be visible.
    marker = "o" if len(x) == 1 else ""
    axes.plot(x, mean, color=colour(index), linestyle=line_style(index), marker=marker, markersize=3, label=label)


@styled
def draw_published(axes: Axes, curve: Curve, *, label: str, index: int = 0) -> None:
    """Draw a published curve, dashed, in the colour of setting ``index`` with which it is compared."""
    axes.plot(*curve, color=colour(index), linestyle=(0, (4, 2)), linewidth=1.0, label=label)


def mark_epochs(axes: Axes) -> None:
    """Label x as epochs, with integer ticks, even if there is only one epoch."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    first, last = axes.dataLim.intervalx
    if first == last:
        axes.set_xlim(first - 0.5, last + 0.5)


@styled
def add_legend(figure: Figure) -> None:
    """Add one legend above all panels, with each label once."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    lengths = [len(label) + 8 for label in entries]  # the line sample takes about eight characters
    room = _LEGEND_CHARACTERS * figure.get_figwidth() / (2 * PANEL[0])
    columns = len(entries) if sum(lengths) <= room else max(1, min(len(entries), int(room / max(lengths))))
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns)


@styled
def trajectories(runs: Runs, quantities: Sequence[Quantity]) -> Figure:
    """Draw quantities over epochs, one panel each: a colour per setting, thin lines for seeds, mean ± std.

    Args:
        runs: label → seeds → records; seeds without a record are left out.
        quantities: what to draw, e.g. ``(TEST_ACCURACY, SPARSITY)``.

    Raises:
        ValueError: there are no records.
    """
    started = {label: [seed for seed in seeds if seed] for label, seeds in runs.items()}
    if not any(started.values()):
        raise ValueError("runs holds no epoch; draw curves after the first one")
    figure, every = panels(len(quantities))
    for axes, quantity in zip(every, quantities, strict=True):
        for index, (label, seeds) in zip(places(started), started.items(), strict=True):
            if len(seeds) > 1:
                label = f"{label}, mean ± std of {len(seeds)} runs"
            if seeds:
                draw_spread(axes, [_curve(seed, quantity) for seed in seeds], label=label, index=index)
        mark_epochs(axes)
        _fit(axes, quantity.axis)
    figure.align_ylabels()
    add_legend(figure)
    return figure


def training_curves(runs: Runs, tested_on: str = "test") -> Figure:
    """Draw test accuracy, sparsity, train loss and test loss over epochs; see `trajectories`.

    ``tested_on`` names the data that were evaluated, if not the test set.
    """
    accuracy, loss = (
        replace(q, axis=replace(q.axis, label=q.axis.label.replace("test", tested_on)))
        for q in (TEST_ACCURACY, TEST_LOSS)
    )
    return trajectories(runs, (accuracy, SPARSITY, TRAIN_LOSS, loss))


@styled
def beside_dense(runs: Runs, left: Mapping[str, float]) -> Figure:
    """Draw test errors over epochs, and beside them what a sparse network has left of a dense one.

    Args:
        runs: label → seeds → records.
        left: what is left, as a fraction, by what it is: weights, multiplications, …
    """
    figure, [curves, bars] = panels(2)
    for index, (label, seeds) in enumerate(runs.items()):
        errors = [([r.epoch for r in seed], TEST_ERROR.shown([100 - r.test_accuracy for r in seed])) for seed in seeds]
        draw_spread(curves, errors, label=label, index=index)
    mark_epochs(curves)
    _fit(curves, TEST_ERROR)
    percents = [100 * fraction for fraction in left.values()]
    drawn = bars.barh(list(left), percents, height=0.55, color=colour(1))
    bars.bar_label(drawn, [f"{percent:.3g}%" for percent in percents], padding=3)
    bars.set(xlabel="left of the dense network (%)", xlim=(0, max(100.0, *percents)))
    bars.invert_yaxis()
    bars.grid(False, axis="y")
    bars.tick_params(axis="y", length=0)
    add_legend(figure)
    return figure


@styled
def layerwise_sparsity(reports: Mapping[str, Sequence[SparsityReport]]) -> Figure:
    """Draw the sparsity of every weight, in network order from the top: a bar per setting, mean ± std over its seeds.

    Weights are tensors of two dimensions or more. The kind of the layer is shown next to its name. A setting without
    zeros takes no room in the rows: the legend tells it.

    Args:
        reports: label → one `SparsityReport` per seed, all of one network.

    Raises:
        ValueError: there is no report or no weight, or the networks differ.
    """
    weights = {label: [[w for w in seed.layers if w.is_weight] for seed in seeds] for label, seeds in reports.items()}
    layers = _shared_layers([seed for seeds in weights.values() for seed in seeds])
    kinds = [kind_of(layer) for layer in layers]
    barred = [label for label, seeds in reports.items() if any(seed.weight_fraction for seed in seeds)]
    row_height = max(0.145, 0.03 + 0.045 * len(barred))  # room for a name and one bar per setting
    figure, [axes] = panels(1, size=(2 * PANEL[0], 0.9 + row_height * len(layers) + 0.17 * len(weights)))
    rows = np.arange(len(layers), dtype=np.float64)
    thickness = 0.8 / max(len(barred), 1)
    for index, (label, seeds) in zip(places(weights), weights.items(), strict=True):
        fractions = [(rows, [100 * layer.fraction for layer in seed]) for seed in seeds]
        _, mean, std = mean_and_std(fractions)
        overall = np.mean([100 * report.weight_fraction for report in reports[label]])
        if label not in barred:
            axes.barh([], [], color=colour(index), label=f"{label}: no zeros")
            continue
        axes.barh(
            rows + (barred.index(label) - (len(barred) - 1) / 2) * thickness,
            mean,
            height=thickness,
            xerr=std,
            error_kw={"elinewidth": 0.6, "ecolor": "#404040"},
            color=colour(index),
            label=f"{label}: {overall:.1f} % of all weights",
        )
    names = [f"{layer.name.removesuffix('.weight')} · {name}" for layer, name in zip(layers, kinds, strict=True)]
    axes.set_yticks(rows, names)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set(xlabel="sparsity (%)", xlim=(0, 100), ylim=(len(layers) - 0.5, -0.5))
    add_legend(figure)
    return figure


def _curve(records: Sequence[EpochRecord], quantity: Quantity) -> Curve:
    return [r.epoch for r in records], [quantity.factor * getattr(r, quantity.field) for r in records]


def _fit(axes: Axes, axis: Axis) -> None:
    """Fit y to the lines, so that no band stretches the axis, and near the values the first epochs do not either."""
    points = np.concatenate([np.asarray(line.get_xydata(), dtype=np.float64) for line in axes.get_lines()])
    shown = (points[:, 0] > 0.05 * points[:, 0].max(initial=0)) | axis.log | axis.from_zero
    axis.fit(axes, points[shown, 1])
    low, high = axes.get_ylim()
    if not all(low <= value <= high for value in points[~shown, 1]):
        axes.set_ylabel(f"{axes.get_ylabel()}, first epochs cut")


def _shared_layers(seeds: Sequence[Sequence[LayerSparsity]]) -> Sequence[LayerSparsity]:
    """Return the layers of these networks; raise unless all have the same ones."""
    if not seeds or not seeds[0]:
        raise ValueError("reports holds no weight; give at least one report of a network with weights")
    first = [layer.name for layer in seeds[0]]
    for seed in seeds:
        if [layer.name for layer in seed] != first:
            raise ValueError("reports holds networks with different layers; draw one figure for each network")
    return seeds[0]
