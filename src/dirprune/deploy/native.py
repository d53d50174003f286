"""The kernels as Python calls them: their library, and the records that both share (see kernels/lanes.h)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from dirprune.deploy import building

Array = np.ndarray[Any, np.dtype[Any]]
KINDS = ("place", "conv", "pool", "adapt", "pointwise", "relay", "take", "gather", "linear", "combine", "scatter")
"""The steps of a program, in the order of run.c."""
LINEAR_UNIT, RELU, GENERAL = range(3)


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for name in names.split()]


class Planes(ctypes.Structure):
    """An image in blocks: where its channels lie in the arena, and what surrounds a block."""

    _fields_ = (
        *_fields(c_int64, "base channel"),
        *_fields(c_int32, "channels height width bh bw top left bottom right"),
        ("fill", c_float),
    )


class Step(ctypes.Structure):
    """One step of a program."""

    _fields_ = (
        *_fields(c_int32, "kind kernel blocks groups activation residual moves dense kh kw sy sx py px"),
        *_fields(c_float, "low high slope"),
        *_fields(Planes, "input output other"),
        ("block", c_int64),
        *_fields(c_void_p, "offsets values bias scale starts ids group_of channel_of move tables"),
    )


class Job(ctypes.Structure):
    """A program and what it runs on."""

    _fields_ = (
        *_fields(c_void_p, "steps arena inputs outputs seconds"),
        *_fields(c_int64, "bytes items"),
        *_fields(c_int32, "count chunk vectors"),
    )


class Convolution(ctypes.Structure):
    """What the streams of a convolution depend on (see streams.c)."""

    _fields_ = (
        *_fields(c_int32, "out channels kh kw groups block blocks group dense parts"),
        *_fields(c_int64, "channel pitch"),
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel for convolutions: its tile of output vectors, its stride (0: any), and how many channels it sums."""

    index: int
    height: int
    width: int
    stride: int
    dense: bool
    group: int


class Library:
    """The kernels for one instruction set."""

    def __init__(self, path: str) -> None:
        self._c = ctypes.CDLL(path)
        self._c.pool_open.restype = c_void_p
        self._c.pool_close.argtypes = (c_void_p,)
        self._c.run.argtypes = (c_void_p, c_void_p)
        self._c.conv_streams.restype = self._c.row_streams.restype = c_int64
        self.lanes: int = self._c.lanes()
        self.grid = {16: (4, 4), 8: (2, 4), 4: (2, 2)}[self.lanes]
        self.kernels = tuple(self._kernels())

    def _kernels(self) -> list[Kernel]:
        found: list[Kernel] = []
        row = (c_int32 * 5)()
        while self._c.kernel(len(found), row):
            height, width, stride, dense, group = row
            found.append(Kernel(len(found), height, width, stride, bool(dense), group))
        return found

    def open(self, threads: int) -> int:
        """Start a pool of threads."""
        pool: int | None = self._c.pool_open(threads)
        if not pool:
            raise OSError(f"could not start {threads} threads; give fewer")
        return pool

    def close(self, pool: int) -> None:
        """End a pool of threads."""
        self._c.pool_close(pool)

    def run(self, pool: int, job: Job) -> int:
        """Run a program and return how often it left its memory, which only checked kernels count."""
        outside: int = self._c.run(pool, byref(job))
        return outside

    def conv_streams(
        self, conv: Convolution, positions: Array, values: Array, parts: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return offsets, values, starts and channels of a convolution's streams."""
        groups = sum(-(-int(n) // conv.group) for n in np.diff(parts))
        starts = np.empty(conv.blocks * (groups + 1), np.int32)
        ids = np.empty(conv.blocks * groups * conv.group, np.int32)
        given = (byref(conv), pointer(positions), pointer(values), c_int64(len(values)), pointer(parts))
        size = self._size(self._c.conv_streams(*given, None, None, pointer(starts), pointer(ids)))
        offsets = np.empty(size, np.uint16)
        streamed = np.empty(size * (conv.group if conv.dense else 1), np.float32)
        self._c.conv_streams(*given, pointer(offsets), pointer(streamed), pointer(starts), pointer(ids))
        return offsets, streamed, starts, ids

    def row_streams(
        self, shape: tuple[int, int], positions: Array, values: Array, *, dense: bool
    ) -> tuple[Array | None, Array, Array, Array]:
        """Return columns (None if dense), values, starts and rows of a matrix in slices."""
        slices = -(-shape[0] // self.lanes)
        starts, ids = np.empty(slices + 1, np.int32), np.empty(slices * self.lanes, np.int32)
        given = (*shape, int(dense), pointer(positions), pointer(values), c_int64(len(values)))
        size = self._size(self._c.row_streams(*given, None, None, pointer(starts), pointer(ids))) * self.lanes
        offsets = None if dense else np.empty(size, np.uint16)
        streamed = aligned(size)
        self._c.row_streams(*given, pointer(offsets), pointer(streamed), pointer(starts), pointer(ids))
        return offsets, streamed, starts, ids

    def frame(self, planes: Planes) -> tuple[Array, Array, int]:
        """Return the moves that complete a channel, their tables, and how many moves there are."""
        vectors = (planes.top + planes.bh + planes.bottom) * (planes.left + planes.bw + planes.right)
        moves = np.empty((vectors, 3), np.int32)
        tables = aligned(vectors * 3 * self.lanes)
        count = c_int32()
        n: int = self._c.frame_moves(byref(planes), pointer(moves), pointer(tables), byref(count))
        kept = aligned(count.value * 3 * self.lanes)
        kept[:] = tables[: len(kept)]
        return moves[:n].copy(), kept, n

    def _size(self, size: int) -> int:
        if size < 0:
            raise MemoryError("not enough memory to prepare a network's weights")
        return size


def address(array: Array) -> int:
    """Return where an array's data begins; the caller keeps the array alive."""
    try:
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # quicker than the other way
    except (TypeError, ValueError):  # an array that is empty, or not to be written
        where: int = array.__array_interface__["data"][0]
        return where


def pointer(array: Array | None) -> c_void_p | None:
    """Return an array's address for a call, or NULL."""
    return None if array is None else c_void_p(address(array))


def aligned(size: int) -> Array:
    """Return memory for float32, not initialised, in which every vector can be aligned."""
    raw = np.empty(size * 4 + 64, np.uint8)
    start = -address(raw) % 64
    return raw[start : start + size * 4].view(np.float32)


@functools.cache
def library(*, checked: bool = False) -> Library:
    """Return this machine's kernels."""
    return Library(str(building.built(building.variant(), checked=checked)))
