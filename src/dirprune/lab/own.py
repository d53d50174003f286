"""Code of the user's own, named as package.module:callable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dirprune.lab import trust


def call(option: str, spec: str, arguments: Callable[[Callable[..., Any]], dict[str, Any]], needs: str) -> Any:
    """Import ``spec`` and call it; nothing happens unless it is trusted.

    Args:
        option: the option that names it, for messages.
        spec: package.module:callable, in the current folder, installed or on PYTHONPATH.
        arguments: a function from the callable to its keyword arguments.
        needs: what the callable takes and returns, for messages.
    """
    module, _, attribute = spec.partition(":")
    if not module or not attribute:
        raise ValueError(f"{option}={spec!r} names no code; write package.module:callable, one that {needs}")
    trust.check(spec)
    try:
        with _current_folder():  # it may import more when it is called
            make = getattr(importlib.import_module(module), attribute)
            return make(**arguments(make))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{option}={spec!r} raised {type(error).__name__}: {error}; name a callable as package.module:name, in "
            f"this folder, installed or on PYTHONPATH, that {needs}; DIRPRUNE_TRACEBACK=1 shows where it failed"
        ) from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Search for modules in the current folder last, where an installed command does not search by itself."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]
