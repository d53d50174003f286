"""From a recipe to a trained network: what the verbs train, resume, demo, tune and compare have in common."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from dirprune import GRDA, prunable_groups
from dirprune.lab import checkpoint, data, models
from dirprune.lab.loader import CIFAR_STATISTICS, IMAGENET_STATISTICS, Loader
from dirprune.lab.processes import Process
from dirprune.lab.recipes import Recipe
from dirprune.lab.runs import Run
from dirprune.lab.train import Divergence, EpochRecord, train
from dirprune.modes import eval_mode

SAVE_SECONDS = 60.0
"""Without another wish, a checkpoint is written when the last one is this old."""

_MACHINE = ("lr", "foreach", "fused", "capturable")
"""Options of an optimizer that say how a machine computes; `train` sets the value of lr at its first step."""

_STATISTICS = {"": None, "cifar": CIFAR_STATISTICS, "imagenet": IMAGENET_STATISTICS}


_FREE_TO_CHANGE = {"about", "keep", "published", "cpu", "cuda"}
"""What of a recipe does not decide the numbers of a run that goes on."""


class Diverged(RuntimeError):
    """A run that diverged, with what to do about it."""


@dataclass(frozen=True)
class Parts:
    """What a recipe asks for, made."""

    model: nn.Module
    optimizer: Optimizer
    loaders: data.Loaders


def assemble(recipe: Recipe, *, device: torch.device, root: Path | None, process: Process | None = None) -> Parts:
    """Make the model, the optimizer and the loaders; the initial weights depend on the recipe's seed alone."""
    process = process or Process()
    loaders = data.load(
        recipe.data,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        root=root,
        device=device,
        validation=recipe.validation,
        normalization=_STATISTICS[recipe.statistics],
        augment=recipe.augment,
        rank=process.rank,
        world_size=process.world_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)  # torch.manual_seed would reseed the caller's GPUs too
        model = models.build(recipe.model, loaders.classes)
    model = recipe.execution(device.type).place(model, device)
    return Parts(model, make_optimizer(recipe, model, device), loaders)


def make_optimizer(recipe: Recipe, model: nn.Module, device: torch.device) -> Optimizer:
    """Return the recipe's optimizer; where steps are captured, its learning rate lives on the device."""
    captured = recipe.execution(device.type).capture and device.type == "cuda"
    if recipe.optimizer == "sgd":
        return SGD(
            model.parameters(),
            lr=torch.tensor(recipe.lr, device=device) if captured else recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=True if captured else None,
        )
    groups = prunable_groups(model, recipe.c, recipe.exempt) if recipe.exempt else model.parameters()
    return GRDA(
        groups,
        lr=recipe.lr,
        c=recipe.c,
        mu=recipe.mu,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        capturable=captured,
    )


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state; where the learning rate lives and which kernels run stay this machine's own."""
    own = [{key: group[key] for key in _MACHINE if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def conduct(
    run: Run,
    *,
    device: torch.device,
    root: Path | None = None,
    process: Process | None = None,
    save_every: int | None = None,
    watch: Callable[[Loader], Loader] = lambda loader: loader,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[EpochRecord]:
    """Train a run from where it stands to its end, saving as it goes, and yield its records.

    Args:
        run: new, or one to go on with.
        device, root, process: where to train, where the data are, which process this is.
        save_every: epochs between checkpoints; by default one a minute. The last epoch, those the recipe keeps, and the
            one after which training stops are always saved.
        watch: wraps the training loader, e.g. to draw a progress bar.
        stopping: asked after each epoch; True saves and ends.

    Raises:
        Diverged: the loss is not finite.
        ValueError: the network does not fit the data, or the run's configuration is not the one it was trained with.
        RunInUse: another process is training this run.
    """
    process = process or Process()
    with run.locked() if process.is_first else nullcontext():
        yield from _conduct(run, device, root, process, save_every, watch, stopping)


def _conduct(
    run: Run,
    device: torch.device,
    root: Path | None,
    process: Process,
    save_every: int | None,
    watch: Callable[[Loader], Loader],
    stopping: Callable[[], bool],
) -> Iterator[EpochRecord]:
    recipe = run.recipe
    parts = assemble(recipe, device=device, root=root, process=process)
    _check_fit(recipe, parts)
    found = checkpoint.latest(run.checkpoints)
    done = 0
    if found is not None:
        done, state = found
        _check_unchanged(run, state)
        parts.model.load_state_dict(state["model"])
        restore(parts.optimizer, state["optimizer"])
    process.wait()  # all have read before the first one writes
    if process.is_first:
        checkpoint.set_aside(run.checkpoints, after=done)
        run.rewind(done)
        run.note_session(device, process.world_size, root)
        if found is None:
            _save(run, 0, parts)
    saved, saved_at = done, time.monotonic()
    records = train(
        parts.model,
        parts.optimizer,
        watch(parts.loaders.train),
        parts.loaders.validation or parts.loaders.test,
        epochs=recipe.epochs,
        lr=recipe.lr,
        schedule=recipe.schedule,
        seed=recipe.seed,
        done=done,
        execution=recipe.execution(device.type),
        process=process,
    )
    try:
        for record in records:
            stops = process.agree(stopping())
            due = record.epoch - saved >= save_every if save_every else time.monotonic() - saved_at >= SAVE_SECONDS
            if process.is_first:
                run.append(record)
            if process.agree(due) or stops or record.epoch == recipe.epochs or record.epoch in recipe.keep:
                if process.is_first:
                    _save(run, record.epoch, parts)
                saved, saved_at = record.epoch, time.monotonic()
            yield record
            if stops:
                return
    except Divergence as error:
        knobs = [("--lr", recipe.lr)]
        if recipe.optimizer == "grda":
            knobs += [("--c", recipe.c), ("--mu", recipe.mu)]
        smaller = ", ".join(f"{name} (now {value})" for name, value in knobs)
        raise Diverged(
            f"{error}. The last good checkpoint is {run.checkpoints}/epoch-{saved:04d}.pt. "
            f"Try a smaller {smaller}, or another --seed"
        ) from error


@torch.no_grad()
def _check_fit(recipe: Recipe, parts: Parts) -> None:
    """Raise unless the network maps these images to one number a class; nothing is written before that is known."""
    device = next(parts.model.parameters()).device
    inputs = torch.zeros(2, *parts.loaders.shape, device=device)  # their shape is known: no reader need be started
    what = (
        f"model={recipe.model!r} does not fit data={recipe.data!r}, whose images have shape {tuple(inputs.shape[1:])}"
    )
    try:
        with eval_mode(parts.model):
            shape = tuple(parts.model(inputs).shape)
    except RuntimeError as error:
        raise ValueError(f"{what}: {str(error).splitlines()[0]}; choose another --model or recipe") from error
    if shape != (len(inputs), parts.loaders.classes):
        raise ValueError(f"{what} in {parts.loaders.classes} classes: it gives shape {shape} for {len(inputs)} of them")


def _check_unchanged(run: Run, state: checkpoint.State) -> None:
    """Raise if config.json says other than what the checkpoint was trained with."""
    trained, told = state["recipe"], json.loads(json.dumps(run.recipe.to_dict()))
    for key in sorted(set(told) - _FREE_TO_CHANGE):
        if trained.get(key) != told[key]:
            raise ValueError(
                f"{run.folder / 'config.json'} says {key}={told[key]!r}, and this run was trained with "
                f"{trained.get(key)!r}; put that back, or start a new run with `dirprune train`"
            )


def _save(run: Run, epoch: int, parts: Parts) -> None:
    state = {
        "epoch": epoch,
        "recipe": json.loads(json.dumps(run.recipe.to_dict())),
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
    }
    checkpoint.save(run.checkpoints, epoch, state)
    checkpoint.prune(run.checkpoints, keep=run.recipe.keep)
