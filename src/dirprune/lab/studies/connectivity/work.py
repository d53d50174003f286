"""Mode connectivity between two runs: fit the curve, profile it and the straight line, map the plane they span.

`folder` describes the directory of a job; calling with the same directory continues the job.
Losses are measured on data without augmentation, in the precision of run A; errors are in percent. BatchNorm statistics
are re-estimated at every point.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dirprune._support.batches import Batch
from dirprune.connect import BezierCurve, FitRecord, Plane, fit_curve
from dirprune.connect.landscape import Evaluator, Place, profile_points
from dirprune.lab.data import EVALUATION_BATCH, Loaders
from dirprune.lab.progress import Progress
from dirprune.lab.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SEVERAL, check
from dirprune.lab.records import checkpoint, provenance
from dirprune.lab.records.files import locked, write_json
from dirprune.lab.records.tables import read_rows, write_rows
from dirprune.lab.studies.connectivity.folder import (
    Mapped,
    Placed,
    Profiled,
    claim,
    facts_of,
    profiles,
    published_curve,
)
from dirprune.lab.training import experiment, runs
from dirprune.lab.training.optimizers import Grda, Sgd
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.schedules import Schedule
from dirprune.weights import Weights, check_alike, flatten, put, take

_SAME = ("data", "model", "statistics", "validation")  # must agree in the two recipes


@dataclass(frozen=True)
class Options:
    """The options of a job, in addition to its two networks.

    The defaults are the published fit of VGG16: 300 epochs, lr .1 constant for half of them, then linear to a hundredth
    at 90%, momentum .9 (WRN28x10: 200 epochs, momentum 0). ``batch_size`` is run A's if None. With ``fit=False`` only
    the straight line is profiled, without curve and plane. ``plane_examples`` limits the plane to the first so many
    training examples; for a large network the plane is most of the work.
    """

    epochs: int = 300
    points: int = 61
    grid: int = 21
    margin: float = 0.2
    lr: float = 0.1
    momentum: float = 0.9
    schedule: str = "constant-linear-constant"
    batch_size: int | None = None
    seed: int = 0
    fit: bool = True
    plane_examples: int | None = None

    def __post_init__(self) -> None:
        check(vars(self), epochs=COUNT, points=SEVERAL, grid=SEVERAL, margin=NOT_NEGATIVE, lr=POSITIVE)
        check(vars(self), momentum=BELOW_ONE, batch_size=COUNT, plane_examples=COUNT)
        Schedule(self.schedule)


def connect(
    run_a: Path,
    run_b: Path,
    out: Path,
    options: Options | None = None,
    *,
    epoch_a: int | None = None,
    epoch_b: int | None = None,
    device: torch.device,
    root: Path | None = None,
) -> Generator[Progress, None, None]:
    """Join run A (t = 0) and run B (t = 1) by a curve, and measure losses along it.

    Yields the progress of its stages: "fit", "curve", "line" and "plane".

    Leaving the loop loses at most the current step; the same call continues from there.

    Args:
        run_a, run_b: run directories; run A's recipe decides model, data, batch size and precision.
        out: the directory of the job, created here.
        epoch_a, epoch_b: the checkpoints to join; by default the newest ones.
        device, root: where to compute, where the data are.

    Raises:
        ValueError: the two runs cannot be joined.
        RunExists: ``out`` holds something else.
        Diverged: the loss of the fit is not finite.

    Reference: Garipov et al. 2018; section 4.2 of the paper.
    """
    with runs.load(run_a).recipe.execution(device.type).threading():
        job = _open(run_a, run_b, out, options or Options(), epoch_a, epoch_b, device, root)
        with locked(out):
            provenance.note_session(out, provenance.environment(device))
            yield from _carry_out(job)


def _carry_out(job: _Job) -> Iterator[Progress]:
    places: list[Place] = [(i / (job.options.points - 1),) for i in range(job.options.points)]
    profile = job.out / "profile.csv"
    if job.options.fit:
        yield from _fit(job)
        yield from _measure("curve", profile, Profiled, ("curve",), lambda: job.evaluator, job.curve.point, places)
    line = BezierCurve(job.start, job.end, bends=0)
    yield from _measure("line", profile, Profiled, ("line",), lambda: job.evaluator, line.point, places)
    if job.options.fit:
        plane = _place(job, places)
        grid: list[Place] = [*plane.grid(job.options.grid, job.options.margin)]
        yield from _measure("plane", job.out / "plane.csv", Mapped, (), lambda: job.plane_evaluator, plane.point, grid)
    _summarise(job)


class _Job:
    """A job in progress: its networks on the device, and the evaluators for them."""

    def __init__(
        self,
        out: Path,
        options: Options,
        recipe: Recipe,
        parts: experiment.Parts,
        measured: Loaders,
        ends: tuple[Weights, Weights],
    ) -> None:
        self.out, self.options, self.recipe = out, options, recipe
        self.model, self.loaders, self.measured = parts.model, parts.loaders, measured
        self.start, self.end = ends
        self.curve = BezierCurve(self.start, self.end)
        self.device = flatten(self.start).device
        self.execution = recipe.execution(self.device.type)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.execution.precision == "bfloat16" else None

    @cached_property
    def evaluator(self) -> Evaluator:
        return self._evaluator(self.measured.train)

    @cached_property
    def plane_evaluator(self) -> Evaluator:
        if self.options.plane_examples is None:
            return self.evaluator
        return self._evaluator(_first(self.measured.train, self.options.plane_examples))

    def _evaluator(self, train: Iterable[Batch]) -> Evaluator:
        return Evaluator(
            self.model,
            train,
            self.measured.test,
            autocast=self.autocast,
            channels_last=self.execution.channels_last,
            compiled=self.execution.compile,
            capture=self.execution.captures(self.device),
        )


def _first(batches: Iterable[Batch], examples: int) -> Iterator[Batch]:
    """Yield batches with the first ``examples`` examples."""
    for inputs, targets in batches:
        yield inputs[:examples], targets[:examples]
        examples -= len(targets)
        if examples <= 0:
            return


def _open(
    run_a: Path,
    run_b: Path,
    out: Path,
    options: Options,
    epoch_a: int | None,
    epoch_b: int | None,
    device: torch.device,
    root: Path | None,
) -> _Job:
    """Load the two networks, raise if they cannot be joined, and make ``out`` the directory of this job."""
    a, b = runs.load(run_a), runs.load(run_b)
    for name in _SAME:
        ours, theirs = a.recipe.values()[name], b.recipe.values()[name]
        if ours != theirs:
            raise ValueError(f"{run_a} has {name}={ours!r} and {run_b} has {name}={theirs!r}; give runs that share it")
    recipe = replace(a.recipe, batch_size=options.batch_size or a.recipe.batch_size, seed=options.seed)
    options = replace(options, batch_size=recipe.batch_size)
    parts = experiment.assemble(recipe, device=device, root=root)
    large = replace(recipe, batch_size=EVALUATION_BATCH)
    measured = experiment.load_data(large, device=device, root=root)
    (epoch_a, start), (epoch_b, end) = (
        _endpoint(run, epoch, parts.model, option)
        for run, epoch, option in ((a, epoch_a, "--epoch-a"), (b, epoch_b, "--epoch-b"))
    )
    if torch.equal(flatten(start), flatten(end)):
        raise ValueError(f"{run_a} (epoch {epoch_a}) and {run_b} (epoch {epoch_b}) hold the same weights; give two")
    name_a, name_b = _labels((a.recipe, epoch_a), (b.recipe, epoch_b))
    networks = {
        **{"run_a": str(run_a), "epoch_a": epoch_a, "network_a": name_a, "weights_a": _digest(start)},
        **{"run_b": str(run_b), "epoch_b": epoch_b, "network_b": name_b, "weights_b": _digest(end)},
        **{"data": recipe.task.data, "model": recipe.model},
        "published": _published_key(a.recipe, b.recipe),
    }
    claim(out, {**networks, **asdict(options)})
    return _Job(out, options, recipe, parts, measured, (start, end))


def _endpoint(run: runs.Run, epoch: int | None, model: nn.Module, option: str) -> tuple[int, Weights]:
    """Load a checkpoint of the run into the model, and return its epoch and its weights on the model's device."""
    found, state = runs.weights_of(run, epoch)
    if found == 0 and epoch is None:  # e.g. of a run that diverged at once: the curve would say nothing about training
        raise ValueError(f"{run.folder} has only its initial weights; train it, or give {option} 0 to join those")
    # Compare the whole state, with buffers and all names of shared weights, to detect another architecture.
    check_alike(model.state_dict(), state, f"the network {run.recipe.model!r}", str(run.folder))
    put(model, runs.parameters_of(model, state))
    return found, take(model)


def _fit(job: _Job) -> Iterator[Progress]:
    """Fit the curve from its current epoch to the last."""
    options, folder = job.options, job.out / "checkpoints"
    settings = replace(job.recipe, optimizer=Sgd(lr=options.lr, momentum=options.momentum), method=None)
    optimizer = experiment.make_optimizer(settings, job.curve, job.device, job.loaders)
    found = checkpoint.latest(folder)
    done = 0
    if found is not None:
        done, state = found
        job.curve.load_state_dict(state["curve"])
        experiment.restore(optimizer, state["optimizer"])

    def save() -> None:
        state = {"epoch": done, "curve": job.curve.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(folder, done, state)
        checkpoint.prune(folder, keep=())

    table = job.out / "fit.csv"
    rows = [row for row in read_rows(table, FitRecord) if row.epoch <= done]
    if done and done not in (row.epoch for row in rows):
        warnings.warn(
            f"{table} lacks epoch {done}, the epoch of the newest checkpoint; the fit continues from there without the "
            "lost records",
            experiment.LostRecords,
            stacklevel=2,
        )
    yield Progress("fit", done, options.epochs)
    schedule = Schedule(options.schedule)
    records = fit_curve(
        job.model,
        job.curve,
        job.loaders.train,
        epochs=options.epochs,
        first_epoch=done + 1,
        optimizer=optimizer,
        schedule=lambda epoch: options.lr * schedule.factor(epoch, options.epochs),
        seed=options.seed,
        autocast=job.autocast,
        channels_last=job.execution.channels_last,
        compiled=job.execution.compile,
        capture=job.execution.captures(job.device),
    )
    saved, saved_at = done, time.monotonic()
    try:
        for record in records:
            rows.append(record)
            write_rows(table, FitRecord, rows)
            done = record.epoch
            if done == options.epochs or time.monotonic() - saved_at >= experiment.SAVE_SECONDS:
                save()
                saved, saved_at = done, time.monotonic()
            yield Progress("fit", done, options.epochs, f"loss {record.loss:.4g}")
    except GeneratorExit:  # the caller stopped between two epochs
        if saved < done:
            save()
        raise
    except FloatingPointError as error:
        raise experiment.Diverged(f"{error} (now {options.lr}) and give another --out than {job.out}") from error


def _measure(
    stage: str,
    table: Path,
    kind: type[Any],
    head: tuple[str, ...],
    evaluator: Callable[[], Evaluator],
    point: Callable[..., Weights],
    places: Sequence[Place],
) -> Iterator[Progress]:
    """Measure the places that are not in the table yet, in order; ``head`` is the start of this stage's rows."""
    rows = read_rows(table, kind)
    done = sum(astuple(row)[: len(head)] == head for row in rows)
    yield Progress(stage, done, len(places))
    if done == len(places):
        return
    for measured in profile_points(evaluator(), point, places[done:]):
        place, *scores = astuple(measured)
        rows.append(kind(*head, *place, *scores))
        write_rows(table, kind, rows)
        done += 1
        yield Progress(stage, done, len(places), f"train loss {measured.train_loss:.4g}")


def _place(job: _Job, places: Sequence[Place]) -> Plane:
    """Save the bend, and write the coordinates of bend, solutions and curve in the plane through them."""
    start, bend, end = job.curve.control_points()
    checkpoint.save(job.out / "bend", job.options.epochs, {"epoch": job.options.epochs, "model": bend})
    plane = Plane(start, end, bend)
    corners = zip(("start", "end", "bend"), (0.0, 1.0, math.nan), plane.corners, strict=True)
    rows = [Placed(name, t, *corner) for name, t, corner in corners]
    with torch.no_grad():
        rows += [Placed("curve", t, *plane.coordinates(job.curve.point(t))) for (t,) in places]
    write_rows(job.out / "points.csv", Placed, rows)
    return plane


def _summarise(job: _Job) -> None:
    """Write summary.json: the results of the tables, and how they were made."""
    config = json.loads((job.out / "config.json").read_text())
    summary: dict[str, Any] = {
        "config": config,
        "sessions": [asdict(each) for each in provenance.sessions(job.out)],
        "distance": (flatten(job.end) - flatten(job.start)).double().norm().item(),
        "sparsity": [(flatten(w) == 0).double().mean().item() for w in (job.start, job.end)],
        **{path: facts_of(profile) for path, profile in profiles(job.out).items()},
    }
    if job.options.fit:
        epochs = read_rows(job.out / "fit.csv", FitRecord)
        curve = [(row.x, row.y) for row in read_rows(job.out / "points.csv", Placed) if row.name == "curve"]
        summary["length"] = sum(map(math.dist, curve, curve[1:]))
        loss = next((record.loss for record in epochs if record.epoch == job.options.epochs), None)  # it may be lost
        summary["fit"] = {"loss": loss, "seconds": sum(record.seconds for record in epochs)}
    if published := published_curve(config):
        fit = {name: getattr(published, name) for name in ("length", "epochs", "lr", "momentum")}
        summary["published"] = {**facts_of(published.profile), **fit}
    write_json(job.out / "summary.json", summary)


def _published_key(a: Recipe, b: Recipe) -> tuple[float, float, bool] | None:
    """Return c and μ of the gRDA run, and whether the SGD run comes first; None unless there is one of each."""
    grda, sgd = (a.pruner, b.pruner) if isinstance(a.pruner, Grda) else (b.pruner, a.pruner)
    if not isinstance(grda, Grda) or sgd.knob is not None:
        return None
    return grda.c, grda.mu, grda is b.pruner


def _labels(a: tuple[Recipe, int], b: tuple[Recipe, int]) -> tuple[str, str]:
    """Return names that distinguish two networks, each a recipe and an epoch; with seed or epoch only if needed."""

    def names(recipe: Recipe, epoch: int) -> Iterator[str]:
        yield recipe.setting
        yield f"{recipe.setting}, seed {recipe.seed}"
        yield f"{recipe.setting}, epoch {epoch}"

    pairs = list(zip(names(*a), names(*b), strict=True))
    return next((pair for pair in pairs if pair[0] != pair[1]), ("A", "B"))


def _digest(weights: Weights) -> str:
    return hashlib.sha256(flatten(weights).cpu().numpy().tobytes()).hexdigest()
