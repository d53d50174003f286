"""CIFAR-10 and CIFAR-100 in their official binary layout: records of label bytes and 3072 pixels, plane by plane."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class BinaryFormat:
    """Where a set keeps its files, and how a record begins: the class is the last of `label_bytes` bytes."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    classes: int


LAYOUTS = {
    "cifar10": BinaryFormat(
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        label_bytes=1,
        classes=10,
    ),
    # A coarse label (of 20) comes first, then the fine one (of 100), which is the class.
    "cifar100": BinaryFormat("cifar-100-binary", train=("train.bin",), test=("test.bin",), label_bytes=2, classes=100),
}


def read_cifar(name: str, root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read (images, targets) of train and test from `root`; images are uint8 (N, 3, 32, 32), targets int64 (N,)."""
    layout = LAYOUTS[name]
    if root.resolve().name == layout.folder:  # the user gave the folder of the data set itself
        root = root.resolve().parent
    folder = root / layout.folder
    missing = [file for file in (*layout.train, *layout.test) if not (folder / file).is_file()]
    if missing:
        place = shlex.quote(str(root))
        raise FileNotFoundError(
            f"{name}: no {', '.join(missing)} in {folder}; `dirprune data {name} --to {place}` gets the set, "
            f"then pass `--data {place}` (or set DIRPRUNE_DATA={place})"
        )
    return _read_files(folder, layout.train, layout), _read_files(folder, layout.test, layout)


def _read_files(folder: Path, files: tuple[str, ...], layout: BinaryFormat) -> tuple[Tensor, Tensor]:
    parts = [read_records(folder / file, label_bytes=layout.label_bytes, classes=layout.classes) for file in files]
    return torch.cat([images for images, _ in parts]), torch.cat([targets for _, targets in parts])


def read_records(path: Path, *, label_bytes: int, classes: int) -> tuple[Tensor, Tensor]:
    """Read the records of one file; an impossible size or label raises an error that names the file."""
    content = bytearray(path.read_bytes())
    record = label_bytes + 3 * 32 * 32
    if not content or len(content) % record:
        raise ValueError(
            f"{path}: {len(content)} bytes are not a whole number of {record}-byte records; delete it and get it again"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record)
    targets = records[:, label_bytes - 1].long()
    wrong = (targets >= classes).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{path}: record {at} has label {int(targets[at])}, but labels run from 0 to {classes - 1}; "
            "delete it and get it again"
        )
    return records[:, label_bytes:].reshape(-1, *SHAPE), targets
