"""Files of packed tensors: valid safetensors files, written atomically, and read with numpy alone.

A file is laid out as

    8 bytes     the length of the header
    header      JSON: {"__metadata__": {"sha256": …, "dirprune": …, …}, NAME: {"dtype", "shape", "data_offsets"}, …}
    data        the tensors, one after the other

- A dense tensor is stored under its own name, a packed one as NAME.nonzero and NAME.mask or NAME.deltas.
- "dirprune" in the metadata is JSON again: what the file holds, and per tensor its dtype, shape and coding, or the name
  of the tensor that it is the same as.
- The checksum is that of the whole file without the checksum's own 64 digits. It shows damage, not who wrote the file,
  so everything else is checked as well. A file of n bytes unpacks to at most 2,040 n.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dirprune._support.atomic import replacing
from dirprune.deploy.packing import CODINGS, Array, Packed

FORMAT = 1
_START = b'{"__metadata__":{"sha256":"'
_DIGITS = slice(8 + len(_START), 8 + len(_START) + 64)
_LARGEST = 2**48  # elements of a tensor, lengths of zero not counted
_DIMENSIONS = 64
T = TypeVar("T")


class _Kind(NamedTuple):
    """How a dtype is stored: its name in a safetensors file, "" if it has none there, and its width in bytes."""

    name: str
    width: int


DTYPES = {
    "float64": _Kind("F64", 8),
    "float32": _Kind("F32", 4),
    "float16": _Kind("F16", 2),
    "bfloat16": _Kind("BF16", 2),
    "float8_e4m3fn": _Kind("F8_E4M3", 1),
    "float8_e5m2": _Kind("F8_E5M2", 1),
    **{name: _Kind("", 1) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")},
    **{f"complex{8 * width}": _Kind("", width) for width in (4, 8, 16)},
    **{f"int{8 * width}": _Kind(f"I{8 * width}", width) for width in (1, 2, 4, 8)},
    **{f"uint{8 * width}": _Kind(f"U{8 * width}", width) for width in (1, 2, 4, 8)},
    "bool": _Kind("BOOL", 1),
}
"""The dtypes of tensors in a file, by their names in torch; one without a name in safetensors is stored as bytes."""
_WIDTHS = {kind.name: kind.width for kind in DTYPES.values() if kind.name}
_ROUNDED = {("float64", "float16"), ("float64", "bfloat16"), ("float32", "float16"), ("float32", "bfloat16")}


class InvalidFile(ValueError):
    """A file of packed tensors is damaged, or is not one."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. ``stored`` is the dtype of the values, ``dtype`` that of the tensor once loaded.

    Values are held as unsigned integers of the stored dtype's width, complex128 as two of them.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str
    packed: Packed


@dataclass(frozen=True)
class Content:
    """What a file holds; shared tensors are the same object under several names."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def unit(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer in which a dtype's values are held."""
    return np.dtype(f"<u{min(DTYPES[dtype].width, 8)}")


def write(path: Path, tensors: Mapping[str, Tensor], *, holds: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a file, completely or not at all; equal content gives equal bytes.

    Args:
        path: the file; one that exists is replaced.
        tensors: by name; the same object under several names is stored once.
        holds: what the file is; `read` wants the same word.
        metadata: texts by name to store beside them.
    """
    records: dict[str, dict[str, Any]] = {}
    entries: dict[str, _Entry] = {}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            records[name] = {"same_as": first[id(tensor)]}
            continue
        records[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "coding": tensor.packed.coding}
        if tensor.stored != tensor.dtype:
            records[name]["stored"] = tensor.stored
        parts = _parts(name, tensor)
        if name == "__metadata__" or parts.keys() & (entries.keys() | tensors.keys() - {name}):
            raise ValueError(f"the name of the tensor {name!r} is taken in {path}; rename it")
        entries |= parts
    told = {"format": FORMAT, "holds": holds, "tensors": records}
    notes = {"sha256": 64 * "0", "dirprune": _json(told)}
    if metadata and (taken := notes.keys() & metadata.keys()):
        raise ValueError(f"metadata has the name {taken.pop()!r}, which the file itself uses; rename it")
    header: dict[str, Any] = {"__metadata__": notes | dict(metadata or {})}
    arrays = []
    end = 0
    for name, entry in sorted(
        entries.items(), key=lambda item: -item[1].array.itemsize
    ):  # each is aligned to its width
        arrays.append(np.ascontiguousarray(entry.array))
        offsets = [end, end := end + entry.array.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    start = bytearray(len(text).to_bytes(8, "little") + text)
    start[_DIGITS] = _checksum(start, *arrays)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(start)
        for array in arrays:
            file.write(array.data)


def read(path: Path, *, holds: str) -> Content:
    """Read a file that `write` wrote; nothing in it is executed. The arrays are views of its bytes.

    Raises:
        InvalidFile: it is damaged, holds something else, or is not such a file.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        header, start = _header(data)
        notes = header.pop("__metadata__")
        told = _typed(notes.pop("dirprune", None), str, "its metadata")
        return Content(_tensors(told, _entries(header, data, start), holds), notes)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} {error}; get a whole copy, or save the network again") from error


class _Entry(NamedTuple):
    """One tensor as a safetensors file knows it."""

    dtype: str
    shape: list[int]
    array: Array  # flat, unsigned integers


def _parts(name: str, tensor: Tensor) -> dict[str, _Entry]:
    """Return the entries that hold a tensor."""
    kind, packed = DTYPES[tensor.stored], tensor.packed
    values = packed.values if kind.name else packed.values.view(np.uint8)
    shape = list(tensor.shape) if kind.name and packed.places is None else [len(values)]
    own = _Entry(kind.name or "U8", shape, values)
    if packed.places is None:
        return {name: own}
    return {f"{name}.nonzero": own, f"{name}.{packed.coding}": _Entry("U8", [len(packed.places)], packed.places)}


def _json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _parsed(text: bytes | str) -> dict[str, Any]:
    """Return a JSON object that could be written again: half a surrogate pair, which no UTF-8 has, is refused."""
    content = _typed(json.loads(text), dict, "its header")
    _json(content).encode()
    return content


def _checksum(start: bytes | bytearray, *rest: Any) -> bytes:
    """Return the checksum of a file that begins with these bytes, whose digits are left out."""
    digest = hashlib.sha256(memoryview(start)[: _DIGITS.start])
    digest.update(memoryview(start)[_DIGITS.stop :])
    for piece in rest:
        digest.update(piece)
    return digest.hexdigest().encode()


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return a file's header and where its data begins, after verifying the checksum."""
    if data[8 : _DIGITS.start] != _START:
        raise ValueError("is no file of packed tensors, or another program has written it again")
    if data[_DIGITS] != _checksum(data):
        raise ValueError("is damaged: its content does not have the checksum that it should")
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data) or start % 8:
        raise ValueError(f"has a header that ends at byte {start} of {len(data)}")
    header = _parsed(data[8:start])
    notes = _typed(header.get("__metadata__"), dict, "its metadata")
    for name, text in notes.items():
        _typed(text, str, f"its metadata {name!r}")
    return header, start


def _entries(header: dict[str, Any], data: bytes, start: int) -> dict[str, _Entry]:
    """Return the entries of a safetensors header; they follow one another and fill the file."""
    found: dict[str, _Entry] = {}
    end = start
    offsets = {name: _whole(_typed(each, dict, name).get("data_offsets"), name) for name, each in header.items()}
    for name in sorted(offsets, key=offsets.__getitem__):
        dtype, shape = header[name].get("dtype"), _whole(header[name].get("shape"), name)
        width = _WIDTHS.get(_typed(dtype, str, name), 0)
        size = math.prod(shape)
        there = [end - start, end - start + size * width]
        if not width or offsets[name] != there or end % width or end + size * width > len(data):
            raise ValueError(f"does not hold the tensor {name!r} where its header says")
        found[name] = _Entry(dtype, shape, np.frombuffer(data, f"<u{width}", size, end))
        end += size * width
    if end != len(data):
        raise ValueError(f"holds {len(data)} bytes, and its header tells of {end}")
    return found


def _tensors(text: str, entries: dict[str, _Entry], holds: str) -> dict[str, Tensor]:
    """Return the tensors that the entries are the parts of."""
    told = _parsed(text)
    if told.get("format") != FORMAT:
        raise ValueError(f"is of format {told.get('format')!r}, and this version of dirprune reads {FORMAT}")
    if told.get("holds") != holds:
        raise ValueError(f"holds {told.get('holds')!r}, not {holds!r}")
    tensors: dict[str, Tensor] = {}
    for name, record in _typed(told.get("tensors"), dict, "its metadata").items():
        same = _typed(record, dict, name).get("same_as")
        if same is not None and _typed(same, str, name) not in tensors:
            raise ValueError(f"has {name!r}, which is the same as an unknown tensor")
        tensors[name] = _tensor(name, record, entries) if same is None else tensors[same]
    if entries:
        raise ValueError(f"holds {next(iter(entries))!r}, which is part of no tensor")
    return tensors


def _tensor(name: str, record: dict[str, Any], entries: dict[str, _Entry]) -> Tensor:
    """Return one tensor, whose parts are taken out of the entries."""
    dtype = _typed(record.get("dtype"), str, name)
    stored = _typed(record.get("stored", dtype), str, name)
    shape = tuple(_whole(record.get("shape"), name))
    coding = record.get("coding")
    if stored not in DTYPES or (stored != dtype and (dtype, stored) not in _ROUNDED) or coding not in CODINGS:
        raise ValueError(f"has {name!r} in an unknown dtype or coding")
    if math.prod(max(length, 1) for length in shape) > _LARGEST:
        raise ValueError(f"has {name!r} in an impossible shape")
    size = math.prod(shape) * -(-DTYPES[stored].width // 8)
    own = name if coding == "dense" else f"{name}.nonzero"
    names = [own] if coding == "dense" else [own, f"{name}.{coding}"]
    if any(part not in entries for part in names):
        raise ValueError(f"lacks a part of the tensor {name!r}")
    values, *places = [entries.pop(part) for part in names]
    try:
        packed = Packed(coding, size, values.array.view(unit(stored)), *(part.array for part in places))
    except ValueError as error:
        raise ValueError(f"has {name!r} damaged: {error}") from error
    tensor = Tensor(shape, dtype, stored, packed)
    if {part: entry[:2] for part, entry in _parts(name, tensor).items()} != {
        part: entry[:2] for part, entry in zip(names, (values, *places), strict=True)
    }:
        raise ValueError(f"has {name!r} in another dtype or shape than it says")
    return tensor


def _typed(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"has no {kind.__name__} where {what!r} needs one")
    return value


def _whole(value: Any, what: str) -> list[int]:
    """Return the value if it is a short list of whole numbers that are not negative."""
    numbers = _typed(value, list, what)
    if len(numbers) > _DIMENSIONS or any(type(n) is not int or not 0 <= n <= _LARGEST for n in numbers):
        raise ValueError(f"has an impossible shape or place of {what!r}")
    return numbers
