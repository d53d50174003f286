"""Parameter groups: which parameters are pruned, and which stay dense."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_WITH_NORM = re.compile(r"[Nn]orm(?![a-z])")  # but not Normalize or Enormous


def prunable_groups(
    model: nn.Module, c: float | None = None, exempt: Sequence[str] = ("bias", "norm")
) -> list[dict[str, Any]]:
    """Return parameter groups for `GRDA`: one to prune, and one that stays dense with ``c = 0``.

    Args:
        model: the module whose parameters are grouped; the groups keep their names.
        c: the pruning strength of all parameters that are not exempt; by default the optimizer's, or its target's.
        exempt: any of ``"bias"`` (every parameter whose name says bias), ``"norm"`` (the parameters of normalisation
            layers), and patterns of parameter names such as ``"head.*"``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> [(group["c"], len(group["params"])) for group in prunable_groups(model, c=1e-3)]
        [(0.001, 1), (0.0, 3)]
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={reprlib.repr(model)} is not a module; pass the model itself, prunable_groups(model)")
    if isinstance(exempt, str):
        raise ValueError(f"exempt={exempt!r} is a string; give a sequence of them, e.g. exempt=({exempt!r},)")
    names = [name for name, _ in model.named_parameters()]
    aliases: dict[Tensor, list[str]] = {}  # a shared tensor has several names, and one that matches is enough
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(p, []).append(name)
    kept_dense: set[Tensor] = set()
    for rule in exempt:
        if rule == "bias":
            kept_dense.update(p for p, known in aliases.items() if any(map(_is_bias, known)))
        elif rule == "norm":
            kept_dense.update(p for module in model.modules() for p in _of_norm(module))
        else:
            matches = {p for p, known in aliases.items() if any(fnmatchcase(name, rule) for name in known)}
            if not matches:
                some = f" like {names[0]!r}" if names else ""
                raise ValueError(
                    f"exempt={rule!r} matches no parameter; use 'bias', 'norm' or a pattern of names{some}"
                )
            kept_dense.update(matches)
    prunable = [(name, p) for name, p in model.named_parameters() if p not in kept_dense]
    dense = [(name, p) for name, p in model.named_parameters() if p in kept_dense]
    strength = {} if c is None else {"c": c}
    groups: list[dict[str, Any]] = [{"params": prunable, **strength}, {"params": dense, "c": 0.0}]
    return [group for group in groups if group["params"]]


def _is_bias(name: str) -> bool:
    """Return whether a parameter's name says bias: bias, in_proj_bias, bias_ih_l0, parametrizations.bias.original."""
    own = re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", name).rpartition(".")[2]
    return own.endswith("bias") or "bias" in own.split("_")


def normalises(module: nn.Module) -> bool:
    """Return whether a layer normalises, judging by the name of its class or of a base class.

    Users' own layers can only be recognised by name: RMSNorm, LayerNorm2d, RMSNormGated, LayerNormLSTM.
    """
    return any(_NORM.search(kind) or _WITH_NORM.search(kind) for kind in _kinds(module))


def _of_norm(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a normalisation layer that normalise, without those of its children.

    For a …Norm or …Norm2d these are all of them. An RMSNormGated, a LayerNormLSTM or a linear layer called …Norm does
    more than normalise: only its parameters that scale or shift count.
    """
    own: list[Tensor] = list(module.parameters(recurse=False)) if normalises(module) else []
    if any(map(_NORM.search, _kinds(module))) and not isinstance(module, (nn.Linear, _ConvNd)):
        return own
    return [p for p in own if sum(size > 1 for size in p.shape) <= 1]


def _kinds(module: nn.Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]
