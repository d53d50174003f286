"""Tables of measured rows as CSV files: one frozen dataclass per table, one field per column."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from dirprune.lab.records.columns import checked, types
from dirprune.lab.records.files import LOCK, as_read, locked, read_json, write_json, write_text
from dirprune.lab.records.provenance import Session

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)
else:
    Row = TypeVar("Row")

SETTINGS = "settings.json"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""How a text begins that a spreadsheet would execute; in files, an apostrophe comes before it."""


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):  # spreadsheets write them in capitals
        raise ValueError("it is neither True nor False")
    return text.lower() == "true"


def _inert(value: Any) -> Any:
    """Return the value of a cell; a text that a spreadsheet would execute gets an apostrophe, a number does not."""
    return f"'{value}" if isinstance(value, str) and _is_formula(value) and not _is_number(value) else value


def _read_text(text: str) -> str:
    """Return the text that `_inert` wrote."""
    return text[1:] if text.startswith("'") and _is_formula(text) else text


def _is_formula(text: str) -> bool:
    return text.lstrip("'").startswith(FORMULA)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    float | None: lambda text: float(text) if text else None,
    str: _read_text,
    bool: _read_bool,
}


class OtherSettings(ValueError):
    """A folder holds rows that were measured with other settings."""


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Write a table atomically, so that a crash leaves the old rows; rows that could not be read are refused."""
    text = as_text(path, kind, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def as_text(path: Path, kind: type[Row], rows: Iterable[Row]) -> str:
    """Return the text of a table, which has been read back, so that nothing replaces a table that could be read."""
    lines = [[field.name for field in fields(kind)], *(map(_inert, asdict(row).values()) for row in rows)]
    text = "".join(map(_line, lines))
    try:
        _rows(io.StringIO(text, newline=""), kind)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not written: a row of {kind.__name__} could not be read back ({error})") from error
    return text


def _line(cells: Iterable[Any]) -> str:
    """Return a line of a table; `csv` quotes line breaks in a cell only if they could also end the line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n") + "\n"


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return exactly the rows that `write_rows` wrote; [] if there is no such file.

    A column with a default may be missing, as in tables from before it was added. Files saved by a spreadsheet can be
    read too, with a byte-order mark and other line endings.

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
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return _rows(file, kind)
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{path} cannot be read as a table of {kind.__name__} ({error}); correct it, or restore it from a "
                "copy, or, if you can do without its rows, delete it"
            ) from error


def _rows(file: TextIO, kind: type[Row]) -> list[Row]:
    """Return the rows of an open table; raise a ValueError that names the line and the column that cannot be read."""
    table = csv.DictReader(file)
    given = table.fieldnames or ()
    if lacking := [each.name for each in fields(kind) if each.name not in given and each.default is MISSING]:
        raise ValueError(f"it has no column {lacking[0]}")
    return [kind(**_values(row, kind, table.line_num)) for row in table]


def _values(row: Mapping[Any, Any], kind: Any, line: int) -> dict[str, Any]:
    """Return the cells of a row as Python values."""
    if None in row:  # where `csv` puts cells beyond the last column
        raise ValueError(f"line {line} has more cells than there are columns")
    values = {}
    for name, hint in types(kind).items():
        if name not in row:  # a column that this table is too old for
            continue
        if row[name] is None:
            raise ValueError(f"line {line} ends before its column {name}")
        try:
            values[name] = checked(kind, name, _READERS[hint](row[name]))
        except ValueError as error:
            raise ValueError(f"line {line} has {name}={row[name]!r}: {error}") from error
    return values


def merge_rows(path: Path, kind: type[Row], rows: Iterable[Row], *, key: Sequence[str], in_order: bool = False) -> None:
    """Write rows into a table, replacing existing rows with the same values in the columns ``key``.

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
    session: Session,
    *,
    table: str,
    files: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Lock a folder of rows and `settle` its settings; if nothing is measured, clean up afterwards."""
    with locked(folder):
        settle(folder, settings, session, table=table, files=files)
        try:
            yield
        finally:
            with suppress(OSError):
                if not _holds_more(folder):
                    for name in (SETTINGS, LOCK):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()


def _holds_more(folder: Path) -> bool:
    """Return whether anything was measured: rows or saved products. Otherwise the settings do not matter."""
    return any(entry.name not in (SETTINGS, LOCK) for entry in folder.iterdir())


def settle(
    folder: Path,
    settings: Mapping[str, Any],
    session: Session,
    *,
    table: str,
    files: Mapping[str, str] | None = None,
) -> None:
    """Record in settings.json how the rows of a folder are measured; raise if the folder was begun differently.

    Args:
        folder: the folder of the rows.
        settings: the settings that all rows share.
        session: where this session runs.
        table: the file name of the rows; if it exists, settings.json must exist too.
        files: checksums of the measured files by name; new ones may be added, but none may change.

    Raises:
        OtherSettings: the folder was begun with other settings, or with other files of these names.
        ValueError: settings.json is missing or damaged, so it is not known how the rows were measured.
    """
    path = folder / SETTINGS
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} is a run directory; give another --out")
    wanted = as_read(settings)
    noted: dict[str, Any] = {"settings": wanted, "sessions": []}
    remedy = "restore it from a copy, give another --out, or delete the folder"
    if path.exists() and _holds_more(folder):
        noted = read_json(path, dict, remedy)
        if not (isinstance(noted.get("settings"), dict) and isinstance(noted.get("sessions"), list)):
            raise ValueError(f"{path} does not say how the rows beside it were measured; {remedy}")
    elif (folder / table).exists():
        raise ValueError(f"{path} is gone, which says how the rows of {table} were measured; {remedy}")
    if not noted["settings"].keys() & wanted.keys():
        raise OtherSettings(f"{folder} holds other measurements; give another --out")
    known_settings = noted["settings"]
    differing = [key for key in wanted | known_settings if known_settings.get(key) != wanted.get(key)]
    if differing:
        there, here = (", ".join(f"{key}={each.get(key)}" for key in differing) for each in (known_settings, wanted))
        raise OtherSettings(f"{folder} was started with {there}, not {here}; give another --out, or delete it")
    known: dict[str, str] = noted.setdefault("files", {})
    for name, checksum in (files or {}).items():
        if known.setdefault(name, checksum) != checksum:
            raise OtherSettings(
                f"{folder} was started with another file as {name}: a run of the same name, or trained again; give "
                "another --out, or delete it"
            )
    noted["sessions"].append(asdict(session))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, noted)
