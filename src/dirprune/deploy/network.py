"""A trained network as layers of plain data: what a runtime is compiled from, saved as and loaded from; needs numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from dirprune.deploy.packing import Packed

Array = np.ndarray[Any, np.dtype[Any]]
Kind = Literal[
    "conv",
    "linear",
    "max_pool",
    "average_pool",
    "adaptive_max_pool",
    "adaptive_average_pool",
    "affine",
    "cat",
    "flatten",
]
KINDS: tuple[str, ...] = get_args(Kind)
ACTIVATES = ("conv", "linear", "affine", "max_pool", "average_pool", "cat")
"""The kinds that end in an activation."""
_WINDOWED = ("conv", "max_pool", "average_pool")
LARGEST = 2**30
"""Elements of a value for one example, or of a weight."""
LONGEST = 2**20
"""Pixels of an image's side."""
_HIGHEST = float(np.finfo(np.float32).max)


class Unsupported(ValueError):
    """A network has an operation that the runtime does not know; the message names it and its place."""


class Pair(NamedTuple):
    """A height and a width."""

    y: int
    x: int


class Window(NamedTuple):
    """How a convolution or a pool slides over an image."""

    size: Pair
    stride: Pair
    padding: Pair

    def results(self, height: int, width: int, *, hang: bool = False) -> Pair:
        """Return how many places the window has; with ``hang`` a last one may hang over, as with torch's ceil_mode."""
        sides = zip((height, width), self.size, self.stride, self.padding, strict=True)
        places = []
        for length, size, stride, padding in sides:
            steps, rest = divmod(length + 2 * padding - size, stride)
            starts = (steps + 1) * stride < length + padding  # the one that hangs begins inside the image
            places.append(steps + 1 + (hang and rest > 0 and starts))
        return Pair(*places)


class Activation(NamedTuple):
    """min(x, high) above ``low``, and ``low + slope · (x − low)`` below it."""

    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0


IDENTITY = Activation()


@dataclass(frozen=True)
class Weight:
    """A weight of which only what is not zero is kept, packed as float32."""

    shape: tuple[int, ...]
    packed: Packed

    @property
    def size(self) -> int:
        """Return the number of elements, zeros included."""
        return math.prod(self.shape)

    @cached_property
    def nonzero(self) -> int:
        """Return how many elements are not zero."""
        return int(np.count_nonzero(self.packed.values.view(np.float32)))

    @property
    def density(self) -> float:
        """Return the share of the elements that is kept."""
        return self.nonzero / max(1, self.size)

    def entries(self) -> tuple[Array, Array]:
        """Return the positions of the elements that are not zero, in order, and their values."""
        values = self.packed.values.view(np.float32)
        positions = self.packed.positions().astype(np.uint32)
        if self.nonzero == len(values):
            return positions, values
        kept = np.flatnonzero(values)
        return positions[kept], values[kept]


class Value(NamedTuple):
    """What one example has at one place of the network: an image (channels, height, width), or rows (..., features)."""

    shape: tuple[int, ...]
    image: bool

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """One operation. Its inputs are numbers of values: the network's inputs come first, then each layer's output.

    A second input of a convolution, a linear layer or an affine one is added before the activation.
    """

    kind: Kind
    name: str
    inputs: tuple[int, ...]
    output: Value
    window: Window | None = None
    groups: int = 1
    count_padding: bool = True
    activation: Activation = IDENTITY
    weight: Weight | None = None
    scale: Array | None = None
    bias: Array | None = None


@dataclass(frozen=True)
class Network:
    """Layers in the order in which they run, and which values come in and go out."""

    inputs: tuple[Value, ...]
    layers: tuple[Layer, ...]
    outputs: tuple[int, ...]
    values: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", (*self.inputs, *(layer.output for layer in self.layers)))

    def number(self, index: int) -> int:
        """Return the number of the value that a layer makes."""
        return len(self.inputs) + index


def expected(layer: Layer, inputs: list[Value]) -> Value:
    """Return what a layer makes of its inputs.

    Raises:
        ValueError: its inputs, its numbers or its arrays do not fit one another.
    """
    first = inputs[0]
    many = layer.kind == "cat"
    adds = layer.kind in ("conv", "linear", "affine")
    _want(len(inputs) == 1 or many or (adds and len(inputs) == 2), "has the wrong number of inputs")
    if layer.weight is not None:
        _want(layer.kind in ("conv", "linear") and 0 < layer.weight.size <= LARGEST, "has an impossible weight")
    made = _MADE[layer.kind](layer, inputs)
    _want(0 < made.size <= LARGEST, "makes an impossible number of elements")
    _want(not made.image or max(made.shape[1:]) <= LONGEST, "makes an impossible image")
    if adds and len(inputs) == 2:
        _want(inputs[1] == made, f"adds {inputs[1].shape} to {made.shape}")
    channels = made.shape[0] if first.image else made.shape[-1]
    for name in ("scale", "bias"):
        array = getattr(layer, name)
        _want(
            array is None or (adds and array.shape == (channels,) and array.dtype == np.float32), f"has a wrong {name}"
        )
    if layer.kind == "affine":
        _want((layer.scale is None) == (layer.bias is None), "has a scale without a bias, or a bias without a scale")
    else:
        _want(layer.scale is None, "has a scale")
    _want(layer.kind in ACTIVATES or layer.activation == IDENTITY, "has an activation")
    _want((layer.window is None) == (layer.kind not in _WINDOWED), "has a window, or lacks one")
    return made


def _want(fine: bool, said: str) -> None:
    if not fine:
        raise ValueError(said)


def _slid(layer: Layer, inputs: list[Value]) -> tuple[Window, Pair]:
    """Return a layer's window and its number of places; a pool may have one more, which hangs over."""
    window, first = layer.window, inputs[0]
    _want(first.image and window is not None, "needs an image and a window")
    assert window is not None
    for size, stride, padding, length in zip(*window, first.shape[1:], strict=True):
        _want(1 <= size <= 255 and 1 <= stride <= 255 and 0 <= padding <= 255, f"has an impossible window {window}")
        _want(layer.kind == "conv" or padding < size, f"has a window that fits into its padding {window}")
        _want(size <= length + 2 * padding, f"has a window larger than its image {first.shape}")
    return window, window.results(*first.shape[1:])


def _conv(layer: Layer, inputs: list[Value]) -> Value:
    _, places = _slid(layer, inputs)
    assert layer.window is not None
    _want(layer.weight is not None and len(layer.weight.shape) == 4, "lacks its weight")
    assert layer.weight is not None
    out, channels, *size = layer.weight.shape
    _want(tuple(size) == layer.window.size, "has a weight of another window")
    _want(layer.groups >= 1 and out % layer.groups == 0, "has impossible groups")
    _want(channels * layer.groups == inputs[0].shape[0], f"has a weight for {channels * layer.groups} channels")
    return Value((out, *places), True)


def _linear(layer: Layer, inputs: list[Value]) -> Value:
    first = inputs[0]
    _want(not first.image and layer.weight is not None and len(layer.weight.shape) == 2, "needs rows and a weight")
    assert layer.weight is not None
    _want(layer.weight.shape[1] == first.shape[-1], f"has a weight for {layer.weight.shape[1]} features")
    return Value((*first.shape[:-1], layer.weight.shape[0]), False)


def _pool(layer: Layer, inputs: list[Value]) -> Value:
    window, places = _slid(layer, inputs)
    shape = layer.output.shape
    _want(len(shape) == 3 and layer.output.image, "makes no image")
    hanging = window.results(*inputs[0].shape[1:], hang=True)
    _want(tuple(shape[1:]) in (places, hanging), f"cannot make {shape}")
    return Value((inputs[0].shape[0], *shape[1:]), True)


def _adaptive(layer: Layer, inputs: list[Value]) -> Value:
    shape = layer.output.shape
    _want(inputs[0].image and layer.output.image and len(shape) == 3, "needs images")
    return Value((inputs[0].shape[0], *shape[1:]), True)


def _cat(layer: Layer, inputs: list[Value]) -> Value:
    first, axis = inputs[0], 0 if inputs[0].image else -1
    _want(all(v.image == first.image and len(v.shape) == len(first.shape) for v in inputs), "joins images and rows")
    shape = list(first.shape)
    shape[axis] = sum(v.shape[axis] for v in inputs)
    for v in inputs:
        rest = list(v.shape)
        rest[axis] = shape[axis]
        _want(rest == shape, f"joins {v.shape} and {first.shape}")
    return Value(tuple(shape), first.image)


def _flatten(layer: Layer, inputs: list[Value]) -> Value:
    _want(inputs[0].image, "flattens what is no image")
    return Value((inputs[0].size,), False)


_MADE: dict[str, Callable[[Layer, list[Value]], Value]] = {
    "conv": _conv,
    "linear": _linear,
    "max_pool": _pool,
    "average_pool": _pool,
    "adaptive_max_pool": _adaptive,
    "adaptive_average_pool": _adaptive,
    "affine": lambda layer, inputs: inputs[0],
    "cat": _cat,
    "flatten": _flatten,
}


def _check_layer(network: Network, index: int) -> None:
    layer, known = network.layers[index], network.number(index)
    try:
        _want(layer.kind in KINDS and bool(layer.inputs), f"is of unknown kind {layer.kind!r}")
        _want(all(0 <= i < known for i in layer.inputs), "uses a value that comes later")
        made = expected(layer, [network.values[i] for i in layer.inputs])
        _want(made == layer.output, f"makes {made.shape}, not {layer.output.shape}")
        low, high, slope = layer.activation
        bounded = all(abs(x) <= _HIGHEST or x == free for x, free in ((low, -math.inf), (high, math.inf)))
        _want(bounded and abs(slope) <= _HIGHEST, f"has an activation beyond float32: {layer.activation}")
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r} {error}") from error


def check(network: Network) -> None:
    """Compare every layer with its inputs.

    Raises:
        ValueError: a layer does not fit; the message names it.
    """
    _want(bool(network.inputs) and bool(network.outputs), "the network has no inputs or no outputs")
    for value in network.inputs:
        fits = len(value.shape) == 3 if value.image else len(value.shape) >= 1
        _want(fits and all(n >= 1 for n in value.shape) and value.size <= LARGEST, f"an input has shape {value.shape}")
    for index in range(len(network.layers)):
        _check_layer(network, index)
    _want(all(0 <= i < len(network.values) for i in network.outputs), "the network has unknown outputs")
    rows = {math.prod(value.shape[:-1]) for value in network.values if not value.image}
    _want(len(rows) <= 1, f"the network mixes {sorted(rows)} rows for one example")
