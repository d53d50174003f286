"""From a recipe to a trained network: what the verbs train, resume, demo, tune and compare have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

SAVE_SECONDS = 60.0
"""Without another wish, a checkpoint is written when the last one is this old."""

_MACHINE = ("lr", "foreach", "fused", "capturable")
"""Options of an optimizer that say how a machine computes; `train` sets the value of lr at its first step."""

_STATISTICS = {"": None, "cifar": CIFAR_STATISTICS, "imagenet": IMAGENET_STATISTICS}


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
    """
    process = process or Process()
    recipe = run.recipe
    parts = assemble(recipe, device=device, root=root, process=process)
    found = checkpoint.latest(run.checkpoints)
    done = 0
    if found is not None:
        done, state = found
        parts.model.load_state_dict(state["model"])
        restore(parts.optimizer, state["optimizer"])
    process.wait()  # all have read before the first one writes
    if process.is_first:
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
        raise Diverged(
            f"{error}. The last good checkpoint is {run.checkpoints}/epoch-{saved:04d}.pt. "
            f"Try a smaller --lr (now {recipe.lr}), --c (now {recipe.c}) or --mu (now {recipe.mu}), or another --seed"
        ) from error


def _save(run: Run, epoch: int, parts: Parts) -> None:
    state = {"epoch": epoch, "model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    checkpoint.save(run.checkpoints, epoch, state)
    checkpoint.prune(run.checkpoints, keep=run.recipe.keep)
