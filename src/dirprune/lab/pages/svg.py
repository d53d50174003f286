"""Figures as SVG that stands in a page: text stays text, and colours can be seen in the dark too."""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib import rc_context
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from dirprune.lab import plots

PAPER = "#161616"
"""The background of a page in the dark."""

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_PIXELS = 1.6  # of a point: the text of a figure is a little smaller than that of the page
_PALE = 0.75  # lightness from which a colour is a background
_CONTRAST = 3.0  # which WCAG asks of graphics


def drawn(figure: Figure, name: str) -> Element:
    """Return a figure as an SVG element without styles, so that a page's policy can forbid them.

    Args:
        figure: it has no formulas; its texts are taken literally.
        name: begins the ids, which must differ between the figures of a page.
    """
    written = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({**plots.STYLE, "svg.fonttype": "none", "svg.hashsalt": name}):
        plots.literal(figure).savefig(written, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(written.getvalue())
    for part in root.iter():
        for child in [each for each in part if each.tag == f"{_SVG}style"]:
            part.remove(child)
        _plain(part, name)
    _, _, width, height = root.get("viewBox", "").split()
    root.set("width", f"{float(width) * _PIXELS:.0f}")
    root.set("height", f"{float(height) * _PIXELS:.0f}")
    root.set("class", "figure")
    return root


def text_of(root: Element) -> str:
    """Return the element as HTML understands it: without namespaces, and with all texts escaped."""
    for part in root.iter():
        part.tag = part.tag.removeprefix(_SVG)
        if _LINK in part.attrib:
            part.set("href", part.attrib.pop(_LINK))
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def dark_rules(figures: Iterable[Element]) -> Iterator[str]:
    """Yield the rules of a style sheet that change the colours of figures where a page is dark."""
    parts = [part for figure in figures for part in figure.iter()]
    for name in ("fill", "stroke"):
        for colour in sorted({part.get(name, "") for part in parts}):
            if colour.startswith("#") and (shown := in_the_dark(colour)) != colour:
                yield f'.figure [{name}="{colour}"] {{ {name}: {shown} }}'


def in_the_dark(colour: str) -> str:
    """Return the colour that stands for another one on dark paper: a background is dark, and the rest is visible.

    >>> in_the_dark("#ffffff") == PAPER, in_the_dark("#0072b2"), in_the_dark("#332288")
    (True, '#0072b2', '#634dd2')
    """
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(colour))
    paper = colorsys.rgb_to_hls(*to_rgb(PAPER))[1]
    if lightness > _PALE:
        return to_hex(colorsys.hls_to_rgb(hue, paper + 1 - lightness, saturation / 2))
    while contrast(colour, PAPER) < _CONTRAST:
        lightness += 0.01
        colour = to_hex(colorsys.hls_to_rgb(hue, lightness, saturation))
    return colour


def contrast(one: str, other: str) -> float:
    """Return the ratio of the luminances of two colours as WCAG defines it, from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in to_rgb(colour)]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _plain(part: Element, name: str) -> None:
    """Turn the style of an element into attributes, its black into that of the page, and make its ids unique."""
    for rule in filter(str.strip, part.attrib.pop("style", "").split(";")):
        key, _, value = (word.strip() for word in rule.partition(":"))
        if key == "font":  # older versions of matplotlib write "8px 'DejaVu Sans'"
            key, value = "font-size", value.split()[0]
        if key != "font-family":
            part.set(key, "currentColor" if value == "#000000" else value)
    if (own := part.get("id")) is not None:
        part.set("id", f"{name}-{own}")
    for key, value in part.attrib.items():
        if key == _LINK and value.startswith("#"):
            part.set(key, f"#{name}-{value[1:]}")
        elif value.startswith("url(#"):
            part.set(key, re.sub(r"^url\(#", f"url(#{name}-", value))
