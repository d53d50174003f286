"""Folds layers into the one before: BatchNorm into weights, sums and activations into what makes their input."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from dirprune.deploy.network import ACTIVATES, IDENTITY, Layer, Network, Weight
from dirprune.deploy.packing import Packed

_WEIGHTED = ("conv", "linear")


def fuse(network: Network) -> Network:
    """Return the same function in fewer layers."""
    first = len(network.inputs)
    layers = {first + index: layer for index, layer in enumerate(network.layers)}
    for number in list(layers):
        if layers[number].kind == "affine":
            _absorb(layers, number, network.outputs)
    renumbered = {i: i for i in range(first)} | {old: first + new for new, old in enumerate(layers)}
    moved = [replace(layer, inputs=tuple(renumbered[i] for i in layer.inputs)) for layer in layers.values()]
    return Network(network.inputs, tuple(moved), tuple(renumbered[i] for i in network.outputs))


def _absorb(layers: dict[int, Layer], number: int, outputs: tuple[int, ...]) -> None:
    """Let an affine layer take in the layer that makes its input, if nothing else needs that."""
    used = Counter(i for layer in layers.values() for i in layer.inputs) + Counter(outputs)
    affine = layers[number]
    for source in sorted(affine.inputs, reverse=True):  # of two that are added, the one that is made last
        made = layers.get(source)
        if made is None or used[source] > 1 or made.activation != IDENTITY or made.kind not in ACTIVATES:
            continue
        others = tuple(i for i in affine.inputs if i != source)
        if affine.scale is not None and (made.kind not in _WEIGHTED or len(made.inputs) > 1):
            continue
        if others and (made.kind not in (*_WEIGHTED, "affine") or len(made.inputs) > 1):
            continue
        whole = made if affine.scale is None else _scaled(made, affine)
        name = made.name or affine.name
        layers[number] = replace(whole, name=name, inputs=(*made.inputs, *others), activation=affine.activation)
        del layers[source]
        return


def _scaled(made: Layer, affine: Layer) -> Layer:
    """Return a layer whose outputs are multiplied and moved."""
    assert made.weight is not None
    assert affine.scale is not None
    assert affine.bias is not None
    positions, values = made.weight.entries()
    scale = affine.scale.astype(np.float64)
    rows = positions // (made.weight.size // made.weight.shape[0])
    packed = made.weight.packed
    scaled = (values * scale[rows]).astype(np.float32).view(np.uint32)
    weight = Weight(made.weight.shape, Packed(packed.coding, packed.size, scaled, packed.places))
    bias = np.zeros(len(scale), np.float32) if made.bias is None else made.bias
    return replace(made, weight=weight, bias=(bias * scale + affine.bias).astype(np.float32))
