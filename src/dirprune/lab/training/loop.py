"""The training loop: a generator of one record per epoch. Logging, saving and stopping are up to the caller."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune._support.modes import eval_mode, seeded
from dirprune._support.rates import set_lr
from dirprune.connect.batchnorm import batchnorms, estimate_statistics
from dirprune.lab.data.loader import Batching, Loader
from dirprune.lab.methods.method import Method
from dirprune.lab.records.columns import Amount, Fraction, Number, Percent
from dirprune.lab.training.execution import Execution, PlainScoring, Scoring, Tally, make_scoring, make_step
from dirprune.lab.training.lean import lowered
from dirprune.lab.training.processes import Process
from dirprune.lab.training.schedules import Schedule
from dirprune.zeros import sparsity

CHECK_EVERY = 200
"""Steps between checks of the loss for divergence; each check waits for the device."""


@dataclass(frozen=True)
class EpochRecord:
    """The results of one epoch; accuracies in percent, sparsity as a fraction.

    Train loss and accuracy are running means over the epoch, in training mode, on augmented data. ``norm_ratio`` is
    ‖w‖₂/‖w‖₁ over all parameters, at least d^-½. ``signs_kept`` is the fraction of the parameters that are positive,
    zero or negative as they were an epoch before; old records lack it.
    """

    epoch: Number
    lr: Amount
    train_loss: float
    train_accuracy: Percent
    test_loss: float
    test_accuracy: Percent
    sparsity: Fraction
    weight_sparsity: Fraction
    norm_ratio: Amount
    train_seconds: Amount
    test_seconds: Amount
    signs_kept: Fraction | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Divergence(FloatingPointError):
    """The loss became infinite or NaN."""

    def __init__(self, epoch: int, step: int, loss: float, *, which: str = "training") -> None:
        super().__init__(f"the {which} loss became {loss} in step {step} of epoch {epoch}")
        self.epoch = epoch
        self.step = step


class Extinct(RuntimeError):
    """Every weight is zero, and none has a gradient that could bring it back."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"since epoch {epoch - 1} every weight is zero, and no gradient reaches one: nothing can recover"
        )
        self.epoch = epoch


@dataclass(frozen=True)
class Score:
    """Mean loss, and accuracy in percent, over a data set."""

    loss: float
    accuracy: float


def train(
    model: nn.Module,
    optimizer: Optimizer,
    train_set: Loader,
    test_set: Loader,
    *,
    epochs: int,
    lr: float,
    schedule: Schedule,
    seed: int,
    done: int = 0,
    execution: Execution | None = None,
    process: Process | None = None,
    method: Method | None = None,
    keep_going: bool = True,
) -> Iterator[EpochRecord]:
    """Train the model in place, and yield a record after each epoch.

    The state after an epoch depends on (weights, optimizer state, seed, epoch) alone. Stopping after an epoch and
    continuing later with ``done`` therefore gives the same numbers. The caller's random state is not changed.

    Args:
        model: the model, on the device of the loaders.
        optimizer: an optimizer of the model's parameters; its learning rates are set here.
        train_set, test_set: the data to train on, and the data to evaluate on after each epoch.
        epochs: the length of the schedule.
        lr, schedule: the learning rate is ``lr * schedule.factor(…)``.
        seed: seed of dropout and other random layers; the loader has its own seed for the order of the data.
        done: number of epochs already trained.
        execution: how a step runs.
        process: this process in a distributed run.
        method: the pruning method, attached to this model and optimizer; the caller has to finish it.
        keep_going: train on even if nothing can recover.

    Raises:
        Divergence: the loss is not finite; the model cannot be used any more.
        Extinct: after the record of the second epoch in a row that ends with nothing that could recover.
    """
    execution, process = execution or Execution(), process or Process()
    device = next(model.parameters()).device
    tally = Tally(len(train_set), device)
    parallel = process.parallel(model, device)
    if method is None:
        method = Method()
        method.attach(model, optimizer, steps=epochs * len(train_set), examples=train_set.examples)
    method.check_attached(model)
    model.train()
    weights = lowered(model, optimizer, execution) if parallel is model else nullcontext()  # DDP needs float32
    with weights:
        sizes = batch_sizes(train_set)
        step = make_step(model, parallel, optimizer, tally, execution, train_set, sizes, method.penalty)
        scoring = make_scoring(model, parallel, execution, device)
    rate, signs, gone = math.nan, signs_of(method.weights().values()), False
    for epoch in range(done + 1, epochs + 1):
        start = time.perf_counter()
        with weights:
            with seeded(_epoch_seed(seed, epoch, process.rank), device):
                model.train()
                tally.reset()
                for i, (inputs, targets) in enumerate(train_set.epoch(epoch)):
                    last, rate = rate, lr * schedule.factor(epoch, epochs, i / len(train_set))
                    if rate != last:
                        set_lr(optimizer, rate)
                    size = min(train_set.batch_size, train_set.examples - i * train_set.batch_size)
                    step(inputs, targets, scale=len(targets) * process.world_size / size)
                    method.after_step((epoch - 1) * len(train_set) + i + 1)
                    if (i + 1) % CHECK_EVERY == 0:
                        _check(tally.losses[: i + 1].cpu(), epoch, process)
            was_gone, gone = gone, not keep_going and is_extinct(model)
            training = _summarise(tally, train_set, epoch, process)
            trained = time.perf_counter()
            process.share_buffers(model)
            test = evaluate(model, test_set, scoring=scoring, process=process)
        if not math.isfinite(test.loss):  # no training loss has seen the weights after the last update
            raise Divergence(epoch, len(train_set), test.loss, which="test")
        before, signs = signs, signs_of(method.weights().values())
        yield _record(epoch, rate, training, test, method, start, trained, signs_kept=share_alike(before, signs))
        if was_gone and gone:  # twice, because momentum moves weights for some steps without a gradient
            raise Extinct(epoch)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    *,
    scoring: Scoring | None = None,
    execution: Execution | None = None,
    process: Process | None = None,
) -> Score:
    """Return the loss and accuracy over all examples of the loader's plain pass, in eval mode.

    A plain pass has no augmentation. The model's mode is restored.

    ``scoring`` scores this model's batches, e.g. compiled and captured. By default the plain model runs under
    ``execution``.
    """
    process = process or Process()
    scoring = scoring or PlainScoring(model, execution or Execution())
    sums = torch.zeros(2, dtype=torch.float64)
    with eval_mode(model):
        for inputs, targets in loader:
            sums = sums.to(inputs.device) + scoring(inputs, targets)
    loss_sum, correct = process.sum(sums).tolist()
    return Score(loss_sum / loader.examples, 100 * correct / loader.examples)


def recalibrate_batchnorm(model: nn.Module, loader: Loader, *, execution: Execution | None = None) -> None:
    """Replace the running statistics of every BatchNorm by their means over one pass of ``loader``, unaugmented.

    The batches must not be sorted by class; see `estimate_statistics`.
    """
    if norms := batchnorms(model):
        with eval_mode(model):  # so that dropout and the like are off
            estimate_statistics(norms, loader, PlainScoring(model, execution or Execution()))


@torch.no_grad()
def norm_ratio(weights: nn.Module | Iterable[Tensor]) -> float:
    """Return ‖w‖₂/‖w‖₁ over all parameters: d^-½ if all have the same magnitude, 1 if all but one are zero."""
    parameters: list[Tensor] = list(weights.parameters() if isinstance(weights, nn.Module) else weights)
    # One sum over millions of float32 numbers loses 1e-3 of itself on a CPU, over 25 million 5 percent.
    one = torch.stack(torch._foreach_norm(parameters, 1, dtype=torch.float64)).sum()
    two = torch.stack(torch._foreach_norm(parameters, 2, dtype=torch.float64)).square().sum().sqrt()
    return float(two / one)


@torch.no_grad()
def signs_of(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return −1, 0 or 1 for every element, in a byte each."""
    return [weight.sign().to(torch.int8) for weight in weights]


def share_alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the fraction of the elements in which two lists of tensors agree."""
    alike = torch.stack([(a == b).sum() for a, b in zip(first, second, strict=True)]).sum()
    return int(alike) / sum(tensor.numel() for tensor in first)


def is_extinct(model: nn.Module) -> bool:
    """Return whether every weight is zero, and got no gradient in the last step: the network is a constant, for good.

    Biases do not count: the last one still has a gradient, but no weight that it could reach.
    """
    weights = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    return bool(weights) and all(p.grad is not None and not p.any() and not p.grad.any() for p in weights)


def batch_sizes(loader: Loader) -> list[int]:
    """Return the batch sizes that occur in an epoch, the most common one first."""
    last = loader.examples % loader.batch_size
    if loader.examples < loader.batch_size:
        return [last]
    return [loader.batch_size, last] if last else [loader.batch_size]


def _epoch_seed(seed: int, epoch: int, rank: int) -> int:
    digest = hashlib.sha256(f"step/{seed}/{epoch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check(losses: Tensor, epoch: int, process: Process) -> None:
    """Raise Divergence, in all processes together, for the first step whose loss is not finite in one of them."""
    for number, loss in enumerate(process.sum(losses).tolist(), start=1):
        if not math.isfinite(loss):
            raise Divergence(epoch, number, loss)


def _record(
    epoch: int,
    lr: float,
    training: Score,
    test: Score,
    method: Method,
    start: float,
    trained: float,
    *,
    signs_kept: float,
) -> EpochRecord:
    """Return the record of an epoch that began at ``start`` and finished its last step at ``trained``."""
    weights = method.weights()
    zeros = sparsity(weights)
    return EpochRecord(
        epoch=epoch,
        lr=lr,
        train_loss=training.loss,
        train_accuracy=training.accuracy,
        test_loss=test.loss,
        test_accuracy=test.accuracy,
        sparsity=zeros.fraction,
        weight_sparsity=zeros.weight_fraction,
        norm_ratio=norm_ratio(weights.values()),
        train_seconds=trained - start,
        test_seconds=time.perf_counter() - trained,
        signs_kept=signs_kept,
    )


def _summarise(tally: Tally, loader: Loader, epoch: int, process: Process) -> Score:
    """Return the epoch's mean loss and accuracy over all processes, with equal weight for every example."""
    batching = Batching(loader.batch_size, seed=0, rank=process.rank, world_size=process.world_size)
    shares = torch.tensor(batching.sizes(loader.examples), dtype=torch.float64)
    losses, correct = torch.stack([tally.losses, tally.correct]).cpu()
    _check(losses, epoch, process)
    loss, right = process.sum(torch.stack([(losses.double() * shares).sum(), correct.double().sum()])).tolist()
    return Score(loss / loader.examples, 100 * right / loader.examples)
