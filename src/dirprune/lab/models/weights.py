"""The weights of a network that methods prune, and the kinds of their layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dirprune.zeros import LayerSparsity


@dataclass(frozen=True)
class PrunableWeight:
    """A weight: its name in the model, the parameter, and its places: modules, each with the attribute that holds it.

    There are several places if modules share the weight.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]


def prunable(model: nn.Module) -> dict[str, PrunableWeight]:
    """Return the trainable parameters of two dimensions or more, by the name of their layer; tables stay dense.

    An embedding's table is pruned if another layer shares it.

    A weight that modules share is listed once. One that is not called "weight" keeps its full name.

    >>> list(prunable(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.GRU(8, 2))))
    ['0', '3.weight_ih_l0', '3.weight_hh_l0']
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, attribute))
    weights = {
        "" if name == "weight" else name.removesuffix(".weight"): PrunableWeight(name, p, tuple(places[id(p)]))
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() > 1 and not all(isinstance(at, nn.Embedding) for at, _ in places.get(id(p), ()))
    }
    if not weights:
        raise ValueError("model has no trainable weight of two dimensions or more, so there is nothing to prune")
    return weights


def size(model: nn.Module) -> int:
    """Return how many weights a network has that methods prune."""
    return sum(weight.parameter.numel() for weight in prunable(model).values())


def kind_of(layer: LayerSparsity) -> str:
    """Return the kind of a weight's layer, based on its shape: "linear", "conv 3×3", "conv 1×1", …"""
    return "linear" if len(layer.shape) == 2 else "conv " + "×".join(map(str, layer.shape[2:]))
