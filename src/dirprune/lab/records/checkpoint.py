"""Checkpoint files: written atomically, checksummed, and loaded without executing anything.

A checkpoint is a plain ``torch.save`` file ``epoch-0004.pt`` with its checksum beside it in ``epoch-0004.pt.sha256``
(``sha256sum -c`` reads it). Both are written completely under temporary names, then renamed, the checksum first. A
crash at any moment therefore leaves either a valid checkpoint or one that is recognised as unfinished.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import os
import pickle
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch

State = dict[str, Any]
"""Tensors, numbers, strings, and dicts and lists of them: what ``torch.load(weights_only=True)`` accepts."""
Fault = Callable[[Any], str]
"""Says what is wrong with the content of a file for its reader, as "holds a list"; "" if nothing is."""


class Unreadable(ValueError):
    """A file is none that torch saved, or holds what could execute; the message says what, without the file's name."""


class CorruptCheckpoint(RuntimeError):
    """A checkpoint file failed its verification."""


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped because it failed its verification."""


def save(folder: Path, epoch: int, state: State) -> Path:
    """Write ``state`` as the checkpoint of ``epoch``, completely or not at all.

    If writing fails (e.g. on a full disk), earlier checkpoints are untouched and no partial file is left. Saving an
    epoch again replaces it; a crash between the two renames then loses this epoch, but no other.

    Args:
        folder: the folder of the checkpoints; created if missing.
        epoch: number of finished epochs, at least 0.
        state: what to save. A state that :func:`load` would refuse is refused here already, while training can still
            be saved.

    Returns:
        The path of the checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(Path(folder), 4, {"weight": torch.ones(2), "epoch": 4})
        ...     (path.name, load(path)["weight"])
        ('epoch-0004.pt', tensor([1., 1.]))
    """
    if epoch < 0:
        raise ValueError(f"epoch={epoch} must be at least 0: it is the number of finished epochs")
    path = path_of(folder, epoch)
    data = _serialise(state)
    checksum = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode()
    contents: dict[Path, bytes | memoryview] = {_sidecar(path): checksum, path: data}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for target, content in contents.items():
            _write(_temporary(target), content)
        for target in contents:
            os.replace(_temporary(target), target)
        _sync_folder(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the checkpoint of epoch {epoch} was not saved ({error.strerror}); those saved before are intact. "
            "Make room or repair the disk, then continue; not written",
            str(path),
        ) from error
    finally:
        for target in contents:
            _temporary(target).unlink(missing_ok=True)
    return path


def _no_fault(content: Any) -> str:
    return ""


def load(path: Path, *, fault: Fault = _no_fault, map_location: str | torch.device = "cpu") -> State:
    """Read a checkpoint after verifying its checksum; nothing in the file is executed.

    Args:
        path: a file written by :func:`save`, with its ``.sha256`` beside it.
        fault: what the reader needs of the content.
        map_location: the device of the loaded tensors.

    Raises:
        CorruptCheckpoint: the checksum is missing or differs, or the file holds more than tensors and plain values, or
            not what is needed.
        FileNotFoundError: there is no such file.

    Example: see :func:`save`.
    """
    try:
        return _read(path, fault, map_location)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{error}; restore it from a copy, or use another epoch's") from error


def _read(path: Path, fault: Fault, map_location: str | torch.device) -> State:
    data = _verified(path)
    try:
        state: State = content(io.BytesIO(data), map_location)
    except Unreadable as error:
        raise CorruptCheckpoint(f"{path} {error}") from error
    if found := fault(state):
        raise CorruptCheckpoint(f"{path} {found}")
    return state


def content(file: BinaryIO | Path, map_location: str | torch.device = "cpu") -> Any:
    """Return what torch saved in a file; nothing in it is executed.

    Raises:
        Unreadable: it holds more than tensors and plain values, or is no file of torch's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is no file of ours, which the error says
            return torch.load(file, map_location=map_location, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of many types, for what is no file of its own
        # torch's own message advises loading without the protection, so it is left to the traceback.
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            raise Unreadable("holds more than tensors and plain values, none of which was executed") from error
        what = str(error).partition("\n")[0]
        raise Unreadable(f"is no file of torch.save: {type(error).__name__}: {what}") from error


def checksum(folder: Path, epoch: int) -> str:
    """Return the recorded checksum of a checkpoint, without reading the checkpoint; "" if there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(Path(folder), 1, {"epoch": 1})
    ...     len(checksum(Path(folder), 1))
    64
    """
    sidecar = _sidecar(path_of(folder, epoch))
    return _noted(sidecar) if sidecar.exists() else ""


def latest(
    folder: Path,
    *,
    fault: Fault = _no_fault,
    map_location: str | torch.device = "cpu",
    before: float = math.inf,
) -> tuple[int, State] | None:
    """Return the newest valid checkpoint as ``(epoch, state)``; ``None`` if there are no checkpoints.

    Args:
        folder: the folder of the checkpoints.
        fault: what the reader needs of the content; a checkpoint with a fault is not valid.
        map_location: the device of the loaded tensors.
        before: only checkpoints of earlier epochs are considered.

    Warns:
        CheckpointWarning: newer checkpoints were skipped; the message names them and the one that is used.

    Raises:
        CorruptCheckpoint: there are checkpoints, but none is valid.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for epoch in (1, 2):
        ...         _ = save(Path(folder), epoch, {"epoch": epoch})
        ...     latest(Path(folder))
        (2, {'epoch': 2})
    """
    problems: list[str] = []
    for epoch in (each for each in reversed(epochs(folder)) if each < before):
        path = path_of(folder, epoch)
        try:
            state = _read(path, fault, map_location)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        if problems:
            message = f"going back to {path}, the newest checkpoint that is whole: {'; '.join(problems)}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)
        return epoch, state
    if problems:
        raise CorruptCheckpoint(
            f"no checkpoint in {folder} can be trusted; restore one from a copy, or train again with another --out. "
            + "; ".join(problems)
        )
    return None


def epochs(folder: Path) -> list[int]:
    """Return the epochs that have a checkpoint file, valid or not, in increasing order; [] if the folder is missing."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"epoch-(\d{4,})\.pt", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def set_aside(folder: Path, after: int) -> None:
    """Rename the checkpoints after epoch ``after``, which failed their verification, so that nothing uses them."""
    for epoch in epochs(folder):
        if epoch > after:
            path = path_of(folder, epoch)
            path.replace(path.with_name(path.name + ".corrupt"))
            _sidecar(path).unlink(missing_ok=True)


def prune(folder: Path, keep: Collection[int], last: int = 2) -> None:
    """Delete all checkpoints except the ``last`` newest, those in ``keep`` and the newest valid one.

    Files left by an interrupted :func:`save` are deleted too, so no other process may be saving to the folder.

    Args:
        folder: the folder of the checkpoints.
        keep: epochs to keep.
        last: number of newest checkpoints to keep, at least 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for epoch in range(1, 6):
        ...         _ = save(Path(folder), epoch, {})
        ...     prune(Path(folder), keep=[1])
        ...     epochs(Path(folder))
        [1, 4, 5]
    """
    if last < 1:
        raise ValueError(f"last={last} must be at least 1: the newest checkpoint is what a run resumes from")
    saved = epochs(folder)
    trusted = next((epoch for epoch in reversed(saved) if _is_whole(path_of(folder, epoch))), None)
    for epoch in saved[:-last]:
        if epoch not in keep and epoch != trusted:
            path_of(folder, epoch).unlink()
    for leftover in folder.glob("epoch-*.tmp"):
        leftover.unlink()
    for sidecar in folder.glob("epoch-*.pt.sha256"):
        if not sidecar.with_suffix("").exists():
            sidecar.unlink()


def path_of(folder: Path, epoch: int) -> Path:
    """Return the path of the checkpoint of an epoch, whether or not the file exists."""
    return folder / f"epoch-{epoch:04d}.pt"


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _serialise(state: State) -> memoryview:
    """Return the bytes of the file. They are made in memory, so that a state that cannot be saved leaves no file."""
    buffer = io.BytesIO()
    torch.save(_own(state, {}), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="meta", weights_only=True)  # the meta device avoids reading tensor data
    except pickle.UnpicklingError as error:
        buffer.seek(0)
        culprits = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
        raise ValueError(
            f"state holds {culprits}, which load() refuses; keep to tensors, numbers, strings, dicts and lists"
        ) from error
    return buffer.getbuffer()


def _own(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return the state with every tensor on a storage of its size: of a part, torch would save the whole storage."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.untyped_storage().nbytes() == value.nbytes:
            return value
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _own(item, copies)
        return copied
    return type(value)(_own(item, copies) for item in value) if type(value) in (list, tuple) else value


def _write(path: Path, content: bytes | memoryview) -> None:
    path.unlink(missing_ok=True)  # a link of that name would lead the writing elsewhere
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verified(path: Path) -> bytes:
    """Return the bytes of a checkpoint whose checksum matches. One read serves both verifying and loading."""
    data = path.read_bytes()
    sidecar = _sidecar(path)
    if not sidecar.exists():
        raise CorruptCheckpoint(f"{path} has no checksum {sidecar.name}, so its writing may not have finished")
    expected = _noted(sidecar)
    if not re.fullmatch("[0-9a-f]{64}", expected):
        raise CorruptCheckpoint(f"{path} cannot be verified: {sidecar.name} holds no checksum")
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise CorruptCheckpoint(f"{path} is corrupt: its sha256 is {found[:8]}…, and should be {expected[:8]}…")
    return data


def _noted(sidecar: Path) -> str:
    """Return the first word of a checksum file, whether or not it is a checksum."""
    return sidecar.read_text(errors="replace").partition(" ")[0]


def _is_whole(path: Path) -> bool:
    try:
        _verified(path)
    except CorruptCheckpoint:
        return False
    return True
