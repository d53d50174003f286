"""From a trained sparse network to what is shipped: small files, and zeros that stay zero; needs numpy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dirprune.deploy.container import InvalidFile
    from dirprune.deploy.keeping import keep_zeros
    from dirprune.deploy.storage import load_sparse, save_sparse

__all__ = ["InvalidFile", "keep_zeros", "load_sparse", "save_sparse"]

# Each name is imported when it is first used: what only reads files does not wait for torch.
_HOMES = {"InvalidFile": "container", "keep_zeros": "keeping", "load_sparse": "storage", "save_sparse": "storage"}


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
