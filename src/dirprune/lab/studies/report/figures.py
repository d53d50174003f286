"""The figures of a report on runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from dirprune.lab import plots
from dirprune.lab.plots import Axis
from dirprune.lab.records.files import check_own
from dirprune.lab.studies.report.report import Report
from dirprune.lab.studies.report.signs import SignRow


def figures(report: Report) -> dict[str, Callable[[], Figure]]:
    """Return how the figures of a report are drawn, by name: curves, signs where a run of gRDA has a twin with SGD,
    and layers or one of each network; none if no epoch is finished.
    """
    drawings: dict[str, Callable[[], Figure]] = {}
    curves = {group.label: group.records for group in report.groups}
    if any(records for group in report.groups for records in group.records):
        drawings["curves"] = partial(plots.training_curves, curves, report.tested_on)
    if report.signs:
        drawings["signs"] = partial(signs_figure, curves, report.signs)
    for network, reports in report.layers.items():
        name = "layers" if len(report.layers) == 1 else f"layers-{_file_name(network)}"
        drawings[name] = partial(plots.layerwise_sparsity, reports)
    return drawings


def draw(report: Report, out: Path | None = None) -> list[Path]:
    """Write the figures of a report as PNG files to its `folder`, and return their paths."""
    out = folder(report, out)
    return [plots.save(plots.literal(drawing()), out / f"{name}.png") for name, drawing in figures(report).items()]


def folder(report: Report, out: Path | None) -> Path:
    """Return ``out``, or where the figures of a single run belong: its own ``figures``."""
    members = [run for group in report.groups for run in group.runs]
    if out is None and len(members) > 1:
        raise ValueError(f"out=None does not say where the figures of {len(members)} runs go; give a folder (--out)")
    if out is None:
        check_own(members[0].folder)
    return out or members[0].run.figures


@plots.styled
def signs_figure(curves: plots.Runs, rows: Sequence[SignRow]) -> Figure:
    """Draw the share of signs that change in an epoch, and of gRDA's signs, without the zeros, that are not SGD's.

    Args:
        curves: label → seeds → records, as for `plots.trajectories`; epochs without a count are left out.
        rows: from `beside_sgd`.
    """
    figure, (changed, unlike) = plots.panels(2)
    axis, drawn = Axis("signs that changed (%)", log=True, floor=1e-3), []
    for index, (label, seeds) in zip(plots.places(curves), curves.items(), strict=True):
        known = [[(r.epoch, 100 * (1 - r.signs_kept)) for r in seed if r.signs_kept is not None] for seed in seeds]
        lines = [([epoch for epoch, _ in seed], axis.shown([share for _, share in seed])) for seed in known if seed]
        if lines:
            plots.draw_spread(changed, lines, label=label, index=index)
            drawn += [share for seed in known for _, share in seed]
    axis.fit(changed, drawn)
    for grda, sgd in dict.fromkeys((row.grda, row.sgd) for row in rows):
        own = [row for row in rows if (row.grda, row.sgd) == (grda, sgd)]
        x, y = [row.epoch for row in own], [100 * (1 - row.alike) for row in own]
        unlike.plot(x, y, marker="o", markersize=3, linewidth=0.8, color=plots.colour(1))
    Axis("gRDA's signs unlike SGD's (%)", from_zero=True).fit(unlike, [100 * (1 - row.alike) for row in rows])
    for axes in (changed, unlike):
        plots.mark_epochs(axes)
    plots.add_legend(figure)
    return figure


def _file_name(model: str) -> str:
    """Return the name of a model with characters that are unsafe in file names replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)
