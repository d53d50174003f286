"""From a trained sparse network to what is shipped: small files, zeros that stay zero, and a runtime that is fast on
CPUs; needs numpy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dirprune.deploy.building import NoKernels
    from dirprune.deploy.capture import compile  # noqa: A004
    from dirprune.deploy.container import InvalidFile
    from dirprune.deploy.keeping import keep_zeros
    from dirprune.deploy.network import Unsupported
    from dirprune.deploy.runtime import Runtime
    from dirprune.deploy.saving import load
    from dirprune.deploy.storage import load_sparse, save_sparse

# Each name is imported when it is first used: what only reads files does not wait for torch.
_HOMES = {
    "InvalidFile": "container",
    "NoKernels": "building",
    "Runtime": "runtime",
    "Unsupported": "network",
    "compile": "capture",
    "keep_zeros": "keeping",
    "load": "saving",
    "load_sparse": "storage",
    "save_sparse": "storage",
}
__all__ = [
    "InvalidFile",
    "NoKernels",
    "Runtime",
    "Unsupported",
    "compile",
    "keep_zeros",
    "load",
    "load_sparse",
    "save_sparse",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dirprune.deploy' has no attribute {name!r}")
    try:
        home = import_module(f"dirprune.deploy.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ModuleNotFoundError(
            "dirprune.deploy needs numpy; pip install 'dirprune[deploy]'", name="numpy"
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
