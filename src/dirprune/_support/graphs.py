"""CUDA graphs: work is recorded once and replayed, so that no Python runs between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_REHEARSALS = 3


def is_capturing(device: torch.device) -> bool:
    """Return whether kernels launched on a device now are recorded in a graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def record(
    work: Callable[[], T],
    *,
    rehearse: Callable[[], object] | None = None,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the work as a CUDA graph on the current device; return the graph and the result of the recorded call.

    The work is rehearsed three times first: the first calls compile, choose algorithms and allocate workspace, none of
    which may be recorded. The caller has to undo what the rehearsals change.

    Args:
        work: launches the same kernels on the same memory whenever it is called, and never waits for the device.
        rehearse: the function to call for a rehearsal; the work itself if None.
        pool: ``pool()`` of another graph to share memory with, which must never run at the same time.
    """
    with _fastest_kernels():
        aside = _aside(torch.cuda.current_device())
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(_REHEARSALS):
                    (rehearse or work)()
        finally:  # after an error the caller may go on and write to memory that is still in use here
            torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may use the device during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    return graph, result


class Kept:
    """The present values of some tensors, to be put back; of those that are made later, the value is taken to be zero.

    Args:
        tensors: returns them; it is called again to put them back, and may then return more.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._values = {tensor: tensor.detach().clone() for tensor in tensors()}

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor in self._tensors():
            if tensor in self._values:
                tensor.copy_(self._values[tensor])
            else:
                tensor.zero_()


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


class Captured(Generic[T]):
    """A function of one batch as CUDA graphs, one per batch shape: ``captured(inputs, targets)``.

    The function must launch the same kernels on the same memory whenever it is called, and must never wait for the
    device. Everything else that it reads (weights, a learning rate) must stay in the memory where it was captured. The
    next call overwrites the result, which has to hold on to every tensor that the caller reads afterwards.

    Args:
        function: ``function(inputs, targets)``; for each new shape it is called as often as `record` calls it.
        changes: returns the tensors that the function changes, e.g. weights; they are put back after the rehearsals.
        before: called before each rehearsal.
        key: returns what else distinguishes graphs, e.g. a mode.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], T],
        *,
        changes: Callable[[], Iterable[Tensor]] = tuple,
        before: Callable[[], object] = lambda: None,
        key: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self._function, self._changes, self._before, self._key = function, changes, before, key
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, T]] = {}

    def __call__(self, inputs: Tensor, targets: Tensor) -> T:
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise ValueError(
                f"inputs is a {type(inputs).__name__} and targets a {type(targets).__name__}; a CUDA graph is recorded "
                "for one tensor each: give capture=False"
            )
        key = self._key_of(inputs, targets)
        if key not in self._graphs:
            self.prepare(inputs, targets)
        graph, static_inputs, static_targets, result = self._graphs[key]
        with torch.cuda.device(inputs.device):
            static_inputs.copy_(inputs)
            static_targets.copy_(targets)
            graph.replay()
        return result

    def prepare(self, inputs: Tensor, targets: Tensor) -> None:
        """Record the graph for batches of this shape."""
        static, kept = (inputs.clone(), targets.clone()), Kept(self._changes)

        def rehearse() -> None:
            self._before()
            self._function(*static)

        # Only one graph runs at a time, so they can share memory.
        pool = next((graph.pool() for graph, *_ in self._graphs.values()), None)
        # fork_rng: the random numbers of a step must not depend on whether it is the first of its shape.
        with torch.cuda.device(inputs.device), torch.random.fork_rng(devices=[inputs.device]):
            graph, result = record(lambda: self._function(*static), rehearse=rehearse, pool=pool)
            kept.put_back()
        self._graphs[self._key_of(inputs, targets)] = (graph, *static, result)

    def _key_of(self, inputs: Tensor, targets: Tensor) -> Hashable:
        return self._key(), inputs.shape, inputs.dtype, targets.shape, targets.dtype


def precision(device: torch.device, autocast: torch.dtype | None) -> torch.autocast:
    """Return the autocast context of a forward pass in this precision, or in that of the weights if it is None.

    Autocast's cache is off: a recorded pass must cast the weights anew in every replay.
    """
    return torch.autocast(device.type, dtype=autocast, enabled=autocast is not None, cache_enabled=False)


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Return the stream for all rehearsals: only one, because cuBLAS keeps a workspace for every stream it sees."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _fastest_kernels() -> Iterator[None]:
    """Let cuDNN benchmark its algorithms, which pays off for work that is replayed thousands of times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
