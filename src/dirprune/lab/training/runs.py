"""A run is a directory of plain files.

config.json         the recipe, with all its values
environment.json    versions, hardware, commit and command of each session that trained here
metrics.jsonl       one line per epoch
outcome.json        how the run ended: zeros of every layer and peak memory, or how it diverged
checkpoints/        see `dirprune.lab.records.checkpoint`
figures/            what `dirprune report` draws
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dirprune import SparsityReport
from dirprune.lab import trust
from dirprune.lab.data import ON_DISK, data_root
from dirprune.lab.records import checkpoint, provenance
from dirprune.lab.records.columns import Amount, record
from dirprune.lab.records.files import LOCK, InUse, as_read, locked, read_json, taken, to_json, write_json, write_text
from dirprune.lab.records.provenance import Session
from dirprune.lab.text import CONTROL
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.recipe import FREE_TO_CHANGE, Recipe, differing
from dirprune.zeros import LayerSparsity

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NO_RECIPE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What `Recipe.from_dict` raises for values that are none of a recipe's."""


COPIES = "restore it: every checkpoint holds a copy under 'recipe'"


class RunExists(FileExistsError):
    """The folder exists; a run is never overwritten."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    ``zeros`` counts the zeros of every parameter, and is None for a run that diverged. ``diverged`` says how it did.
    ``peak_memory_mib`` is the peak memory of tensors on a GPU in the last session, None if it is not known.
    """

    zeros: SparsityReport | None = None
    diverged: str = ""
    peak_memory_mib: float | None = None

    def to_dict(self) -> dict[str, Any]:
        layers = self.zeros.layers if self.zeros else ()
        return {
            "diverged": self.diverged,
            "peak_memory_mib": self.peak_memory_mib,
            "layers": [asdict(layer) for layer in layers],
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Outcome:
        """Return the outcome with these values from `to_dict`; in old files, zero channels were not counted."""
        found = record(_Ended, values)
        for layer in found.layers:
            if min(layer.shape, default=0) < 0 or not 0 <= layer.zeros <= math.prod(layer.shape):
                raise ValueError(f"{layer.name} of shape {layer.shape} cannot have {layer.zeros} zeros")
            if layer.cost is not None and not 0 <= layer.cost < math.inf:
                raise ValueError(f"{layer.name} cannot cost {layer.cost} multiplications")
        return Outcome(SparsityReport(found.layers) if found.layers else None, found.diverged, found.peak_memory_mib)


@dataclass(frozen=True)
class _Ended:
    """The content of outcome.json."""

    diverged: str
    peak_memory_mib: Amount | None
    layers: tuple[LayerSparsity, ...]


@dataclass(frozen=True)
class Run:
    """A run on disk and the recipe it follows."""

    folder: Path
    recipe: Recipe

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def saved(self) -> int:
        """The epoch of the newest checkpoint, verified or not; 0 if there is none or only the initial weights."""
        return max(checkpoint.epochs(self.checkpoints), default=0)

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: a trained or recorded epoch, or an outcome.

        The initial weights do not count, because the recipe reproduces them.
        """
        ended = (self.folder / "outcome.json").exists()
        return ended or self.saved > 0 or bool(self.records())

    @property
    def figures(self) -> Path:
        return self.folder / "figures"

    def records(self) -> list[EpochRecord]:
        """Return the records of the epochs trained so far, without a last line that a crash cut short."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines and not _is_whole(lines[-1]):
            lines.pop()
        records: list[EpochRecord] = []
        for number, line in enumerate(lines, start=1):
            try:
                found = record(EpochRecord, json.loads(line))
                self._check_place(found.epoch, after=records[-1].epoch if records else 0)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {path} is not an epoch record: {error}; correct it by hand"
                ) from error
            records.append(found)
        return records

    def _check_place(self, epoch: int, *, after: int) -> None:
        """Raise unless a record of this epoch may follow one of the epoch ``after``."""
        if epoch <= after:
            raise ValueError(f"epoch {epoch} follows epoch {after}")
        if epoch > self.recipe.epochs:
            raise ValueError(f"epoch {epoch} is not one of the run's {self.recipe.epochs}")

    def check_known(self) -> None:
        """Raise unless config.json says how the run is pruned, by which tables tell runs apart."""
        part = self.recipe.optimizer
        if lacking := [name for name in part.decides if vars(part)[name] is None]:
            raise ValueError(f"{self.folder / 'config.json'} does not say {lacking[0]}; {COPIES}")

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run, so that no second job can train it."""
        return locked(self.folder, "trained")

    def append(self, record: EpochRecord) -> None:
        path = self.folder / "metrics.jsonl"
        try:
            with path.open("a") as file:
                file.write(to_json(record.to_dict()) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a failed write does not name the file
            raise OSError(
                error.errno,
                f"epoch {record.epoch} was not recorded ({error.strerror}); what was saved before is intact. Make room "
                "or repair the disk, then continue; not written",
                str(path),
            ) from error

    def discard(self) -> None:
        """Remove what `create` and a session without a finished epoch wrote, and the folder if it is then empty.

        If another job has started training the run meanwhile, nothing is removed.
        """
        with suppress(InUse), self.locked():
            for name in ("config.json", "environment.json", "metrics.jsonl", "outcome.json", LOCK):
                (self.folder / name).unlink(missing_ok=True)
            for folder in (self.checkpoints, self.folder / "tensorboard"):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                self.folder.rmdir()

    def rewind(self, epoch: int) -> None:
        """Remove the records after ``epoch`` and the outcome; training continues from there and writes them again."""
        kept = [record for record in self.records() if record.epoch <= epoch]
        text = "".join(to_json(record.to_dict()) + "\n" for record in kept)
        write_text(self.folder / "metrics.jsonl", text)
        if epoch < self.recipe.epochs:
            (self.folder / "outcome.json").unlink(missing_ok=True)

    def outcome(self) -> Outcome | None:
        """Return how the run ended, or None if it has not."""
        path, remedy = self.folder / "outcome.json", "delete it, and `dirprune resume` writes it again"
        if not path.exists():
            return None
        values = read_json(path, dict, remedy)
        try:
            return Outcome.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as an outcome: {error}; {remedy}") from error

    def conclude(self, outcome: Outcome) -> None:
        """Write how the run ended to outcome.json."""
        write_json(self.folder / "outcome.json", outcome.to_dict())

    def sessions(self) -> list[Session]:
        """Return the sessions that trained here: versions, hardware, commit and command."""
        return provenance.sessions(self.folder)

    def read(self) -> History:
        """Return what the files of the run say."""
        return History(self.folder, self.recipe, tuple(self.records()), self.outcome(), tuple(self.sessions()))

    def last_root(self) -> Path | None:
        """Return the data folder of the last session; None if it was not recorded or no longer exists."""
        with suppress(ValueError, OSError):  # the data may be found without it
            sessions = self.sessions()
            if sessions and sessions[-1].data and Path(sessions[-1].data).exists():
                return Path(sessions[-1].data)
        return None

    def note_session(
        self, device: torch.device, world_size: int, root: Path | None, examples: int, fingerprint: str = ""
    ) -> None:
        """Add this session to environment.json, with the data folder and the number of training examples.

        Raises a ValueError if an earlier session had data with another fingerprint.
        """
        if fingerprint and any(each.fingerprint not in ("", fingerprint) for each in self.sessions()):
            raise ValueError(
                f"{self.folder} was trained on another text; continue with the Python or the --data of its "
                "environment.json, or train a new run"
            )
        told = root is not None or self.recipe.task.data in ON_DISK
        where = str(data_root(root).resolve()) if told else ""
        made = replace(
            provenance.environment(device, world_size), data=where, examples=examples, fingerprint=fingerprint
        )
        provenance.note_session(self.folder, made)


@dataclass(frozen=True)
class History:
    """What the files of a run said when they were read, each of them once."""

    folder: Path
    recipe: Recipe
    records: tuple[EpochRecord, ...]
    outcome: Outcome | None
    sessions: tuple[Session, ...]

    @property
    def run(self) -> Run:
        return Run(self.folder, self.recipe)

    @property
    def seconds(self) -> float:
        """The time of all training and testing so far."""
        return sum(each.train_seconds + each.test_seconds for each in self.records)

    def told(self, name: str) -> str:
        """Return the sessions' distinct values of a field, joined by semicolons: "GPU one; GPU two"."""
        return "; ".join(dict.fromkeys(str(value) for session in self.sessions if (value := getattr(session, name))))


def create(folder: Path, recipe: Recipe) -> Run:
    """Create the directory of a new run; raise if it already exists. Code that the recipe names is trusted."""
    Recipe.from_dict(as_read(recipe.to_dict()))  # what could not be read again is not written
    if taken(folder, "config.json"):
        remedy = (
            f"continue it with `dirprune resume {quoted(folder)}`, or " if (folder / "config.json").is_file() else ""
        )
        raise RunExists(f"{folder} exists and is never overwritten; {remedy}give another --out")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", recipe.to_dict())
    except OSError:  # e.g. a full disk: leave no empty folders behind
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise
    for spec in recipe.code:
        trust.allow(spec)
    return Run(folder, recipe)


def keeping(run: Run, epochs: Sequence[int]) -> Run:
    """Return the run with these epochs added to ``keep``, the checkpoints to keep; config.json is updated too."""
    if set(epochs) <= set(run.recipe.keep):
        return run
    recipe = replace(run.recipe, keep=tuple(sorted({*run.recipe.keep, *epochs})))
    write_json(run.folder / "config.json", recipe.to_dict())
    return replace(run, recipe=recipe)


def default_name(recipe: Recipe) -> str:
    """Return a folder name made of recipe, setting and seed, e.g. vgg16-cifar10-grda-c0.0005-mu0.6-s0."""
    return f"{recipe.name}-{recipe.pruner.tag}-s{recipe.seed}"


def unused(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, … that does not exist yet."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def quoted(folder: Path) -> str:
    """Return a folder's path quoted for a shell."""
    return shlex.quote(str(folder))


def load(folder: Path, *, trusted: bool = False) -> Run:
    """Open an existing run.

    Reading a run executes nothing. If it is ``trusted``, code that its config.json names may be imported later as
    `module:callable`, provided that the newest checkpoint was trained with the same recipe.
    """
    config = folder / "config.json"
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; name the folder of a run, as `dirprune train` makes them")
    if not config.is_file():
        if checkpoint.epochs(folder / "checkpoints"):
            raise FileNotFoundError(f"{config} is gone; {COPIES}")
        inside = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        remedy = f"it contains {', '.join(inside)}" if inside else "`dirprune train` makes one"
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json; {remedy}")
    try:
        run = Run(folder, Recipe.from_dict(json.loads(config.read_text())))
    except NO_RECIPE as error:
        raise ValueError(f"{config} cannot be read as a recipe: {error}; {COPIES}") from error
    if trusted and run.recipe.code:
        if found := checkpoint.latest(run.checkpoints, fault=lambda state: fault_of(state, "recipe")):
            check_unchanged(run, found[1])
        for spec in run.recipe.code:
            trust.allow(spec)
    return run


def fault_of(state: Any, *needed: str) -> str:
    """Return what is wrong with the state of a run, of which its weights and the parts ``needed`` will be used."""
    if not isinstance(state, dict):
        return f"holds a {type(state).__name__}, not the state of a run"
    for part in ("model", *needed, *({"training", "method"} & state.keys())):
        if not isinstance(state.get(part), dict):
            return f"holds no {part} of a run" + (f", but a {type(state[part]).__name__}" if part in state else "")
    weights = state["model"]
    for name, tensor in (*weights.items(), *state.get("training", {}).items()):
        if not isinstance(name, str) or CONTROL.search(name):
            return f"holds a tensor called {name!r}"
        if not _is_dense(tensor):
            return f"holds no dense tensor as {name!r}"
    named = state.get("parameters", [])
    if not isinstance(named, list):
        return f"holds no list of parameters, but a {type(named).__name__}"
    if lacking := [name for name in named if not isinstance(name, str) or name not in weights]:
        return f"names a parameter {lacking[0]!r}, but does not hold it"
    if "recipe" in needed:
        try:
            Recipe.from_dict(state["recipe"])
        except NO_RECIPE as error:
            return f"holds a recipe that cannot be read: {error}"
    return ""


def _is_dense(value: Any) -> bool:
    """Return whether this is a tensor as checkpoints hold them: its values, all of them, are in memory."""
    is_plain = (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
    )
    return is_plain and value.untyped_storage().nbytes() >= value.nbytes


def check_unchanged(run: Run, state: checkpoint.State) -> None:
    """Raise if config.json differs from the recipe that the checkpoint was trained with."""
    # Read both alike: fields that an old checkpoint lacks get their defaults, and lists become tuples.
    trained, here = (Recipe.from_dict(values) for values in (state["recipe"], as_read(run.recipe.to_dict())))
    if names := differing(trained, here, FREE_TO_CHANGE):
        was, told = (recipe.values()[names[0]] for recipe in (trained, here))
        raise ValueError(
            f"{run.folder / 'config.json'} says {names[0]}={told!r}, but this run was trained with {was!r}; restore "
            "that, or start a new run with `dirprune train`"
        )


def weights_of(run: Run, epoch: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return (epoch, model state) of the run's newest checkpoint, or of ``epoch``."""
    epoch, state = state_of(run, epoch)
    return epoch, state["model"]


def state_of(run: Run, epoch: int | None = None) -> tuple[int, checkpoint.State]:
    """Return (epoch, state) of the run's newest checkpoint, or of ``epoch``."""
    if epoch is not None:
        if epoch not in (known := checkpoint.epochs(run.checkpoints)):
            raise FileNotFoundError(
                f"{run.folder} has no checkpoint of epoch {epoch}; it has {', '.join(map(str, known)) or 'none'}"
            )
        return epoch, checkpoint.load(checkpoint.path_of(run.checkpoints, epoch), fault=fault_of)
    found = checkpoint.latest(run.checkpoints, fault=fault_of)
    if found is None:
        if run.records():
            raise FileNotFoundError(f"the checkpoints of {run.folder} are gone; train again with another --out")
        raise FileNotFoundError(f"{run.folder} has no checkpoint yet; `dirprune resume {quoted(run.folder)}` trains it")
    return found


def parameters_of(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters of a model's state dict, in the model's order and without the buffers."""
    return {name: state[name] for name, _ in model.named_parameters()}


def parameters_in(state: checkpoint.State) -> dict[str, Tensor]:
    """Return the parameters in a checkpoint; no network is built, because that could execute code of others.

    Old checkpoints do not name them: there they are the tensors of floating point except BatchNorm's statistics, and
    tied weights count once.
    """
    model = state["model"]
    if "parameters" in state:
        return {name: model[name] for name in state["parameters"]}
    floating = {name: tensor for name, tensor in model.items() if tensor.is_floating_point()}
    named = {name: tensor for name, tensor in floating.items() if name.rpartition(".")[2] not in _BUFFERS}
    first = {(tensor.data_ptr() or name): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[tensor.data_ptr() or name] == name}


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
