"""The options of gRDA and their checks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dirprune._support.rates import number
from dirprune.optim.threshold import LARGEST, SHAPES

MACHINE = ("foreach", "fused", "capturable", "skip_nonfinite")
"""Options that say how a step is executed on this machine."""
MATHEMATICS = (
    *("lr", "c", "mu", "momentum", "nesterov", "weight_decay", "maximize", "shape", "rescale", "decay"),
    *("betas", "eps"),
)
"""Options that say what a step computes."""
_NUMBERS = {
    "lr": 0.1,
    "c": 5e-4,
    "mu": 0.51,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "eps": 1e-8,
    "power": 0.5,
}
"""Options that are numbers, each with an example value."""
_ROUNDING = 1e-12
"""How far below 0 rounding may leave a scheduler that ends at 0; a state saved with such a rate must load."""


def check_options(options: dict[str, Any], *, wait: bool = True) -> None:
    """Raise a ValueError if an option cannot be used, and convert numbers to plain floats in place.

    Without ``wait``, a rate that lies on a device is not read, because the host would wait for it.
    """
    for name in _NUMBERS.keys() & options.keys():
        value, example = options[name], _NUMBERS[name]
        if name == "lr" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            continue
        if not isinstance(value, Real):
            raise ValueError(f"{name}={value!r} is not a number; give one, e.g. {name}={example:g}")
        options[name] = number(value)  # a numpy number or a Fraction could not be saved with the state
    for name in {"nesterov", "maximize", "rescale", "skip_nonfinite"} & options.keys():
        if not isinstance(options[name], int):
            raise ValueError(f"{name}={options[name]!r} is neither True nor False")
    lr = options["lr"]
    lr = number(lr) if wait or not isinstance(lr, Tensor) or _is_on_host(lr) else 0.0
    c, mu, weight_decay = (options[name] for name in ("c", "mu", "weight_decay"))
    momentum = options.get("momentum", 0.0)
    if not -_ROUNDING <= lr <= LARGEST:
        raise ValueError(f"lr={lr} is not a learning rate; give a finite number ≥ 0, e.g. lr=0.1")
    if not 0 <= c <= LARGEST:
        raise ValueError(f"c={c} is not a pruning strength; give a finite number ≥ 0, e.g. c=5e-4 (c=0 prunes nothing)")
    if not 0 < mu <= 1:
        raise ValueError(
            f"mu={mu} is not a growth exponent; give a number in (0, 1], e.g. mu=0.51: above 1 the threshold outgrows "
            "every weight in the end"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is out of range; give a number in [0, 1), e.g. momentum=0.9")
    if options.get("nesterov") and momentum == 0:
        raise ValueError("nesterov=True needs momentum, and momentum=0; give e.g. momentum=0.9, or nesterov=False")
    if not 0 <= weight_decay <= LARGEST:
        raise ValueError(
            f"weight_decay={weight_decay} is not a decay; give a finite number ≥ 0, e.g. weight_decay=5e-4"
        )
    if "betas" in options:
        _check_adam(options)
    # At μ ≤ 1 the first step's growth, at a rate that stays, is the largest.
    if lr > 0 and math.log(max(c, 1.0)) + (mu + 0.5) * math.log(lr / (1 - momentum)) > math.log(LARGEST):
        raise ValueError(f"lr={lr} and c={c} give a threshold beyond the range of float32; give smaller ones")
    for name in ("scale", "cost"):
        if not (isinstance(options[name], Real) and 0 < number(options[name]) < math.inf):
            raise ValueError(f"{name}={options[name]!r} of a group is out of range; give a finite number > 0, e.g. 1.0")
    if not isinstance(options["shape"], str) or options["shape"] not in SHAPES:
        raise ValueError(f"shape={options['shape']!r} is not known; take one of {', '.join(SHAPES)}")
    if options["plan"] is not None and c not in (0.0, 1.0):
        raise ValueError(
            f"c={c} has no effect beside a target, which moves the threshold; leave it alone, or give no target"
        )
    if options.get("decay", "weights") not in ("weights", "accumulator"):
        raise ValueError(f"decay={options['decay']!r} is not known; weights or accumulator can decay")
    if options["fused"] and (options.get("rescale") or options.get("decay") == "accumulator"):
        raise ValueError('fused=True knows neither rescale=True nor decay="accumulator"; leave fused=None')
    if options["foreach"] and options["fused"]:
        raise ValueError("foreach=True and fused=True exclude each other; give one of them, or neither for the default")


def _check_adam(options: dict[str, Any]) -> None:
    betas = options["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(isinstance(beta, Real) for beta in betas)):
        raise ValueError(f"betas={betas!r} are not two numbers; give e.g. betas=(0.9, 0.999)")
    beta1, beta2 = options["betas"] = (float(betas[0]), float(betas[1]))
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas={betas!r} are out of range; give numbers in [0, 1), e.g. betas=(0.9, 0.999)")
    if not 0 <= options["eps"] <= LARGEST:
        raise ValueError(f"eps={options['eps']} cannot be used; give a finite number ≥ 0, e.g. eps=1e-8")
    if not 0 <= options["power"] <= 1:
        raise ValueError(
            f"power={options['power']} is out of range; give a number from 0 (one threshold for all weights) to 1 "
            "(Adam's own metric)"
        )


def _is_on_host(lr: Tensor) -> bool:
    return lr.is_cpu and type(lr) in (Tensor, torch.nn.Parameter)  # a fake or a traced tensor has no value
