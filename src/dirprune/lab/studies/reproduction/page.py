"""Generate docs/reproduction.md and the table of all cells from the ledger, benchmarks and the published numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from dirprune.lab import plots, published
from dirprune.lab.plots import Curve
from dirprune.lab.published import Estimate, Setting
from dirprune.lab.records.files import write_text
from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.studies.bench.work import MeasuredCost
from dirprune.lab.studies.reproduction import cells as reproduce
from dirprune.lab.studies.reproduction import figures as reproduction_plots
from dirprune.lab.studies.reproduction.cells import Cell, format_deviation
from dirprune.lab.studies.reproduction.ledger import Recorded

Groups = dict[Setting, list[Recorded]]

IMAGENET_IMAGES = 1_281_167
TITLES = {
    "vgg16-cifar10": "VGG16 on CIFAR-10, 600 epochs, c = .0005",
    "wrn28x10-cifar10": "WRN28x10 on CIFAR-10, 200 epochs, c = .001",
    "wrn28x10-cifar100": "WRN28x10 on CIFAR-100, 200 epochs, c = .001",
}

WORDS = Path(__file__).with_name("page.md")
"""The page without its numbers; what stands for them begins with a dollar sign."""


@dataclass(frozen=True)
class CellRow:
    """A row of cells.csv: a published number, and ours. Deviations are None without a run, or without a spread.

    ``comparable`` is recomputed from the authors' logs, over the runs that measured as ours do, with the sample std.
    """

    experiment: str
    run: str
    metric: str
    epoch: int
    our_runs: int
    ours: float | None
    paper_mean: float
    paper_std: float
    deviation: float | None
    comparable_runs: int
    comparable_mean: float
    comparable_std: float
    comparable_deviation: float | None

    @classmethod
    def of(cls, cell: Cell) -> CellRow:
        given = cell.published
        return cls(
            given.setting.experiment,
            str(given.setting),
            given.metric,
            given.epoch,
            len(cell.ours),
            None if cell.missing else cell.mean,
            given.paper.mean,
            given.paper.std,
            cell.deviation,
            given.comparable.n,
            given.comparable.mean,
            given.comparable.std,
            cell.comparable_deviation,
        )


def write_page(runs: Sequence[Recorded], results: Path, docs: Path) -> Path:
    """Write docs/reproduction.md, its figures and cells.csv from the runs in ``results``; return the page's path.

    There may be none; the page says what is missing.
    """
    draw(reproduce.reproductions(runs), docs / "figures")
    write_rows(results / "cells.csv", CellRow, map(CellRow.of, reproduce.compared(runs)))
    path = docs / "reproduction.md"
    write_text(path, page(runs, results))
    return path


def draw(groups: Groups, figures: Path) -> None:
    """Draw the figures of the page and save them in a folder."""
    for experiment in published.EXPERIMENTS:
        if drawn := drawable(experiment, groups):
            plots.save(_trajectory_figure(experiment, drawn), figures / f"reproduction-{experiment}.png")
    plots.save(_norm_figure(groups), figures / "reproduction-norms.png")
    plots.save(reproduction_plots.imagenet(published.imagenet_runs()), figures / "reproduction-resnet50-imagenet.png")


def drawable(experiment: str, groups: Groups) -> Groups:
    """Return the settings of an experiment of which some run has a tenth of its epochs, with those runs."""
    found = {}
    for setting in published.settings(experiment):
        if runs := [run for run in groups.get(setting, []) if 10 * run.entry.epochs_done >= run.entry.epochs]:
            found[setting] = runs
    return found


def page(runs: Sequence[Recorded], results: Path) -> str:
    """Return the page as Markdown."""
    cells, groups = reproduce.compared(runs), reproduce.reproductions(runs)
    bench = [row for row in read_rows(results / "bench.csv", MeasuredCost) if row.floor_ms is not None]
    return Template(WORDS.read_text(encoding="utf-8")).substitute(
        conclusion="\n".join(f"- {line}" for line in reproduce.conclusion(cells)),
        ends=_ends(cells),
        surprising=_surprising(cells, groups),
        experiments="\n\n".join(_experiment(name, cells, groups) for name in published.EXPERIMENTS),
        norms=_norms(groups),
        imagenet=_imagenet(bench),
        costs=_costs(bench),
    )


def _experiment(experiment: str, cells: list[Cell], groups: Groups) -> str:
    """Return the section of an experiment: its figure, and how many of its cells have a run."""
    title = TITLES[experiment]
    own = [cell for cell in cells if cell.published.setting.experiment == experiment]
    begun = sum(not cell.missing for cell in own)
    parts = [f"## {title}"]
    if drawable(experiment, groups):
        parts.append(f"![{title}](figures/reproduction-{experiment}.png)")
    return "\n\n".join([*parts, f"{begun} of {len(own)} cells have a run of ours." if begun else "No run yet."])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _ends(cells: list[Cell]) -> str:
    """Return a table of the last epoch of every setting that a run of ours has reached."""
    rows = []
    for setting, group in reproduce.by_setting(cells).items():
        last = max(cell.published.epoch for cell in group)
        by_metric = {cell.published.metric: cell for cell in group if cell.published.epoch == last}
        shown = [by_metric[metric] for metric in ("test_accuracy", "sparsity")]
        if not any(cell.missing for cell in shown):
            parts = [part for cell in shown for part in _brief(cell)]
            rows.append([setting.experiment, str(setting), str(last), *parts])
    head = ["experiment", "run", "epoch", "test accuracy", "paper", "off by", "sparsity", "paper", "off by"]
    return table(head, rows) if rows else "None yet."


def _surprising(cells: list[Cell], groups: Groups) -> str:
    odd = reproduce.surprising(cells)
    if not odd:
        return ""
    head = (
        "These cells deviate by more than the authors' own spread explains (the same number of their runs would do so "
        f"less than once in {1 / reproduce.SURPRISING:.0f} times), least likely first:"
    )
    return "\n".join([head, "", *(f"- {_sentence(cell, groups[cell.published.setting])}" for cell in odd)])


def _brief(cell: Cell) -> tuple[str, str, str]:
    paper = cell.published.paper
    return _ours(cell), _estimate(paper, cell.published.metric), format_deviation(cell.mean, paper)


def _sentence(cell: Cell, runs: list[Recorded]) -> str:
    given = cell.published
    sentence = (
        f"{given.setting.experiment}, {given.setting}, {_words(given.metric)} at epoch {given.epoch}: {_ours(cell)}, "
        f"theirs {_estimate(given.comparable, given.metric)} (n={given.comparable.n}), "
        f"{format_deviation(cell.mean, given.comparable)}."
    )
    if near := reproduce.around(cell, runs):
        ours, theirs = (_number(mean, given.metric) for mean in near)
        sentence += f" In the epochs around it, up to 10 away, ours averages {ours} and theirs {theirs}."
    return sentence


def _ours(cell: Cell) -> str:
    count = f" ({len(cell.ours)})" if len(cell.ours) > 1 else ""
    return _number(cell.mean, cell.published.metric) + count


def _estimate(estimate: Estimate, metric: str) -> str:
    return f"{_number(estimate.mean, metric)} ± {_number(estimate.std, metric)}"


def _number(value: float, metric: str) -> str:
    return f"{value:.4f}" if metric.endswith("loss") else f"{value:.3f}"


def _words(metric: str) -> str:
    return metric.replace("_", " ") + ("" if metric.endswith("loss") else " (%)")


def _trajectory_figure(experiment: str, groups: Groups) -> Figure:
    bands = {key: band for key, band in published.bands(experiment).items() if key[0] in groups}
    ours = {(setting, metric): [_curve(run, metric) for run in groups[setting]] for setting, metric in bands}
    return reproduction_plots.trajectories(bands, ours)


def _norm_figure(groups: Groups) -> Figure:
    ours = {setting: [_curve(run, "norm_ratio") for run in runs] for setting, runs in groups.items()}
    return reproduction_plots.norm_ratio(published.norm_ratios(), ours)


def _curve(run: Recorded, metric: str) -> Curve:
    return [epoch.epoch for epoch in run.epochs], [reproduce.value(epoch, metric) for epoch in run.epochs]


def _norms(groups: Groups) -> str:
    """Return the table of the norm ratio at the end of training."""
    rows = []
    for curve in published.norm_ratios():
        last = curve.epochs[-1]
        ours = [r.norm_ratio for run in groups.get(curve.setting, []) for r in run.epochs if r.epoch == last]
        mean = f"{sum(ours) / len(ours):.3e}" if ours else "—"
        bound = f"{curve.parameters**-0.5:.3e}"
        rows.append([curve.setting.experiment, str(curve.setting), str(last), mean, f"{curve.ratios[-1]:.3e}", bound])
    return table(["experiment", "run", "epoch", "ours", "paper", "bound d^-½"], rows)


def _imagenet(bench: list[MeasuredCost]) -> str:
    """Return how long a run of Figure 3 takes, from the time of a step: the paper's, and ours if it was measured."""
    steps = -(-IMAGENET_IMAGES // 256) * published.imagenet_runs()[0].epochs[-1]
    theirs = next(cost.ms for cost in published.costs() if (cost.model, cost.optimizer) == ("resnet50", "grda"))
    told = [f"{steps:,} steps of 256 images: {_hours(theirs, steps)} hours on the paper's two V100s"]
    told += [
        f"{_hours(row.ms * (1 + row.overhead), steps)} on one {row.hardware}, if it gets its images in time"
        for row in bench
        if (row.model, row.batch_size, row.optimizer) == ("resnet50", 256, "grda")
    ]
    return ", ".join(told) + "."


def _hours(ms: float, steps: int) -> str:
    return f"{ms * steps / 3.6e6:.1f}"


def _costs(bench: list[MeasuredCost]) -> str:
    """Return the paper's table of wall time and memory, with our numbers beside it."""
    measured = {(row.model, row.batch_size, row.optimizer): row for row in bench}
    theirs = {(cost.model, cost.batch_size, cost.optimizer): cost for cost in published.costs()}
    rows = []
    for key, cost in theirs.items():
        model, batch_size, optimizer = key
        base = (model, batch_size, "sgd")
        row = [model, str(batch_size), optimizer]
        row += [f"{cost.ms:g}", f"{cost.ms / theirs[base].ms:.2f}", f"{cost.peak_mib:g}"]
        own = measured.get(key)
        if own is None:
            row += ["—", "", ""]
        else:
            ratio = f"{own.ms / measured[base].ms:.3f}" if base in measured else ""
            row += [f"{own.ms:.4g}", ratio, f"{own.peak_mib:.0f}" if own.peak_mib else "—"]
        rows.append(row)
    head = ["network", "batch", "optimizer", "paper: ms", "× SGD", "peak MiB", "ours: ms", "× SGD", "peak MiB"]
    origins: dict[str, list[str]] = {}
    for own in measured.values():
        origins.setdefault(f"{own.hardware}, torch {own.torch}, commit {own.commit}", []).append(own.model)
    told = [f"{', '.join(dict.fromkeys(models))}: {where}" for where, models in origins.items()]
    origin = f"Ours, {'; '.join(told)}." if told else "Ours are not measured yet; `dirprune bench` measures them."
    return "\n\n".join([table(head, rows), origin])
