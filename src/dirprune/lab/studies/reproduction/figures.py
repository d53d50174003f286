"""Figures of the reproduction page: our trajectories over the published ones. Numbers in, figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dirprune.lab import plots
from dirprune.lab.plots import Axis, Curve
from dirprune.lab.published import METRICS, Band, ImageNetRun, NormRatio, Setting

THEIRS, OURS = 0, 1  # indices of their colours
BAND = "range of the authors' runs"
LOSS_FLOOR = 1e-5
"""Lower end of the train-loss axis: the authors logged four decimals, so theirs drop from 1e-4 to 0 in one step."""
AXES = {
    "train_loss": Axis("train loss", log=True),
    "train_accuracy": Axis("train accuracy (%)"),
    "test_loss": Axis("test loss"),
    "test_accuracy": Axis("test accuracy (%)"),
    "sparsity": Axis("sparsity (%)", from_zero=True),
}
UNIT = 1e-4  # unit of the norm ratio's axis


@plots.styled
def trajectories(
    bands: Mapping[tuple[Setting, str], Band], ours: Mapping[tuple[Setting, str], Sequence[Curve]]
) -> Figure:
    """Draw every metric over the epochs of one experiment: a row per setting, a column per metric.

    Args:
        bands: the published runs of the settings to draw; their range is shaded, their mean dashed.
        ours: one curve per seed, drawn over the bands; the label of a row says if our runs are unfinished.
    """
    settings = list(dict.fromkeys(setting for setting, _ in bands))
    figure, every = plots.panels(len(METRICS) * len(settings), columns=len(METRICS), size=(1.65, 1.5))
    for i, axes in enumerate(every):
        metric, setting = METRICS[i % len(METRICS)], settings[i // len(METRICS)]
        band, curves = bands[setting, metric], ours.get((setting, metric), ())
        _compare(axes, band, curves)
        _scale(axes, metric, [band for (_, name), band in bands.items() if name == metric])
        axes.set(title=AXES[metric].label if i < len(METRICS) else "")
        axes.set_ylabel(f"{setting}{_progress(band, curves)}" if i % len(METRICS) == 0 else "")
        axes.set_xlabel("epoch" if i >= len(every) - len(METRICS) else "")
    figure.supxlabel(
        "Axes span the published values after the first tenth of the epochs; what lies outside is cut.", fontsize=7
    )
    plots.add_legend(figure)
    return figure


@plots.styled
def imagenet(runs: Sequence[ImageNetRun]) -> Figure:
    """Draw Figure 3: train and test accuracy and the share of parameters that are not zero, over the epochs."""
    figure, (train, test, left) = plots.panels(3, columns=3, size=(2.4, 2.4))
    for index, run in enumerate(runs):
        setting = run.setting
        label = "SGD" if setting.c is None else f"gRDA c={setting.c:g} μ={setting.mu:g}"
        style: dict[str, Any] = {"color": plots.colour(index), "linewidth": 0.9}
        train.plot(run.epochs, run.train_accuracy, label=label, **style)
        test.plot(run.epochs, run.test_accuracy, **style)
        left.plot(run.epochs, [100 - share for share in run.sparsity], **style)
    for axes, metric in ((train, "train_accuracy"), (test, "test_accuracy")):
        axes.set(ylabel=f"{AXES[metric].label}, cut at 30", ylim=(30, None))
    left.set(ylabel="weights left (%), cut at 42", ylim=(0, 42))
    for axes in figure.axes:
        plots.mark_epochs(axes)
    plots.add_legend(figure)
    return figure


@plots.styled
def norm_ratio(theirs: Sequence[NormRatio], ours: Mapping[Setting, Sequence[Curve]]) -> Figure:
    """Draw Figure 2: ‖w‖₂/‖w‖₁ over training above its bound d^-½, one panel per experiment."""
    experiments = list(dict.fromkeys(curve.setting.experiment for curve in theirs))
    figure, every = plots.panels(len(experiments))
    for axes, experiment in zip(every, experiments, strict=True):
        curves = [curve for curve in theirs if curve.setting.experiment == experiment]
        for curve in sorted(curves, key=lambda curve: curve.setting.optimizer, reverse=True):
            index = int(curve.setting.optimizer == "grda")
            name = ("SGD", "gRDA")[index]
            if runs := ours.get(curve.setting):
                plots.draw_spread(axes, [_in_units(run) for run in runs], label=f"{name}, ours", index=index)
                axes.lines[-1].set(linewidth=3, alpha=0.4)  # keep the published line visible where both agree
            plots.draw_published(axes, _in_units((curve.epochs, curve.ratios)), label=f"{name}, paper", index=index)
            if index:
                axes.set_title(f"{experiment}, SGD and {curve.setting}")
                axes.axhline(curve.parameters**-0.5 / UNIT, color="#606060", linestyle=":", label="bound $d^{-1/2}$")
        axes.set(xlabel="epoch", ylabel=r"$\Vert w\Vert_2\,/\,\Vert w\Vert_1\quad(10^{-4})$", ylim=(0, None))
    plots.add_legend(figure)
    return figure


def _in_units(curve: Curve) -> Curve:
    x, y = curve
    return x, [float(value) / UNIT for value in y]


def _compare(axes: Axes, band: Band, ours: Sequence[Curve]) -> None:
    """Draw the published band, then our runs, then the published mean."""
    axes.fill_between(band.epochs, band.low, band.high, color=plots.colour(THEIRS), alpha=0.3, linewidth=0, label=BAND)
    for curve in ours:
        axes.plot(*curve, color=plots.colour(OURS), linewidth=0.6, alpha=0.8, label="a run of ours")
    plots.draw_published(axes, (band.epochs, band.mean), label="their mean", index=THEIRS)


def _progress(band: Band, ours: Sequence[Curve]) -> str:
    """Return the addition to a label that says if our runs are unfinished."""
    furthest = max((int(max(epochs)) for epochs, _ in ours), default=0)
    return "" if furthest >= band.epochs[-1] else f",\nepoch {furthest} so far"


def _scale(axes: Axes, metric: str, bands: Sequence[Band]) -> None:
    """Give all panels of a metric the same axis: the range of the published runs after the first tenth of epochs."""
    last = max(band.epochs[-1] for band in bands)
    late = [i for i, epoch in enumerate(bands[0].epochs) if epoch >= 0.1 * last]
    values = [value for band in bands for i in late for value in (band.low[i], band.high[i])]
    AXES[metric].fit(axes, [max(value, LOSS_FLOOR) for value in values] if metric == "train_loss" else values)
    axes.set(xlim=(0, last), xticks=[0, last // 2, last])
