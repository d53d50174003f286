"""Output of the commands: bars and tables on a terminal, JSON lines otherwise; messages go to stderr."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
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
from rich.table import Column
from rich.text import Text

from dirprune.lab.text import printable

INTERRUPTED = 130
QUIET = 10.0  # seconds between progress lines where no bar can be drawn


def say(message: str) -> None:
    """Print a message, which is not a result, to stderr."""
    # Not typer.echo: it would bypass the redirection of sys.stderr that keeps a progress bar below the messages.
    try:
        message = printable(message)
        print(wrapped(message) if sys.stderr.isatty() else message, file=sys.stderr, flush=True)
    except BrokenPipeError:  # the reader is gone, e.g. because a signal stopped the whole pipeline
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def say_once(message: str) -> None:
    """Print a message from the first of the processes that torchrun started only."""
    if os.environ.get("RANK", "0") == "0":
        say(message)


def wrapped(text: str) -> str:
    """Wrap a text to the width of the terminal. A line indented by four is a command, and is not broken."""
    width = max(Console(stderr=True).width, 20)
    return "\n".join(line if line.startswith("    ") else _fill(line, width) for line in text.split("\n"))


def _fill(line: str, width: int) -> str:
    hanging = 2 * (len(line) - len(line.lstrip())) * " "
    return textwrap.fill(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


@contextmanager
def clear_errors(stopped: str = "Stopped.") -> Iterator[None]:
    """Show errors that the user can fix as one message. DIRPRUNE_TRACEBACK=1 shows the traceback as well.

    A Ctrl-C that nothing else handles prints ``stopped``.
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
    """Show our own warnings as messages, without the source line that issued them."""
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


_REMEDIES = {
    **dict.fromkeys(("EACCES", "EPERM", "EEXIST", "ENOTDIR", "EROFS"), "; choose another folder"),
    **dict.fromkeys(("ENOENT", "ENAMETOOLONG"), "; name one that exists or can be made"),
    **dict.fromkeys(("ENOSPC", "EDQUOT"), "; make room, or choose another folder"),
    "EFBIG": "; raise the limit on the size of files (ulimit -f)",
}


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        known = errno.errorcode.get(error.errno or 0, "")
        # If we replaced the system's message by our own, that already contains the remedy.
        closed = known in ("EACCES", "EPERM") and os.path.isfile(error.filename or "")
        usual = "; change its permissions, e.g. with chmod u+rw" if closed else _REMEDIES.get(known, "")
        remedy = usual if error.strerror.startswith(os.strerror(error.errno or 0)) else ""
        named = f": {_shortened(str(error.filename))}" if error.filename else ""
        return f"{error.strerror}{named}{remedy if error.filename else ''}"
    return str(error)


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class Interruption:
    """Tells when to stop: after Ctrl-C, after a scheduler's SIGTERM, or when the time is up.

    A second Ctrl-C stops immediately. A second SIGTERM is ignored, because torchrun and timeout send it twice; use
    SIGKILL to stop immediately.
    """

    def __init__(self, minutes: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise ValueError(f"--minutes {minutes:g} leaves no time to train; give more than 0, or omit it")
        self.asked = False
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def __call__(self) -> bool:
        return self.asked or self.late

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    @contextmanager
    def listening(self, after: str = "epoch", *, quietly: bool = False) -> Iterator[Interruption]:
        """Handle the signals. The first prints ``after`` what the command stops, unless ``quietly``."""
        then: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_IGN}

        def first(signum: int, frame: object) -> None:
            self.asked = True
            for each, handler in then.items():
                signal.signal(each, handler)
            if not quietly:
                say(f"Stopping after this {after}; press Ctrl-C again to stop immediately.")

        before = {each: signal.signal(each, first) for each in then}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


class _Clock(ProgressColumn):
    """The time left, or the time elapsed if the total is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return TimeElapsedColumn().render(task)
        return Text.assemble(TimeRemainingColumn().render(task), " left")


class _Note(ProgressColumn):
    """The note at the end of a bar, cut if the terminal is too narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def _columns(width: int) -> list[ProgressColumn]:
    """Return the columns of a bar. If they do not fit, the note is shortened, then the bar, but never the numbers."""
    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=min(40, width // 8)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[unit]}"),
        _Clock(table_column=Column(no_wrap=True)),
        _Note(),
    ]


def drawing() -> Progress:
    """Return what draws bars; on a stream that is no terminal it is disabled."""
    console = Console(stderr=True)
    hidden = not console.is_terminal or console.is_dumb_terminal  # rich draws nothing there
    # Do not redirect stdout: it may be a file while the bar is on a terminal.
    return Progress(*_columns(console.width), console=console, disable=hidden, transient=True, redirect_stdout=False)


@contextmanager
def bar(description: str, total: float | None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal, or print a line every ten seconds elsewhere.

    Yields ``advance(count, note="…", total=…, restart="new description", unit="…")``.
    """
    spoken = time.monotonic()
    with drawing() as progress:
        task = progress.add_task(description, total=total, note="", unit=unit)

        def advance(count: float = 1, restart: str | None = None, **changes: Any) -> None:
            nonlocal spoken
            if restart is not None:
                progress.reset(task, description=restart, **{**progress.tasks[task].fields, "note": ""})
            given = {name: value for name, value in changes.items() if value is not None}
            progress.update(task, advance=count, **given)
            if progress.disable and time.monotonic() - spoken >= QUIET:
                say(line(progress.tasks[task]))
                spoken = time.monotonic()

        yield advance


def line(task: Task) -> str:
    """Return the state of a bar as text: "epoch 5: 12/300 products, residual 1.9e-04"."""
    numbers = [task.completed] if task.total is None else [task.completed, task.total]
    counted = f"{'/'.join(f'{round(number, 2):.10g}' for number in numbers)} {task.fields['unit']}".rstrip()
    return f"{task.description}: {', '.join(filter(None, (counted, task.fields['note'])))}"
