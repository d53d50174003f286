"""Code that is named as module:callable is imported only if the user named or trusted it in this command."""

from __future__ import annotations

from collections.abc import Iterable

_ALLOWED: set[str] = set()


class Untrusted(ValueError):
    """A file names code that nobody has trusted in this process."""


def allow(spec: str) -> None:
    """Let the code called ``spec`` run in this process."""
    _ALLOWED.add(spec)


def allowed() -> set[str]:
    """Return what may run, for another process of the same user."""
    return set(_ALLOWED)


def vouch(specs: Iterable[str], *, trusted: bool) -> None:
    """Let code that a file names run if the user trusts whoever wrote the file; raise otherwise."""
    for spec in specs:
        allow(spec) if trusted else check(spec)


def check(spec: str) -> None:
    """Raise unless the code called ``spec`` may run."""
    if spec not in _ALLOWED:
        raise Untrusted(
            f"{spec!r} is code that a file names, and nothing of it was executed; add --trust if you would run any "
            f"program of whoever gave you the file (in Python: dirprune.lab.trust.allow({spec!r}))"
        )
