"""The command that demonstrates the theorem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dirprune.lab.cli.console import bar, clear_errors
from dirprune.lab.cli.output import JsonOption, Output

app = typer.Typer()


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="Folder for the table and the figures.")] = Path("runs/theory"),
    figures: Annotated[Path | None, typer.Option(help="Folder for the figures.", show_default="--out")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Random problems to average over.")] = 20,
    runs: Annotated[int, typer.Option(min=2, help="Simulated runs for the limit law.")] = 4000,
    seed: Annotated[int, typer.Option(help="Random seed for the problems and the noise.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Demonstrate the theorem: gRDA approaches directional pruning as the learning rate falls. Under a minute."""
    with clear_errors():
        from dataclasses import asdict

        from dirprune.lab import plots
        from dirprune.lab.records.columns import cells
        from dirprune.lab.records.tables import write_rows
        from dirprune.lab.studies.theorem import figures as drawing
        from dirprune.lab.studies.theorem import work

        output, pictures = Output(as_json), figures or out
        for folder in (out, pictures):
            folder.mkdir(parents=True, exist_ok=True)  # fail before the work if it cannot be written
        events: list[work.Event] = []
        with bar("theory", total=work.FINDINGS) as advance:
            for event in work.study(problems=problems, runs=runs, seed=seed):
                events.append(event)
                if isinstance(event, work.Finding):
                    advance(1, note=f"{event.part}, γ={event.row.gamma:g}")
                    output.record({"part": event.part, **asdict(event.row)})
        findings = [event for event in events if isinstance(event, work.Finding)]
        write_rows(out / "theory.csv", work.TheoryValue, work.values(findings, seed=seed))
        for name, figure in drawing.figures(events).items():
            plots.save(figure, pictures / f"theory-{name}.png")
        for part in dict.fromkeys(finding.part for finding in findings):
            rows = [cells(finding.row) for finding in findings if finding.part == part]
            output.rows(part, rows, left=0, spare=work.SPARE)
        folders = f"{out}, {figures}" if figures else str(out)
        output.tell(f"Numbers and figures: {folders}. They are explained in docs/theory.md of the repository.")
