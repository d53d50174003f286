"""How far a long computation is, as it tells those who wait for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Of ``what``, ``done`` of at most ``total`` are done, counted in ``unit``; ``note`` is what else there is to say.

    The first one of a job that goes on says what was done before.
    """

    what: str
    done: int
    total: int
    note: str = ""
    unit: str = ""
