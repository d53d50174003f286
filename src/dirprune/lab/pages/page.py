"""What a page shows, and how it is written: one file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from dirprune.lab import plots
from dirprune.lab.pages import svg
from dirprune.lab.records.files import write_text
from dirprune.lab.text import NOTHING


@dataclass(frozen=True)
class Table:
    """Rows of text by column, of which the ``left`` first are words; a ``folded`` table is opened by its title."""

    rows: Sequence[Mapping[str, str]]
    title: str = ""
    left: int = 1
    folded: bool = False

    @property
    def columns(self) -> list[str]:
        """The columns that are not empty."""
        return [
            name for name in (self.rows[0] if self.rows else ()) if {row[name] for row in self.rows} - {NOTHING, ""}
        ]

    def turned(self) -> Table:
        """Return the table with a row for each column, which suits few rows, and phones."""
        first, *others = self.columns
        rows = [{first: name, **{row[first]: row[name] for row in self.rows}} for name in others]
        return Table(rows, self.title, folded=self.folded)


@dataclass(frozen=True)
class Picture:
    """A figure, drawn once for a wide page and once for a phone; one that cannot be narrow is scrolled there.

    A ``folded`` one is opened by its title. The titles of a page differ.
    """

    title: str
    draw: Callable[[], Figure]
    narrows: bool = True
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page, in the order of its fields; facts are names and texts, such as a commit and its number."""

    title: str
    tiles: Mapping[str, str] | None = None
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    facts: Mapping[str, Sequence[str]] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section]

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]


def write(page: Page, path: Path, drawn: Callable[[], None] = lambda: None) -> Path:
    """Write a page to a file, and return its path; ``drawn`` is called after each picture."""
    write_text(path, rendered(page, drawn))
    return path


def rendered(page: Page, drawn: Callable[[], None]) -> str:
    """Return a page as HTML. Whatever it shows is text: what others wrote cannot become a part of the page.

    The page has no scripts, and its policy forbids them and every request.
    """
    shown: dict[str, list[tuple[str, str]]] = {}
    elements = []
    for number, picture in enumerate(page.pictures):
        sizes = [("wide", svg.drawn(picture.draw(), f"w{number}"))]
        if picture.narrows:
            with plots.narrow():
                sizes.append(("phone", svg.drawn(picture.draw(), f"n{number}")))
        elements += [element for _, element in sizes]
        shown[picture.title] = [(size, Markup(svg.text_of(element))) for size, element in sizes]
        drawn()
    here = Environment(
        loader=PackageLoader("dirprune.lab", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = here.get_template("page.css").render(paper=svg.PAPER, rules=map(Markup, svg.dark_rules(elements)))
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return here.get_template("page.html").render(page=page, shown=shown, style=Markup(style), allowed=allowed)
