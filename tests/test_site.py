"""What the site is made of: docstrings that name every argument, a gallery of all figures, links that lead somewhere.

The build itself is `make site`, in which every warning is an error.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from links import faults
from test_docs import ROOT, blocks, commands, verbs

import dirprune

GALLERY = ROOT / "docs" / "figures" / "README.md"
ROOMS = ("optim", "curvature", "connect", "deploy")
PUBLIC = sorted(
    {f"dirprune.{name}" for name in dirprune.__all__}
    | {f"dirprune.{room}.{name}" for room in ROOMS for name in import_module(f"dirprune.{room}").__all__}
    | {f"dirprune.weights.{name}" for name in ("take", "put", "flatten", "unflatten", "combine")}
)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_names_every_argument(name: str) -> None:
    home, _, own = name.rpartition(".")
    value: Any = getattr(import_module(home), own)
    told = inspect.getdoc(value)
    assert told
    if not (isinstance(value, type) and issubclass(value, Exception)):
        parameters = inspect.signature(value).parameters.values()
        given = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        assert [each for each in given if not re.search(rf"\b{each}\b", told)] == []


def test_the_gallery_shows_every_figure_under_a_command() -> None:
    text = GALLERY.read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert sorted(shown) == sorted(path.name for path in GALLERY.parent.glob("*.png"))
    for section in text.split("\n## ")[1:]:
        assert -1 < section.find("```sh\ndirprune") < section.find("![")
    for verb, *words in (found for block in blocks(GALLERY) for found in commands(block.text)):
        assert {word for word in words if word.startswith("--")} <= verbs()[verb]


def test_the_pages_of_the_gallery_exist() -> None:
    for target in re.findall(r"[^!]\[[^\]]+\]\(([^)]+)\)", GALLERY.read_text()):
        assert (GALLERY.parent / target).is_file(), target


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ('<a href="other.html#place">', None),
        ('<a href="https://example.org/">', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<a href="#here"><p id="here">', None),
        ('<a href="other.html#nowhere">', "names no place"),
        ('<a href="missing.html">', "there is no missing.html"),
        ('<img src="picture.png">', "there is no picture.png"),
        ('<script src="https://example.org/a.js">', "loads https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css"),
    ],
)
def test_links_that_lead_nowhere_are_found(tmp_path: Path, link: str, fault: str | None) -> None:
    (tmp_path / "other.html").write_text('<h1 id="place">')
    (tmp_path / "page.html").write_text(link)
    found = list(faults(tmp_path))
    assert (fault in found[0]) if fault else found == []
