"""Where the numbers of a page come from, as every page says it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence

import dirprune
from dirprune.lab.pages.page import Section
from dirprune.lab.records import provenance
from dirprune.lab.records.provenance import Session
from dirprune.lab.text import printable

_TOLD = {
    "command": "command",
    "commit": "commit",
    "device": "hardware",
    "threads": "threads",
    "processes": "processes",
    "dirprune": "dirprune",
    "torch": "torch",
    "python": "Python",
    "platform": "system",
    "data": "data",
    "examples": "training examples",
    "time": "begun",
}
"""The fields of a session that a page shows, and their names there."""


def came_from(sessions: Iterable[Session], more: Mapping[str, Sequence[str]]) -> Section:
    """Return the section that says where the numbers of a page come from, and how the page was made."""
    every = list(sessions)
    facts = {label: distinct(getattr(session, name) for session in every) for name, label in _TOLD.items()}
    command = printable(shlex.join(["dirprune", *sys.argv[1:]]))
    facts["this page"] = [f"{command} (dirprune {dirprune.__version__}, commit {provenance.commit() or 'unknown'})"]
    return Section("Where it comes from", facts={**more, **{name: told for name, told in facts.items() if told}})


def distinct(values: Iterable[object]) -> list[str]:
    """Return what values say, without repetitions and what is not known."""
    return list(dict.fromkeys(str(value) for value in values if value not in ("", None)))
