"""What the commands show: bars and tables at a terminal, one JSON object a line elsewhere; messages go to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

INTERRUPTED = 130


def is_terminal() -> bool:
    return sys.stdout.isatty()


def say(message: str) -> None:
    """Tell the user something that is not a result."""
    typer.echo(message, err=True)


def emit(values: Mapping[str, Any]) -> None:
    """Print a result for a machine."""
    print(json.dumps(values), flush=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Show what the user can mend as one message, without a traceback; DIRPRUNE_TRACEBACK=1 shows that too."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("dirprune.")
        if not ours or os.environ.get("DIRPRUNE_TRACEBACK") == "1":
            raise
        say(f"dirprune: {_message(error)}")
        raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table; the first ``left`` columns are words, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=number >= left)
    for row in rows:
        table.add_row(*row)
    Console(width=None if is_terminal() else 200).print(table)


class Interruption:
    """The first Ctrl-C asks for a stop at the next good moment, the second stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self, message: str) -> Iterator[Interruption]:
        def first(signum: int, frame: object) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            say(message)

        before = signal.signal(signal.SIGINT, first)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def bar(description: str, total: int | None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar at a terminal; gives ``advance(count, note="…", total=…, restart="new description")``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(description, total=total, note="")

        def advance(
            count: float = 1, note: str | None = None, total: int | None = None, restart: str | None = None
        ) -> None:
            if restart is not None:
                progress.reset(task, description=restart, note="")
            changes: dict[str, Any] = {"advance": count}
            if note is not None:
                changes["note"] = note
            if total is not None:
                changes["total"] = total
            progress.update(task, **changes)

        yield advance


def integers(option: str, text: str) -> list[int]:
    """Read an option like 0,10,100."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of numbers; write e.g. 0,10,100") from None
