"""Progress of runs that train at the same time: one line for each that trains, and one for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import TaskID

from dirprune.lab.cli import console


@contextmanager
def lines(titles: Sequence[str], epochs: Sequence[int]) -> Iterator[Callable[..., None]]:
    """Show bars on a terminal, or print them every ten seconds elsewhere.

    Yields ``show(index, epoch, note, ended=…)``, with the index of a run among the titles.
    """
    spoken = time.monotonic()
    reached: dict[int, int] = {}
    training: dict[int, TaskID] = {}
    with console.drawing() as progress:
        everything = progress.add_task("", total=sum(epochs), note="", unit="epochs")

        def show(index: int, epoch: int, note: str, *, ended: bool) -> None:
            nonlocal spoken
            first = index not in reached
            reached[index] = epoch
            if first and epoch:  # trained before: it says nothing about the time left
                progress.reset(everything, completed=sum(reached.values()))
            if ended and index in training:
                progress.remove_task(training.pop(index))
            elif not ended and index not in training:
                training[index] = progress.add_task(titles[index], total=epochs[index], note=note, unit="epochs")
            if index in training:
                progress.update(training[index], completed=epoch, note=note)
            done, waiting = len(reached) - len(training), len(titles) - len(reached)
            described = f"{done} of {len(titles)} runs done, {waiting} waiting"
            progress.update(everything, description=described, completed=sum(reached.values()))
            if progress.disable and time.monotonic() - spoken >= console.QUIET:
                every, *each = progress.tasks
                left = "" if every.time_remaining is None else f", {timedelta(seconds=every.time_remaining)} left"
                console.say("\n  ".join([f"{console.line(every)}{left}", *map(console.line, each)]))
                spoken = time.monotonic()

        yield show
