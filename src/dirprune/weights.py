"""Points in weight space: the parameters of a model by name, separate from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]


def take(model: nn.Module) -> Weights:
    """Return copies of the model's parameters, in the order of ``model.named_parameters()``.

    >>> take(nn.Linear(2, 1)).keys()
    dict_keys(['weight', 'bias'])
    """
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` into the model's parameters, in place; nothing is written unless every tensor fits."""
    check_fits(model, weights, "weights")
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def stateless(model: nn.Module) -> Callable[[Mapping[str, Tensor], Any], Any]:
    """Return ``call(state, inputs)``: the model's outputs at other weights and buffers; the model does not change.

    A tensor that the model uses in several places has its first name, as in ``model.named_parameters()``. The places
    are looked up once, here. torch's own `functional_call` looks them up in every call, and if a module is registered
    twice, it replaces the same attribute twice and leaves the replacement behind.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> call = stateless(nn.Sequential(layer, layer))
    >>> call({"0.weight": torch.tensor([[3.0]])}, torch.ones(1, 1))
    tensor([[9.]])
    """
    aliases = _aliases(model)

    def call(state: Mapping[str, Tensor], inputs: Any) -> Any:
        others = {alias: state[name] for alias, name in aliases.items() if name in state}
        return functional_call(model, {**state, **others}, (inputs,), tie_weights=False)

    return call


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of shared tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    places: set[tuple[int, str]] = set()
    aliases = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    # A list, so that no tensor is freed and its id reused.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        owner, _, attribute = name.rpartition(".")
        place = (id(modules[owner]), attribute)
        if place in places:  # the same module under another name
            continue
        places.add(place)
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


def flatten(weights: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors of ``weights`` as one vector, in the mapping's order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in weights.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Weights:
    """Split the vector into the names and shapes of ``like``, as views: the inverse of `flatten`."""
    size = sum(tensor.numel() for tensor in like.values())
    if vector.shape != (size,):
        raise ValueError(f"vector has shape {tuple(vector.shape)}; these weights need a flat one of {size} elements")
    pieces = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def combine(coefficients: Sequence[float], points: Sequence[Mapping[str, Tensor]]) -> Weights:
    """Return the sum of ``points``, which have the same names and shapes, each times its one of ``coefficients``."""
    if len(coefficients) != len(points) or not points:
        raise ValueError(f"got {len(coefficients)} coefficients for {len(points)} points; give one for each point")
    first, *others = points
    for other in others:
        check_alike(first, other, "the first point", "another point")
    return {
        name: sum((a * p[name] for a, p in zip(coefficients[1:], others, strict=True)), coefficients[0] * tensor)
        for name, tensor in first.items()
    }


def check_named(weights: object, weights_is: str) -> None:
    """Raise a ValueError unless this is a mapping that holds weights by name."""
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise ValueError(
            f"{weights_is} is a {kind}; give weights by name, as dirprune.weights.take(model) returns them"
        )
    if not weights:
        raise ValueError(f"{weights_is} holds no weights; give those of a network, as dirprune.weights.take(model)")


def check_fits(model: nn.Module, weights: Mapping[str, Tensor], weights_is: str) -> None:
    """Raise a ValueError that names the first tensor in which the weights do not fit the model."""
    parameters = dict(model.named_parameters())
    others = [name for name in weights if name not in parameters]
    if others and others[0] in model.state_dict():
        raise ValueError(
            f"{others[0]!r} in {weights_is} is a buffer of the model, or a second name of a weight: "
            "give take(model) and not state_dict()"
        )
    check_alike(parameters, weights, "the model", weights_is)


def check_alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor], a_is: str, b_is: str) -> None:
    """Raise a ValueError that names the first tensor in which two points differ in name or shape."""
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            missing, present = (a_is, b_is) if name not in a else (b_is, a_is)
            raise ValueError(f"{name!r} is in {present} but not in {missing}: these are different networks")
        if a[name].shape != b[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(a[name].shape)} in {a_is} and {tuple(b[name].shape)} in {b_is}: "
                "these are different networks"
            )
