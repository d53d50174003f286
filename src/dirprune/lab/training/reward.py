"""The reward for methods that search (AMC): minus the loss on held-out images, or on those of an extra epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from torch import nn

from dirprune.lab.data import Loaders
from dirprune.lab.data.loader import Batch, Loader
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.loop import evaluate
from dirprune.lab.training.processes import Process

EXAMPLES = 2000
"""Number of training images on which the reward is measured if none are held out."""


@dataclass(frozen=True)
class FewBatches:
    """A Loader over a few given batches; all passes are the same."""

    batches: tuple[Batch, ...]
    examples: int
    batch_size: int

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return iter(self)


class Reward:
    """Minus the mean loss of a model, in eval mode.

    It is measured on the held-out data. If there are none, as in a comparison in which all methods train on the same
    images, it is measured on the first `EXAMPLES` images of epoch 0, which is never trained on: the network has seen
    these images, but not with these crops and flips. The test set is not used.

    >>> from dirprune.lab import data, models
    >>> reward = Reward(data.load("digits", batch_size=100, seed=0))
    >>> reward(models.build("small", 10)) < 0
    True
    """

    def __init__(self, loaders: Loaders, execution: Execution | None = None, process: Process | None = None) -> None:
        self.loaders = loaders
        self.execution = execution
        self.process = process

    def __call__(self, model: nn.Module) -> float:
        return -evaluate(model, self.images, execution=self.execution, process=self.process).loss

    @cached_property
    def images(self) -> Loader:
        """The data on which the reward is measured, created at first use."""
        if self.loaders.validation is not None:
            return self.loaders.validation
        train = self.loaders.train
        count = max(1, EXAMPLES // train.batch_size)
        return FewBatches(
            tuple(islice(train.epoch(0), count)), min(count * train.batch_size, train.examples), train.batch_size
        )
