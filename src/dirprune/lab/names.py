"""The error message for unknown names that users type."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def unknown(kind: str, name: str, known: Collection[str], advice: str = "") -> ValueError:
    """Return the error for an unknown name, with the nearest known name and the list of all.

    >>> print(unknown("recipe", "digit", ["digits", "vgg16"]))
    there is no recipe 'digit'. Did you mean 'digits'? Known: digits, vgg16
    """
    nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"there is no {kind} {name!r}.{hint} Known: {', '.join(known)}{advice}")
