"""Arrays without their zeros: the other elements in order, and where they belong.

An array is taken by its bits, as unsigned integers, so that every dtype is packed alike and comes back bit for bit:
only elements whose bits are all zero are left out, and −0.0 is kept like any value. The places are

- ``mask``: one bit per element, the first in the lowest bit of the first byte; or
- ``deltas``: one byte per value, the number of zeros before it; 255 stands for 255 zeros and no value.

A mask is smaller above a density of about an eighth. Both cover the whole array, so a record of few bytes cannot claim
a large one: at most 255 elements a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Coding = Literal["dense", "mask", "deltas"]
CODINGS: tuple[Coding, ...] = ("dense", "mask", "deltas")

_SKIP = 255  # in deltas: this many zeros and no value
_RECORD = 128  # about the bytes that another record takes in a file's header


@dataclass(frozen=True)
class Packed:
    """An array of ``size`` elements: ``values`` are those that are kept, as unsigned integers; ``places`` are bytes.

    Raises:
        ValueError: values, places and size disagree.
    """

    coding: Coding
    size: int
    values: Array  # (kept,), or (size,) if dense
    places: Array | None = None

    def __post_init__(self) -> None:
        kept, rest = self.size, 0
        if self.places is not None and self.coding == "mask":
            bits = np.unpackbits(self.places, bitorder="little")
            kept = int(np.count_nonzero(bits))
            rest = len(self.places) - -(-self.size // 8) or int(np.count_nonzero(bits[self.size :]))
        elif self.places is not None:
            kept = int(np.count_nonzero(self.places != _SKIP))
            rest = (self.size - int(self.places.sum(dtype=np.int64)) - kept) // _SKIP
        if kept != len(self.values) or rest:
            raise ValueError(f"{len(self.values)} values do not fit the places of {kept} in {self.size} elements")

    def positions(self) -> Array:
        """Return the index of each value in the array."""
        if self.places is None:
            found: Array = np.arange(self.size)
        elif self.coding == "mask":
            found = np.flatnonzero(np.unpackbits(self.places, bitorder="little"))
        else:
            here = self.places != _SKIP
            found = np.cumsum(self.places + here, dtype=np.int64)[here] - 1
        return found

    def unpacked(self) -> Array:
        """Return the whole array, as unsigned integers that the caller owns."""
        whole: Array = np.zeros(self.size, self.values.dtype)
        whole[... if self.places is None else self.positions()] = self.values
        return whole


def pack(bits: Array) -> Packed:
    """Return a flat array of unsigned integers in the form that takes the fewest bytes.

    >>> pack(np.uint32([7, 0, 0, 9])).coding, pack(np.zeros(1000, np.uint32)).coding
    ('dense', 'deltas')
    """
    positions = np.flatnonzero(bits)
    gaps = np.diff(positions, prepend=-1) - 1
    last = len(bits) - 1 - (positions[-1] if len(positions) else -1)
    skips = np.append(gaps, last) // _SKIP
    mask_bytes, delta_bytes = -(-len(bits) // 8), len(positions) + int(skips.sum())
    if len(positions) * bits.itemsize + min(mask_bytes, delta_bytes) + _RECORD >= bits.nbytes:
        return Packed("dense", len(bits), bits)
    if mask_bytes <= delta_bytes:
        return Packed("mask", len(bits), bits[positions], np.packbits(bits != 0, bitorder="little"))
    deltas = np.full(delta_bytes, _SKIP, np.uint8)
    deltas[np.cumsum(skips[:-1] + 1) - 1] = gaps % _SKIP
    return Packed("deltas", len(bits), bits[positions], deltas)
