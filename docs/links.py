"""Checks the links of a built site offline: python docs/links.py build/site

Every link within the site must lead to a file, and to a place in it if it names one. No page may load anything from
elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and where its elements lead: (element, target)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids = {"", "top"}
        self.targets: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value or "")
            elif name in ("href", "src"):
                self.targets.append((tag, value or ""))


read = cache(Page)


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong with the links of a site."""
    for path in sorted(site.rglob("*.html")):
        for tag, target in read(path).targets:
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if tag != "a":
                    yield f"{path}: {tag} loads {target}"
                continue
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not other.is_file():
                yield f"{path}: there is no {target}"
            elif other.suffix == ".html" and unquote(parts.fragment) not in read(other).ids:
                yield f"{path}: {target} names no place there"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1])))
    print("\n".join(found) or f"All links of {sys.argv[1]} lead somewhere.")
    sys.exit(bool(found))
