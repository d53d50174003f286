"""How a training step runs on a device: precision, memory format, compilation, capture in a CUDA graph.

`PlainStep` is the reference implementation of a step. `CapturedStep` is the same step, recorded once and replayed, so
that no Python runs between kernels. A test on a GPU checks that the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from dirprune._support.graphs import Captured, states

PRECISIONS = ("float32", "bfloat16")

Compilable = TypeVar("Compilable", bound=Callable[..., Any])

Penalty = Callable[[], "Tensor | None"]
"""A term to add to the data loss in the objective, or None. The tally records the data loss alone."""


Scoring = Callable[[Tensor, Tensor], Tensor]
"""Maps a batch (inputs, targets) to the sum of its losses and its number of correct answers, in float64.

An example with several targets counts as one, with their mean."""


def no_penalty() -> None:
    return None


@dataclass(frozen=True)
class Execution:
    """How to run on a device; ``capture`` needs CUDA and one process."""

    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False
    capture: bool = False
    lean: bool = False
    """With bfloat16 and gRDA, store the weights in bfloat16 during training; see `dirprune.lab.training.lean`."""
    threads: int = 0
    """Number of CPU threads. 0 leaves the choice to torch; results then depend on the number of cores."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not known; take one of {', '.join(PRECISIONS)}")
        if self.threads < 0:
            raise ValueError(f"threads={self.threads}: give how many, or 0 for torch's own choice")

    @contextmanager
    def threading(self) -> Iterator[None]:
        """Run with ``threads`` threads, and restore torch's number afterwards."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which forward passes run."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def captures(self, device: torch.device) -> bool:
        """Whether a single process records its steps on this device as CUDA graphs."""
        return self.capture and device.type == "cuda"

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model on the device, in the memory format."""
        # torch's own annotation of nn.Module.to lacks memory_format.
        return model.to(device, memory_format=self.memory_format)  # type: ignore[call-overload, no-any-return]

    def compiled(self, function: Compilable) -> Compilable:
        """Return a model or function, compiled if ``compile`` is set. Every batch shape is compiled separately."""
        if not self.compile:
            return function
        compiled: Any = torch.compile(function, dynamic=False)
        return compiled  # type: ignore[no-any-return]


class PlainScoring:
    """The `Scoring` of a network, without capture."""

    def __init__(self, forward: Callable[[Tensor], Tensor], execution: Execution) -> None:
        self.forward = forward
        self.execution = execution

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.execution.autocast(inputs.device):
            logits = self.forward(inputs.to(memory_format=self.execution.memory_format)).float()
        loss = cross_entropy(logits, targets, reduction="sum")
        right = (logits.argmax(1) == targets).sum()
        return torch.stack([loss.double(), right.double()]) / max(targets[:1].numel(), 1)


class Tally:
    """Loss and number of correct answers of every step of an epoch, kept on the device without synchronisation."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.losses = torch.zeros(steps, device=device)
        self.correct = torch.zeros(steps, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def reset(self) -> None:
        for tensor in (self.losses, self.correct, self._position):
            tensor.zero_()

    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.losses.index_copy_(0, self._position, loss.detach().float().view(1))
        right = (logits.detach().argmax(1) == targets).sum().float() / max(targets[:1].numel(), 1)
        self.correct.index_copy_(0, self._position, right.view(1))
        self._position += 1


class PlainStep:
    """One optimization step on one batch, without capture.

    DDP averages gradients over processes. ``scale`` weights this process's mean loss in that average, so that the
    gradient is that of the global batch, however the batch is divided.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        optimizer: Optimizer,
        tally: Tally,
        execution: Execution,
        penalty: Penalty = no_penalty,
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self.tally = tally
        self.execution = execution
        self.penalty = penalty

    def __call__(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.execution.autocast(inputs.device):
            logits = self.forward(inputs.to(memory_format=self.execution.memory_format))
            total = cross_entropy(logits.float(), targets, reduction="sum")
        loss = total / max(targets.numel(), 1)
        objective = loss if scale == 1.0 else loss * scale
        penalty = self.penalty()
        (objective if penalty is None else objective + penalty).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.tally.add(loss, logits, targets)


class CapturedStep:
    """The same step as one CUDA graph per batch size.

    The learning rate must be a tensor on the device (GRDA's ``capturable``, a tensor ``lr`` of a fused SGD).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        tally: Tally,
        execution: Execution,
        penalty: Penalty = no_penalty,
    ) -> None:
        self.optimizer = optimizer
        self.tally = tally
        # What the plan of a target does on the host is done around the replays.
        self._recording, self._replaying = (
            getattr(optimizer, name, nullcontext) for name in ("recording", "replaying")
        )
        self._plain = PlainStep(model, optimizer, tally, execution, penalty)
        self._replay = Captured(
            self._step,
            changes=lambda: [*model.parameters(), *model.buffers(), *states(optimizer)],
            before=tally.reset,  # it may have room for a single step only
        )
        self._latest: object = None

    def prepare(self, inputs: Tensor, targets: Tensor, sizes: Iterable[int]) -> None:
        """Capture a graph for each batch size; weights, buffers, optimizer state and random state are put back."""
        # gRDA's accumulators start at the weights; all other state of an optimizer starts at zero.
        begin = getattr(self.optimizer, "begin", lambda p, group: None)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    begin(p, group)
        model, execution = self._plain.forward, self._plain.execution
        for number, size in enumerate(sizes):
            # Only the common batch size is worth compiling for; the short last batch of an epoch runs uncompiled.
            self._plain.forward = execution.compiled(model) if number == 0 else model
            alike = [part[:1].expand(size, *part.shape[1:]).contiguous() for part in (inputs, targets)]
            self._replay.prepare(*alike)
        self.tally.reset()

    def _step(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Take a step, and return the parameters with the tensors that hold their gradients."""
        with self._recording():
            self._plain(inputs, targets)
        return [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]

    def __call__(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> None:
        with self._replaying():
            gradients = self._replay(inputs, targets)
        if gradients is not self._latest:  # let p.grad be the gradient of this step, as after a plain step
            self._latest = gradients
            for p, gradient in gradients:
                p.grad = gradient


def make_scoring(model: nn.Module, parallel: nn.Module, execution: Execution, device: torch.device) -> Scoring:
    """Return the scoring of batches for this execution; ``parallel`` is the model, or DDP around it."""
    scoring = PlainScoring(execution.compiled(model), execution)
    return Captured(scoring) if parallel is model and execution.captures(device) else scoring


def make_step(
    model: nn.Module,
    parallel: nn.Module,
    optimizer: Optimizer,
    tally: Tally,
    execution: Execution,
    batches: Iterable[tuple[Tensor, Tensor]],
    sizes: Iterable[int],
    penalty: Penalty = no_penalty,
) -> PlainStep | CapturedStep:
    """Return the step for this execution, captured for batches of these sizes that are like the first of ``batches``.

    ``parallel`` is the model, or DDP around it.
    """
    with torch.no_grad():
        if penalty() is not None:  # worth compiling: it has many small operations per layer
            penalty = execution.compiled(penalty)
    if parallel is model and execution.captures(tally.losses.device):
        captured = CapturedStep(model, optimizer, tally, execution, penalty)
        captured.prepare(*next(iter(batches)), sizes)
        return captured
    return PlainStep(execution.compiled(parallel), optimizer, tally, execution, penalty)
