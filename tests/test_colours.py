"""The colours of the methods: told apart by colour-blind readers, and seen on paper, by computation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from dirprune.lab.pages.svg import contrast
from dirprune.lab.plots import METHODS, PALETTE

Array = NDArray[np.float64]
DICHROMATS = {
    "normal": np.eye(3),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
"""Machado, Oliveira & Fernandes 2009, severity 1, in linear sRGB."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lab(colour: str, sight: str = "normal") -> Array:
    """Return a colour in CIELAB, as such a reader sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(DICHROMATS[sight] @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: Array, other: Array) -> float:
    """Return CIEDE2000 (Sharma, Wu & Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    c7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    a1, a2 = (a * (1 + (1 - np.sqrt(c7 / (c7 + 25.0**7))) / 2) for a in (a1, a2))
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lm, cm, hm = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    waves = zip((-0.17, 0.24, 0.32, -0.20), (1, 2, 3, 4), (-30, 0, 6, -63), strict=True)
    t = 1 + sum(size * np.cos(np.radians(times * hm + shift)) for size, times, shift in waves)
    sl, sc, sh = 1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2), 1 + 0.045 * cm, 1 + 0.015 * cm * t
    rt = -2 * np.sqrt(cm**7 / (cm**7 + 25.0**7)) * np.sin(np.radians(60 * np.exp(-(((hm - 275) / 25) ** 2))))
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, dh / sh
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rt * dc * dh))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((6.7747, -0.2908, -2.4247), (5.8714, -0.0985, -2.2286), 0.6377),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_of_colours_is_that_of_the_published_pairs(one: Array, other: Array, expected: float) -> None:
    assert difference(one, other) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sight", DICHROMATS)
def test_colours_of_methods_differ_for_every_reader(sight: str) -> None:
    """2.3 can just be noticed. Methods have markers besides."""
    for colours, least in ((set(PALETTE), 12.0), ({shade for shade, _ in METHODS.values()}, 9.0)):
        pairs = combinations(sorted(colours), 2)
        worst = min((difference(lab(one, sight), lab(other, sight)), one, other) for one, other in pairs)
        assert worst[0] >= least, worst


@pytest.mark.parametrize("colour", sorted({*PALETTE, *(shade for shade, _ in METHODS.values())}))
def test_a_colour_is_seen_on_paper(colour: str) -> None:
    assert contrast(colour, "#ffffff") >= 2.2


def test_methods_that_are_compared_have_markers_of_their_own() -> None:
    by_marker: dict[str, set[str]] = {}
    for shade, marker in METHODS.values():
        by_marker.setdefault(marker, set()).add(shade)
    assert all(len(shades) == 1 for shades in by_marker.values())
