"""Which parameters are pruned, and which stay dense."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def prunable_groups(model: nn.Module, c: float, exempt: Sequence[str] = ("bias", "norm")) -> list[dict[str, Any]]:
    """Return parameter groups for `GRDA` that keep dense, by ``c = 0``, what must stay dense.

    Args:
        model: whose parameters to group; the groups keep their names.
        c: the pruning strength of everything not exempt.
        exempt: any of ``"bias"`` (every bias), ``"norm"`` (the parameters of normalisation layers), and patterns of
            parameter names such as ``"head.*"``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> [(group["c"], len(group["params"])) for group in prunable_groups(model, c=1e-3)]
        [(0.001, 1), (0.0, 3)]
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={reprlib.repr(model)} is not a module; pass the model itself, prunable_groups(model, c)"
        )
    if isinstance(exempt, str):
        raise ValueError(f"exempt={exempt!r} is a string; give a sequence of them, e.g. exempt=({exempt!r},)")
    norms = {
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if any(re.search(r"norm(\dd)?$", kind.__name__, re.IGNORECASE) for kind in type(module).__mro__)
        for leaf, _ in module.named_parameters(recurse=False)
    }
    names = [name for name, _ in model.named_parameters()]
    kept_dense: set[str] = set()
    for rule in exempt:
        if rule == "bias":
            kept_dense.update(name for name in names if name.rpartition(".")[2].endswith("bias"))
        elif rule == "norm":
            kept_dense.update(norms)
        else:
            matches = [name for name in names if fnmatchcase(name, rule)]
            if not matches:
                some = f" like {names[0]!r}" if names else ""
                raise ValueError(
                    f"exempt={rule!r} matches no parameter; use 'bias', 'norm' or a pattern of names{some}"
                )
            kept_dense.update(matches)
    prunable = [(name, p) for name, p in model.named_parameters() if name not in kept_dense]
    dense = [(name, p) for name, p in model.named_parameters() if name in kept_dense]
    groups: list[dict[str, Any]] = [{"params": prunable, "c": c}, {"params": dense, "c": 0.0}]
    return [group for group in groups if group["params"]]
