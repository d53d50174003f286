"""Small files that are written atomically, and folders that only one job at a time writes to."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dirprune._support.atomic import replacing, temporary

T = TypeVar("T")


LOCK = ".lock"


class InUse(RuntimeError):
    """Another job is working in the folder."""


class LeadsElsewhere(ValueError):
    """A folder holds a link, through which what is written to the folder would land elsewhere."""


def check_own(folder: Path) -> None:
    """Raise if anything in the folder, which may come from somebody else, is a link."""
    if links := sorted(str(path) for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_symlink()):
        raise LeadsElsewhere(
            f"{links[0]} is a link, and what is written to its folder could land elsewhere; replace it by what it "
            "leads to, or remove it"
        )


@contextmanager
def locked(folder: Path, doing: str = "written", *, wait: bool = False) -> Iterator[None]:
    """Lock the folder; raise if another job holds it. The system releases the lock when this process ends.

    ``doing`` completes the error message: "runs/a is being trained by process 7 on host". With ``wait``, for quick
    work, wait for the lock instead of raising.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_own(folder)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            number = re.search(r"\d+", holder)
            remedy = f", or stop it with `kill {number[0]}`" if number else ""
            raise InUse(f"{folder} is being {doing} by {holder}; wait for it{remedy}") from None
        with suppress(OSError):  # on a full disk, the error of a second job does not name the holder
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file, a dict or a list; anything else raises an error that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds no {kind.__name__}; {remedy}")
    return content


def taken(folder: Path, first: str) -> bool:
    """Return whether anything exists at the path, except a leftover from an interrupted write of the ``first`` file."""
    if not folder.is_dir():
        return folder.exists()
    return any(path != temporary(folder / first) for path in folder.iterdir())


def write_text(path: Path, text: str) -> None:
    """Write the text to a file atomically; if anything fails, the old file stays and no partial one is left.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder) / "a.txt", "one")
    ...     [path.name for path in Path(folder).iterdir()]
    ['a.txt']
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Any) -> None:
    """Write the content to a file as JSON, atomically."""
    write_text(path, to_json(content, indent=1) + "\n")


def to_json(content: Any, indent: int | None = None) -> str:
    """Return the content as JSON. NaN and infinities, which JSON lacks, become null.

    >>> to_json({"a": [1.5, float("nan")]})
    '{"a": [1.5, null]}'
    """
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def as_read(content: Any) -> Any:
    """Return the content as it would be read back from a JSON file, for comparison with such content.

    >>> as_read({"keep": (1, 2)})
    {'keep': [1, 2]}
    """
    return json.loads(to_json(content))


def finite(content: Any) -> Any:
    """Return nested values with tuples replaced by lists, and NaN and infinities by None."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content
