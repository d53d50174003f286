"""Text as bytes: files split into train, validation and test, and windows drawn from them."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dirprune.lab.data.loader import Batch, Batched, Batching

VOCABULARY = 256
TEST_WINDOWS = 1024
MOST = 2**33
"""Bytes of a text; a run of somebody else may name any folder of this machine as its data."""
PARTS = ("train", "validation", "test")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def corpus(root: Path | None) -> list[Path]:
    """Return the files of a text: ``root``, a file or a folder; by default the source of Python's standard library.

    The standard library is on every machine. It differs between versions of Python, which `fingerprint` tells.
    """
    if root is not None and root.is_file():
        return [root]
    top = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    if not top.is_dir():
        raise FileNotFoundError(f"{top} is no text file and no folder of them; give one with --data")
    kind = "*.py" if root is None else "*"
    inner = (path for path in top.rglob(kind) if path.is_file() and not path.name.startswith("."))
    found = sorted(path for path in inner if root is not None or not _LEFT_OUT & set(path.relative_to(top).parts))
    if not found:
        raise FileNotFoundError(f"{top} holds no files; give a text file, or a folder of them, with --data")
    return found


def read_parts(files: list[Path], held_out: float) -> dict[str, Tensor]:
    """Return the bytes of train, validation and test, as uint8; whole files are held out, chosen by their names.

    A tenth of the files is the test set, and ``held_out`` of the others the validation set. A single file is cut by
    position instead: its end is the test set.
    """
    if (size := sum(path.stat().st_size for path in files)) > MOST:
        raise ValueError(
            f"the text of {files[0]}, … has {size / 1e9:,.0f} GB and would lie in memory; give less with --data"
        )
    parts: dict[str, list[bytes]] = {part: [] for part in PARTS}
    if len(files) == 1:
        text = files[0].read_bytes()
        end = len(text) - len(text) // 10
        start = end - round(held_out * end)
        parts = {"train": [text[:start]], "validation": [text[start:end]], "test": [text[end:]]}
    else:
        top = Path(*_common(files))
        for path in files:
            digest = hashlib.sha256(path.relative_to(top).as_posix().encode()).digest()
            place, again = digest[0] / 256, int.from_bytes(digest[1:5], "big") / 2**32
            part = "test" if place < 0.1 else "validation" if again < held_out else "train"
            parts[part].append(path.read_bytes())
    joined = {part: b"".join(texts) for part, texts in parts.items()}
    return {part: torch.frombuffer(bytearray(text), dtype=torch.uint8) for part, text in joined.items() if text}


def fingerprint(parts: dict[str, Tensor]) -> str:
    """Return the first digits of a checksum of all parts."""
    digest = hashlib.sha256()
    for part in sorted(parts):
        digest.update(parts[part].numpy().tobytes())
    return digest.hexdigest()[:12]


def _common(files: list[Path]) -> tuple[str, ...]:
    """Return the parts of the innermost folder that holds all files."""
    first, last = min(files).parent.parts, max(files).parent.parts
    shared = [a for a, b in zip(first, last, strict=False) if a == b]
    return first[: len(shared)]


@dataclass(frozen=True, eq=False)
class WindowLoader(Batched):
    """A Loader of windows of a text, which is on the device: each predicts the next byte at every place.

    The plain pass has windows at equal distances. A training pass has as many, at random places.

    >>> text = torch.arange(100, dtype=torch.uint8)
    >>> loader = WindowLoader(text, context=4, examples=3, batching=Batching(2, seed=0))
    >>> [targets.tolist() for _, targets in loader]
    [[[1, 2, 3, 4], [48, 49, 50, 51]], [[96, 97, 98, 99]]]
    """

    text: Tensor
    context: int
    examples: int
    batching: Batching

    def __post_init__(self) -> None:
        if len(self.text) <= self.context:
            raise ValueError(
                f"a part of the text has {len(self.text)} bytes, and a window needs {self.context + 1}; give more "
                "text, or a smaller context"
            )

    def __iter__(self) -> Iterator[Batch]:
        last = len(self.text) - self.context - 1
        return self._batches(torch.linspace(0, last, self.examples, dtype=torch.float64).long())

    def epoch(self, epoch: int) -> Iterator[Batch]:
        random = self.batching.generator(epoch)
        return self._batches(torch.randint(len(self.text) - self.context, (self.examples,), generator=random))

    def _batches(self, starts: Tensor) -> Iterator[Batch]:
        places = torch.arange(self.context + 1, device=self.text.device)
        for share in self.batching.shares(starts):
            windows = self.text[share.to(self.text.device)[:, None] + places].long()  # (batch, context + 1)
            yield windows[:, :-1], windows[:, 1:]
