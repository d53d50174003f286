"""The page of `dirprune report --html`, put together from what several studies know about runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dirprune import SparsityReport
from dirprune.lab.cli.console import bar
from dirprune.lab.pages.origin import came_from, distinct
from dirprune.lab.pages.page import Page, Picture, Section, Table, write
from dirprune.lab.records import provenance
from dirprune.lab.records.checkpoint import CorruptCheckpoint
from dirprune.lab.records.columns import cells
from dirprune.lab.records.tables import read_rows
from dirprune.lab.stats import Spread
from dirprune.lab.studies.deployment.export import Exported, export
from dirprune.lab.studies.deployment.speed import Latency
from dirprune.lab.studies.report.figures import figures
from dirprune.lab.studies.report.report import Group, Report
from dirprune.lab.text import NOTHING
from dirprune.lab.training.runs import History

_FEW = 4  # settings that stand side by side on a phone
_CAPTIONS = {
    "curves": "Training: a thin line for each seed, their mean, and a band of one standard deviation",
    "signs": "Signs of the weights: how many change in an epoch, and how many of gRDA's are not SGD's",
    "layers": "Zeros of each layer, in the order of the network",
}


def page_of_runs(report: Report) -> Page:
    """Return the page of a report: what was reached, curves, layers, what would be shipped, and where it comes from."""
    members = [run for group in report.groups for run in group.runs]
    files = exported(members)
    names = list(dict.fromkeys(run.recipe.name for run in members))
    title = report.groups[0].label if len(report.groups) == 1 else f"{len(report.groups)} settings"
    networks = ", ".join(dict.fromkeys(run.recipe.model for run in members))
    seeds = f"{len(members)} run{'s' * (len(members) > 1)}"
    drawings = [Picture(_caption(name), draw) for name, draw in figures(report).items()]
    curves = [each for each in drawings if not each.title.startswith(_CAPTIONS["layers"])]
    return Page(
        f"{title} on {', '.join(names)}" if len(report.groups) == 1 else f"{title} of {', '.join(names)}",
        f"Network {networks}, {seeds}. Accuracy and loss are measured on {report.tested_on} data.",
        [
            _summary(report, files),
            *([Section("Training", pictures=curves)] if curves else []),
            *([_layers(report, [each for each in drawings if each not in curves])] if report.layers else []),
            *_speed(members),
            came_from([session for run in members for session in run.sessions], _of_recipes(report.groups)),
        ],
    )


def write_with_progress(page: Page, path: Path) -> Path:
    """Write a page to a file, and return its path."""
    with bar("drawing the page", len(page.pictures), unit="figures") as advance:
        return write(page, path, advance)


def exported(members: Sequence[History]) -> dict[Path, Exported]:
    """Return what `dirprune export` would write of each run; a run without a sound checkpoint is left out."""
    found = {}
    with TemporaryDirectory() as folder, bar("measuring files", len(members), unit="runs") as advance:
        for run in members:
            with suppress(FileNotFoundError, CorruptCheckpoint, ValueError):
                found[run.folder] = export(run.run, Path(folder) / "network.safetensors", force=True)
            advance()
    return found


def file_cells(files: Sequence[Exported]) -> dict[str, str]:
    """Return the mean size of files, and how many times smaller than dense they are."""
    if not files:
        return {"file (kB)": NOTHING, "times smaller": NOTHING}
    size, dense = (Spread.of(each).mean for each in zip(*((f.file_bytes, f.dense_bytes) for f in files), strict=True))
    return {"file (kB)": f"{size / 1e3:,.1f}", "times smaller": f"{dense / size:.1f}"}


def _caption(name: str) -> str:
    kind, _, network = name.partition("-")
    return f"{_CAPTIONS[kind]}{f': {network}' if network else ''}"


def _summary(report: Report, files: Mapping[Path, Exported]) -> Section:
    """Return tiles for a single setting, a table for several."""
    rows = []
    for group, told in zip(report.groups, report.cells, strict=True):
        kept = {name: value for name, value in told.items() if name not in ("recipe", "setting", "epochs", "seeds")}
        own = file_cells([files[run.folder] for run in group.runs if run.folder in files])
        rows.append({"setting": group.label, **kept, **own, "epochs": told["epochs"], "seeds": told["seeds"]})
    whole = Table(rows)
    signs = [Table([cells(row) for row in report.signs], "Signs after the same epochs", left=2)] if report.signs else []
    if len(rows) == 1:
        tiles = {name: rows[0][name] for name in whole.columns[1:]}
        return Section("What was reached", tiles, tables=signs, notes=report.notes)
    table = whole.turned() if len(rows) <= _FEW else whole
    return Section("What was reached", tables=[table, *signs], notes=report.notes)


def _layers(report: Report, pictures: Sequence[Picture]) -> Section:
    tables = [
        Table(_layer_rows(seeds), f"{network}: {label}", folded=True)
        for network, labels in report.layers.items()
        for label, seeds in labels.items()
    ]
    return Section("Layers", pictures=pictures, tables=tables)


def _layer_rows(seeds: Sequence[SparsityReport]) -> list[dict[str, str]]:
    """Return the layers of a network, with means over seeds."""
    rows = []
    for layers in zip(*(seed.layers for seed in seeds), strict=True):
        layer, zeros = layers[0], Spread.of([each.fraction for each in layers])
        empty = [each.zero_output_channels for each in layers if each.zero_output_channels is not None]
        rows.append(
            {
                "layer": layer.name,
                "shape": "×".join(map(str, layer.shape)) or "scalar",
                "zeros (%)": zeros.text(2, scale=100),
                "left": f"{layer.total * (1 - zeros.mean):,.0f}",
                "of": f"{layer.total:,}",
                "MACs left": f"{layer.cost * (1 - zeros.mean):,.0f}" if layer.cost else NOTHING,
                "of MACs": f"{layer.cost:,.0f}" if layer.cost else NOTHING,
                "empty channels": f"{sum(empty) / len(empty):g} of {layer.output_channels}" if empty else NOTHING,
            }
        )
    return rows


def _speed(members: Sequence[History]) -> list[Section]:
    """Return what `dirprune speed` measured of the runs and noted in their folders."""
    rows, sessions = [], []
    for run in members:
        found = read_rows(run.folder / "speed" / "speed.csv", Latency)
        rows += [{"run": run.folder.name, **cells(row)} for row in found]
        sessions += provenance.sessions(run.folder / "speed")
    hardware = {"hardware": distinct(session.device for session in sessions)}
    return [Section("Speed", tables=[Table(rows, left=2)], facts=hardware if sessions else None)] if rows else []


def _of_recipes(groups: Sequence[Group]) -> dict[str, Sequence[str]]:
    return {
        "runs": [str(run.folder) for group in groups for run in group.runs],
        "settings": [group.label for group in groups],
        "seeds": distinct(sorted({run.recipe.seed for group in groups for run in group.runs})),
    }
