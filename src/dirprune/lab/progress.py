"""Progress reports of long computations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """``done`` of at most ``total`` steps of ``what`` are done, counted in ``unit``; ``note`` is additional text.

    The first report of a job that is continued says what was done before.
    """

    what: str
    done: int
    total: int
    note: str = ""
    unit: str = ""
