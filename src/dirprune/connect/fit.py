"""The fit that bends a curve between two networks into the valley of the loss."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from dirprune._support.batches import Batch, Loss, examples_in, mean_loss, moved, pairs, refuse_iterator
from dirprune._support.graphs import Captured, precision, states
from dirprune._support.modes import seeded
from dirprune._support.rates import set_lr
from dirprune.connect.batchnorm import lacks_variance
from dirprune.connect.curve import BezierCurve
from dirprune.connect.landscape import means, tally
from dirprune.weights import check_fits, stateless


@dataclass(frozen=True)
class FitRecord:
    """One epoch of a fit: its ``lr``, means of loss and accuracy (in percent) over its minibatches, and its seconds."""

    epoch: int
    lr: float
    loss: float
    accuracy: float
    seconds: float


def fit_curve(
    model: nn.Module,
    curve: BezierCurve,
    train: Iterable[Batch],
    *,
    epochs: int = 300,
    first_epoch: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    schedule: Callable[[int], float] | None = None,
    loss_fn: Loss = cross_entropy,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
    compiled: bool = False,
    capture: bool = False,
) -> Iterator[FitRecord]:
    """Bend the curve into the valley, epoch by epoch: minimise E[loss(θ(t))] over t ~ U(0, 1), one t per batch.

    Only the model's architecture is used; the model itself does not change. All random numbers of an epoch (t, dropout)
    follow from ``(seed, epoch)``: to resume, load the states of curve and optimizer and continue at ``first_epoch``.

    Args:
        train: ``train.epoch(e)`` gives the minibatches of epoch e = first_epoch … epochs; a DataLoader, or anything
            else without ``epoch``, is iterated once per epoch. Inputs, targets and outputs may be tensors in
            any nesting, and are moved to the curve's device.
        optimizer: over ``curve.parameters()``; by default SGD with lr .1 and momentum .9, as published for VGG16.
        schedule: the learning rate of epoch e; by default the optimizer's own.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch; the record weights batches by their size.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``.
        channels_last: give images to the network in that memory format.
        compiled: `torch.compile` the network, for batches of the shape of the first one.
        capture: replay whole steps as CUDA graphs; the optimizer must then be a fused SGD with lr a CUDA tensor.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> curve = BezierCurve({"weight": torch.eye(2)}, {"weight": 2 * torch.eye(2)})
    >>> fit = fit_curve(nn.Linear(2, 2, bias=False), curve, train=data, epochs=2)
    >>> [record.epoch for record in fit]
    [1, 2]

    Reference: Garipov et al. 2018, section 3.2. Raises FloatingPointError if a loss or bend is no longer finite.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; a fit needs at least one")
    optimizer = _checked(model, curve, optimizer, capture)
    refuse_iterator(train, "train")
    kind = _CapturedFitStep if capture else _FitStep
    with torch.inference_mode(False):  # the caller may be in it
        step = kind(model, curve, optimizer, loss_fn, autocast, channels_last, compiled)
    device = curve.bends[0].device
    for epoch in range(first_epoch, epochs + 1):
        began = time.perf_counter()
        lr = float(optimizer.param_groups[0]["lr"]) if schedule is None else schedule(epoch)
        if schedule is not None:
            set_lr(optimizer, lr)
        step.reset()
        with seeded(seed * 1_000_003 + epoch, device), torch.inference_mode(False), torch.enable_grad():
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            for inputs, targets in pairs(_minibatches(train, epoch), "train"):
                if not examples_in(targets):  # its mean loss would be NaN
                    continue
                t = torch.rand((), dtype=torch.float64, device="cpu").item()
                totals += step(moved(inputs, device), moved(targets, device), t)
        loss, error = means(totals, "train")
        if not (math.isfinite(loss) and all(bend.isfinite().all() for bend in curve.bends)):
            raise FloatingPointError(f"the fit diverged in epoch {epoch} (mean loss {loss}, lr {lr:g}); lower lr")
        yield FitRecord(epoch, lr, loss, 100 - error, time.perf_counter() - began)


def _minibatches(train: Any, epoch: int) -> Iterable[Batch]:
    batches: Iterable[Batch] = train.epoch(epoch) if hasattr(train, "epoch") else train
    return batches


class _FitStep:
    """One step of the fit at a given t, not captured."""

    def __init__(
        self,
        model: nn.Module,
        curve: BezierCurve,
        optimizer: torch.optim.Optimizer,
        loss_fn: Loss,
        autocast: torch.dtype | None,
        channels_last: bool,
        compiled: bool,
    ) -> None:
        self._network = copy.deepcopy(model).train()  # the caller's model keeps its mode
        self._outputs = stateless(self._network)
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._curve, self._optimizer, self._loss_fn = curve, optimizer, loss_fn
        self._autocast, self._channels_last = autocast, channels_last
        self._compiled = torch.compile(self._outputs, dynamic=False) if compiled else self._outputs
        self._device = curve.bends[0].device
        self._shapes: list[torch.Size] = []

    def reset(self) -> None:
        """Begin an epoch with the model's own buffers: only curve and optimizer carry over from the last one."""
        for name, buffer in self._network.named_buffers():
            self._buffers[name].copy_(buffer)

    def __call__(self, inputs: Any, targets: Any, t: float | Tensor) -> Tensor:
        if self._channels_last:
            inputs = tree_map(_channels_last, inputs)
        shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._shapes = self._shapes or shapes
        forward = self._compiled if shapes == self._shapes else self._outputs  # a short last batch is not worth it
        weights = self._curve.point(t)
        # Leaves, so that only the network's derivative is compiled; the curve's follows by `backward` below.
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with precision(self._device, self._autocast):
            with _variance_asked_for():
                outputs = forward({**leaves, **self._buffers}, inputs)
            loss = mean_loss(self._loss_fn, outputs, targets)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        self._optimizer.zero_grad()
        torch.autograd.backward(list(weights.values()), gradients)  # on to the bends
        self._optimizer.step()
        with torch.no_grad():
            return tally(outputs, targets, loss)


class _CapturedFitStep(_FitStep):
    """The same step as a CUDA graph, which reads t and the learning rate from tensors on the device."""

    def __init__(self, model: nn.Module, curve: BezierCurve, optimizer: torch.optim.Optimizer, *options: Any) -> None:
        super().__init__(model, curve, optimizer, *options)
        device = self._device
        if device.type != "cuda":
            raise ValueError(f"capture is True but the curve is on {device}; move its endpoints to a CUDA device")
        for group in optimizer.param_groups:
            lr = group["lr"]
            on_device = isinstance(lr, Tensor) and lr.device == device
            if not (isinstance(optimizer, torch.optim.SGD) and group["fused"] and on_device and not group["dampening"]):
                raise ValueError(
                    f"capture is True but optimizer is {type(optimizer).__name__} with lr={lr!r}; give SGD with "
                    f"lr=torch.tensor(…, device={str(device)!r}), fused=True and no dampening"
                )
        self._t = torch.zeros((), dtype=torch.float64, device=device)
        self._replay = Captured(
            lambda inputs, targets: super(_CapturedFitStep, self).__call__(inputs, targets, self._t),
            changes=lambda: [*curve.bends, *states(optimizer), *self._buffers.values()],
        )

    def __call__(self, inputs: Any, targets: Any, t: float | Tensor) -> Tensor:
        self._t.fill_(t)
        return self._replay(inputs, targets)


def _channels_last(leaf: Any) -> Any:
    images = isinstance(leaf, Tensor) and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if images else leaf


@contextmanager
def _variance_asked_for() -> Iterator[None]:
    """Name the remedy if a batch is too small to train a BatchNorm on."""
    try:
        yield
    except ValueError as error:
        if not lacks_variance(error):
            raise
        raise ValueError(
            "train gave a batch of one example, of which BatchNorm has no variance; leave it out, e.g. with "
            "DataLoader(…, drop_last=True)"
        ) from error


def _checked(
    model: nn.Module, curve: BezierCurve, optimizer: torch.optim.Optimizer | None, capture: bool
) -> torch.optim.Optimizer:
    """Return the optimizer, by default the published one; raise if it or the curve cannot be fitted."""
    check_fits(model, curve.point(0), "the curve")
    if not curve.bends:
        raise ValueError("curve has bends=0 and nothing to fit; build it with bends=1 or more")
    if optimizer is None:
        device = curve.bends[0].device
        replayed = capture and device.type == "cuda"
        lr = torch.tensor(0.1, device=device) if replayed else 0.1
        optimizer = torch.optim.SGD(curve.parameters(), lr=lr, momentum=0.9, fused=replayed or None)
    if {id(p) for group in optimizer.param_groups for p in group["params"]} != {id(p) for p in curve.parameters()}:
        raise ValueError("optimizer trains other tensors than the curve's bends; build it over curve.parameters()")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise ValueError(f"optimizer is {name}, whose step needs a closure; give one that does without, e.g. SGD, Adam")
    return optimizer
