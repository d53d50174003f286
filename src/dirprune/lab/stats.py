"""Statistics over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n − 1 in the denominator) over seeds; one seed has no deviation."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        mean = sum(values) / len(values)
        if len(values) == 1:
            return Spread(mean, None)
        return Spread(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))

    def text(self, digits: int, scale: float = 1.0, *, signed: bool = False) -> str:
        """Return "98.61 ± 0.48", or "98.61" for one seed; if ``signed``, the mean has a sign."""
        mean = f"{round(scale * self.mean, digits) + 0.0:{'+' if signed else ''}.{digits}f}"  # + 0.0 avoids −0.00
        return mean if self.std is None else f"{mean} ± {scale * self.std:.{digits}f}"
