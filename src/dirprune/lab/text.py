"""How values are shown to people."""

from __future__ import annotations

NOTHING = "–"  # a table cell without a value


def duration(seconds: float) -> str:
    """Return a duration as readable text.

    >>> duration(4.21), duration(95), duration(7500)
    ('4.2 s', '1 min 35 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
