"""Small files that are there whole or not at all."""

from __future__ import annotations

import json
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
    write_text(path, json.dumps(content, indent=1) + "\n")
