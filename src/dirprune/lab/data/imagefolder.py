"""Folders of images, such as ImageNet: train/ and val/ with a folder per class, read by Pillow in worker processes."""

import math
import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dirprune.lab.data.loader import Batch, Batched, Batching, Normalization, generator

SIZE = 224
"""The usual side of an image, in pixels."""
MARGIN = 8 / 7
"""Before its centre is cropped, an image is resized to this multiple of the side: 256 for 224."""
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
SUFFIXES = (".jpeg", ".jpg", ".png")

Box = tuple[float, float, float, float]
"""(left, upper, right, lower) in pixels of the stored image."""


@dataclass(frozen=True)
class ImageFiles:
    """Image paths and targets. `classes` are the sorted folder names, and a target is an index into them."""

    paths: tuple[str, ...]
    targets: Tensor
    classes: tuple[str, ...]

    def take(self, indices: Tensor) -> "ImageFiles":
        """Return the images at `indices`, in that order."""
        return ImageFiles(tuple(self.paths[i] for i in indices.tolist()), self.targets[indices], self.classes)

    def mixed(self) -> "ImageFiles":
        """Return the images in a fixed random order, because BatchNorm statistics need batches of mixed classes."""
        return self.take(torch.randperm(len(self.paths), generator=generator(0)))


def find_images(folder: Path) -> ImageFiles:
    """List folder/CLASS/IMAGE, with classes and images in sorted order."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; give --data the folder that contains train/ and val/, or your classes"
        )
    classes = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    if not classes:
        raise ValueError(f"{folder}: no class folders; it must contain one folder of images per class")
    paths: list[str] = []
    counts = []
    for name in classes:
        found = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
        if not found:
            raise ValueError(f"{folder / name}: no images ({', '.join(SUFFIXES)}); add some or remove the class folder")
        paths += found
        counts.append(len(found))
    return ImageFiles(tuple(paths), torch.arange(len(classes)).repeat_interleave(torch.tensor(counts)), classes)


def find_imagenet(root: Path) -> tuple[ImageFiles, ImageFiles]:
    """Return the images of train/ and val/ under `root`, or under root/imagenet if that exists."""
    root = root / "imagenet" if (root / "imagenet").is_dir() else root
    train, test = find_images(root / "train"), find_images(root / "val")
    differing = sorted(set(train.classes) ^ set(test.classes))
    if differing:
        raise ValueError(
            f"{root}: train/ and val/ must contain the same class folders, but {len(differing)} are in only one of "
            f"them: {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}"
        )
    return train, test


def random_box(size: tuple[int, int], chance: random.Random) -> Box:
    """Draw the box of a RandomResizedCrop: 8–100 % of the area, aspect 3/4–4/3 (log-uniform), uniformly placed.

    Boxes that do not fit are drawn again; after ten attempts the largest central box of an allowed aspect is used.
    """
    width, height = size
    for _ in range(10):
        area = width * height * chance.uniform(*SCALE)
        aspect = math.exp(chance.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, upper = chance.randint(0, width - across), chance.randint(0, height - down)
            return left, upper, left + across, upper + down
    across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


def centre_box(size: tuple[int, int], side: int = SIZE) -> Box:
    """Return the part of the stored image that is left after "resize the shorter side to 256, crop 224 × 224"."""
    width, height = size
    resized = [round(MARGIN * side) * length // min(size) for length in size]
    left, upper = (round((length - side) / 2) for length in resized)
    x, y = width / resized[0], height / resized[1]
    return left * x, upper * y, (left + side) * x, (upper + side) * y


def crop_resize(image: Image.Image, box: Box, side: int = SIZE) -> Image.Image:
    """Return the box of a freshly opened image as a square of RGB.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the box stays at least as wide and high as the square: most of
    the time to decode a large photograph goes into detail that the resize would average away.
    """
    width, height = image.size
    left, upper, right, lower = box
    wanted = math.ceil(width * side / (right - left)), math.ceil(height * side / (lower - upper))
    drafted = image.draft("RGB", wanted)
    scale = drafted[1][2] / width if drafted else 1.0
    if image.mode != "RGB":
        image = image.convert("RGB")
    scaled = (left * scale, upper * scale, right * scale, lower * scale)
    return image.resize((side, side), Image.Resampling.BILINEAR, box=scaled, reducing_gap=2.0)


def read_image(
    path: str, chance: random.Random | None, side: int = SIZE
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read an image as uint8 (side, side, 3): a random crop and flip drawn from `chance`, the central crop if None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # an image may have to be decoded whole
            with Image.open(path) as image:
                box = random_box(image.size, chance) if chance else centre_box(image.size, side)
                pixels = np.asarray(crop_resize(image, box, side))
    except Exception as error:  # decoders raise many types, and the user needs to know the file
        raise ValueError(f"{path}: not a readable image ({error}); replace or remove it") from error
    return pixels[:, ::-1] if chance and chance.random() < 0.5 else pixels


@dataclass(frozen=True)
class Request:
    """A batch for a worker to read; without a key the images are not augmented."""

    indices: list[int]
    key: str | None


def _deaf(worker: int) -> None:
    """Make a worker ignore SIGTERM; the training process decides when to stop, and then closes its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Delay SIGTERM for this thread until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Reader(Dataset[Batch | str]):
    """The data set in a worker: maps a request to uint8 (N, 3, side, side) and targets, or to an error message.

    The error is returned rather than raised, because it would arrive buried in the traceback of another process.
    """

    images: ImageFiles
    side: int

    def __getitem__(self, request: Request) -> Batch | str:
        try:
            return self._read(request)
        except ValueError as error:
            return str(error)

    def _read(self, request: Request) -> Batch:
        pixels = np.empty((len(request.indices), 3, self.side, self.side), dtype=np.uint8)
        for row, index in enumerate(request.indices):
            # One generator per example, so that the result depends on neither the worker nor the rest of the batch.
            chance = random.Random(f"{request.key}/{index}") if request.key is not None else None
            pixels[row] = read_image(self.images.paths[index], chance, self.side).transpose(2, 0, 1)
        return torch.from_numpy(pixels), self.images.targets[request.indices]


@dataclass(frozen=True, eq=False)
class ImageFolderLoader(Batched):
    """A Loader over images on disk. Workers decode and crop; the device normalises.

    With `workers=0` this process reads. Every pass starts its own workers, so that passes may overlap.
    """

    images: ImageFiles
    batching: Batching
    normalization: Normalization
    device: torch.device
    workers: int
    augment: bool
    side: int = SIZE

    @property
    def examples(self) -> int:
        return len(self.images.paths)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(torch.arange(self.examples), key=None)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        order = torch.randperm(self.examples, generator=self.batching.generator(epoch))
        return self._batches(order, key=f"{self.batching.seed}/{epoch}" if self.augment else None)

    def _batches(self, order: Tensor, key: str | None) -> Iterator[Batch]:
        requests = [Request(share.tolist(), key) for share in self.batching.shares(order)]
        loader: DataLoader[Batch | str] = DataLoader(
            _Reader(self.images, self.side),
            batch_size=None,  # a request is already a batch
            sampler=requests,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the DataLoader would otherwise draw from the global generator
            worker_init_fn=_deaf,
        )
        normalise = self.normalization.on(self.device)
        with _sigterm_waits():  # workers inherit the mask, which protects them until they run _deaf
            answers = iter(loader)
        for answer in answers:
            if isinstance(answer, str):
                raise ValueError(answer)
            pixels, targets = answer
            inputs = normalise(pixels.to(self.device, non_blocking=True))
            yield inputs, targets.to(self.device, non_blocking=True)
