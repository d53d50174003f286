"""What the commands show: bars and tables at a terminal, one JSON object a line elsewhere; messages go to stderr."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from rich.table import Column, Table
from rich.text import Text

INTERRUPTED = 130
QUIET = 10.0  # seconds without a word, where no bar is seen


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
def clear_errors(stopped: str = "Stopped.") -> Iterator[None]:
    """Show what the user can mend as one message, without a traceback; DIRPRUNE_TRACEBACK=1 shows that too.

    Ctrl-C, where nobody else listens for it, says ``stopped``.
    """
    try:
        with _clear_warnings():
            yield
    except KeyboardInterrupt:
        say(stopped)
        raise typer.Exit(INTERRUPTED) from None
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
    """Print a table, on its side where it is too wide and that is narrower.

    The first ``left`` columns are words, the others numbers.
    """
    console = Console(width=None if is_terminal() else 200)
    upright = [columns, *rows]
    width = partial(_least_width, console)
    table = _table(title, upright, left)
    if width(table) > console.width:
        table = min(table, _table(title, list(zip(*upright, strict=True)), 1), key=width)
        console.width = max(console.width, width(table))  # better broken lines than lost numbers
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


class _Note(ProgressColumn):
    """What there is to say besides, cut where the terminal is too narrow for it."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def _columns(width: int, unit: str) -> list[ProgressColumn]:
    """Return the columns of a bar; where they do not fit, the note gives way, then the bar, but never the numbers."""
    return [
        TextColumn("{task.description}"),
        BarColumn(bar_width=min(40, width // 8)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(unit),
        _Clock(table_column=Column(no_wrap=True)),
        _Note(),
    ]


@contextmanager
def bar(description: str, total: float | None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar at a terminal, and elsewhere a line every ten seconds.

    Gives ``advance(count, note="…", total=…, restart="new description")``.
    """
    console = Console(stderr=True)
    hidden = not console.is_terminal
    columns = _columns(console.width, unit)
    spoken = time.monotonic()
    # Results must reach stdout, which may be a file while the bar is at a terminal.
    with Progress(*columns, console=console, disable=hidden, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(description, total=total, note="")

        def advance(
            count: float = 1, note: str | None = None, total: float | None = None, restart: str | None = None
        ) -> None:
            nonlocal spoken
            if restart is not None:
                progress.reset(task, description=restart, note="")
            changes: dict[str, Any] = {"advance": count}
            if note is not None:
                changes["note"] = note
            if total is not None:
                changes["total"] = total
            progress.update(task, **changes)
            if hidden and time.monotonic() - spoken >= QUIET:
                say(_line(progress.tasks[task], unit))
                spoken = time.monotonic()

        yield advance


def _line(task: Task, unit: str) -> str:
    """Return a bar in words: "epoch 5: 12/300 products, residual 1.9e-04"."""
    numbers = [task.completed] if task.total is None else [task.completed, task.total]
    counted = f"{'/'.join(f'{round(number, 1):.10g}' for number in numbers)} {unit}".rstrip()
    return f"{task.description}: {', '.join(filter(None, (counted, task.fields['note'])))}"


def integers(option: str, text: str) -> list[int]:
    """Read an option like 0,10,100."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of numbers; write e.g. 0,10,100") from None
