"""Which kernel a layer gets, by counting: a core does two loads, or two multiplications of vectors, a cycle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dirprune.deploy.layout import Image
from dirprune.deploy.native import Array, Kernel
from dirprune.deploy.network import Layer, Pair, Unsupported

L1 = 38 * 1024  # bytes of input that stay in the first cache beside the streams
LEAST = 12  # weights of an output channel that make it worth reloading its sums for one more block of channels
REACH = 65535 * 8  # bytes that an offset of a stream can span
DENSE_ROWS = 0.35
"""The density from which a linear layer is stored densely: picking an input takes as long as three plain loads."""


class Choice(NamedTuple):
    """A kernel, into how many blocks the input channels are cut, its cycles for one image, and why it was taken."""

    kernel: Kernel
    blocks: int
    cycles: float
    reason: str


def choose(
    layer: Layer, positions: Array, given: Image, made: Image, kernels: tuple[Kernel, ...], lanes: int
) -> Choice:
    """Return the kernel with the fewest cycles for a convolution; ``positions`` are those of its weights."""
    assert layer.window is not None
    assert layer.weight is not None
    fits = [
        kernel
        for kernel in kernels
        if kernel.height <= made.block.y
        and kernel.width <= made.block.x
        and kernel.stride in (0, layer.window.stride.x)
    ]
    special = [kernel for kernel in fits if kernel.stride]
    unions = _Unions(layer, positions)
    options = [_cost(layer, given, made, kernel, lanes, unions) for kernel in special or fits]
    best = {dense: min((o for o in options if o.kernel.dense == dense), key=lambda o: o.cycles) for dense in (0, 1)}
    sparse, dense = best[0], best[1]
    chosen = dense if dense.cycles < sparse.cycles else sparse
    share = (sparse.cycles / dense.cycles) if chosen is sparse else (dense.cycles / sparse.cycles)
    other = "dense" if chosen is sparse else "sparse"
    return chosen._replace(reason=f"{share:.0%} of the cycles of {other} at {layer.weight.density:.1%} density")


class _Unions:
    """How many positions a group of neighbouring output channels uses, added up over the groups."""

    def __init__(self, layer: Layer, positions: Array) -> None:
        assert layer.weight is not None
        self.out = layer.weight.shape[0]
        self.row = int(np.prod(layer.weight.shape[1:]))
        self.positions = positions if layer.weight.density > 0.1 else None
        self.known: dict[int, int] = {1: layer.weight.nonzero}

    def size(self, group: int) -> int:
        if self.positions is None:  # too sparse for channels to share anything
            return -(-self.out // group) * self.row
        if group not in self.known:
            used: Array = np.zeros((-(-self.out // group), self.row), bool)
            used[self.positions // self.row // group, self.positions % self.row] = True
            self.known[group] = int(used.sum())
        return self.known[group]


def _cost(layer: Layer, given: Image, made: Image, kernel: Kernel, lanes: int, unions: _Unions) -> Choice:
    assert layer.weight is not None
    tile = kernel.height * kernel.width
    tiles = -(-made.block.y // kernel.height) * -(-made.block.x // kernel.width)
    blocks = _blocks(layer, given, kernel, lanes)
    if kernel.dense:
        inner = unions.size(kernel.group) * max(tile * kernel.group, tile + kernel.group + 1) / 2
    else:
        inner = layer.weight.nonzero * (tile + 2) / 2
    sums = 1.5 * tile * layer.weight.shape[0] * blocks
    return Choice(kernel, blocks, tiles * (inner + sums), "")


def _blocks(layer: Layer, given: Image, kernel: Kernel, lanes: int) -> int:
    """Return the number of blocks of input channels: as many as the cache asks for and the weights are worth."""
    assert layer.window is not None
    assert layer.weight is not None
    size, stride, _ = layer.window
    vector = lanes * 4
    touched = Pair((kernel.height - 1) * stride.y + size.y, (kernel.width - 1) * stride.x + size.x)
    if size == (1, 1):
        touched = Pair(kernel.height, kernel.width)
    channels = given.shape[0]
    wanted = -(-channels // max(1, L1 // (touched.y * touched.x * vector)))
    worth = layer.weight.nonzero // layer.weight.shape[0] // LEAST
    window = (size.y - 1) * given.pitch + size.x
    if window > REACH // vector:
        raise Unsupported(f"layer {layer.name!r} slides over an image too wide for an offset: {given.shape}")
    reached = 1 + max(0, (REACH // vector - window) // given.vectors)
    return max(1, min(wanted, worth), -(-channels // reached))
