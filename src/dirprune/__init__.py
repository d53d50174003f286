"""Train sparse networks by directional pruning: gRDA as a torch optimizer, and the tools to see what it does."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dirprune.optim import GRDA as GRDA
    from dirprune.optim import prunable_groups as prunable_groups
    from dirprune.zeros import SparsityReport as SparsityReport
    from dirprune.zeros import sparsity as sparsity

__version__ = "0.1.0"

# Imported when first used, so that `dirprune --help` does not wait for torch.
_HOMES = {
    "GRDA": "optim",
    "prunable_groups": "optim",
    "SparsityReport": "zeros",
    "sparsity": "zeros",
}
__all__ = ["GRDA", "SparsityReport", "prunable_groups", "sparsity"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dirprune' has no attribute {name!r}")
    value = getattr(import_module(f"dirprune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
