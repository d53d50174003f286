"""What the commands show: bars and tables at a terminal, one JSON object a line elsewhere; messages go to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

INTERRUPTED = 130


def is_terminal() -> bool:
    return sys.stdout.isatty()


def say(message: str) -> None:
    """Tell the user something that is not a result."""
    typer.echo(message, err=True)


def emit(values: Mapping[str, Any]) -> None:
    """Print a result for a machine."""
    try:
        print(json.dumps(values), flush=True)
    except BrokenPipeError:  # the reader has seen enough; that is no reason to stop
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def clear_errors() -> Iterator[None]:
    """Show what the user can mend as one message, without a traceback; DIRPRUNE_TRACEBACK=1 shows that too."""
    try:
        with _clear_warnings():
            yield
    except Exception as error:
        ours = isinstance(error, ValueError | OSError) or _is_ours(type(error))
        if not ours or os.environ.get("DIRPRUNE_TRACEBACK") == "1":
            raise
        say(f"dirprune: {_message(error)}")
        raise typer.Exit(1) from None


@contextmanager
def _clear_warnings() -> Iterator[None]:
    """Show our own warnings as messages, without the line of code that gave them."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if _is_ours(category):
                say(f"dirprune: {message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show_warning
        yield


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("dirprune.")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table, on its side where it is too wide; the first ``left`` columns are words, the others numbers."""
    console = Console(width=None if is_terminal() else 200)
    upright = [columns, *rows]
    table = _table(title, upright, left)
    if _least_width(console, table) > console.width:
        table = _table(title, list(zip(*upright, strict=True)), 1)
        console.width = max(console.width, _least_width(console, table))  # better broken lines than lost numbers
    console.print(table)


def _table(title: str, lines: Sequence[Sequence[str]], left: int) -> Table:
    """Return the table of the lines, the first of which is the header; words and headers may be broken, numbers not."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", show_edge=False)
    for number, (header, *cells) in enumerate(zip(*lines, strict=True)):
        words = number < left
        least = 0 if words else max(map(len, cells), default=0)
        table.add_column(header, justify="left" if words else "right", min_width=least)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _least_width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum


class Interruption:
    """The first Ctrl-C asks for a stop at the next good moment, the second stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self, message: str) -> Iterator[Interruption]:
        """Listen for Ctrl-C; the first one says ``message``, if there is one."""

        def first(signum: int, frame: object) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if message:
                say(message)

        before = signal.signal(signal.SIGINT, first)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class _Clock(ProgressColumn):
    """The time left, or the time so far where the end is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return TimeElapsedColumn().render(task)
        return Text.assemble(TimeRemainingColumn().render(task), " left")


@contextmanager
def bar(description: str, total: float | None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar at a terminal; gives ``advance(count, note="…", total=…, restart="new description")``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        _Clock(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    # Results must reach stdout, which may be a file while the bar is at a terminal.
    with Progress(*columns, console=console, disable=hidden, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(description, total=total, note="")

        def advance(
            count: float = 1, note: str | None = None, total: float | None = None, restart: str | None = None
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
