"""The page of `dirprune compare --html`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dirprune.lab.cli.page_of_runs import exported, file_cells
from dirprune.lab.pages.origin import came_from, distinct
from dirprune.lab.pages.page import Page, Picture, Section, Table
from dirprune.lab.studies.comparison import tables as comparison
from dirprune.lab.studies.comparison.rows import Ended, Row
from dirprune.lab.studies.comparison.tables import PairRow, RankRow
from dirprune.lab.studies.comparison.tradeoff import Level
from dirprune.lab.studies.deployment.export import Exported
from dirprune.lab.text import NOTHING, duration
from dirprune.lab.training import runs

_FEW = 20  # rows of a table that nobody has to open
_CAPTIONS = {
    "tradeoff": "Score and sparsity; error bars are standard deviations over seeds",
    "tradeoff-macs": "Score and the multiplications that the zeros save",
}


def page_of_comparison(
    found: Sequence[Ended], out: Path, levels: Sequence[Level], differences: Sequence[PairRow]
) -> Page:
    """Return the page of the runs of a comparison that have ended: ranking, figures, every run, where it comes from."""
    members = [runs.load(config.parent).read() for config in sorted((out / "runs").glob("*/config.json"))]
    files = {folder.name: told for folder, told in exported(members).items()}
    ranked = comparison.ranking(found, levels)
    tables = [Table([_standing(row) for row in ranked if row.is_at(level)], f"At {level.title}") for level in levels]
    if differences:
        tables.append(Table([row.cells() for row in differences], "Seed by seed", left=2))
    drawings = comparison.figures(found, levels)
    pictures = {name: _picture(name, draw) for name, draw in drawings.items()}
    shared = distinct(each.row.recipe for each in found)
    told = {
        "recipe": shared,
        "seeds": distinct(sorted({each.row.seed for each in found})),
        "commit": distinct(each.row.commit for each in found),
        "hardware": distinct(each.row.device for each in found),
    }
    every = [_cells(each.row, files.get(each.row.run)) for each in found]
    return Page(
        f"Pruning methods on {', '.join(shared)}",
        f"{len(found)} runs of {len(distinct(each.row.method for each in found))} methods.",
        [
            Section(
                "Ranking",
                pictures=[pictures[name] for name in _CAPTIONS if name in pictures],
                tables=tables,
                notes=comparison.notes(found),
            ),
            Section("Layers", pictures=[each for name, each in pictures.items() if name not in _CAPTIONS]),
            Section("Runs", tables=[Table(every, f"All {len(every)}", left=2, folded=len(every) > _FEW)]),
            came_from([session for run in members for session in run.sessions], told),
        ],
    )


def _picture(name: str, draw: Callable[[], Figure]) -> Picture:
    if name in _CAPTIONS:
        return Picture(_CAPTIONS[name], draw)
    nearest = f"Zeros of each layer in the runs nearest to {float(name.removeprefix('layers-')):.1%}"
    return Picture(nearest, draw, narrows=False, folded=True)


def _standing(row: RankRow) -> dict[str, str]:
    """Return a row of the ranking with its method first and its source last, so that a phone shows the numbers."""
    cells = row.cells()
    source = cells.pop("from")
    return {"method": cells.pop("method"), **cells, "from": source}


def _cells(row: Row, file: Exported | None) -> dict[str, str]:
    """Return what a run reached, as text by column."""
    return {
        "method": row.title,
        "setting": row.setting or NOTHING,
        "seed": str(row.seed),
        row.measure.title: f"{row.score:.{row.measure.digits}f}",
        "weight sparsity (%)": f"{100 * row.sparsity:.2f}",
        "MACs left (%)": NOTHING if row.macs_left != row.macs_left else f"{100 * row.macs_left:.2f}",
        **file_cells([file] if file else []),
        "took": duration(row.seconds),
        "diverged": row.diverged or NOTHING,
    }
