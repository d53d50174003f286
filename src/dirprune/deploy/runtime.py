"""A compiled network: called with arrays, saved as one file, loaded without torch; needs numpy."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dirprune.deploy.native import Array, Job, address, aligned, library
from dirprune.deploy.network import Network, Unsupported, check
from dirprune.deploy.plan import Program, plan_images, plan_rows

_CHUNK = 16  # vectors of rows that go through the linear layers at once


class LayerReport(NamedTuple):
    """What one step of a runtime does and takes."""

    layer: str
    """Its name in the model; empty for steps that only bring data in, out or into another form."""
    kernel: str
    density: float | None
    """The share of its weights that is not zero."""
    multiplications: int
    """For one example, with weights that are not zero."""
    reason: str
    """Why this kernel was taken."""
    microseconds: float
    """The median of the repeats, for the whole batch."""


class Runtime:
    """A network compiled for this machine.

    Args:
        network: what `dirprune.deploy.compile` or `dirprune.deploy.load` made of a model.
        threads: how many threads a call uses.
        checked: compare every access of the kernels with the memory they were given, slowly; for debugging. Needs a C
            compiler.
        source: the file that the network was loaded from.

    Call it with one array (examples first) for each input of the model, of any number of examples; it returns an array
    of float32, or a tuple of them if the model does.
    """

    def __init__(
        self, network: Network, *, threads: int = 1, checked: bool = False, source: Path | None = None
    ) -> None:
        if not 1 <= threads <= 256:
            raise ValueError(f"threads={threads} is not between 1 and 256")
        check(network)
        self.threads = threads
        self._library = library(checked=checked)
        self._images = plan_images(network, self._library, threads)
        self._rows = plan_rows(network, self._library, threads)
        _fits(self._images.bytes * threads)
        self._source = source
        self._network = network if source is None else _without_weights(network)
        self._per_example = max((math.prod(v.shape[:-1]) for v in network.values if not v.image), default=1)
        self._arena: Array = np.empty(0, np.float32)
        self._room = self._start = 0
        self._lock = threading.Lock()
        self._pool = self._library.open(threads)
        weakref.finalize(self, self._library.close, self._pool)

    def __call__(self, *inputs: Any) -> Array | tuple[Array, ...]:
        outputs = self._run(self._given(inputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def __repr__(self) -> str:
        return f"Runtime({len(self._network.layers)} layers, threads={self.threads}, {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """The memory that the prepared weights take."""
        return self._images.nbytes + self._rows.nbytes

    def save(self, path: str | PathLike[str]) -> None:
        """Write the network to one file that `dirprune.deploy.load` opens on any machine; see docs/deploy.md."""
        from dirprune.deploy import saving

        saving.save(self._network if self._source is None else saving.read(self._source), path)

    def report(self, *inputs: Any, repeats: int = 20) -> list[LayerReport]:
        """Return for every step its kernel, why it was taken, and the microseconds that it took.

        Args:
            inputs: what to run it on; by default one example of zeros.
            repeats: of how many runs to take the median.
        """
        given = self._given(inputs or tuple(np.zeros((1, *value.shape), np.float32) for value in self._network.inputs))
        times: list[Array] = []
        for _ in range(repeats + 1):
            seconds = np.zeros(len(self._images.told) + len(self._rows.told))
            self._run(given, seconds)
            times.append(seconds)
        medians = np.median(times[1:] or times, axis=0) * 1e6
        told = [*self._images.told, *self._rows.told]
        return [LayerReport(*known, float(took)) for known, took in zip(told, medians, strict=True)]

    def _given(self, inputs: tuple[Any, ...]) -> list[Array]:
        """Return the inputs as arrays of float32, or say which does not fit."""
        wanted = self._network.inputs
        if len(inputs) != len(wanted):
            raise ValueError(f"the network takes {len(wanted)} inputs, not {len(inputs)}")
        arrays: list[Array] = []
        for number, (value, each) in enumerate(zip(wanted, inputs, strict=True)):
            plain = each.detach() if hasattr(each, "detach") else each
            array = np.ascontiguousarray(plain, dtype=np.float32)
            if array.ndim == 0 or array.shape[1:] != value.shape or len(array) != len(arrays[0] if arrays else array):
                raise ValueError(
                    f"input {number} has shape {array.shape}; it must be (examples, {_listed(value.shape)})"
                )
            arrays.append(array)
        return arrays

    def _run(self, inputs: list[Array], seconds: Array | None = None) -> tuple[Array, ...]:
        examples = len(inputs[0])
        numbers = {*self._images.outputs, *self._rows.outputs}
        made = {n: np.empty((examples, *self._network.values[n].shape), np.float32) for n in numbers}
        values = made | dict(enumerate(inputs))  # what steps read; they write what is made
        split = len(self._images.told)
        with self._lock:
            self._job(self._images, values, made, examples, 0, None if seconds is None else seconds[:split])
            rows = examples * self._per_example
            vectors = min(-(-rows // self._library.lanes), _CHUNK) if rows > 1 else 0
            self._job(self._rows, values, made, rows, vectors, None if seconds is None else seconds[split:])
        return tuple(made[number] for number in self._network.outputs)

    def _job(
        self,
        program: Program,
        values: dict[int, Array],
        made: dict[int, Array],
        items: int,
        vectors: int,
        seconds: Array | None,
    ) -> None:
        """Run one program on all items: images, or rows in chunks of so many vectors."""
        if not items or not program.told:
            return
        chunk = vectors * self._library.lanes or 1
        size = -(-program.bytes * chunk // 64) * 64
        if self._room < size * self.threads:
            self._room = size * self.threads
            self._arena = aligned(self._room // 4)
            self._start = address(self._arena)
        inputs = program.given(*[address(values[n]) for n in program.inputs])
        outputs = program.made(*[address(made[n]) for n in program.outputs])
        job = Job(
            program.address, self._start, ctypes.addressof(inputs), ctypes.addressof(outputs),
            None if seconds is None else address(seconds), size, items, len(program.told), chunk, vectors,
        )  # fmt: skip
        outside = self._library.run(self._pool, job)
        if outside:
            raise RuntimeError(f"kernels left their memory {outside} times; please report this network")


def _fits(arena: int) -> None:
    """Refuse a network whose images cannot be held, rather than let the system end the process."""
    held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if arena > held:
        raise Unsupported(f"its images need {arena / 1e9:.1f} GB, and this machine has {held / 1e9:.1f}")


def _listed(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _without_weights(network: Network) -> Network:
    """Return a network whose weights, now in streams, no longer take memory."""
    layers = tuple(replace(layer, weight=None, scale=None, bias=None) for layer in network.layers)
    return Network(network.inputs, layers, network.outputs)
