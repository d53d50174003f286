"""Small files that are there whole or not at all, and folders that one job at a time writes to."""

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

T = TypeVar("T")


LOCK = ".lock"


class InUse(RuntimeError):
    """A folder is written by one job at a time."""


@contextmanager
def locked(folder: Path, doing: str = "written", *, wait: bool = False) -> Iterator[None]:
    """Hold the folder: a second job that asks for it is refused. The system lets go of it when this process ends.

    ``doing`` is what the refusal says of the folder: "runs/a is being trained by process 7 on host". With ``wait``, for
    what takes no time, a second job is not refused but waits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            number = re.search(r"\d+", holder)
            remedy = f", or stop it with `kill {number[0]}`" if number else ""
            raise InUse(f"{folder} is being {doing} by {holder}; wait for it{remedy}") from None
        with suppress(OSError):  # a full disk: who is refused then is not told by whom
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Return what a JSON file holds, a dict or a list; anything else is an error that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} holds no {kind.__name__}; {remedy}")
    return content


def taken(folder: Path, first: str) -> bool:
    """Tell whether anything is at the path besides what was left of a stop while the first file was written."""
    if not folder.is_dir():
        return folder.exists()
    return any(path != _temporary(folder / first) for path in folder.iterdir())


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.stem}.tmp{path.suffix}")  # whose suffix may tell the format


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let errors name this path: one of writing to an open file names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, and put what was written in the place of a file; if that fails, the old one stays."""
    temporary = _temporary(path)
    try:
        with named(path):
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a read-only disk
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text; whatever goes wrong, the old one stays and no part of the new one does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder) / "a.txt", "one")
    ...     [path.name for path in Path(folder).iterdir()]
    ['a.txt']
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Any) -> None:
    """Replace a file by this content as JSON."""
    write_text(path, to_json(content, indent=1) + "\n")


def to_json(content: Any, indent: int | None = None) -> str:
    """Return the content as JSON, which knows neither nan nor infinity: they are null.

    >>> to_json({"a": [1.5, float("nan")]})
    '{"a": [1.5, null]}'
    """
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def as_read(content: Any) -> Any:
    """Return the content as it comes back from a JSON file: what was read before can be compared with that.

    >>> as_read({"keep": (1, 2)})
    {'keep': [1, 2]}
    """
    return json.loads(to_json(content))


def finite(content: Any) -> Any:
    """Return nested values with lists for tuples and None for numbers that JSON has no name for."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content
