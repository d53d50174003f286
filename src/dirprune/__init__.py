"""Train sparse networks by directional pruning: gRDA as a torch optimizer, and the tools to see what it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dirprune.connect import BezierCurve, Plane, curve_profile, fit_curve, plane_profile
    from dirprune.cost import macs
    from dirprune.curvature import Eigenpairs, HessianOperator, hessian_diagonal, top_eigenpairs
    from dirprune.direction import (
        directional_path,
        directional_prune,
        directional_score,
        eigenspace_share,
        lam_for_sparsity,
        null_projection,
    )
    from dirprune.optim import GRDA, AdamGRDA, prunable_groups
    from dirprune.zeros import SparsityReport, sparsity

__version__ = "0.2.0"
# What a training script needs
__all__ = ["GRDA", "AdamGRDA", "SparsityReport", "macs", "prunable_groups", "sparsity"]
# For research; at home in dirprune.curvature, dirprune.direction and dirprune.connect
__all__ += [
    "BezierCurve",
    "Eigenpairs",
    "HessianOperator",
    "Plane",
    "curve_profile",
    "directional_path",
    "directional_prune",
    "directional_score",
    "eigenspace_share",
    "fit_curve",
    "hessian_diagonal",
    "lam_for_sparsity",
    "null_projection",
    "plane_profile",
    "top_eigenpairs",
]

# Each name is imported when it is first used, so that `dirprune --help` does not wait for torch.
_HOMES = {
    "optim": ("GRDA", "AdamGRDA", "prunable_groups"),
    "cost": ("macs",),
    "zeros": ("SparsityReport", "sparsity"),
    "curvature": ("Eigenpairs", "HessianOperator", "hessian_diagonal", "top_eigenpairs"),
    "direction": (
        "directional_path",
        "directional_prune",
        "directional_score",
        "eigenspace_share",
        "lam_for_sparsity",
        "null_projection",
    ),
    "connect": ("BezierCurve", "Plane", "curve_profile", "fit_curve", "plane_profile"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"dirprune.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'dirprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
