"""Damaged and hostile versions of a good file, by hypothesis: the same ones in every run.

`damaged` knows only bytes. `edited` knows JSON: one that parses, with impossible values in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

NASTY: list[Any] = [
    *(None, True, -1, 0, 1, 7, 255, 256, 2**31, 2**48, 2**63, 2**70, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "../x", "0" * 64, "\ud800", "sys:exit", "float32", "float16", "dense", "mask", "deltas", "U8", "F32"),
    *([], [[]], [0], [2**48, 2**48], [-1, 4], {}, {"a": {}}, {"same_as": "x"}, [1] * 100),
]


def fuzz(versions: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, start: int = 0) -> int:
    """Call ``check`` with so many of the versions, shrink the first that fails, and return how many were tried."""
    tried = 0

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(versions)
    def attempt(version: Any) -> None:
        nonlocal tried
        tried += 1
        check(version)

    attempt()
    return tried


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the data after one to three accidents: cut, extended, shifted, overwritten, or with a bit turned."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(found)))
        end = min(len(found), start + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["cut", "insert", "delete", "overwrite", "repeat", "bit"])):
            case "cut":
                del found[start:]
            case "insert":
                found[start:start] = draw(st.binary(max_size=40))
            case "delete":
                del found[start:end]
            case "overwrite":
                found[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
            case "repeat":
                found[end:end] = found[start:end]
            case "bit" if start < len(found):
                found[start] ^= 1 << draw(st.integers(0, 7))
    return bytes(found)


@st.composite
def edited(draw: st.DrawFn, content: Any) -> Any:
    """Return the JSON content with one to three of its values replaced by nasty ones, by one another, or removed."""
    found = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(_paths(found))
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        holder = reduce(getitem, way, found)
        match draw(st.sampled_from(["nasty", "other", "remove"])):
            case "nasty":
                holder[last] = copy.deepcopy(draw(st.sampled_from(NASTY)))
            case "other":
                holder[last] = copy.deepcopy(reduce(getitem, draw(st.sampled_from(paths)), found))
            case "remove":
                del holder[last]
    return found


def _paths(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value inside the content."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*way, key)
        yield from _paths(value, (*way, key))
