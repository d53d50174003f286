"""The command that demonstrates the theorem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dirprune.lab.cli.console import (
    bar,
    clear_errors,
)
from dirprune.lab.cli.output import JsonOption, Output
from dirprune.lab.text import NOTHING

app = typer.Typer()


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="Folder for the table and the figures.")] = Path("theory"),
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.", show_default="--out")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Random problems to average over.")] = 20,
    runs: Annotated[int, typer.Option(min=2, help="Simulated runs for the limit law.")] = 4000,
    seed: Annotated[int, typer.Option(help="Random seed for the problems and the noise.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Demonstrate the theorem: gRDA approaches directional pruning as the learning rate falls. Under a minute."""
    with clear_errors():
        from dataclasses import asdict

        from dirprune.lab.studies.theorem import work as theory_report

        output = Output(as_json)
        found: dict[str, list[dict[str, Any]]] = {}
        with bar("theory", total=theory_report.FINDINGS) as advance:
            for finding in theory_report.report(out, figures=figures, problems=problems, runs=runs, seed=seed):
                row = asdict(finding.row)
                found.setdefault(finding.part, []).append(row)
                advance(1, note=f"{finding.part}, γ={row['gamma']:g}")
                output.record({"part": finding.part, **row})
        for part, rows in found.items():
            cells = [[NOTHING if value is None else f"{value:.4g}" for value in row.values()] for row in rows]
            headers = [theory_report.HEADERS[name] for name in rows[0]]
            output.table(part, headers, cells, left=0, spare=theory_report.SPARE)
        folders = f"{out}, {figures}" if figures else str(out)
        output.tell(f"Numbers and figures: {folders}. They are explained in docs/theory.md of the repository.")
