"""How values are shown to people."""

from __future__ import annotations

import re

NOTHING = "–"  # a table cell without a value
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that command a terminal, and halves of characters, which nothing can print."""


def printable(text: str) -> str:
    """Return a text, perhaps out of the file of somebody else, without what would command the terminal.

    >>> printable("small\\x1b[2J")
    'small�[2J'
    """
    return CONTROL.sub("�", text)


def duration(seconds: float) -> str:
    """Return a duration as readable text.

    >>> duration(4.21), duration(95), duration(7500)
    ('4.2 s', '1 min 35 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
