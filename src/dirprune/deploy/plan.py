"""From a network to programs for this machine: memory, kernels and streams of weights."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dirprune.deploy.choice import DENSE_ROWS, Choice, choose
from dirprune.deploy.layout import Image, Layout, Move, Room, pack_rooms
from dirprune.deploy.native import (
    GENERAL,
    KINDS,
    LINEAR_UNIT,
    RELU,
    Array,
    Convolution,
    Library,
    Planes,
    Step,
    aligned,
    pointer,
)
from dirprune.deploy.network import IDENTITY, Activation, Layer, Network, Unsupported

_RELU = Activation(low=0.0)
_STEP = {
    "affine": "pointwise",
    "cat": "pointwise",
    "max_pool": "pool",
    "average_pool": "pool",
    "adaptive_max_pool": "adapt",
    "adaptive_average_pool": "adapt",
}
_LINE = 64


class Told(NamedTuple):
    """What is known of a step before it has run."""

    layer: str
    kernel: str
    density: float | None
    multiplications: int  # of one example, by weights that are not zero
    reason: str


@dataclass
class Program:
    """Steps that run one after the other on one arena; ``kept`` are the arrays that they point to."""

    steps: Any
    bytes: int  # of an arena: for an image, or for one row
    told: list[Told]
    inputs: list[int]  # values by the number that a step knows them by
    outputs: list[int]
    kept: list[Array] = field(repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.steps)
        self.given, self.made = (ctypes.c_void_p * len(those) for those in (self.inputs, self.outputs))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all streams and tables."""
        return sum(array.nbytes for array in self.kept) + ctypes.sizeof(self.steps)


class _Builder:
    """Collects the steps of a program and keeps their arrays."""

    def __init__(self, network: Network, library: Library, threads: int) -> None:
        self.network = network
        self.library = library
        self.threads = threads
        self.steps: list[Step] = []
        self.told: list[Told] = []
        self.kept: list[Array] = []
        self._frames: dict[bytes, tuple[Any, Any, int]] = {}

    def keep(self, array: Array | None) -> Any:
        """Return an array's address, and keep it as long as the program."""
        if array is None:
            return None
        whole = np.ascontiguousarray(array)
        self.kept.append(whole)
        return pointer(whole)

    def step(self, kind: str, layer: Layer | None, channels: int) -> Step:
        """Return a new step whose channels are shared evenly among the threads."""
        step = Step(kind=KINDS.index(kind))
        activation = layer.activation if layer else IDENTITY
        step.activation = {IDENTITY: LINEAR_UNIT, _RELU: RELU}.get(activation, GENERAL)
        step.low, step.high, step.slope = activation
        step.channel_of = self.keep(np.linspace(0, channels, self.threads + 1).astype(np.int32))
        if layer and layer.window:
            step.kh, step.kw, step.sy, step.sx, step.py, step.px = (n for pair in layer.window for n in pair)
        self.steps.append(step)
        return step

    def tell(self, layer: Layer | None, kernel: str, multiplications: int = 0, reason: str = "") -> None:
        density = layer.weight.density if layer and layer.weight else None
        self.told.append(Told(layer.name if layer else "", kernel, density, multiplications, reason))

    def frame(self, planes: Planes) -> tuple[Any, Any, int]:
        """Return how a channel of an image is completed; the same for all images of its form."""
        form = bytes(planes)[2 * 8 + 4 :]
        if form not in self._frames:
            moves, tables, count = self.library.frame(planes)
            self._frames[form] = self.keep(moves), self.keep(tables), count
        return self._frames[form]

    def program(self, size: int, inputs: list[int], outputs: list[int]) -> Program:
        return Program((Step * len(self.steps))(*self.steps), size, self.told, inputs, outputs, self.kept)


def plan_images(network: Network, library: Library, threads: int) -> Program:
    """Return the program that takes one image through the network, up to where it is flattened."""
    layout = Layout(network, library.grid)
    size = _place_images(layout, library.lanes)
    builder = _Builder(network, library, threads)
    inputs = [number for number, value in enumerate(network.inputs) if value.image]
    for move in layout.moves:
        layer = None if move.layer is None else network.layers[move.layer]
        if move.kind == "conv":
            assert layer is not None
            step = _conv(builder, layer, move)
        else:
            channels = (move.inputs[0] if move.inputs else move.output or move.inputs[0]).shape[0]
            step = builder.step(_STEP.get(move.kind, move.kind), layer, channels)
            builder.tell(layer, move.kind)
        if move.kind in ("place", "take"):
            step.kernel = (inputs if move.kind == "place" else layout.leaving).index(move.number)
        if move.kind in ("average_pool", "adaptive_average_pool"):
            step.dense = 1
        if move.kind == "relay":
            step.ids = builder.keep(_origins(move, library))
        if move.kind == "average_pool":
            assert layer is not None
            step.scale = builder.keep(_shares(layer, move, library))
        if layer and layer.scale is not None:
            step.scale, step.bias = builder.keep(layer.scale), builder.keep(layer.bias)
        _images(builder, step, move)
    return builder.program(size, inputs, layout.leaving)


def _images(builder: _Builder, step: Step, move: Move) -> None:
    """Tell a step where its images lie, and how its output is completed."""
    lanes = builder.library.lanes
    if move.inputs:
        step.input = move.inputs[0].planes(lanes)
    if len(move.inputs) == 2:
        step.other, step.residual = move.inputs[1].planes(lanes), 1
    if not move.output:
        return
    step.output = move.output.planes(lanes)
    if move.kind == "cat":
        step.output.base += move.number * step.output.channel
        step.output.channels = move.inputs[0].shape[0]
    step.move, step.tables, step.moves = builder.frame(step.output)


def _origins(move: Move, library: Library) -> Array:
    """Return for every lane of every vector of an image where its pixel lies in the image that it is a copy of."""
    (given,), made = move.inputs, move.output
    assert made is not None
    (gy, gx), (bh, bw) = library.grid, made.block
    y, x = (np.minimum(np.arange(g * b), n - 1) for g, b, n in zip((gy, gx), (bh, bw), made.shape[1:], strict=True))
    vector = (y % given.block.y * given.pitch)[:, None] + x % given.block.x
    lane = (y // given.block.y * gx)[:, None] + x // given.block.x
    places: Array = (vector * library.lanes + lane).reshape(gy, bh, gx, bw).transpose(1, 3, 0, 2)
    return places.astype(np.int32)


def _shares(layer: Layer, move: Move, library: Library) -> Array:
    """Return for every output pixel, vector by vector, one over the number of pixels that it is the average of."""
    assert layer.window is not None
    assert move.output is not None
    counts = []
    for axis, (size, stride, padding) in enumerate(zip(*layer.window, strict=True)):
        length, places = move.inputs[0].shape[1 + axis], move.output.block[axis] * library.grid[axis]
        start = np.arange(places) * stride - padding
        low, high = (-padding, length + padding) if layer.count_padding else (0, length)
        counts.append(np.clip(start + size, low, high) - np.clip(start, low, high))
    count = np.maximum(np.outer(*counts), 1)  # (gy * bh, gx * bw)
    (gy, gx), (bh, bw) = library.grid, move.output.block
    vectors = count.reshape(gy, bh, gx, bw).transpose(1, 3, 0, 2)
    shares = aligned(vectors.size)
    shares[:] = (1.0 / vectors).ravel()
    return shares


def _conv(builder: _Builder, layer: Layer, move: Move) -> Step:
    """Add a convolution: its kernel, its streams, and which channels each thread has."""
    (given, *_), made = move.inputs, move.output
    library = builder.library
    assert made is not None
    assert layer.weight is not None
    assert layer.window is not None
    positions, values = layer.weight.entries()
    choice = choose(layer, positions, given, made, library.kernels, library.lanes)
    out, channels, *_ = layer.weight.shape
    total, blocks = given.shape[0], choice.blocks
    block = -(-total // blocks)
    planes = given.planes(library.lanes)
    conv = Convolution(
        out, channels, *layer.window.size, layer.groups, block, -(-total // block), choice.kernel.group,
        choice.kernel.dense, builder.threads, planes.channel, given.pitch * library.lanes * 4,
    )  # fmt: skip
    parts = _split(np.bincount(positions // (layer.weight.size // out), minlength=out), choice.kernel.group, builder)
    offsets, streamed, starts, ids = library.conv_streams(conv, positions, values, parts)
    step = builder.step("conv", layer, out)
    step.kernel, step.blocks, step.block = choice.kernel.index, conv.blocks, block * planes.channel
    groups = -(-np.diff(parts) // conv.group)
    step.groups, step.dense = int(groups.sum()), conv.dense
    step.offsets, step.values = builder.keep(offsets), builder.keep(streamed)
    step.starts, step.ids = builder.keep(starts), builder.keep(ids)
    step.bias = builder.keep(layer.bias if layer.bias is not None else np.zeros(out, np.float32))
    step.channel_of = builder.keep(parts)
    step.group_of = builder.keep(np.append(0, np.cumsum(groups)).astype(np.int32))
    _tell_conv(builder, layer, choice, layer.weight.nonzero * made.shape[1] * made.shape[2])
    return step


def _tell_conv(builder: _Builder, layer: Layer, choice: Choice, multiplications: int) -> None:
    kernel = choice.kernel
    name = f"{'dense' if kernel.dense else 'sparse'} {kernel.height}×{kernel.width}×{kernel.group}"
    builder.tell(layer, name, multiplications, choice.reason)


def _split(work: Array, group: int, builder: _Builder) -> Array:
    """Return where each thread's channels begin, so that all have about as much work; in whole groups."""
    done = np.append(0, np.cumsum(work + 16))
    places = np.searchsorted(done, done[-1] * np.arange(1, builder.threads) / builder.threads)
    whole = np.minimum(np.round(places / group) * group, len(work))
    return np.concatenate([[0], whole, [len(work)]]).astype(np.int32)


def _place_images(layout: Layout, lanes: int) -> int:
    """Give every image its place in the arena, and return the arena's size."""
    first: dict[Image, int] = {}
    last: dict[Image, int] = {}
    for index, move in enumerate(layout.moves):
        if move.output:
            first.setdefault(move.output, index)
        for image in [*move.inputs, *([move.output] if move.output else [])]:
            last[image] = index
    images = list(first)
    rooms = []
    for image in images:
        bytes_ = image.shape[0] * image.vectors * lanes * 4
        rooms.append(Room(-(-bytes_ // _LINE) * _LINE, first[image], last[image]))
    starts, size = pack_rooms(rooms)
    for image, start in zip(images, starts, strict=True):
        image.base = start
    return size


def plan_rows(network: Network, library: Library, threads: int) -> Program:
    """Return the program that takes rows through the network: tokens, or flattened images."""
    builder = _Builder(network, library, threads)
    flattened = [network.number(i) for i, layer in enumerate(network.layers) if layer.kind == "flatten"]
    inputs = [number for number, value in enumerate(network.inputs) if not value.image]
    inputs += [number for number in flattened if number not in inputs]
    outputs = [number for number in network.outputs if not network.values[number].image]
    layers = [
        (network.number(i), layer)
        for i, layer in enumerate(network.layers)
        if not network.values[layer.inputs[0]].image
    ]
    places, size = _place_rows(network, inputs, layers, outputs)

    def planes(number: int) -> Planes:
        return Planes(base=places[number], channels=network.values[number].shape[-1])

    for index, number in enumerate(inputs):
        step = builder.step("gather", None, network.values[number].shape[-1])
        step.kernel, step.output = index, planes(number)
        builder.tell(None, "gather")
    for number, layer in layers:
        if layer.kind == "cat":
            start = 0
            for source in layer.inputs:
                step = builder.step("combine", layer, planes(source).channels)
                step.input, step.output = planes(source), planes(number)
                step.output.base += start
                start += step.input.channels
                builder.tell(layer, "cat")
            continue
        step = (
            _linear(builder, layer)
            if layer.kind == "linear"
            else builder.step("combine", layer, planes(number).channels)
        )
        if layer.kind == "affine":
            builder.tell(layer, "affine")
            if layer.scale is not None:
                step.scale, step.bias = builder.keep(layer.scale), builder.keep(layer.bias)
        step.input, step.output = planes(layer.inputs[0]), planes(number)
        if len(layer.inputs) == 2:
            step.other, step.residual = planes(layer.inputs[1]), 1
    for index, number in enumerate(outputs):
        step = builder.step("scatter", None, network.values[number].shape[-1])
        step.kernel, step.input = index, planes(number)
        builder.tell(None, "scatter")
    return builder.program(size * 4, inputs, outputs)


def _place_rows(
    network: Network, inputs: list[int], layers: list[tuple[int, Layer]], outputs: list[int]
) -> tuple[dict[int, int], int]:
    """Return where the values of one row lie, in floats from its start, and how many there are."""
    first = dict.fromkeys(inputs, 0) | {number: at + 1 for at, (number, _) in enumerate(layers)}
    last = dict(first)
    for at, (_, layer) in enumerate(layers):
        last |= dict.fromkeys(layer.inputs, at + 1)
    last |= dict.fromkeys(outputs, len(layers) + 1)
    rooms = [Room(network.values[number].shape[-1], first[number], last[number]) for number in first]
    starts, size = pack_rooms(rooms)
    return dict(zip(first, starts, strict=True)), size


def _linear(builder: _Builder, layer: Layer) -> Step:
    """Add a linear layer: its slices, and which of them each thread has."""
    assert layer.weight is not None
    out, features = layer.weight.shape
    dense = layer.weight.density > DENSE_ROWS
    if features > 65536 and not dense:
        raise Unsupported(f"layer {layer.name!r} has {features} inputs; sparse linear layers have at most 65,536")
    positions, values = layer.weight.entries()
    offsets, streamed, starts, ids = builder.library.row_streams((out, features), positions, values, dense=dense)
    step = builder.step("linear", layer, out)
    step.offsets, step.values = builder.keep(offsets), builder.keep(streamed)
    step.starts, step.ids, step.dense = builder.keep(starts), builder.keep(ids), dense
    bias = aligned(len(ids))  # in the order of the slices
    bias[:] = 0 if layer.bias is None else layer.bias[ids]
    step.bias = builder.keep(bias)
    parts = np.searchsorted(starts, starts[-1] * np.arange(builder.threads + 1) / builder.threads)
    parts[0], parts[-1] = 0, len(starts) - 1
    step.group_of = builder.keep(parts.astype(np.int32))
    compared = f"density {layer.weight.density:.1%}, dense from {DENSE_ROWS:.0%}"
    builder.tell(layer, "dense rows" if dense else "sparse rows", layer.weight.nonzero, compared)
    return step
