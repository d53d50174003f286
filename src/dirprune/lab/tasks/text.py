"""Language modelling as a part of a recipe: the next byte at every place of a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from dirprune.lab.data import EVALUATION_BATCH, Loaders
from dirprune.lab.data.loader import Batching
from dirprune.lab.data.text import TEST_WINDOWS, VOCABULARY, WindowLoader, corpus, fingerprint, read_parts
from dirprune.lab.ranges import BELOW_ONE, COUNT, check
from dirprune.lab.tasks.measure import LOSS, Measure


@dataclass(frozen=True)
class Text:
    """The bytes of a text: the source of Python's standard library, or any file or folder given as its data.

    ``context`` is the length of a window, ``windows`` how many of them make an epoch. Whole files are held out: a tenth
    for the test, and ``validation`` of the others. Losses are in nats a byte.
    """

    name: ClassVar[str] = "text"
    measure: ClassVar[Measure] = LOSS

    data: str = "python"
    context: int = 64
    windows: int = 1600
    validation: float = 0.0

    def __post_init__(self) -> None:
        check(vars(self), context=COUNT, windows=COUNT, validation=BELOW_ONE)

    def load(self, batching: Batching, *, device: torch.device, root: Path | None = None) -> Loaders:
        """Return the loaders of the text, in which each of several processes has its share of every batch."""
        large = replace(batching, batch_size=max(batching.batch_size, EVALUATION_BATCH // 4))
        parts = read_parts(corpus(root), self.validation)

        def loader(part: str, examples: int, batching: Batching = large) -> WindowLoader:
            empty = torch.empty(0, dtype=torch.uint8)
            return WindowLoader(parts.get(part, empty).to(device), self.context, examples, batching)

        return Loaders(
            train=loader("train", self.windows, batching),
            test=loader("test", TEST_WINDOWS),
            validation=loader("validation", TEST_WINDOWS) if self.validation else None,
            classes=VOCABULARY,
            shape=(self.context,),
            answers=(self.context,),
            dtype=torch.int64,
            fingerprint=fingerprint(parts),
        )
