"""A runtime as a file: the network's layers as JSON beside its packed weights; needs numpy.

The file says what is to be computed and never how: kernels, offsets and memory are made afresh on the machine that
loads it, from shapes that have been checked.
"""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from dirprune.deploy import container
from dirprune.deploy.container import InvalidFile
from dirprune.deploy.network import (
    KINDS,
    Activation,
    Array,
    Kind,
    Layer,
    Network,
    Pair,
    Unsupported,
    Value,
    Weight,
    Window,
    check,
)
from dirprune.deploy.packing import pack
from dirprune.deploy.runtime import Runtime

_HOLDS = "network"
_ARRAYS = ("weight", "scale", "bias")


def save(network: Network, path: str | PathLike[str]) -> None:
    """Write a network to a file, completely or not at all."""
    tensors = {}
    records = []
    for number, layer in enumerate(network.layers):
        arrays = [name for name in _ARRAYS if getattr(layer, name) is not None]
        for name in arrays:
            tensors[f"{number}.{layer.name}.{name}"] = _tensor(getattr(layer, name))
        record = {
            "kind": layer.kind,
            "name": layer.name,
            "inputs": layer.inputs,
            "output": layer.output,
            "window": layer.window,
            "groups": layer.groups,
            "count_padding": layer.count_padding,
            "activation": [None if math.isinf(x) else x for x in layer.activation],
            "arrays": arrays,
        }
        records.append(record)
    told = {"inputs": network.inputs, "layers": records, "outputs": network.outputs}
    container.write(Path(path), tensors, holds=_HOLDS, metadata={"network": json.dumps(told, separators=(",", ":"))})


def load(path: str | PathLike[str], *, threads: int = 1, checked: bool = False) -> Runtime:
    """Return the runtime that `Runtime.save` wrote, made for this machine; needs numpy and no torch.

    Nothing in the file is executed, and a file that has been tampered with raises an error that names it.

    Args:
        path: the file.
        threads: how many threads a call uses.
        checked: as for `Runtime`.
    """
    source = Path(path).absolute()
    network = read(source)
    try:
        return Runtime(network, threads=threads, checked=checked, source=source)
    except (Unsupported, MemoryError) as error:
        raise InvalidFile(f"{path} holds a network that cannot be run here: {error}") from error


def read(path: Path) -> Network:
    """Return the network that a file holds, checked."""
    content = container.read(path, holds=_HOLDS)
    try:
        network = _network(json.loads(content.metadata.get("network", "")), dict(content.tensors))
        check(network)
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} holds a network that cannot be run: {error}") from error
    return network


def _tensor(array: Array | Weight) -> container.Tensor:
    if isinstance(array, Weight):
        return container.Tensor(array.shape, "float32", "float32", array.packed)
    return container.Tensor(array.shape, "float32", "float32", pack(np.ascontiguousarray(array).view(np.uint32)))


def _network(told: Any, tensors: dict[str, container.Tensor]) -> Network:
    """Return the network that JSON describes; whether its layers fit one another is checked later."""
    told = _of(told, dict)
    layers = [_layer(number, _of(record, dict), tensors) for number, record in enumerate(_of(told.get("layers"), list))]
    if tensors:
        raise ValueError(f"no layer has the tensor {next(iter(tensors))!r}")
    inputs = tuple(_value(each) for each in _of(told.get("inputs"), list))
    return Network(inputs, tuple(layers), _whole(told.get("outputs")))


def _layer(number: int, record: dict[str, Any], tensors: dict[str, container.Tensor]) -> Layer:
    kind, name = _of(record.get("kind"), str), _of(record.get("name"), str)
    if kind not in KINDS:
        raise ValueError(f"layer {name!r} is of unknown kind {kind!r}")
    arrays: dict[str, Any] = {}
    for each in _of(record.get("arrays"), list):
        key = f"{number}.{name}.{each}"
        if each not in _ARRAYS or key not in tensors:
            raise ValueError(f"layer {name!r} lacks the tensor {key!r}")
        arrays[each] = _array(each, tensors.pop(key))
    low, high, slope = (None if x is None else _number(x) for x in _some(record.get("activation"), 3))
    activation = Activation(-math.inf if low is None else low, math.inf if high is None else high, slope or 0.0)
    window = record.get("window")
    (groups,) = _whole([record.get("groups")])
    return Layer(
        cast(Kind, kind),
        name,
        _whole(record.get("inputs")),
        _value(record.get("output")),
        None if window is None else Window(*(Pair(*_whole(_some(pair, 2))) for pair in _some(window, 3))),
        groups,
        _of(record.get("count_padding"), bool),
        activation,
        **arrays,
    )


def _array(name: str, tensor: container.Tensor) -> Array | Weight:
    if tensor.stored != "float32" or tensor.dtype != "float32":
        raise ValueError(f"holds a {name} in {tensor.stored}, not in float32")
    if name == "weight":
        return Weight(tensor.shape, tensor.packed)
    return tensor.packed.unpacked().view(np.float32).reshape(tensor.shape)


def _value(told: Any) -> Value:
    shape, image = _some(told, 2)
    return Value(_whole(shape), _of(image, bool))


def _of(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"the layers have {value!r:.40} where a {kind.__name__} belongs")
    return value


def _some(value: Any, count: int) -> list[Any]:
    if len(found := list(_of(value, list))) != count:
        raise ValueError(f"the layers have {len(found)} entries where {count} belong")
    return found


def _number(value: Any) -> float:
    return float(value if type(value) is int else _of(value, float))


def _whole(value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers that are not negative."""
    numbers = tuple(_of(each, int) for each in _of(value, list))
    if any(not 0 <= n < 2**31 for n in numbers):
        raise ValueError(f"the layers have {numbers} where small numbers belong")
    return numbers
