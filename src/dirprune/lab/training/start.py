"""Trained weights to start from: those of a run, of a safetensors file, or of a state dict that torch saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dirprune.lab.records import checkpoint
from dirprune.lab.training import runs

_WRAPPERS = ("module.", "_orig_mod.")  # names that DDP and torch.compile put in front
_GIVE = "give a run, a .safetensors file, or what torch.save wrote of a state dict alone"
_INSIDE = ("model", "state_dict", "model_state_dict")  # under which training scripts save the weights


class NotThere(UserWarning):
    """Some weights of the network are not among those to start from."""


def start_from(model: nn.Module, source: Path) -> None:
    """Load the weights and buffers of ``source`` that fit the model by name and shape; warn about those it lacks."""
    state, own = _read(source), model.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    if not fitting.keys() & dict(model.named_parameters()).keys():
        raise ValueError(
            f"--from {source} has no weight that fits this network, by name and shape: it has "
            f"{', '.join(list(state)[:3])}, …, the network {', '.join(list(own)[:3])}, …"
        )
    if missing := [name for name in own if name not in fitting]:
        warnings.warn(
            f"{len(missing)} of {len(own)} tensors start as without {source}, which lacks them in the network's "
            f"shape: {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}",
            NotThere,
            stacklevel=2,
        )
    model.load_state_dict({**own, **fitting})


def _read(source: Path) -> dict[str, Tensor]:
    """Return the tensors of a run, or of a file; nothing in it is executed."""
    if source.is_dir():
        return runs.weights_of(runs.load(source))[1]
    if not source.is_file():
        raise FileNotFoundError(
            f"--from {source} does not exist; name a run, a .safetensors file or a saved state dict"
        )
    try:
        found: Any = _safetensors(source) if source.suffix == ".safetensors" else checkpoint.content(source)
        if not isinstance(found, Mapping):
            raise checkpoint.Unreadable(f"cannot be used: it holds a {type(found).__name__}")
    except checkpoint.Unreadable as error:
        raise ValueError(f"--from {source} {error}; {_GIVE}") from error
    except Exception as error:  # of many types, for what is no file of its kind
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"--from {source} cannot be read: {what}; {_GIVE}") from error
    for key in _INSIDE:
        found = found[key] if isinstance(found.get(key), Mapping) else found
    return {_plain(name): value.detach() for name, value in found.items() if _can_be_copied(name, value)}


def _can_be_copied(name: Any, value: Any) -> bool:
    """Return whether this is a named tensor whose values are in memory, as those of networks are."""
    real = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex()
    return isinstance(name, str) and real and not (value.is_meta or value.is_quantized or value.is_nested)


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    from safetensors import safe_open

    from dirprune.deploy import load_sparse

    with safe_open(path, "pt") as file:
        is_ours = bool(file.metadata() or {}) and any("dirprune" in key for key in file.metadata())
        return load_sparse(path) if is_ours else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
