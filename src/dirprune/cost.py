"""What a network costs to run: multiply-accumulates per weight, counted in one forward pass."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dirprune._support.modes import eval_mode, seeded

_aten = torch.ops.aten
# Operations that multiply matrices or vectors, and the position of the first of the two.
_MATRIX_PRODUCTS = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot, _aten.vdot), 0),
    **dict.fromkeys((_aten.addmm, _aten._addmm_activation, _aten.addmv, _aten.baddbmm, _aten.addbmm), 1),
}
_CONVOLUTIONS = (_aten.convolution, _aten._convolution)
_JOINS = (_aten.cat, _aten.stack)


def macs(model: nn.Module, *inputs: Any, examples: int | None = None) -> dict[str, float]:
    """Return how often a forward pass multiplies with each weight, per example, by parameter name.

    A convolution uses its weights once per output position, a linear layer once per token. The uses of a parameter in
    several places add up; of one that is used in parts, the mean over its weights is given. Biases, embeddings and
    scales are not multiplied in this sense, and products of activations with each other, as in attention, belong to no
    weight.

    The model runs once, in eval mode and without gradients, and is left as it was. On the meta device, with its inputs
    there too, nothing is computed.

    Args:
        model: any module.
        inputs: what the model is called with.
        examples: how many examples these are; if omitted, the first dimension of the first tensor.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
        >>> macs(model, torch.zeros(1, 3, 6, 6))
        {'0.weight': 36.0, '0.bias': 0.0, '2.weight': 1.0, '2.bias': 0.0}
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={reprlib.repr(model)} is not a module; pass the model itself, macs(model, x)")
    unshaped = [name for name, p in model.named_parameters() if is_lazy(p)]
    if unshaped:
        raise ValueError(f"parameter {unshaped[0]!r} has no shape yet; run the model once before counting")
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "full_tensor")]
    if sharded:
        raise ValueError(f"parameter {sharded[0]!r} is sharded; count before the model is, or on a copy that is not")
    count = _examples(inputs) if examples is None else examples
    if count < 1:
        raise ValueError(f"the inputs hold {count} examples; give at least one")
    meter = _Meter(model)
    device = next((p.device for p in model.parameters()), None)
    with torch.no_grad(), seeded(0, device), _unchanged(model, meter), eval_mode(model), _plain_operations(), meter:
        model(*inputs)
    return {name: uses / count for name, uses in meter.uses.items()}


def _examples(inputs: tuple[Any, ...]) -> int:
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError("no tensor to run the model on; give it an input, macs(model, x), or say how many examples=")
    return len(first) if first.dim() else 1


_Origin = frozenset[str]  # the names of the parameters that a tensor is computed from
_CONSTANT = _Origin([""])  # part of the model, but no parameter
_FRESH = _Origin()  # made from nothing, like zeros or positions


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products with each parameter, through whatever views, casts or parametrisations it is used.

    What is computed without the inputs has a known origin. A product of two tensors of the model prepares a weight, as
    in spectral normalisation, and is not counted; a product with what is fresh or comes from the inputs is.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = {name: 0.0 for name, _ in model.named_parameters()}
        self.overwritten: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # the model's, and a copy
        self._sizes = {"": 0} | {name: p.numel() for name, p in model.named_parameters()}
        self._origins: dict[int, list[tuple[int, _Origin]]] = {}  # by storage: from which element on, origin
        self._kept: dict[int, torch.UntypedStorage] = {}  # known storages: nothing else may take their address
        attributes = (value for module in model.modules() for value in vars(module).values())
        constants = (("", tensor) for tensor in (*model.buffers(), *attributes))
        for name, tensor in (*model.named_parameters(), *constants):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                parts = self._origins.setdefault(self._keep(tensor), [])
                parts.append((int(tensor.storage_offset()), _Origin([name])))
        self._own = set(self._kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # flex_attention and its like, which hold no weights
            return func(*args, **kwargs)
        kind = func.overloadpacket
        if kind not in _MATRIX_PRODUCTS and kind not in _CONVOLUTIONS:
            with self:  # inference mode leaves operations whole that consist of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = _tensors((args, kwargs))
        if func._schema.is_mutable:
            self._save(given)
        result = func(*args, **kwargs)
        origin = None if self._count(kind, args, result) else self._combined(kind, given)
        for tensor in _tensors(result):
            self._learn(tensor, origin)
        return result

    def _count(self, kind: Any, args: Any, result: Tensor) -> bool:
        """Count a product of a parameter with something that is not part of the model, and return whether it is one."""
        if kind in _MATRIX_PRODUCTS:
            a, b = args[_MATRIX_PRODUCTS[kind] :][:2]  # (…, n, k), (…, k, m)
            total = a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
        elif kind in _CONVOLUTIONS:
            a, b, transposed = args[0], args[1], args[6]
            positions = a if transposed else result  # (examples, channels, …)
            total = positions.numel() // max(1, positions.shape[1]) * b.numel()
        elif kind is _aten._trilinear:  # of nn.Bilinear
            a, b = args[:2]
            total = len(result) * b.numel()
        else:
            return False
        for weight, other in ((self._origin(a), self._origin(b)), (self._origin(b), self._origin(a))):
            if weight and weight != _CONSTANT and not other:
                names = weight - _CONSTANT
                for name in names:
                    self.uses[name] += total / sum(self._sizes[each] for each in names)
                return True
        return False

    def _origin(self, tensor: Tensor) -> _Origin | None:
        """Return what a tensor is computed from; None if that includes the inputs."""
        if tensor.layout is not torch.strided:
            return None
        parts = self._origins.get(tensor.untyped_storage()._cdata, [])
        before = [part for part in parts if part[0] <= tensor.storage_offset()]
        return max(before, key=itemgetter(0))[1] if before else None

    def _combined(self, kind: Any, given: list[Tensor]) -> _Origin | None:
        """Return the origin of a result: that of the largest weight, or of all that are joined."""
        origins = [self._origin(tensor) for tensor in given]
        if kind is _aten.lift_fresh or not origins:
            return _FRESH
        if None in origins:
            return None
        known = [origin for origin in origins if origin is not None]
        if kind in _JOINS:
            return _Origin().union(*known)
        return max(known, key=lambda origin: (sum(self._sizes[name] for name in origin), len(origin)))

    def _learn(self, tensor: Tensor, origin: _Origin | None) -> None:
        if tensor.layout is not torch.strided:
            return
        key = tensor.untyped_storage()._cdata
        if key in self._own:
            return
        if origin is None:
            self._origins.pop(key, None)
            self._kept.pop(key, None)
        else:
            self._origins[self._keep(tensor)] = [(0, origin)]

    def _keep(self, tensor: Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        self._kept[key] = tensor.untyped_storage()
        return key

    def _save(self, given: list[Tensor]) -> None:
        """Copy the model's storages among these before an operation that may write into them."""
        for key in {tensor.untyped_storage()._cdata for tensor in given if tensor.layout is torch.strided} & self._own:
            if key not in self.overwritten and self._kept[key].device.type != "meta":
                self.overwritten[key] = self._kept[key], self._kept[key].clone()  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _unchanged(model: nn.Module, meter: _Meter) -> Iterator[None]:
    """Give every module its attributes and buffers back, as they were."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for storage, original in meter.overwritten.values():
            storage.copy_(original)
        for module, attributes, buffers in before:
            for mapping, content in ((vars(module), attributes), (module._buffers, buffers)):
                mapping.clear()
                mapping.update(content)


@contextmanager
def _plain_operations() -> Iterator[None]:
    """Switch off fused layers and compilation, which hide products, and autocast's cache of earlier casts."""
    attention, cached = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)  # their recurrent layers
    enabled = [backend.enabled for backend in backends]
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            torch.set_autocast_cache_enabled(False)
            for backend in backends:
                backend.enabled = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(attention)
            torch.set_autocast_cache_enabled(cached)
            for backend, value in zip(backends, enabled, strict=True):
                backend.enabled = value
