"""Image classification as a part of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from dirprune.lab.data import Loaders, load
from dirprune.lab.data.loader import STATISTICS, Batching
from dirprune.lab.ranges import BELOW_ONE, NOT_NEGATIVE, BadValue, check
from dirprune.lab.tasks.measure import ACCURACY, Measure


@dataclass(frozen=True)
class Images:
    """Classes of images: which, and how they are prepared.

    ``data`` is the name of a data set, or package.module:callable. ``statistics`` names the normalisation; if empty,
    the data set's own is used. ``validation`` is the fraction of the training set that is held out, ``size`` the side
    of the images of a folder in pixels, 0 for the usual one.
    """

    name: ClassVar[str] = "images"
    measure: ClassVar[Measure] = ACCURACY

    data: str
    statistics: str = ""
    augment: bool = True
    validation: float = 0.0
    size: int = 0

    def __post_init__(self) -> None:
        check(vars(self), validation=BELOW_ONE, size=NOT_NEGATIVE)
        if self.statistics not in ("", *STATISTICS):
            raise BadValue("statistics", self.statistics, f"take one of {', '.join(STATISTICS)}, or none")

    def load(self, batching: Batching, *, device: torch.device, root: Path | None = None) -> Loaders:
        """Return the loaders of the data, in which each of several processes has its share of every batch."""
        return load(
            self.data,
            **vars(batching),
            root=root,
            device=device,
            validation=self.validation,
            normalization=STATISTICS.get(self.statistics),
            augment=self.augment,
            size=self.size,
        )
