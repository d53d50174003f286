"""Train runs with a progress display: handle Ctrl-C, write event files, and say what to do next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import typer

from dirprune._support.atomic import named
from dirprune.lab.cli.console import INTERRUPTED, Interruption, bar, say
from dirprune.lab.cli.lines import lines
from dirprune.lab.cli.output import Output
from dirprune.lab.data.loader import Batch, Loader
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.processes import Process, joined
from dirprune.lab.training.runs import Run, load
from dirprune.lab.training.surroundings import Surroundings

TICKS = 16
"""Updates of the bar per epoch; a power of two, so that the parts of an epoch add up to exactly one."""


def follow(
    run: Run | Callable[[], Run],
    *,
    device: str,
    root: Path | None = None,
    save_every: int | None = None,
    tensorboard: bool = False,
    minutes: float | None = None,
    keep_going: bool = False,
    title: str = "",
    output: Output | None = None,
) -> None:
    """Train a run with a progress bar, until it ends, Ctrl-C is pressed or the time is up.

    Args:
        run: the run, or a function that creates it (called in the first process only).
        device: "cpu", "cuda" or "auto".
        root: where the data are.
        save_every: epochs between checkpoints.
        tensorboard: also write event files into the run.
        minutes: save and stop after this many minutes.
        keep_going: train on even if nothing can recover.
        title: the title of the bar; the recipe's name if empty.
        output: where the results go; without it, nothing but the bar is shown.
    """
    interruption = Interruption(minutes)
    with joined(device_of(device)) as (process, where):
        first, is_new = process.is_first, not isinstance(run, Run)
        found = _shared(run, process)
        try:
            here = Surroundings(where, root, process, save_every, stopping=interruption, keep_going=keep_going)
            _train(found, here, interruption, tensorboard and first, title, output)
            stopped = first and not _conclude(found, output, is_new, process)
            if stopped and (interruption.asked or not interruption.late):  # or another process got the signal
                raise typer.Exit(INTERRUPTED)
        finally:
            if first and is_new and not found.begun:
                found.discard()  # so that the same command works once the cause is fixed


def _train(
    run: Run, here: Surroundings, interruption: Interruption, tensorboard: bool, title: str, output: Output | None
) -> None:
    first = here.process.is_first
    with interruption.listening(quietly=not first), _bar(run, title, first) as advance, _board(run, tensorboard) as log:
        records = conduct(run, replace(here, watch=lambda loader: _Watched(loader, advance)))
        with suppress(KeyboardInterrupt):  # the second one
            for record in records:
                advance(0, note=f"accuracy {record.test_accuracy:.2f}%, {record.sparsity:.1%} zero")
                log(record)
                if first and output:
                    output.record(record.to_dict())


class SeriesStep(Protocol):
    """Progress of a series: run ``number``, counted from 1, after ``epoch`` epochs, and whether it has ended."""

    @property
    def number(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def note(self) -> str: ...
    @property
    def ended(self) -> bool: ...


Taken = TypeVar("Taken", bound=SeriesStep)


def follow_series(
    steps: Iterable[Taken],
    titles: Sequence[str],
    epochs: Sequence[int],
    interruption: Interruption,
    *,
    ended: Callable[[Taken], None],
    several: bool = False,
) -> None:
    """Train a series of runs with a progress display, until it ends, Ctrl-C is pressed or the time is up.

    Args:
        steps: the steps from `dirprune.lab.training.series` or `dirprune.lab.studies.comparison.work`.
        titles: the title of the bar for each run.
        epochs: the number of epochs of each run.
        interruption: tells when to stop; ``steps`` must use the same one.
        ended: called for every run that has ended.
        several: whether they train at the same time; each that trains then has a line of its own.
    """
    count = 0
    follows = _together if several else _in_turn
    with (
        interruption.listening(),
        suppress(KeyboardInterrupt),  # the second one
        closing(follows(steps, titles, epochs)) as followed,
    ):
        for step in followed:
            if step.ended:
                count += 1
                ended(step)
    if count < len(titles):
        say(f"Stopped; {count} of {len(titles)} runs are complete. Run the same command to continue.")
    if interruption.asked:
        raise typer.Exit(INTERRUPTED)


def _in_turn(steps: Iterable[Taken], titles: Sequence[str], epochs: Sequence[int]) -> Generator[Taken]:
    """Pass on the steps of runs that train one after the other, under the bar of the one that trains."""
    number = done = 0
    with bar("", total=None, unit="epochs") as advance:
        for step in steps:
            if step.number != number:
                number, done = step.number, 0
                advance(0, restart=f"[{number}/{len(titles)}] {titles[number - 1]}", total=epochs[number - 1])
            advance(step.epoch - done, note=step.note)
            done = step.epoch
            yield step


def _together(steps: Iterable[Taken], titles: Sequence[str], epochs: Sequence[int]) -> Generator[Taken]:
    """Pass on the steps of runs that train at the same time, under a line for each that trains and one for all."""
    with lines(titles, epochs) as show:
        for step in steps:
            show(step.number - 1, step.epoch, step.note, ended=step.ended)
            yield step


def surroundings(
    device: str, root: Path | None, stopping: Callable[[], bool], at_once: int | None, cluster: str | None
) -> Surroundings:
    """Return where to train several runs: here, or on a cluster, which is joined."""
    if cluster is None:
        return Surroundings(device_of(device), root, stopping=stopping, at_once=at_once)
    from dirprune.lab.training.cluster import connect

    there = connect(cluster, device)
    return Surroundings(there, root and root.absolute(), stopping=stopping, at_once=at_once, cluster=cluster)


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is not a device; give cpu, cuda or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: training runs on cpu and cuda; give one of them, or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no CUDA device here; give --device cpu")
    return device


@dataclass(frozen=True)
class _Watched:
    """A loader whose training batches advance a progress bar."""

    loader: Loader
    advance: Callable[..., None]

    @property
    def examples(self) -> int:
        return self.loader.examples

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        total, told = len(self), 0
        for number, batch in enumerate(self.loader.epoch(epoch), start=1):
            yield batch
            ticks = TICKS * number // total
            if ticks > told:
                self.advance((ticks - told) / TICKS)
                told = ticks


@contextmanager
def _bar(run: Run, title: str, show: bool) -> Iterator[Callable[..., None]]:
    """Show a bar of the run's epochs if ``show``, and yield its ``advance``."""
    if not show:
        yield lambda *_, **__: None
        return
    with bar(title or run.recipe.name, total=run.recipe.epochs, unit="epochs") as advance:
        advance(run.saved)
        yield advance


@contextmanager
def _board(run: Run, wanted: bool) -> Iterator[Callable[[EpochRecord], None]]:
    """Write TensorBoard event files, if wanted."""
    if not wanted:
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / "tensorboard"
    with named(folder):
        writer: Any = SummaryWriter(str(folder), purge_step=1)  # replaces the events of earlier sessions

    def log(record: EpochRecord) -> None:
        with named(folder):
            for name, value in record.to_dict().items():
                if name != "epoch":
                    writer.add_scalar(name, value, record.epoch)
            writer.flush()

    try:
        for record in run.records():  # a killed session may lack the events of epochs that it saved
            if record.epoch <= run.saved:
                log(record)
        yield log
    finally:
        writer.close()


def _shared(run: Run | Callable[[], Run], process: Process) -> Run:
    """Create the run in the first process, and open it in the others."""
    if isinstance(run, Run):
        return run
    made: Run | None = None
    try:
        made = run() if process.is_first else None
    finally:
        folder = process.tell(str(made.folder) if made else "")
    if not folder:  # the first process reports the error
        raise typer.Exit(1)
    return made or load(Path(folder))


def _launcher(process: Process) -> tuple[str, str]:
    """Return the words that introduce the command to continue with as many processes, and how that command begins."""
    if process.world_size == 1:
        return "Continue with", "dirprune"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size))
    if here < process.world_size:  # only the user knows the options that connect the nodes
        return "Continue on every node, with torchrun's options as before", "torchrun … -m dirprune"
    return "Continue with", f"torchrun --nproc-per-node {here} -m dirprune"


def _conclude(run: Run, output: Output | None, is_new: bool, process: Process) -> bool:
    """Print the state of the run and what to do next; return whether it has ended."""
    if is_new and not run.begun:
        say("Stopped before the end of the first epoch; nothing is kept.")
        return False
    if run.saved < run.recipe.epochs:
        how, program = _launcher(process)
        say(f"Stopped; saved up to epoch {run.saved} of {run.recipe.epochs}{_so_far(run)}. {how}:")
        trust = " --trust" if run.recipe.code else ""
        say(f"    {program} resume {shlex.quote(str(run.folder))}{trust}")
        return False
    if output is None:
        return True
    records = run.records()
    if not records:
        raise ValueError(
            f"{run.folder}: all {run.recipe.epochs} epochs are done, but metrics.jsonl has no record of them; restore "
            "it from a copy, or train again with another --out"
        )
    last = records[-1]
    what = "validation" if run.recipe.task.validation else "test"
    outcome = run.outcome()
    left = outcome.zeros.cost_left_fraction if outcome and outcome.zeros else None
    macs = "" if left is None else f", {left:.2%} of the multiplications are left"
    output.tell(
        f"{run.folder}: epoch {last.epoch} of {run.recipe.epochs}, {what} accuracy {last.test_accuracy:.2f}%, "
        f"{last.sparsity:.2%} of all parameters are zero{macs}. See it with:"
    )
    output.tell(f"    dirprune report {shlex.quote(str(run.folder))}")
    if run.recipe.optimizer.decides:
        for line in _remarks_on_zeros(run, last):
            say(line)
    return True


def _so_far(run: Run) -> str:
    """Return how many zeros there are of those that were asked for, if they were."""
    asked, records = vars(run.recipe.optimizer).get("sparsity"), run.records()
    if asked is None or not records:
        return ""
    return f", {records[-1].weight_sparsity:.1%} of the weights zero so far (target {asked:.1%})"


def _remarks_on_zeros(run: Run, last: EpochRecord) -> Iterator[str]:
    """Yield a remark if layers have no weight left, so that the network may compute nothing any more."""
    outcome = run.outcome()
    layers = outcome.zeros.layers if outcome and outcome.zeros else ()
    gone = [layer.name for layer in layers if layer.is_weight and layer.zeros == layer.total > 0]
    knob, lr = run.recipe.optimizer.knob, run.recipe.optimizer.lr
    knobs = f"--{knob} ({run.recipe.optimizer.value:g}) or --lr ({lr:g})"
    if last.weight_sparsity == 1:
        yield f"Every weight is zero: the threshold grew past all of them. Lower {knobs}."
    elif gone:
        names = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        yield f"No weight is left in {names}: such a layer passes nothing on, unless a shortcut leads around it."
        yield f"If the accuracy has suffered, lower {knobs}."
