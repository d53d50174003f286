"""By which number networks are compared that learn a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """The column of a record that is compared, its name in tables and figures, and whether less of it is better.

    ``digits`` is how many decimals are shown.
    """

    column: str
    title: str
    lower_is_better: bool
    digits: int

    def best_first(self, value: float) -> float:
        """Return a number by which the better of two values sorts first."""
        return value if self.lower_is_better else -value


ACCURACY = Measure("test_accuracy", "test accuracy (%)", lower_is_better=False, digits=2)
LOSS = Measure("test_loss", "test loss (nats a byte)", lower_is_better=True, digits=3)
