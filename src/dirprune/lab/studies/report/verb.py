"""The command that shows runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dirprune.lab.cli.console import clear_errors
from dirprune.lab.cli.output import HtmlOption, JsonOption, Output

app = typer.Typer()


@app.command()
def report(
    run: Annotated[
        list[Path], typer.Argument(help="Run directories; those that differ only in the seed are averaged.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figures.", show_default="RUN/figures; runs/report")
    ] = None,
    html: HtmlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side: table, curves, layerwise sparsity."""
    with clear_errors():
        from dirprune.lab.records.columns import cells
        from dirprune.lab.studies.report import figures
        from dirprune.lab.studies.report import report as reports

        output, found, paths = Output(as_json), reports.report(run), []
        output.rows("Runs", found.cells, left=2, spare=reports.SPARE)  # before the figures, which may fail
        for note in found.notes:
            output.tell(note)
        if found.signs:
            output.rows("Signs after the same epochs", [cells(row) for row in found.signs], left=2)
        out = out or (None if len(run) == 1 else Path("runs/report"))
        try:
            paths = figures.draw(found, out)
            if html:
                from dirprune.lab.cli.page_of_runs import page_of_runs, write_with_progress

                paths.append(write_with_progress(page_of_runs(found), figures.folder(found, out) / "report.html"))
        finally:
            output.record({**found.to_dict(), "figures": [str(path) for path in paths]})
        if len(run) == 1 and (networks := found.layers):
            ((label, (zeros,)),) = networks[next(iter(networks))].items()
            output.tell(f"\nLayer by layer, {label}:\n\n{zeros}\n")
        for path in paths:
            output.tell(f"{'page' if path.suffix == '.html' else 'figure'}: {path}")
