"""Parameter groups: which parameters are pruned, and which stay dense."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
_WITH_NORM = re.compile(r"[Nn]orm(?![a-z])")  # but not Normalize or Enormous


def prunable_groups(
    model: nn.Module,
    c: float | None = None,
    exempt: Sequence[str] = ("bias", "norm"),
    *,
    cost: Mapping[str, float] | None = None,
    tilt: float = 0.5,
    named: bool = True,
) -> list[dict[str, Any]]:
    """Return parameter groups for `GRDA`: one to prune, and one that stays dense with ``c = 0``.

    Args:
        model: the module whose parameters are grouped.
        c: the pruning strength of all parameters that are not exempt; by default the optimizer's, or its target's.
        exempt: any of ``"bias"`` (every parameter whose name says bias), ``"norm"`` (the parameters of normalisation
            layers), and patterns of parameter names such as ``"head.*"``.
        cost: what one weight of each parameter costs, by name, as `macs` returns it. There is then a group for each
            cost, and parameters that cost nothing stay dense.
        tilt: thresholds grow in proportion to costᵗⁱˡᵗ, with a geometric mean of 1 over the weights, so that zeros go
            where they save; 0 prunes all alike.
        named: whether the groups keep the names of the parameters; `torch.distributed.optim.ZeroRedundancyOptimizer`
            takes none.

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
    # Zeros of what these are computed from are not zeros of the weights, which would end up all zero.
    kept_dense.update(
        p
        for module in model.modules()
        if isinstance(module, ParametrizationList) and any(type(step).__name__ == "_Orthogonal" for step in module)
        for p in module.parameters()
    )
    if cost is not None:
        kept_dense.update(p for name, p in model.named_parameters() if _cost_of(name, cost) == 0)
    prunable = [(name, p) for name, p in model.named_parameters() if p not in kept_dense]
    dense = [(name, p) for name, p in model.named_parameters() if p in kept_dense]
    strength = {} if c is None else {"c": c}
    pruned = [{"params": prunable}] if cost is None else _by_cost(prunable, cost, tilt)
    groups: list[dict[str, Any]] = [*({**group, **strength} for group in pruned), {"params": dense, "c": 0.0}]
    if not named:
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    return [group for group in groups if group["params"]]


def _by_cost(named: Sequence[tuple[str, Tensor]], cost: Mapping[str, float], tilt: float) -> list[dict[str, Any]]:
    """Return a group for each cost of a weight, with the scale of its threshold."""
    if not 0 <= tilt <= 1:
        raise ValueError(f"tilt={tilt} is out of range; give a number from 0 (all alike) to 1, e.g. tilt=0.5")
    members: dict[float, list[tuple[str, Tensor]]] = {}
    for name, p in named:
        members.setdefault(cost[name], []).append((name, p))
    logs = {price: tilt * math.log(price) for price in members}
    weights = {price: sum(p.numel() for _, p in group) for price, group in members.items()}
    mean = sum(logs[price] * weights[price] for price in members) / max(1, sum(weights.values()))
    return [{"params": group, "cost": price, "scale": math.exp(logs[price] - mean)} for price, group in members.items()]


def _cost_of(name: str, cost: Mapping[str, float]) -> float:
    if not 0 <= cost.get(name, -1) < math.inf:
        raise ValueError(
            f"cost has {cost.get(name)!r} for {name!r}; give a number ≥ 0 for every parameter, as macs(model, x) does"
        )
    return cost[name]


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
