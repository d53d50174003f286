"""Products of one batch's Hessian, or Gauss-Newton matrix, with vectors, computed in two ways.

Reverse over reverse differentiates the gradient backwards once more. It works with every op that can be differentiated
twice, and the vectors of a block share the first differentiation. Forward over reverse carries a tangent through the
computation of the gradient. It is a pure function of tensors, which `torch.compile` turns into few and fast kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dirprune._support.batches import Loss, mean_loss
from dirprune.weights import Weights, stateless

Kind = Literal["hessian", "gauss-newton"]
Network = Callable[[Mapping[str, Tensor], Any], Any]
"""Maps (weights and buffers by name, inputs) to the outputs."""
Pieces = Sequence[Tensor]
ForwardProduct = Callable[[Weights, Weights, Weights, Any, Any], Weights]
"""Maps (all weights, a vector over some or all of them, buffers, inputs, targets) to the product, named alike."""


def outputs_of(network: Network, state: Weights, inputs: Any, autocast: torch.dtype | None) -> Any:
    """Return the network's outputs at this state, cast back from a lower precision to that of the weights.

    Only the forward pass runs under autocast; derivatives follow its dtypes. All of the state is cast, which is more
    than autocast does: if BatchNorm multiplies bfloat16 inputs by a float32 weight, the forward-mode tangent has
    another dtype than the output, which torch refuses.
    """
    if autocast is None:
        return network(state, inputs)
    first = next(iter(state.values()))
    lower = {name: _cast(tensor, autocast) for name, tensor in state.items()}
    with torch.autocast(first.device.type, autocast):
        outputs = network(lower, _cast(inputs, autocast))
    return _cast(outputs, first.dtype)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Return the data, tensors in any nesting, with floating-point tensors cast to this dtype."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, data
    )


def has_graph(outputs: Any) -> bool:
    """Return whether any output has a graph to differentiate."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs))


def check_derivative(loss: Tensor) -> None:
    """Raise a ValueError if the loss is cut off from the parameters."""
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no derivative by any parameter: model.forward or loss_fn runs under torch.no_grad or "
            "torch.inference_mode, or detaches; leave that out"
        )


class PlainWeightNorm(TorchFunctionMode):
    """Evaluate weight norms as g · v/‖v‖: the second derivative of torch's fused op ignores that ‖v‖ depends on v."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v, g, dim = args
            others = [d for d in range(v.ndim) if d != dim]  # dim = -1: one norm of the whole tensor
            return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1))
        return func(*args, **(kwargs or {}))


def reverse_product(
    kind: Kind, outputs: Any, targets: Any, loss_fn: Loss, weights: Pieces
) -> Callable[[Pieces], Pieces]:
    """Return v ↦ ∇²f v, or Jᵀ(∇²loss)J v, for outputs with a graph that leads to the weights."""
    return _REVERSE[kind](outputs, targets, loss_fn, weights)


def forward_product(model: nn.Module, loss_fn: Loss, kind: Kind, autocast: torch.dtype | None = None) -> ForwardProduct:
    """Return the product as a pure function of tensors, to be compiled: new weights need no new compilation.

    >>> product = forward_product(nn.Linear(2, 1, bias=False), nn.MSELoss(), "hessian")
    >>> w, v = {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([[1.0, 0.0]])}
    >>> product(w, v, {}, torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))                 # H = 2 x xᵀ
    {'weight': tensor([[2., 4.]])}
    """
    rule, model_at = _FORWARD[kind], stateless(model)

    def product(weights: Weights, vector: Weights, buffers: Weights, inputs: Any, targets: Any) -> Weights:
        def network(w: Weights) -> Any:
            # Copies: a module may write to its buffers even in eval mode, which no transform allows for outer tensors.
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            with PlainWeightNorm():
                return outputs_of(model_at, {**w, **copies}, inputs, autocast)

        # Zeros for the rest: torch cannot compile the forward mode of a BatchNorm with tangents in some arguments only.
        whole = {name: vector[name] if name in vector else torch.zeros_like(w) for name, w in weights.items()}
        found = rule(network, loss_fn, targets, weights, whole)
        return {name: found[name] for name in vector}

    return product


def _forward_hessian(
    network: Callable[[Weights], Any], loss_fn: Loss, targets: Any, weights: Weights, vector: Weights
) -> Weights:
    return dict(_along(grad(lambda w, t: mean_loss(loss_fn, network(w), t)), weights, vector, targets))


def _forward_gauss_newton(
    network: Callable[[Weights], Any], loss_fn: Loss, targets: Any, weights: Weights, vector: Weights
) -> Weights:
    # Inside vjp the network computes as in training: without gradients, attention takes a path that has none.
    outputs, pushed = jvp(lambda w: vjp(network, w)[0], (weights,), (vector,))[:2]
    curved = _along(grad(lambda o, t: mean_loss(loss_fn, o, t)), outputs, pushed, targets)
    pull = vjp(network, weights)[1]
    return dict(pull(curved)[0])


def _along(function: Callable[[Any, Any], Any], point: Any, tangent: Any, targets: Any) -> Any:
    """Return the derivative of p ↦ function(p, targets) along the tangent.

    Floating-point targets get a tangent of zeros: without one, torch's forward mode of a squared error fails.
    """
    leaves, form = tree_flatten(targets)
    soft = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def at(p: Any, given: list[Tensor]) -> Any:
        found = dict(zip(soft, given, strict=True))
        return function(p, tree_unflatten([found.get(i, leaf) for i, leaf in enumerate(leaves)], form))

    known = [leaves[i] for i in soft]
    return jvp(at, (point, known), (tangent, [torch.zeros_like(leaf) for leaf in known]))[1]


def _vjp(outputs: Pieces, inputs: Pieces, vectors: Pieces, *, create_graph: bool = False) -> Pieces:
    """Return Jᵀv, with zeros where the outputs do not depend on an input; the graph is kept for the next v."""
    pairs = [(output, vector) for output, vector in zip(outputs, vectors, strict=True) if output.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    kept, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(
        kept, inputs, weights, retain_graph=True, create_graph=create_graph, materialize_grads=True
    )


def _reverse_hessian(outputs: Any, targets: Any, loss_fn: Loss, weights: Pieces) -> Callable[[Pieces], Pieces]:
    """Return v ↦ ∇²f v: the gradient differentiated once more, backwards because H = Hᵀ."""
    loss = mean_loss(loss_fn, outputs, targets)
    if has_graph(outputs):
        check_derivative(loss)
    gradient = _vjp([loss], weights, [torch.ones_like(loss)], create_graph=True)
    return lambda vector: _vjp(gradient, weights, vector)


def _reverse_gauss_newton(outputs: Any, targets: Any, loss_fn: Loss, weights: Pieces) -> Callable[[Pieces], Pieces]:
    """Return v ↦ Jᵀ(∇²loss)Jv; Jv comes from differentiating u ↦ Jᵀu, so that no op needs a forward mode."""
    leaves, form = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not places:
        raise ValueError(
            f"kind is 'gauss-newton', but the model returned a {type(outputs).__name__} in which there are no tensors "
            "to differentiate the loss by; return tensors, alone or in a tuple, list or dict"
        )
    results = [leaves[i] for i in places]
    points = [result.detach().requires_grad_() for result in results]
    for i, point in zip(places, points, strict=True):  # anything else that the model returns is a constant
        leaves[i] = point
    dummies = [torch.zeros_like(result, requires_grad=True) for result in results]
    pulled = _vjp(results, weights, dummies, create_graph=True)
    curve = _reverse_hessian(tree_unflatten(leaves, form), targets, loss_fn, points)
    return lambda vector: _vjp(results, weights, curve(_vjp(pulled, dummies, vector)))


_REVERSE = {"hessian": _reverse_hessian, "gauss-newton": _reverse_gauss_newton}
_FORWARD = {"hessian": _forward_hessian, "gauss-newton": _forward_gauss_newton}
