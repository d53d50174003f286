"""The ranges of options: a table of them in a constructor checks every value, and one kind of error names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple


class BadValue(ValueError):
    """An option has a value that is not allowed."""

    def __init__(self, name: str, value: Any, remedy: str) -> None:
        super().__init__(f"{name}={value!r} cannot be used; {remedy}")
        self.name, self.value, self.remedy = name, value, remedy


class Range(NamedTuple):
    """Which numbers an option may have: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


LARGEST = 2.0**128
"""Numbers from here on are infinite in float32, in which torch computes with them."""

FINITE = Range("a finite number", math.isfinite)
POSITIVE = Range("a finite number > 0 that float32 can hold", lambda value: 0 < value < LARGEST)
NOT_NEGATIVE = Range("a finite number ≥ 0 that float32 can hold", lambda value: 0 <= value < LARGEST)
FRACTION = Range("a fraction in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = Range("a fraction in [0, 1), e.g. 0.9", lambda value: 0 <= value < 1)
UP_TO_ONE = Range("a number in (0, 1]", lambda value: 0 < value <= 1)
BETWEEN = Range("a fraction between 0 and 1, e.g. 0.9", lambda value: 0 < value < 1)
COUNT = Range("a whole number of at least 1", lambda value: value >= 1 and value == int(value))
SEVERAL = Range("a whole number of at least 2", lambda value: value >= 2 and value == int(value))
SEED = Range("a whole number from 0 to 2^63 − 1", lambda value: 0 <= value < 2**63 and value == int(value))


def check(values: Mapping[str, Any], **ranges: Range) -> None:
    """Raise `BadValue` for the first of the values that is not in its range; None stands for a default and passes.

    >>> check({"momentum": 1.5}, momentum=BELOW_ONE)
    Traceback (most recent call last):
    dirprune.lab.ranges.BadValue: momentum=1.5 cannot be used; give a fraction in [0, 1), e.g. 0.9
    """
    for name, allowed in ranges.items():
        value = values[name]
        if value is not None and not (isinstance(value, Real) and math.isfinite(value) and allowed.holds(value)):
            raise BadValue(name, value, f"give {allowed.words}")
