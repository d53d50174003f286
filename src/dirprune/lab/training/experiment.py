"""From a recipe to a trained network: the common part of train, resume, demo, tune and compare."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune import SparsityReport, macs, sparsity
from dirprune._support.modes import seeded
from dirprune.lab import data, models
from dirprune.lab.data.loader import Batching, Loader
from dirprune.lab.methods import Method
from dirprune.lab.records import checkpoint
from dirprune.lab.records.files import as_read
from dirprune.lab.training.loop import Divergence, EpochRecord, Extinct, train
from dirprune.lab.training.optimizers import TrainingPlan
from dirprune.lab.training.processes import Process
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.reward import Reward
from dirprune.lab.training.runs import Outcome, Run, check_unchanged, fault_of, quoted
from dirprune.lab.training.start import start_from
from dirprune.lab.training.surroundings import Surroundings
from dirprune.optim.options import MACHINE

SAVE_SECONDS = 60.0
"""By default, a checkpoint is written when the last one is at least this old."""


class LostRecords(UserWarning):
    """A run's metrics.jsonl ends before its newest checkpoint."""


class OneBatch(UserWarning):
    """The batch size is larger than the training set."""


class Diverged(RuntimeError):
    """A run diverged; the message says what to try."""


class Hopeless(RuntimeError):
    """A run stopped because nothing can recover; the message says what to try."""


@dataclass(frozen=True)
class Parts:
    """The model, optimizer and data that a recipe describes."""

    model: nn.Module
    optimizer: Optimizer
    loaders: data.Loaders


def assemble(recipe: Recipe, *, device: torch.device, root: Path | None, process: Process | None = None) -> Parts:
    """Build the model, the optimizer and the loaders. The initial weights depend only on the recipe's seed."""
    loaders = load_data(recipe, device=device, root=root, process=process)
    with seeded(recipe.seed):
        model = models.build(recipe.model, loaders.classes)
    model = recipe.execution(device.type).place(model, device)
    return Parts(model, make_optimizer(recipe, model, device, loaders), loaders)


def load_data(
    recipe: Recipe, *, device: torch.device, root: Path | None, process: Process | None = None
) -> data.Loaders:
    """Return the loaders of the recipe's data."""
    process = process or Process()
    batching = Batching(recipe.batch_size, recipe.seed, process.rank, process.world_size)
    return recipe.task.load(batching, device=device, root=root)


def make_optimizer(recipe: Recipe, model: nn.Module, device: torch.device, loaders: data.Loaders) -> Optimizer:
    """Return the recipe's optimizer of a model that is trained on these loaders."""
    execution = recipe.execution(device.type)
    example = loaders.example(1, device).to(memory_format=execution.memory_format)
    captured_on = device if execution.captures(device) else None
    return recipe.optimizer.make(model, TrainingPlan(recipe.epochs * len(loaders.train), example, captured_on))


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state, but keep what depends on this machine: where the learning rate is stored, and the kernels.

    `train` sets the value of the learning rate at its first step.
    """
    own = [{key: group[key] for key in ("lr", *MACHINE) if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def conduct(run: Run, here: Surroundings) -> Iterator[EpochRecord]:
    """Train a new run, or one to continue, to the end; save checkpoints, and yield its records.

    The last epoch, those the recipe keeps, and the one after which training stops are always saved.

    Raises:
        Diverged: the loss is not finite.
        Hopeless: nothing can recover, and ``here`` does not ask to keep going.
        ValueError: the network does not fit the data, or config.json differs from what the run was trained with.
        InUse: another process is training this run.
    """
    alone = run.locked() if here.process.is_first else nullcontext()
    with alone, run.recipe.execution(here.device.type).threading():
        yield from _conduct(run, here)


def _conduct(run: Run, here: Surroundings) -> Iterator[EpochRecord]:
    device, process = here.device, here.process
    recipe = run.recipe
    run.check_known()
    execution = recipe.execution(device.type)
    parts = assemble(recipe, device=device, root=here.root, process=process)
    check_fit(recipe, parts, device)
    if process.is_first:
        _check_batches(recipe, parts.loaders.train)
    reward = Reward(parts.loaders, execution, process)
    method = recipe.method.make(seed=recipe.seed, reward=reward) if recipe.method else Method()
    process.wait()  # the first process may still be writing a checkpoint
    fault = _fault(run, parts.model)
    found = checkpoint.latest(run.checkpoints, fault=fault)
    _check_records(run, found[0] if found else None, tell=process.is_first)
    done = _restore_from(run, parts, method, found, fault)
    process.wait()  # all processes must have read before the first one writes
    if process.is_first:
        checkpoint.set_aside(run.checkpoints, after=done)
        run.rewind(done)
        loaders = parts.loaders
        run.note_session(device, process.world_size, here.root, loaders.train.examples, loaders.fingerprint)
        if found is None:
            _save(run, 0, parts, method)
    if done == recipe.epochs:
        if process.is_first and run.outcome() is None:  # the last session ended right after its last checkpoint
            checkpoint.prune(run.checkpoints, keep=recipe.keep)
            run.conclude(Outcome(_zeros(parts, device)))
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    records = train(
        parts.model,
        parts.optimizer,
        here.watch(parts.loaders.train),
        parts.loaders.validation or parts.loaders.test,
        epochs=recipe.epochs,
        lr=recipe.optimizer.lr,
        schedule=recipe.schedule,
        seed=recipe.seed,
        done=done,
        execution=execution,
        process=process,
        method=method,
        keep_going=here.keep_going,
    )
    yield from _saving(records, run, parts, method, done, here)


def _saving(
    records: Iterator[EpochRecord], run: Run, parts: Parts, method: Method, done: int, here: Surroundings
) -> Iterator[EpochRecord]:
    """Pass records on, and write each epoch's metrics, due checkpoints and finally the outcome to the run."""
    recipe, process, every = run.recipe, here.process, here.save_every
    saved, saved_at = done, time.monotonic()
    try:
        for record in records:
            stops, ends = process.agree(here.stopping()), record.epoch == recipe.epochs
            due = record.epoch - saved >= every if every else time.monotonic() - saved_at >= SAVE_SECONDS
            if process.is_first:
                run.append(record)
            if ends:
                method.finish()
            if process.agree(due) or stops or ends or record.epoch in recipe.keep:
                if process.is_first:
                    _save(run, record.epoch, parts, method)
                saved, saved_at = record.epoch, time.monotonic()
            if ends and process.is_first:
                run.conclude(Outcome(_zeros(parts, here.device), peak_memory_mib=_peak_memory(here.device)))
            yield record
            if stops:
                return
    except Divergence as error:
        if process.is_first:
            run.conclude(Outcome(diverged=str(error), peak_memory_mib=_peak_memory(here.device)))
        raise Diverged(_advice(run, error, saved)) from error
    except Extinct as error:
        if process.is_first and saved < error.epoch:
            _save(run, error.epoch, parts, method)
        raise Hopeless(
            f"{error}. Stopped after epoch {error.epoch} of {recipe.epochs}, which is saved. {_smaller(recipe)}, or go "
            f"on with `dirprune resume {quoted(run.folder)} --keep-going`"
        ) from error


def _fault(run: Run, model: nn.Module) -> checkpoint.Fault:
    """Return what is wrong with a state for continuing this run with its network."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def fault(state: Any) -> str:
        if found := fault_of(state, "recipe", "optimizer"):
            return found
        check_unchanged(run, state)
        theirs = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        wrong = [name for name in (*shapes, *theirs) if shapes.get(name) != theirs.get(name)]
        return (
            f"holds {wrong[0]!r} as {_shape(theirs, wrong[0])}, and the network {_shape(shapes, wrong[0])}"
            if wrong
            else ""
        )

    return fault


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"a tensor of shape {shapes[name]}" if name in shapes else "nothing"


def _zeros(parts: Parts, device: torch.device) -> SparsityReport:
    """Return the zeros of the model, with the multiplications of each layer."""
    return sparsity(parts.model, cost=macs(parts.model, parts.loaders.example(2, device)))


def _restore_from(
    run: Run, parts: Parts, method: Method, found: tuple[int, checkpoint.State] | None, fault: checkpoint.Fault
) -> int:
    """Attach the method, restore everything from the checkpoint ``found``, and return the number of finished epochs.

    If its optimizer or method cannot continue, the trained ones before it are tried. For a finished run only the plain
    model is restored; the method is not attached.
    """
    if found is not None and found[0] == run.recipe.epochs:
        parts.model.load_state_dict(found[1]["model"])
        return found[0]
    if found is None and run.recipe.start:
        start_from(parts.model, Path(run.recipe.start))
    train_set = parts.loaders.train
    steps = run.recipe.epochs * len(train_set)
    method.attach(parts.model, parts.optimizer, steps=steps, examples=train_set.examples)
    while found is not None:
        done, state = found
        try:
            parts.model.load_state_dict(state["training"] if "training" in state else state["model"])
            restore(parts.optimizer, state["optimizer"])
            method.load_state_dict(state.get("method", {}))
            return done
        except models.OF_DEVICE:
            raise
        except (ValueError, RuntimeError) as error:
            path, what = checkpoint.path_of(run.checkpoints, done), str(error).partition("\n")[0]
            told = f"{path} cannot be continued from: {what}"
            found = checkpoint.latest(run.checkpoints, fault=fault, before=done)
            if found is None or not found[0]:  # all training would be lost, perhaps for want of an older dirprune
                raise checkpoint.CorruptCheckpoint(
                    f"{told}; restore it from a copy, or remove it, and training begins again"
                ) from error
            warnings.warn(f"{told}; going back to epoch {found[0]}", checkpoint.CheckpointWarning, stacklevel=2)
    return 0


def _advice(run: Run, error: Divergence, saved: int) -> str:
    """Return a message that says where a run diverged, which checkpoint is left and what to try."""
    left = checkpoint.path_of(run.checkpoints, saved)
    return f"{error}. The last good checkpoint is {left}. {_smaller(run.recipe)}, or another --seed"


def _smaller(recipe: Recipe) -> str:
    """Return the advice to lower what makes a run diverge, or prunes everything."""
    knobs = [(f"--{name}", vars(recipe.optimizer)[name]) for name in ("lr", *recipe.optimizer.decides)]
    return f"Try a smaller {', '.join(f'{name} (now {value})' for name, value in knobs)}"


def _peak_memory(device: torch.device) -> float | None:
    """Return the peak memory of tensors on a GPU in MiB; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


def check_fit(recipe: Recipe, parts: Parts, device: torch.device) -> None:
    """Raise unless the network maps two examples to one number per class, in both modes, and can be differentiated.

    This runs before anything is written. Weights, gradients, buffers and random state are restored.
    """
    model, execution, shape = parts.model, recipe.execution(device.type), tuple(parts.loaders.shape)
    what = f"model={recipe.model!r} does not fit data={recipe.task.data!r}, whose examples have shape {shape}"
    inputs = parts.loaders.example(2, device).to(memory_format=execution.memory_format)
    expected = (2, parts.loaders.classes, *parts.loaders.answers)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for mode in (False, True):
            with seeded(recipe.seed, device), execution.autocast(device):
                outputs = model.train(mode)(inputs)
            if not isinstance(outputs, Tensor) or outputs.shape != expected:
                gives = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
                raise ValueError(f"it gives {gives} for two examples, not a tensor of shape {expected}")
        outputs.float().logsumexp(1).sum().backward()
    except models.OF_DEVICE:
        raise
    except Exception as error:
        raise ValueError(
            f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}; choose another --model or recipe, or "
            "correct your own: DIRPRUNE_TRACEBACK=1 shows where it failed"
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


def _check_batches(recipe: Recipe, train_set: Loader) -> None:
    if recipe.batch_size > train_set.examples:
        warnings.warn(
            f"--batch-size {recipe.batch_size} is more than the {train_set.examples:,} training examples: every epoch "
            "is one step, on all of them",
            OneBatch,
            stacklevel=2,
        )


def _check_records(run: Run, saved: int | None, *, tell: bool) -> None:
    """Raise if starting from scratch would lose records; warn if the records end before the newest checkpoint."""
    recorded = max((record.epoch for record in run.records()), default=0)
    if saved is None and recorded:
        raise ValueError(
            f"{run.folder} has {recorded} recorded epochs and no checkpoint to continue from; restore its checkpoints, "
            "or train again with another --out"
        )
    if tell and saved and recorded < saved:
        warnings.warn(
            f"{run.folder / 'metrics.jsonl'} ends at epoch {recorded}, but the newest checkpoint is of epoch {saved}: "
            "the records in between are lost",
            LostRecords,
            stacklevel=2,
        )


def _save(run: Run, epoch: int, parts: Parts, method: Method) -> None:
    """Write a checkpoint whose ``model`` is the plain network that is evaluated, whatever the method.

    If the method trains other tensors instead, ``training`` holds those.
    """
    training, plain = parts.model.state_dict(), method.plain_state()
    state = {
        "epoch": epoch,
        "recipe": as_read(run.recipe.to_dict()),
        "model": plain,
        "parameters": list(method.weights()),
        "optimizer": parts.optimizer.state_dict(),
        "method": method.state_dict(),
    }
    if plain.keys() != training.keys():
        state["training"] = training
    checkpoint.save(run.checkpoints, epoch, state)
    checkpoint.prune(run.checkpoints, keep=run.recipe.keep)
