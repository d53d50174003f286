"""The figure of the latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from matplotlib.figure import Figure

from dirprune.lab import plots


class Timed(Protocol):
    """A row of measured latencies."""

    @property
    def runtime(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def fastest(self) -> float: ...


@plots.styled
def speed_figure(rows: Sequence[Timed]) -> Figure:
    """Draw a panel of bars for every batch and number of threads; the shortest bar is the fastest runtime."""
    cases = list(dict.fromkeys((row.batch, row.threads) for row in rows))
    names = list(dict.fromkeys(row.runtime for row in rows))
    figure, axes = plots.panels(len(cases))
    for axis, (batch, threads) in zip(axes, cases, strict=False):
        those = [row for row in rows if (row.batch, row.threads) == (batch, threads)]
        places = [names.index(row.runtime) for row in those]
        colours = [plots.colour(1) if row.runtime == names[0] else plots.GREY for row in those]
        bars = axis.barh(places, [row.fastest for row in those], color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.margins(x=0.15)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("milliseconds")
        axis.set_title(f"batch {batch}, {threads} thread{'s' * (threads > 1)}")
    return figure
