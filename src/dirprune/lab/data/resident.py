"""Loader for sets that fit on the training device; they are shuffled, augmented and normalised there in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from dirprune.lab.data.loader import Batch, Batched, Batching, Normalization

CHUNK_BYTES = 64 * 2**20
"""Bytes of float32 inputs prepared at once: enough to hide launch costs, little compared with any network."""


def draw_crop_flip(examples: int, padding: int, generator: torch.Generator) -> Tensor:
    """Return a row (top, left, flip) per example, uniform over the (2·padding + 1)² offsets and both orientations."""
    offsets = torch.randint(2 * padding + 1, (examples, 2), generator=generator)
    flips = torch.randint(2, (examples, 1), generator=generator)
    return torch.cat([offsets, flips], dim=1)


class Crops:
    """Crops of a set of images: padded with black, cropped to their original size, optionally flipped horizontally.

    The padded images are kept. Every possible crop is a strided view of them, so only the selected crops are copied.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> Crops(image, padding=1)(torch.tensor([[0, 2, 1, 1]]))
    tensor([[[[4, 3],
              [0, 0]]]], dtype=torch.uint8)
    """

    def __init__(self, images: Tensor, padding: int) -> None:
        height, width = images.shape[-2:]
        self._windows = pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the crops given by rows (example, top, left, flip)."""
        example, top, left, flip = rows.unbind(dim=1)
        crops = self._windows[example, :, top, left]
        return torch.where(flip.bool().view(-1, 1, 1, 1), crops.flip(-1), crops)


@dataclass(frozen=True, eq=False)
class ResidentLoader(Batched):
    """A Loader over uint8 images (N, C, H, W) and int64 targets (N,) that are already on the device.

    With `padding=None` the training pass is not augmented; with a number it has random crops with that padding, and
    random flips.

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
    _plans: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def examples(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(torch.arange(self.examples).unsqueeze(1))

    def epoch(self, epoch: int) -> Iterator[Batch]:
        plan = self._plans.pop(epoch, None)
        yield from self._batches(self._plan(epoch) if plan is None else plan)
        self._plans.clear()
        self._plans[epoch + 1] = self._plan(epoch + 1)  # most likely needed next, and the device is still busy

    def _plan(self, epoch: int) -> Tensor:
        generator = self.batching.generator(epoch)
        plan = torch.randperm(self.examples, generator=generator).unsqueeze(1)
        if self.padding is not None:
            plan = torch.cat([plan, draw_crop_flip(self.examples, self.padding, generator)], dim=1)
        return plan

    @cached_property
    def _crops(self) -> Crops:
        return Crops(self.images, self.padding or 0)

    def _batches(self, plan: Tensor) -> Iterator[Batch]:
        """Yield the batches of a plan: rows (example, top, left, flip), or (example,) alone, in the order of the pass.

        A batch is a slice of a chunk prepared beforehand. It costs no launch, and the host never waits for the device.
        """
        sizes = self.batching.sizes(len(plan))
        plan = self.batching.own(plan).to(self.images.device)
        normalise = self.normalization.on(self.images.device)
        chunk = max(1, CHUNK_BYTES // (4 * self.images[0].numel() * self.batch_size))
        start = 0
        for first in range(0, len(sizes), chunk):
            lengths = sizes[first : first + chunk]
            rows = plan[start : start + sum(lengths)]
            start += sum(lengths)
            images = self.images[rows[:, 0]] if rows.shape[1] == 1 else self._crops(rows)
            targets = self.targets[rows[:, 0]]
            yield from zip(torch.split(normalise(images), lengths), torch.split(targets, lengths), strict=True)
