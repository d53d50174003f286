"""The loader protocol, and the rules for order and normalisation that all loaders share."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs (float32, normalised, on the device) and targets (int64, on the device)."""


class Loader(Protocol):
    """Batches of one set of examples. Every pass contains every example exactly once; the last batch may be short."""

    @property
    def examples(self) -> int:
        """Number of examples in one pass, over all processes."""

    @property
    def batch_size(self) -> int:
        """Global batch size, over all processes."""

    def __len__(self) -> int:
        """Return the number of batches in one pass."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the plain pass: fixed order, no augmentation."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Iterate over the training pass: shuffled and augmented, a pure function of (seed, epoch)."""


@dataclass(frozen=True)
class Batching:
    """Assigns examples to batches, and parts of each batch to processes.

    The global batches do not depend on `world_size`: process `rank` takes `batch[rank::world_size]`, perhaps empty.

    >>> batching = Batching(batch_size=4, seed=0, rank=1, world_size=2)
    >>> [share.tolist() for share in batching.shares(torch.arange(9))]
    [[1, 3], [5, 7], []]
    """

    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: a batch needs at least one example")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}, world_size={self.world_size}: rank must lie in 0 ... world_size - 1")

    def batches(self, examples: int) -> int:
        """Return the number of batches in one pass over `examples` examples."""
        return -(-examples // self.batch_size)

    def shares(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return this process's rows of every global batch of consecutive rows."""
        return torch.split(self.own(rows), self.sizes(len(rows)))

    def own(self, rows: Tensor) -> Tensor:
        """Return this process's rows of all global batches, concatenated."""
        if self.world_size == 1:
            return rows
        return rows[torch.arange(len(rows)) % self.batch_size % self.world_size == self.rank]

    def sizes(self, examples: int) -> list[int]:
        """Return how many rows of every global batch belong to this process."""
        starts = range(0, examples, self.batch_size)
        return [len(range(self.rank, min(self.batch_size, examples - start), self.world_size)) for start in starts]

    def generator(self, epoch: int) -> torch.Generator:
        """Return the generator of an epoch's random numbers; on the CPU, so that all devices see the same order."""
        return generator(self.seed, epoch)


class Batched:
    """What loaders share that assign their examples by a `Batching`."""

    batching: Batching

    @property
    def batch_size(self) -> int:
        return self.batching.batch_size

    def __len__(self) -> int:
        return self.batching.batches(cast("Loader", self).examples)


def generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded by a hash of `key`, so that neighbouring keys give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Normalization:
    """x = (pixel / white − mean) / std, channel by channel.

    `white` is the largest pixel value; `mean` and `std` are given on the scale 0 ... 1.

    >>> Normalization(mean=(0.5,), std=(0.25,)).on("cpu")(torch.tensor([[[0, 255]]], dtype=torch.uint8))
    tensor([[[-2.,  2.]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int = 255

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean={self.mean}, std={self.std}: give one value per channel in both")
        if min(self.std, default=0.0) <= 0:
            raise ValueError(f"std={self.std}: every channel needs a positive standard deviation")

    def on(self, device: torch.device | str) -> Callable[[Tensor], Tensor]:
        """Return the map from uint8 (..., C, H, W) to float32. Its constants are moved once, so calls never wait."""
        mean, std = (
            (torch.tensor(values, dtype=torch.float32) * self.white).view(-1, 1, 1).to(device)
            for values in (self.mean, self.std)
        )
        return lambda pixels: torch.sub(pixels, mean).div_(std)


IMAGENET_STATISTICS = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""ImageNet's statistics; the published VGG16 runs on CIFAR-10 used them too."""

CIFAR_STATISTICS = Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""The statistics of the published WRN28x10 runs, CIFAR-10 and CIFAR-100."""

STATISTICS = {"cifar": CIFAR_STATISTICS, "imagenet": IMAGENET_STATISTICS}
"""Normalisations by their names in recipes."""
