"""A network's weights as a small file and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dirprune.deploy import container
from dirprune.deploy.packing import pack

HOLDS = "weights"
_HALVES = (torch.float16, torch.bfloat16)
_ROUNDED = (torch.float32, torch.float64)


def save_sparse(
    model: nn.Module | Mapping[str, Tensor],
    path: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a network's weights and buffers to a safetensors file in which the zeros take next to no space.

    Args:
        model: a module, or its state dict.
        path: the file, by convention ``*.safetensors``; one that exists is replaced.
        dtype: `torch.float16` or `torch.bfloat16` rounds float32 and float64 tensors of two dimensions or more; they
            load in their own dtype again. By default nothing is rounded.
        metadata: texts to store beside the weights, by name.

    Example:
        >>> import tempfile
        >>> layer = nn.Linear(100, 100, bias=False)
        >>> _ = layer.weight.data.mul_(torch.rand(100, 100) > 0.95)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_sparse(layer, f"{folder}/layer.safetensors")
        ...     torch.equal(load_sparse(f"{folder}/layer.safetensors")["weight"], layer.weight)
        True
    """
    if dtype not in (None, *_HALVES):
        raise ValueError(f"dtype={dtype} is not offered; give torch.float16, torch.bfloat16 or None for no rounding")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    packed: dict[str, container.Tensor] = {}
    shared: dict[
        tuple[object, ...], tuple[Tensor, container.Tensor]
    ] = {}  # with the tensor, so that no address is reused
    for name, tensor in state.items():
        plain = _plain(name, tensor)
        place = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if place not in shared or not plain.numel():
            shared[place] = plain, _pack(name, plain, dtype)
        packed[name] = shared[place][1]
    container.write(Path(path), packed, holds=HOLDS, metadata=metadata)


def load_sparse(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict that `save_sparse` wrote, on the CPU; nothing in the file is executed.

    Tensors that were shared are one tensor under several names.

    Args:
        path: the file.

    Raises:
        InvalidFile: the file is damaged, or holds something else; the message names it.
    """
    content = container.read(Path(path), holds=HOLDS)
    distinct = {id(tensor): tensor for tensor in content.tensors.values()}
    try:
        loaded = {key: _unpack(tensor) for key, tensor in distinct.items()}
    except (MemoryError, RuntimeError, AttributeError) as error:  # the last one: a dtype that this torch lacks
        raise container.InvalidFile(f"{path} holds tensors that cannot be loaded on this machine: {error}") from error
    return {name: loaded[id(tensor)] for name, tensor in content.tensors.items()}


def _plain(name: str, tensor: object) -> Tensor:
    """Return a tensor of a state dict in plain form: gathered if it is sharded, conjugated in memory."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__} and no tensor; leave it out of the state dict")
    plain = tensor.detach()
    plain = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
    if (
        type(plain) is not Tensor
        or plain.layout is not torch.strided
        or plain.is_meta
        or _name(plain) not in container.DTYPES
    ):
        raise ValueError(
            f"{name!r} is no plain tensor ({_name(plain)}, {plain.layout}, on {plain.device}); give one with its values"
        )
    return plain.resolve_conj().resolve_neg()


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _pack(name: str, tensor: Tensor, dtype: torch.dtype | None) -> container.Tensor:
    rounded = tensor
    if dtype and tensor.dim() > 1 and tensor.dtype in _ROUNDED:
        rounded = tensor.to(dtype)
        if bool((rounded.isinf() & ~tensor.isinf()).any()):
            raise ValueError(f"{name!r} has values beyond the range of {dtype}; give dtype=None, or torch.bfloat16")
    bits = rounded.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(container.unit(_name(rounded)))
    return container.Tensor(tuple(tensor.shape), _name(tensor), _name(rounded), pack(bits))


def _unpack(tensor: container.Tensor) -> Tensor:
    own, stored = getattr(torch, tensor.dtype), getattr(torch, tensor.stored)
    values = torch.from_numpy(tensor.packed.unpacked().view(np.uint8)).view(stored)
    return values.to(own).reshape(tensor.shape)
