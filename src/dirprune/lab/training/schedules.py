"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dirprune.lab.ranges import NOT_NEGATIVE, BadValue, check

KINDS = ("constant", "drop", "constant-linear-constant", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The factor on the base learning rate as a function of the epoch (1-based) and, for "cosine", the step within it.

    - "constant": 1.
    - "drop": ÷10 after each epoch of ``after``, or after every ``every`` epochs.
    - "constant-linear-constant": with α = epoch/epochs, 1 up to α = .5, linear to .01 at α = .9, then .01.
    - "cosine": a linear warm-up over ``warmup`` epochs, then half a cosine to 0, step by step.

    >>> [round(Schedule("constant-linear-constant").factor(e, 10), 4) for e in (1, 5, 7, 9, 10)]
    [1.0, 1.0, 0.505, 0.01, 0.01]
    """

    kind: str = "constant"
    after: tuple[int, ...] = ()
    every: int = 0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadValue("schedule", self.kind, f"take one of {', '.join(KINDS)}")
        check({"warmup": self.warmup, "every": self.every}, warmup=NOT_NEGATIVE, every=NOT_NEGATIVE)

    @staticmethod
    def of(text: str) -> Schedule:
        """Read a schedule as users type it: its kind, and perhaps its options.

        >>> Schedule.of("cosine:warmup=2"), Schedule.of("drop:after=30,60").after
        (Schedule(kind='cosine', after=(), every=0, warmup=2.0), (30, 60))
        """
        kind, _, rest = text.partition(":")
        name, _, value = rest.partition("=")
        read: dict[str, Callable[[str], Any]] = {"after": _epochs, "every": int, "warmup": float}
        try:
            return Schedule(kind, **{name: read[name](value)} if rest else {})
        except BadValue:
            raise
        except (KeyError, ValueError):
            raise BadValue("schedule", text, "write e.g. cosine:warmup=2, drop:after=30,60 or drop:every=30") from None

    def factor(self, epoch: int, epochs: int, progress: float = 0.0) -> float:
        """Return the factor in ``epoch`` of ``epochs``, ``progress`` ∈ [0, 1) of the way through it."""
        if self.kind == "drop":
            drops = sum(epoch > last for last in self.after) + ((epoch - 1) // self.every if self.every else 0)
            return float(0.1**drops)
        if self.kind == "constant-linear-constant":
            done = epoch / epochs
            return 1.0 if done <= 0.5 else 1.0 - 0.99 * (done - 0.5) / 0.4 if done <= 0.9 else 0.01
        if self.kind == "cosine":
            place = epoch - 1 + progress
            if place < self.warmup:
                return place / self.warmup
            return 0.5 * (1 + math.cos(math.pi * (place - self.warmup) / max(epochs - self.warmup, 1e-9)))
        return 1.0


def _epochs(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
