"""Small files that are there whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text; whatever goes wrong, the old one stays and no part of the new one does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder) / "a.txt", "one")
    ...     [path.name for path in Path(folder).iterdir()]
    ['a.txt']
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # a read-only disk
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Any) -> None:
    """Replace a file by this content as JSON."""
    write_text(path, to_json(content, indent=1) + "\n")


def to_json(content: Any, indent: int | None = None) -> str:
    """Return the content as JSON, which knows neither nan nor infinity: they are null.

    >>> to_json({"a": [1.5, float("nan")]})
    '{"a": [1.5, null]}'
    """
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def finite(content: Any) -> Any:
    """Return nested values with lists for tuples and None for numbers that JSON has no name for."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content
