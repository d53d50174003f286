"""The loss landscape: loss and error of many points of weight space on a data set, measured fast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dirprune._support.batches import Batch, Loss, examples_in, mean_loss, moved, pairs
from dirprune._support.graphs import Captured, precision
from dirprune.connect.batchnorm import batchnorms, estimate_statistics
from dirprune.weights import Weights, put

Place = tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """Mean loss, and error in percent (NaN if targets are not class indices), at a place (t,) or (x, y)."""

    place: Place
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float


class Evaluator:
    """Measures many points of weight space on one data set: ``evaluator(weights) -> Measurement``.

    It uses a copy of the model in eval mode, and plain data. BatchNorm statistics are re-estimated at every point: mean
    and variance of each training batch, averaged over the training samples (without dropout, so nothing is random).
    Batches are moved to the device and stay there; inputs, targets and outputs may be tensors in any nesting. On CUDA
    the forward pass is captured once per batch shape, and the host waits once per point.

    Args:
        train, test: the batches, iterated once. With BatchNorm those of ``train`` must not be sorted by class. If it
            shuffles, the result depends on torch's global seed.
        loss_fn: ``loss_fn(outputs, targets)``, a mean over the batch; batches are weighted by their number of targets.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``.
        channels_last: hold convolution weights in that memory format; images follow in the first layer.
        compiled: `torch.compile` the network, for every batch shape; pays off for few shapes and many points.
        capture: replay CUDA graphs; by default on CUDA. Turn it off if the forward pass waits for the device, or if a
            batch is not a pair of tensors.

    >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> evaluate = Evaluator(nn.Linear(2, 2, bias=False), train=data, test=data)
    >>> evaluate({"weight": 100 * torch.eye(2)}).test_error
    0.0
    """

    def __init__(
        self,
        model: nn.Module,
        train: Iterable[Batch],
        test: Iterable[Batch],
        *,
        loss_fn: Loss = cross_entropy,
        autocast: torch.dtype | None = None,
        channels_last: bool = False,
        compiled: bool = False,
        capture: bool | None = None,
    ) -> None:
        self._network = copy.deepcopy(model).eval().requires_grad_(False)
        first = next(self._network.parameters(), None)
        if first is None:
            raise ValueError(f"model is a {type(model).__name__} without parameters; there are no weights to measure")
        self._device = first.device
        self._norms = batchnorms(self._network)
        others = [module for module in self._network.modules() if module not in self._norms]
        self._noted = [(m, name, b, b.clone()) for m in others for name, b in m.named_buffers(recurse=False)]
        if channels_last:
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if capture and self._device.type != "cuda":
            raise ValueError(f"capture is True but the model is on {self._device}; move it to a CUDA device")
        # fork_rng: a torch DataLoader draws from the global generator when it is iterated.
        with torch.random.fork_rng(devices=[]):
            self._train, self._test = self._held(train, "train"), self._held(test, "test")
        self._loss_fn, self._autocast = loss_fn, autocast
        self._forward = torch.compile(self._network, dynamic=False) if compiled else self._network
        self._step: Callable[[Any, Any], Tensor] = self._score
        if self._device.type == "cuda" if capture is None else capture:
            self._step = Captured(self._score, key=lambda: any(norm.training for norm in self._norms))

    @torch.no_grad()
    def __call__(self, weights: Mapping[str, Tensor], place: Place = ()) -> Measurement:
        """Measure the weights; ``place`` is copied to the result."""
        self._reset_buffers()
        put(self._network, weights)
        with torch.cuda.device_of(next(self._network.parameters())):  # type: ignore[no-untyped-call]
            if self._norms:
                estimate_statistics(self._norms, self._train, self._step)
            train = self._totals(self._train)
            self._reset_buffers()
            train, test = torch.stack([train, self._totals(self._test)]).cpu()  # the only wait
        return Measurement(place, *means(train, "train"), *means(test, "test"))

    def _reset_buffers(self) -> None:
        """Restore buffers that the network changes even in eval mode: no point may depend on earlier ones."""
        for module, name, buffer, value in self._noted:
            buffer.copy_(value)  # in place, where a graph reads it; a network may have replaced the tensor
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)

    def _held(self, batches: Iterable[Batch], name: str) -> list[Batch]:
        # Empty batches are left out: their mean loss is NaN.
        held = (batch for batch in pairs(batches, name) if examples_in(batch[1]))
        return [moved(batch, self._device) for batch in held]

    def _totals(self, batches: list[Batch]) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        for inputs, targets in batches:
            totals += self._step(inputs, targets)
        return totals

    def _score(self, inputs: Any, targets: Any) -> Tensor:
        with precision(self._device, self._autocast):
            outputs = self._forward(inputs)
            loss = mean_loss(self._loss_fn, outputs, targets)
        return tally(outputs, targets, loss)


def profile_points(measure: Evaluator, point: Callable[..., Weights], places: Iterable[Place]) -> Iterator[Measurement]:
    """Yield a measurement of ``point(*place)`` for each place; ``point`` is that of a curve or a plane.

    To resume, pass the places that are left.
    """
    for place in places:
        with torch.no_grad():
            weights = point(*place)
        yield measure(weights, place)


def tally(outputs: Any, targets: Any, loss: Tensor) -> Tensor:
    """Return batch size · (loss, error in percent, 1), to be summed over batches and divided by `means`."""
    wrong = torch.full_like(loss, math.nan)
    if _are_classes(outputs, targets):
        wrong = (outputs.argmax(1) != targets).double().mean()
    return torch.stack([loss.double(), 100 * wrong.double(), torch.ones_like(loss).double()]) * examples_in(targets)


def _are_classes(outputs: Any, targets: Any) -> bool:
    """Return whether the outputs score classes along dimension 1 and the targets are class indices."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.ndim < 2:
        return False
    if outputs.shape[1] == 1:  # one logit for two classes, or regression: argmax would always be 0
        return False
    return not targets.is_floating_point() and targets.shape == (*outputs.shape[:1], *outputs.shape[2:])


def means(totals: Tensor, source: str) -> tuple[float, float]:
    """Return mean loss and error from summed tallies; ``source`` names the batches in an error message."""
    loss, error, size = totals.tolist()
    if size == 0:
        raise ValueError(f"{source} gave no batches; there is nothing to measure on")
    return loss / size, error / size
