"""Tables of measured rows as CSV files: one frozen dataclass a table, one field a column."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from dirprune.lab.files import LOCK, as_read, locked, read_json, write_json, write_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)
else:
    Row = TypeVar("Row")

SETTINGS = "settings.json"
_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    float | None: lambda text: float(text) if text else None,
    str: str,
    bool: "True".__eq__,
}


class OtherSettings(ValueError):
    """A folder holds rows that were measured in another way."""


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Write a table whole or not at all, so that a crash leaves the rows it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows that `write_rows` wrote, exactly; none if there is no such file.

    >>> import tempfile
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Point:
    ...     name: str
    ...     value: float | None
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_rows(Path(folder) / "points.csv", Point, [Point("a", 0.1), Point("b", None)])
    ...     read_rows(Path(folder) / "points.csv", Point)
    [Point(name='a', value=0.1), Point(name='b', value=None)]
    """
    if not path.exists():
        return []
    readers = {name: _READERS[hint] for name, hint in get_type_hints(kind).items()}
    with path.open(encoding="utf-8", newline="") as file:
        try:
            table = csv.DictReader(file)
            if lacking := [name for name in readers if name not in (table.fieldnames or ())]:
                raise ValueError(f"it has no column {lacking[0]}")
            return [kind(**{name: reader(row[name]) for name, reader in readers.items()}) for row in table]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a table of {kind.__name__} ({error}); delete it") from error


def merge_rows(path: Path, kind: type[Row], rows: Iterable[Row], *, key: Sequence[str], in_order: bool = False) -> None:
    """Write rows into a table; they take the place of those that are alike in the columns ``key``, the others stay.

    ``in_order`` sorts the table by these columns; otherwise new rows come last.
    """
    new = list(rows)

    def known_by(row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in key)

    replaced = {known_by(row) for row in new}
    merged = [*(row for row in read_rows(path, kind) if known_by(row) not in replaced), *new]
    write_rows(path, kind, sorted(merged, key=known_by) if in_order else merged)


@contextmanager
def measuring(
    folder: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    files: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Hold a folder of rows and `settle` how they are measured; if nothing is, nothing of it stays."""
    with locked(folder):
        settle(folder, settings, environment, files=files)
        try:
            yield
        finally:
            with suppress(OSError):
                if not _holds_more(folder):
                    for name in (SETTINGS, LOCK):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()


def _holds_more(folder: Path) -> bool:
    """Whether anything was measured: rows, or products that were kept. Settings without that bind nobody."""
    return any(entry.name not in (SETTINGS, LOCK) for entry in folder.iterdir())


def settle(
    folder: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    files: Mapping[str, str] | None = None,
) -> None:
    """Note in settings.json how the rows of a folder are measured, and refuse to add rows measured in another way.

    Args:
        folder: of the rows.
        settings: in which all rows agree.
        environment: of this session.
        files: checksums of what is measured, by a name; more of them may join, but none may change.

    Raises:
        OtherSettings: the folder was begun with other settings, or with other files of these names.
    """
    path = folder / SETTINGS
    wanted = as_read(settings)
    noted: dict[str, Any] = {"settings": wanted, "sessions": []}
    if path.exists() and _holds_more(folder):
        noted |= read_json(path, dict, "give another --out, or delete the folder")
    differing = [key for key in wanted if noted["settings"].get(key) != wanted[key]]
    if differing:
        there = ", ".join(f"{key}={noted['settings'].get(key)}" for key in differing)
        here = ", ".join(f"{key}={wanted[key]}" for key in differing)
        raise OtherSettings(f"{folder} was started with {there}, not {here}; give another --out, or delete it")
    known: dict[str, str] = noted.setdefault("files", {})
    for name, checksum in (files or {}).items():
        if known.setdefault(name, checksum) != checksum:
            raise OtherSettings(
                f"{folder} was started with another file as {name}: a run of the same name, or trained again; give "
                "another --out, or delete it"
            )
    noted["sessions"].append(dict(environment))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, noted)
