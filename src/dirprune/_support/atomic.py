"""Files that are replaced completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def temporary(path: Path) -> Path:
    """Return the name under which a file is written before it is complete."""
    return path.with_name(f"{path.stem}.tmp{path.suffix}")  # keep the suffix: it may decide the format


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add this path to errors, because an error in writing to an open file names no path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to ``path``; if anything fails, the old file stays."""
    unfinished = temporary(path)
    try:
        with named(path):
            unfinished.unlink(missing_ok=True)  # a link of that name would lead the writing elsewhere
            yield unfinished
            unfinished.replace(path)
    finally:
        with suppress(OSError):  # e.g. on a read-only disk
            unfinished.unlink(missing_ok=True)
