"""How the benchmarks measure time: candidates take turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def turns(
    works: Mapping[str, Callable[[], object]], rounds: int, *, repeats: int = 1, warm: int = 1
) -> dict[str, float]:
    """Return the median milliseconds of each over rounds in which all take turns, after ``warm`` uncounted rounds.

    >>> list(turns({"one": lambda: None, "two": lambda: None}, rounds=3))
    ['one', 'two']
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(warm + rounds):
        for name, work in works.items():
            start = _now()
            for _ in range(repeats):
                work()
            took = _now() - start
            if round_ >= warm:
                times[name].append(1e3 * took / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def _now() -> float:
    """Return the time after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
