"""Drive work that reports its progress, under a progress bar and an interruption that leaves it resumable."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dirprune.lab.cli.console import INTERRUPTED, Interruption, bar, say
from dirprune.lab.cli.output import Output

CONTINUE = "Stopped; run the same command to continue."

OutOption = Annotated[
    Path, typer.Option(help="Folder for tables and figures; run again with the same folder to continue.")
]


def drive(verb: str, steps: Any, interruption: Interruption, output: Output, *, after: str = "product") -> list[Any]:
    """Run a generator of progress and rows with a progress bar, and return the rows.

    Closing the generator saves its progress. It can be interrupted after each step, which messages call ``after``.
    """
    from dataclasses import asdict

    from dirprune.lab.progress import Progress

    rows: list[Any] = []
    with interruption.listening(after), closing(steps), bar(verb, total=None) as advance:
        what, done = "", 0
        for step in steps:
            if not isinstance(step, Progress):
                rows.append(step)
                advance(0, note=f"{len(rows)} measured")
                output.record(asdict(step))
            else:
                if step.what != what:
                    what, done = step.what, 0
                    advance(0, restart=what, unit=step.unit, total=step.total)
                advance(step.done - done, note=step.note)
                done = step.done
            if interruption():
                stop(interruption)
    return rows


def stop(interruption: Interruption) -> NoReturn:
    """Exit before the work is finished; the progress so far has been saved."""
    say(CONTINUE)
    raise typer.Exit(INTERRUPTED if interruption.asked else 0)
