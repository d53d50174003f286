"""Data sets as Loaders: digits, CIFAR, ImageNet, any folder of images, noise, or torch Datasets of a user's own."""

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from dirprune.lab.data import cifar, dataset
from dirprune.lab.data.imagefolder import SIZE, ImageFiles, ImageFolderLoader, find_imagenet, find_images
from dirprune.lab.data.loader import (
    CIFAR_STATISTICS,
    IMAGENET_STATISTICS,
    Batch,
    Batching,
    Loader,
    Normalization,
    generator,
)
from dirprune.lab.data.resident import ResidentLoader

__all__ = [
    "CIFAR_STATISTICS",
    "DIGITS_STATISTICS",
    "IMAGENET_STATISTICS",
    "NAMES",
    "Batch",
    "Loader",
    "Loaders",
    "Normalization",
    "Synthetic",
    "data_root",
    "load",
    "stratified_split",
]

NAMES = ("digits", "cifar10", "cifar100", "imagenet", "folder", "synthetic")
ON_DISK = ("cifar10", "cifar100", "imagenet", "folder")
"""The data sets that are read from disk."""
FOLDERS = ("imagenet", "folder")
"""Those that are folders of images: train/ and val/, with a folder per class in each; folder may lack these two."""
TESTED = 0.2
"""The share of every class that is held out to test on, where a folder does not say it."""

DIGITS_STATISTICS = Normalization((0.3056,), (0.3761,), white=16)
"""Statistics of the training part of scikit-learn's digits, whose pixels run from 0 to 16."""

CROP_PADDING = 4
EVALUATION_BATCH = 1000
WHOLE = {"cifar10": 50_000, "cifar100": 50_000}
"""Number of training images of the official sets."""
RESIZED = (*FOLDERS, *WHOLE)
"""The data sets whose images can have another size."""
SPLIT_SEED = 20_200_612
"""Decides what is held out, independently of the run's seed, so that all runs share validation and test sets."""


class HeldOut(UserWarning):
    """A folder does not say which pictures to test on, so that some were chosen."""


@dataclass(frozen=True)
class Loaders:
    """A data set ready for training; `validation` is None unless part of train was held out."""

    train: Loader
    test: Loader
    validation: Loader | None
    classes: int
    shape: tuple[int, ...]
    answers: tuple[int, ...] = ()
    """The shape of an example's targets; empty for one class per image."""
    dtype: torch.dtype = torch.float32
    fingerprint: str = ""
    """A checksum of the data, where they are not the same everywhere."""

    def example(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return inputs that are all zero."""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Synthetic:
    """Uniform noise with random balanced labels, of any shape: for benchmarks.

    If ``test_examples`` is None, the test set is a fifth the size of the training set.
    """

    shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10
    examples: int = 2048
    test_examples: int | None = None

    def __post_init__(self) -> None:
        if min(*self.shape, self.classes, self.examples, 1 if self.test_examples is None else self.test_examples) < 1:
            raise ValueError(f"{self}: shape, classes and examples must be positive")


Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Resident:
    """A data set held in memory, with its normalisation; if `padding` is None, it is not augmented."""

    train: Examples
    test: Examples
    classes: int
    normalization: Normalization
    padding: int | None


def load(
    name: str,
    *,
    batch_size: int,
    seed: int,
    root: Path | None = None,
    device: torch.device | str = "cpu",
    validation: float = 0.0,
    normalization: Normalization | None = None,
    augment: bool = True,
    size: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = None,
    synthetic: Synthetic | None = None,
) -> Loaders:
    """Load a data set. The batches of epoch e depend on (seed, e) alone, so two optimizers see the same ones.

    Args:
        name: one of `NAMES`, or the user's own as package.module:callable, which returns two torch Datasets.
        batch_size: the global batch size; with several processes, each yields its share of the same batches.
        seed: seed of order and augmentation, but not of what is held out.
        root: the folder of the files; by default $DIRPRUNE_DATA, or ~/.cache/dirprune.
        device: the device of the batches; all sets except imagenet are stored there as uint8.
        validation: the fraction of every class of the training set to hold out.
        normalization: replaces the set's own mean and standard deviation.
        augment: if False, `epoch` only shuffles.
        size: side of the images of imagenet or a folder, in pixels; 0 stands for 224.
        rank, world_size: the index of this process, and the number of processes.
        workers: number of processes that read images (imagenet); by default one per CPU, divided by ``world_size``.
        synthetic: shape, classes and examples of the synthetic set.

    >>> data = load("digits", batch_size=128, seed=0)
    >>> inputs, targets = next(data.train.epoch(0))
    >>> inputs.shape, data.train.examples, data.test.examples
    (torch.Size([128, 1, 8, 8]), 1438, 359)
    """
    if ":" not in name and name not in NAMES:
        raise ValueError(f"name={name!r}: no such data set; known are {', '.join(NAMES)}")
    if not 0 <= validation < 1:
        raise ValueError(f"validation={validation}: the fraction to hold out must lie in [0, 1)")
    if size and name not in RESIZED:
        raise ValueError(f"--image-size {size}: only the images of {', '.join(RESIZED)} are resized; leave it out")
    batching = Batching(batch_size, seed, rank, world_size)
    if ":" in name:
        return _own(name, batching, torch.device(device), validation)
    if name in FOLDERS:
        chosen = _channels(normalization or IMAGENET_STATISTICS, 3)
        readers = _workers(workers, world_size)
        parts = (find_imagenet if name == "imagenet" else _pictures)(data_root(root))
        return _folder(parts, batching, chosen, torch.device(device), validation, augment, readers, size or SIZE)
    data = _shrunk(_read(name, data_root(root), synthetic or Synthetic()), size)
    chosen = _channels(normalization or data.normalization, data.train[0].shape[1])
    return _resident(data, batching, chosen, torch.device(device), validation, augment)


def data_root(root: Path | None = None) -> Path:
    """Return the folder of the data sets: `root`, else $DIRPRUNE_DATA, else ~/.cache/dirprune."""
    return Path(root or os.environ.get("DIRPRUNE_DATA") or "~/.cache/dirprune").expanduser()


def stratified_split(targets: Tensor, fraction: float, *, seed: int = SPLIT_SEED) -> tuple[Tensor, Tensor]:
    """Split example indices into (kept, held out), holding out the rounded `fraction` of every class.

    >>> kept, held = stratified_split(torch.tensor([0, 0, 0, 0, 1, 1]), 0.5)
    >>> len(kept), len(held)
    (3, 3)
    """
    source = generator(seed)
    held = torch.zeros(len(targets), dtype=torch.bool)
    for label in torch.unique(targets).tolist():
        members = (targets == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=source)]
        held[shuffled[: round(fraction * len(members))]] = True
    return (~held).nonzero().squeeze(1), held.nonzero().squeeze(1)


def _validation_split(targets: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    kept, held = stratified_split(targets, fraction)
    if not len(kept) or (fraction and not len(held)):
        raise ValueError(
            f"validation={fraction}: leaves {len(kept)} examples to train and {len(held)} to validate on; "
            "both need some: choose another fraction"
        )
    return kept, held


def _channels(normalization: Normalization, channels: int) -> Normalization:
    if len(normalization.mean) != channels:
        raise ValueError(f"normalization={normalization}: the images have {channels} channels; give a value for each")
    return normalization


def _workers(workers: int | None, world_size: int) -> int:
    if workers is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cpus // world_size)
    if workers < 0:
        raise ValueError(f"workers={workers}: give the number of reading processes, or 0 to read in this one")
    return workers


def _read(name: str, root: Path, synthetic: Synthetic) -> _Resident:
    if name == "digits":
        return _read_digits()
    if name == "synthetic":
        return _make_synthetic(synthetic)
    train, test = cifar.read_cifar(name, root)
    return _Resident(train, test, cifar.LAYOUTS[name].classes, CIFAR_STATISTICS, CROP_PADDING)


def _shrunk(data: _Resident, size: int) -> _Resident:
    """Return the data with every image averaged over squares of pixels, so that ``size`` is its side; 0 for its own."""
    side = data.train[0].shape[-1]
    if size in (0, side):
        return data
    if side % size:
        raise ValueError(f"--image-size {size}: the side of the images, {side}, is no multiple of it; halve it instead")

    def shrunk(part: Examples) -> Examples:
        return avg_pool2d(part[0].float(), side // size).round().to(torch.uint8), part[1]

    padding = None if data.padding is None else data.padding * size // side
    return replace(data, train=shrunk(data.train), test=shrunk(data.test), padding=padding)


def _read_digits() -> _Resident:
    from sklearn.datasets import load_digits  # imported here because that takes a second

    bunch = load_digits()
    images, targets = torch.from_numpy(bunch.images).to(torch.uint8).unsqueeze(1), torch.from_numpy(bunch.target).long()
    train, test = stratified_split(targets, 0.2)
    # No augmentation: at 8 × 8 a shift cuts off strokes, and most digits do not survive mirroring.
    return _Resident((images[train], targets[train]), (images[test], targets[test]), 10, DIGITS_STATISTICS, None)


def _make_synthetic(synthetic: Synthetic) -> _Resident:
    """Draw the synthetic set. It is augmented like CIFAR, so that a benchmark has the cost of a real run."""

    def draw(examples: int, part: int) -> Examples:
        source = generator(SPLIT_SEED, part)
        images = torch.randint(256, (examples, *synthetic.shape), dtype=torch.uint8, generator=source)
        return images, torch.randperm(examples, generator=source) % synthetic.classes

    channels = synthetic.shape[0]
    uniform = Normalization((0.5,) * channels, (12**-0.5,) * channels)
    tested = max(1, synthetic.examples // 5) if synthetic.test_examples is None else synthetic.test_examples
    train, test = draw(synthetic.examples, 0), draw(tested, 1)
    return _Resident(train, test, synthetic.classes, uniform, CROP_PADDING)


def _resident(
    data: _Resident,
    batching: Batching,
    normalization: Normalization,
    device: torch.device,
    validation: float,
    augment: bool,
) -> Loaders:
    # Evaluation uses larger batches: the results are the same, and a GPU is used better.
    large = replace(batching, batch_size=max(batching.batch_size, EVALUATION_BATCH))

    def loader(part: Examples, padding: int | None, batching: Batching = large) -> ResidentLoader:
        return ResidentLoader(part[0].to(device), part[1].to(device), batching, normalization, padding)

    images, targets = data.train
    kept, held = _validation_split(targets, validation)
    channels, height, width = images.shape[1:]
    return Loaders(
        train=loader((images[kept], targets[kept]), data.padding if augment else None, batching),
        test=loader(data.test, None),
        validation=loader((images[held], targets[held]), None) if validation else None,
        classes=data.classes,
        shape=(channels, height, width),
    )


def _pictures(root: Path) -> tuple[ImageFiles, ImageFiles]:
    """Return the pictures to train and to test on: train/ and val/, or parts of every class where there is neither."""
    if any((root / part).is_dir() for part in ("train", "val", "imagenet")):
        return find_imagenet(root)
    every = find_images(root)
    kept, held = stratified_split(every.targets, TESTED)
    if not len(held):
        raise ValueError(
            f"{root}: no class has the 3 pictures it takes to hold one out; add some, or make train/ and val/"
        )
    told = f"{root} has no train/ and val/: {len(held)} of its {len(every.paths)} pictures are held out to test on"
    warnings.warn(told, HeldOut, stacklevel=2)
    return every.take(kept), every.take(held)


def _folder(
    parts: tuple[ImageFiles, ImageFiles],
    batching: Batching,
    normalization: Normalization,
    device: torch.device,
    validation: float,
    augment: bool,
    workers: int,
    side: int,
) -> Loaders:
    train, test = parts
    kept, held = _validation_split(train.targets, validation)
    options = (batching, normalization, device, workers)
    return Loaders(
        train=ImageFolderLoader(train.take(kept).mixed(), *options, augment=augment, side=side),
        test=ImageFolderLoader(test, *options, augment=False, side=side),
        validation=ImageFolderLoader(train.take(held), *options, augment=False, side=side) if validation else None,
        classes=len(train.classes),
        shape=(3, side, side),
    )


def _own(spec: str, batching: Batching, device: torch.device, validation: float) -> Loaders:
    (train, targets), (test, tested) = dataset.read(spec)
    kept, held = _validation_split(targets, validation)
    large = replace(batching, batch_size=max(batching.batch_size, EVALUATION_BATCH))
    channels, height, width = train[0][0].shape
    return Loaders(
        train=dataset.DatasetLoader(train, kept, batching, device),
        test=dataset.DatasetLoader(test, torch.arange(len(tested)), large, device),
        validation=dataset.DatasetLoader(train, held, large, device) if validation else None,
        classes=int(max(targets.max(), tested.max())) + 1,
        shape=(channels, height, width),
    )
