"""The ledger: all runs so far, in two tidy files to which new runs are added.

ledger.csv          one row per run: its recipe, departures from it, finished epochs, hardware and versions
trajectories.csv    one row per epoch; ``run`` names its row of the ledger
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dirprune.lab.data import WHOLE
from dirprune.lab.records.columns import Column, Count, Number
from dirprune.lab.records.files import locked, write_text
from dirprune.lab.records.provenance import Session
from dirprune.lab.records.tables import as_text, read_rows
from dirprune.lab.training import runs
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.recipe import FREE_TO_CHANGE
from dirprune.lab.training.recipes import departures
from dirprune.lab.training.runs import History

CHOICES = {"name", "optimizer", "c", "mu", "seed"} | FREE_TO_CHANGE
"""Fields in which a run may differ and still follow its recipe: the axes of the published tables, and free fields."""


@dataclass(frozen=True)
class Entry:
    """A row of the ledger; c and μ are empty for SGD, ``departs`` for a run that follows its recipe.

    ``epochs`` is the configured length, on which the schedule depends. ``complete`` is "yes", "no" or "diverged".
    Values that differ between the sessions of a run are joined by semicolons; ``command`` and ``started`` are those of
    the first session.
    """

    run: str
    recipe: str
    optimizer: str
    c: float | None
    mu: float | None
    seed: int
    departs: str
    epochs_done: Count
    epochs: Number
    complete: Annotated[str, Column(valid=("yes", "no", "diverged"))]
    hardware: str
    torch: str
    commit: str
    command: str
    started: str


@dataclass(frozen=True)
class Origin:
    """The columns that identify the run of an epoch."""

    run: str
    dataset: str
    model: str
    optimizer: str
    c: float | None
    mu: float | None
    seed: int


@dataclass(frozen=True)
class Epoch(EpochRecord, Origin):
    """A row of trajectories.csv: the origin, then the epoch record with six significant digits."""


@dataclass(frozen=True)
class Recorded:
    """A run in the ledger, with its epochs."""

    entry: Entry
    epochs: tuple[Epoch, ...]


def collect(folders: Iterable[Path], results: Path) -> list[str]:
    """Add run directories to the ledger in ``results``, and return the names of the runs that were added or replaced.

    A run is identified by its recipe, optimizer, c, μ, seed and departures. If it is collected again, it replaces its
    rows, unless the ledger already holds more epochs of it. Collecting twice therefore changes nothing.
    """
    every = [_trajectory(runs.load(folder).read()) for folder in folders]
    with locked(results, wait=True):  # another job may collect at the same time
        known = {trajectory.entry.run: trajectory for trajectory in read(results)}
        taken = []
        for found in every:
            name = found.entry.run
            if name not in known or len(found.epochs) >= len(known[name].epochs):
                known[name] = found
                taken.append(name)
        # Epochs first: after a crash in between, a ledger entry without epochs would count as a trained run.
        epochs = [epoch for trajectory in known.values() for epoch in trajectory.epochs]
        tables = (results / "trajectories.csv", results / "ledger.csv")
        entries = [trajectory.entry for trajectory in known.values()]
        texts = as_text(tables[0], Epoch, epochs), as_text(tables[1], Entry, entries)  # both, before either is replaced
        for path, text in zip(tables, texts, strict=True):
            write_text(path, text)
    return taken


def read(results: Path) -> list[Recorded]:
    """Return all runs of the ledger; [] if there is no ledger yet."""
    epochs: dict[str, list[Epoch]] = {}
    for epoch in read_rows(results / "trajectories.csv", Epoch):
        epochs.setdefault(epoch.run, []).append(epoch)
    return [Recorded(entry, tuple(epochs.get(entry.run, ()))) for entry in read_rows(results / "ledger.csv", Entry)]


def _trajectory(run: History) -> Recorded:
    """Return the ledger entry and the epochs of a run."""
    run.run.check_known()
    recipe, options = run.recipe, run.recipe.values()
    c, mu = (float(f"{options[name]:g}") if name in options else None for name in ("c", "mu"))
    departs = " ".join(filter(None, [departures(recipe, CHOICES), _part_of_the_data(run)]))
    name = f"{recipe.name}/{recipe.optimizer.tag}/seed{recipe.seed} {departs}".rstrip()
    entry = Entry(
        run=name,
        recipe=recipe.name,
        optimizer=recipe.optimizer.name,
        c=c,
        mu=mu,
        seed=recipe.seed,
        departs=departs,
        epochs_done=len(run.records),
        epochs=recipe.epochs,
        complete=_ended(run),
        **_circumstances(run),
    )
    origin = (name, recipe.task.data, recipe.model, recipe.optimizer.name, c, mu, recipe.seed)
    return Recorded(entry, tuple(Epoch(*origin, **_rounded(record)) for record in run.records))


def _part_of_the_data(run: History) -> str:
    """Return "examples=20" for a run on part of its data set. Old runs did not record the number, and give ""."""
    whole = WHOLE.get(run.recipe.task.data)
    seen = {session.examples for session in run.sessions if session.examples is not None}
    if whole is None or run.recipe.task.validation or seen <= {whole}:
        return ""
    return f"examples={min(seen)}"


def _ended(run: History) -> str:
    """Return "yes" for a run of full length, "diverged" for one that diverged, "no" for one that is unfinished."""
    if len(run.records) == run.recipe.epochs:
        return "yes"
    return "diverged" if run.outcome and run.outcome.diverged else "no"


def _rounded(record: EpochRecord) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in record.to_dict().items()
    }


def _circumstances(run: History) -> dict[str, str]:
    """Return hardware, torch version, commit, command and start of a run."""
    first = next(iter(run.sessions), Session())
    return {
        "hardware": run.told("device"),
        "torch": run.told("torch"),
        "commit": run.told("commit"),
        "command": first.command,
        "started": first.time,
    }
