"""Records of plain values: what a field may hold, and how it is shown, is declared once, on the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dirprune.lab.text import CONTROL, NOTHING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)
else:
    Record = TypeVar("Record")


@dataclass(frozen=True)
class Column:
    """What a field may hold, and how a table shows it.

    Attributes:
        title: the header of its column; without one it is not shown.
        form: how its number is formatted, after it is multiplied by ``scale``.
        valid: the range of its numbers, in which NaN always is, or the words that it may be.

    >>> @dataclass(frozen=True)
    ... class Score:
    ...     method: str
    ...     accuracy: Annotated[float, Column("accuracy (%)", ".2f", valid=(0, 100))]
    >>> record(Score, {"method": "gRDA", "accuracy": 93})
    Score(method='gRDA', accuracy=93.0)
    >>> cells(record(Score, {"method": "gRDA", "accuracy": 93}))
    {'accuracy (%)': '93.00'}
    """

    title: str = ""
    form: str = ""
    scale: float | None = None
    valid: tuple[float, float] | Collection[str] | None = None


Number = Annotated[int, Column(valid=(1, math.inf))]
Count = Annotated[int, Column(valid=(0, math.inf))]
Amount = Annotated[float, Column(valid=(0, math.inf))]
Fraction = Annotated[float, Column(valid=(0, 1))]
Percent = Annotated[float, Column(valid=(0, 100))]


def record(kind: type[Record], values: Any) -> Record:
    """Return the record with these values from JSON, where null stands for NaN.

    Raises:
        ValueError: a field is missing, unknown, of another type or out of its range; the message names it.
    """
    if not isinstance(values, dict):
        raise ValueError(f"it is {_named(values)}, not an object with fields")
    hints = types(kind)
    if strange := values.keys() - hints.keys():
        raise ValueError(f"it has {sorted(strange)[0]!r}, which this version of dirprune does not know")
    if missing := [each.name for each in fields(kind) if each.name not in values and _is_needed(each)]:
        raise ValueError(f"it has no {missing[0]}")
    return kind(**{name: checked(kind, name, plain(name, hints[name], value)) for name, value in values.items()})


def cells(row: DataclassInstance) -> dict[str, str]:
    """Return the fields of a record that have a title as text, by title."""
    told = {column.title: _text(getattr(row, name), column) for name, column in columns(type(row)).items()}
    return {title: text for title, text in told.items() if title}


def _text(value: Any, column: Column) -> str:
    if value is None or value == "" or value != value:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value if column.scale is None else column.scale * value:{column.form}}"


def checked(kind: Any, name: str, value: Any) -> Any:
    """Return a value of the field's type; raise a ValueError if it is none that the field may hold."""
    valid = columns(kind)[name].valid
    if isinstance(valid, tuple) and isinstance(value, int | float):
        least, most = valid
        if value < least or value > most:
            raise ValueError(f"{name}={value!r} is not in [{least:g}, {most:g}]")
    elif valid is not None and isinstance(value, str) and value not in valid:
        raise ValueError(f"{name}={value!r} is none of {', '.join(map(str, valid))}")
    return value


@cache
def types(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


@cache
def columns(kind: Any) -> dict[str, Column]:
    """Return what is declared of a record's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: next(_declared(hints[each.name]), Column()) for each in fields(kind)}


def _declared(hint: Any) -> Iterator[Column]:
    for each in get_args(hint):
        if isinstance(each, Column):
            yield each
        else:
            yield from _declared(each)


def _is_needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def plain(name: str, hint: Any, value: Any) -> Any:
    """Return a value from JSON as the type of its field; raise a ValueError that names it if it is none."""
    if hint is Any:
        return value
    if get_origin(hint) in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner = get_args(hint)
        if inner[-1] is not Ellipsis and len(inner) != len(value):
            raise ValueError(f"{name} has {len(value)} values, not {len(inner)}")
        return tuple(plain(f"{name}[{i}]", inner[0], each) for i, each in enumerate(value))
    if is_dataclass(hint) and isinstance(hint, type):
        try:
            return record(hint, value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if hint is float and (value is None or type(value) in (int, float)):
        try:
            return math.nan if value is None else float(value)
        except OverflowError as error:
            raise ValueError(f"{name} is too large") from error
    if type(value) is not hint:
        raise ValueError(f"{name} is {_named(value)}, not {_NAMES.get(hint, 'a list')}")
    if isinstance(value, str) and (found := CONTROL.search(value)):
        raise ValueError(f"{name} has the control character {found[0]!r}")
    return value


_NAMES: dict[Any, str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "an object"}


def _named(value: Any) -> str:
    """Return the type of a value from JSON in words."""
    return "null" if value is None else _NAMES.get(type(value), "a list")
