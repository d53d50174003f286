"""A user's own torch Datasets as loaders: examples are read one by one, in this process, in the lab's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from dirprune.lab import own
from dirprune.lab.data.loader import Batch, Batched, Batching

NEEDS = "takes no argument and returns two torch Datasets, to train and to test on, of pairs (image, class)"


@dataclass(frozen=True, eq=False)
class DatasetLoader(Batched):
    """A Loader over some examples of a map-style Dataset; random transforms may draw from torch's generator."""

    dataset: Any
    indices: Tensor
    batching: Batching
    device: torch.device

    @property
    def examples(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.indices)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        return self._batches(self.indices[torch.randperm(self.examples, generator=self.batching.generator(epoch))])

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        for share in self.batching.shares(order):
            rows = share.tolist() or order[:1].tolist()  # a process without a share still needs the shape
            inputs, targets = default_collate([self.dataset[row] for row in rows])
            count = len(share)
            yield inputs[:count].float().to(self.device), torch.as_tensor(targets)[:count].long().to(self.device)


def read(spec: str) -> tuple[tuple[Any, Tensor], tuple[Any, Tensor]]:
    """Return the user's (training set, its classes) and (test set, its classes)."""
    made = own.call("data", spec, lambda make: {}, NEEDS)
    if not (isinstance(made, Sequence) and len(made) == 2 and all(hasattr(each, "__getitem__") for each in made)):
        raise ValueError(f"data={spec!r} returned a {type(made).__name__}; name a callable that {NEEDS}")
    try:
        (train, test), example = made, made[0][0]
        classes = [_classes(each) for each in (train, test)]
    except Exception as error:
        raise ValueError(f"data={spec!r} cannot be read: {type(error).__name__}: {error}; it {NEEDS}") from error
    if not isinstance(example[0], Tensor) or example[0].dim() != 3 or min(int(each.min()) for each in classes) < 0:
        raise ValueError(
            f"data={spec!r} must hold pairs of an image, as a tensor (channels, height, width), and a class from 0 on"
        )
    return (train, classes[0]), (test, classes[1])


def _classes(dataset: Any) -> Tensor:
    """Return the class of every example; ``targets``, which torchvision's sets have, saves reading them all."""
    known = getattr(dataset, "targets", None)
    known = [dataset[i][1] for i in range(len(dataset))] if known is None else known
    return torch.as_tensor(known).long()
