"""Sets small enough to live on the training device: shuffled, augmented and normalised there, many batches at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dirprune.lab.loader import Batch, Batching, Normalization

CHUNK_BYTES = 64 * 2**20
"""Inputs prepared at once, in bytes of float32: large enough to hide launch costs, small beside any network."""


def draw_crop_flip(examples: int, padding: int, generator: torch.Generator) -> Tensor:
    """One row (top, left, flip) an example, uniform over the (2·padding + 1)² offsets and both orientations."""
    offsets = torch.randint(2 * padding + 1, (examples, 2), generator=generator)
    flips = torch.randint(2, (examples, 1), generator=generator)
    return torch.cat([offsets, flips], dim=1)


def crop_flip(images: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Pads each image with black, cuts its own size out at (top, left), and mirrors it left to right where flip is 1.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> crop_flip(image, torch.tensor([[2, 1, 1]]), padding=1)
    tensor([[[[4, 3],
              [0, 0]]]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    # Every possible crop of every image as a strided view; indexing then copies only the chosen ones, in one launch.
    windows = pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    top, left, flip = draws.unbind(dim=1)
    crops = windows[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(flip.bool().view(-1, 1, 1, 1), crops.flip(-1), crops)


@dataclass(frozen=True, eq=False)
class ResidentLoader:
    """A Loader over uint8 images (N, C, H, W) and int64 targets (N,) that already lie on the device.

    `padding=None` leaves the training pass unaugmented; a number asks for a random crop with that padding and a flip.

    >>> images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
    >>> batching, grey = Batching(batch_size=2, seed=0), Normalization((0.5,), (0.5,))
    >>> loader = ResidentLoader(images, torch.arange(5), batching, grey)
    >>> [targets.tolist() for _, targets in loader]
    [[0, 1], [2, 3], [4]]
    """

    images: Tensor
    targets: Tensor
    batching: Batching
    normalization: Normalization
    padding: int | None = None

    @property
    def examples(self) -> int:
        return len(self.targets)

    @property
    def batch_size(self) -> int:
        return self.batching.batch_size

    def __len__(self) -> int:
        return self.batching.batches(self.examples)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(torch.arange(self.examples).unsqueeze(1), padding=None)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        generator = self.batching.generator(epoch)
        plan = torch.randperm(self.examples, generator=generator).unsqueeze(1)
        if self.padding is not None:
            plan = torch.cat([plan, draw_crop_flip(self.examples, self.padding, generator)], dim=1)
        return self._batches(plan, padding=self.padding)

    def _batches(self, plan: Tensor, padding: int | None) -> Iterator[Batch]:
        """Carries out a plan: rows (example, top, left, flip), or (example,) alone, in the order of the pass.

        A batch is a slice of a chunk prepared beforehand: it costs no launch, and the host never waits for the device.
        """
        shares = self.batching.shares(plan)
        plan = torch.cat(shares).to(self.images.device)
        sizes = [len(share) for share in shares]
        normalise = self.normalization.on(self.images.device)
        chunk = max(1, CHUNK_BYTES // (4 * self.images[0].numel() * self.batch_size))
        start = 0
        for first in range(0, len(sizes), chunk):
            lengths = sizes[first : first + chunk]
            rows = plan[start : start + sum(lengths)]
            start += sum(lengths)
            images, targets = self.images[rows[:, 0]], self.targets[rows[:, 0]]
            if padding is not None:
                images = crop_flip(images, rows[:, 1:], padding)
            yield from zip(torch.split(normalise(images), lengths), torch.split(targets, lengths), strict=True)
