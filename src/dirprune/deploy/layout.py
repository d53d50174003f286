"""Where a network's images lie on a machine with so many lanes: blocks, borders and what must be laid out anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from dirprune.deploy.native import Planes
from dirprune.deploy.network import Layer, Network, Pair, Window

VECTOR = 4  # bytes of a lane


@dataclass(eq=False)
class Image:
    """An image in blocks of ``block`` pixels, one for each lane of a grid."""

    shape: tuple[int, int, int]
    block: Pair
    positive: bool = False
    fill: float = 0.0
    border: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # top, left, bottom, right
    base: int = 0  # bytes, from the arena's start

    def planes(self, lanes: int) -> Planes:
        """Return the record that the kernels read."""
        channels, height, width = self.shape
        channel = self.vectors * lanes * VECTOR
        return Planes(self.base, channel, channels, height, width, *self.block, *self.border, self.fill)

    @property
    def vectors(self) -> int:
        """Return the number of vectors of a channel, border included."""
        return (self.border[0] + self.block.y + self.border[2]) * self.pitch

    @property
    def pitch(self) -> int:
        """Return the number of vectors from one row of a block to the next."""
        return self.border[1] + self.block.x + self.border[3]


class Move(NamedTuple):
    """A step on images: a layer, or the laying out of an image (no layer)."""

    kind: str
    layer: int | None
    inputs: tuple[Image, ...]
    output: Image | None
    number: int = 0  # of the network's input, of the value that leaves, or of the first channel to write


class Layout:
    """The steps of a network's images, in order; ``images`` has one for each value that is an image."""

    def __init__(self, network: Network, grid: tuple[int, int]) -> None:
        self.network = network
        self.grid = grid
        self.moves: list[Move] = []
        self.images: dict[int, Image] = {}
        self.leaving: list[int] = []
        self._again: dict[tuple[int, Pair, float], Image] = {}
        for number, value in enumerate(network.inputs):
            if value.image:
                self._place(number)
        for index, layer in enumerate(network.layers):
            if network.values[layer.inputs[0]].image:
                self._add(index, layer)
        for number in network.outputs:
            if network.values[number].image and number not in self.leaving:
                self._leave(number, None, number)

    def _place(self, number: int) -> None:
        """Bring an input in, in the blocks that its first user wants."""
        value = self.network.inputs[number]
        image = Image(_three(value.shape), self._least(value.shape))
        for layer in self.network.layers:
            if number in layer.inputs and layer.window:
                out = self._out_block(layer.window, value.shape, layer.output.shape)
                image.block = Pair(out.y * layer.window.stride.y, out.x * layer.window.stride.x)
                break
        self.images[number] = image
        self.moves.append(Move("place", None, (), image, number))

    def _leave(self, source: int, layer: int | None, number: int) -> None:
        """Take an image out, to a plain matrix; ``number`` is the value that this makes."""
        self.moves.append(Move("take", layer, (self.images[source],), None, number))
        self.leaving.append(number)

    def _add(self, index: int, layer: Layer) -> None:
        number = self.network.number(index)
        if layer.kind == "flatten":
            self._leave(layer.inputs[0], index, number)
            return
        first = self.images[layer.inputs[0]]
        positive = layer.activation.low >= 0 and layer.activation.slope == 0
        positive |= layer.kind not in ("conv", "affine") and all(self.images[i].positive for i in layer.inputs)
        shape = _three(layer.output.shape)
        if layer.window:
            first, block = self._windowed(layer, layer.window, first)
        else:
            block = self._least(shape) if layer.kind.startswith("adaptive") else first.block
        inputs = [first, *(self._relaid(self.images[i], block) for i in layer.inputs[1:])]
        image = self.images[number] = Image(shape, block, positive)
        if layer.kind != "cat":
            self.moves.append(Move(layer.kind, index, tuple(inputs), image))
            return
        channel = 0
        for part in inputs:
            self.moves.append(Move("cat", index, (part,), image, channel))
            channel += part.shape[0]

    def _windowed(self, layer: Layer, window: Window, first: Image) -> tuple[Image, Pair]:
        """Return a window's input, laid out as it needs it, and the blocks of its output."""
        (size, stride, padding), (_, *shape) = window, first.shape
        places = layer.output.shape[1:]
        fill = 0.0
        if layer.kind == "max_pool" and not first.positive:
            hangs = any(
                (n - 1) * s - p + k > length
                for n, s, p, k, length in zip(places, stride, padding, size, shape, strict=True)
            )
            fill = -math.inf if hangs or any(padding) else 0.0
        fits = all(
            b % s == 0 and g * (b // s) >= n for b, s, g, n in zip(first.block, stride, self.grid, places, strict=True)
        )
        out = Pair(first.block.y // stride.y, first.block.x // stride.x)
        if not fits:
            out = self._out_block(window, first.shape, layer.output.shape)
        first = self._relaid(first, Pair(out.y * stride.y, out.x * stride.x), fill)
        needs = (*padding, *(max(0, k - p - s) for k, p, s in zip(size, padding, stride, strict=True)))
        first.border = [max(a, b) for a, b in zip(first.border, needs, strict=True)]
        return first, out

    def _relaid(self, image: Image, block: Pair, fill: float = 0.0) -> Image:
        """Return the same image in other blocks, or with something else around it."""
        if image.block == block and image.fill == fill:
            return image
        key = (id(image), block, fill)
        if key not in self._again:
            self._again[key] = Image(image.shape, block, image.positive, fill)
            self.moves.append(Move("relay", None, (image,), self._again[key]))
        return self._again[key]

    def _least(self, shape: tuple[int, ...]) -> Pair:
        """Return the smallest blocks that hold an image."""
        return Pair(*(-(-length // g) for length, g in zip(shape[-2:], self.grid, strict=True)))

    def _out_block(self, window: Window, given: tuple[int, ...], made: tuple[int, ...]) -> Pair:
        """Return the smallest blocks of an output whose input blocks, a stride larger, hold the whole input."""
        sides = zip(self.grid, given[-2:], made[-2:], window.stride, strict=True)
        return Pair(*(max(-(-out // g), -(-length // (g * stride))) for g, length, out, stride in sides))


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, height, width


class Room(NamedTuple):
    """A stretch of memory, and the first and last step that needs it."""

    size: int
    first: int
    last: int


def pack_rooms(rooms: list[Room]) -> tuple[list[int], int]:
    """Return where each stretch begins so that none that are needed at once overlap, and the size of the whole.

    >>> pack_rooms([Room(64, 0, 1), Room(128, 1, 2), Room(64, 2, 3)])
    ([128, 0, 128], 192)
    """
    starts = [0] * len(rooms)
    placed: list[int] = []
    for index in sorted(range(len(rooms)), key=lambda i: -rooms[i].size):
        room = rooms[index]
        at = 0
        meets = [i for i in placed if rooms[i].first <= room.last and room.first <= rooms[i].last]
        for other in sorted(meets, key=starts.__getitem__):
            if at + room.size <= starts[other]:
                break
            at = max(at, starts[other] + rooms[other].size)
        starts[index] = at
        placed.append(index)
    return starts, max((starts[i] + rooms[i].size for i in placed), default=0)
