"""Compare runs. Runs that differ only in the seed become one row of the table and one colour of the figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from dirprune import SparsityReport, sparsity
from dirprune.lab.records import checkpoint
from dirprune.lab.records.files import finite
from dirprune.lab.stats import Spread
from dirprune.lab.studies.report.signs import SignRow, beside_sgd
from dirprune.lab.text import NOTHING, duration
from dirprune.lab.training import runs
from dirprune.lab.training.costs import priced
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.loop import EpochRecord
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.runs import History
from dirprune.lab.training.schedules import Schedule

TESTED_ON = ("test", "validation", "test or validation")
"""The data on which accuracies and losses of a report may be measured."""
SPARE = (
    *(f"{part} loss" for part in TESTED_ON),
    "weight sparsity (%)",
    "MACs left (%)",
    "s/epoch",
    "seeds",
    "total",
    "epochs",
)
"""Columns of `ReportRow.cells` that are dropped on a narrow terminal, in this order."""
_NAMELESS: dict[str, Any] = {"seed": 0, "about": "", "keep": (), "published": ()}  # not part of a setting
_TOLD = {"name", "optimizer", "c", "mu", "lam", "method", "options"}  # already in `Recipe.setting`


@dataclass(frozen=True)
class ReportRow:
    """One setting over its seeds, at the last epoch that all seeds have finished; seeds without an epoch are left out.

    ``test_accuracy`` is in percent, the sparsities are fractions; ``macs_left`` is the fraction of the multiplications
    that the zeros leave at the end of a run. ``epoch_seconds`` is the median time to train an epoch (the first may
    compile), ``total_seconds`` the time of all training and testing so far; both are means over seeds. Values that are
    not known before the first epoch are None; so are c and μ of SGD.
    """

    recipe: str
    setting: str
    optimizer: str
    c: float | None
    mu: float | None
    epoch: int
    epochs: int
    seeds: tuple[int, ...]
    test_accuracy: Spread | None = None
    test_loss: Spread | None = None
    sparsity: Spread | None = None
    weight_sparsity: Spread | None = None
    macs_left: Spread | None = None
    epoch_seconds: float | None = None
    total_seconds: float | None = None

    def cells(self, tested_on: str = "test") -> dict[str, str]:
        """Return the row as text by column. The column names say what the accuracy and loss were measured on."""
        return {
            "recipe": self.recipe,
            "setting": self.setting,
            "epochs": f"{self.epoch}/{self.epochs}",
            "seeds": str(len(self.seeds)),
            f"{tested_on} accuracy (%)": self.test_accuracy.text(2) if self.test_accuracy else NOTHING,
            f"{tested_on} loss": self.test_loss.text(4) if self.test_loss else NOTHING,
            "sparsity (%)": self.sparsity.text(2, scale=100) if self.sparsity else NOTHING,
            "weight sparsity (%)": self.weight_sparsity.text(2, scale=100) if self.weight_sparsity else NOTHING,
            "MACs left (%)": self.macs_left.text(2, scale=100) if self.macs_left else NOTHING,
            "s/epoch": NOTHING if self.epoch_seconds is None else f"{self.epoch_seconds:.3g}",
            "total": NOTHING if self.total_seconds is None else duration(self.total_seconds),
        }


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    setting: str
    label: str
    runs: tuple[History, ...]

    @property
    def records(self) -> list[tuple[EpochRecord, ...]]:
        return [run.records for run in self.runs]

    @property
    def row(self) -> ReportRow:
        recipe = self.runs[0].recipe
        options = vars(recipe.pruner)
        started = [run for run in self.runs if run.records]
        row = ReportRow(
            recipe=recipe.name,
            setting=self.setting,
            optimizer=recipe.optimizer.name,
            c=options.get("c"),
            mu=options.get("mu"),
            epoch=_last_of_all([run.records for run in started]),
            epochs=recipe.epochs,
            seeds=tuple(run.recipe.seed for run in started),
        )
        if not row.epoch:
            return row
        ended = [_zeros_at_the_end(run) for run in started] if row.epoch == row.epochs else []
        left = [zeros.cost_left_fraction for zeros in ended if zeros and zeros.cost_left_fraction is not None]
        last = [next(record for record in run.records if record.epoch == row.epoch) for run in started]
        return replace(
            row,
            test_accuracy=Spread.of([record.test_accuracy for record in last]),
            test_loss=Spread.of([record.test_loss for record in last]),
            sparsity=Spread.of([record.sparsity for record in last]),
            weight_sparsity=Spread.of([record.weight_sparsity for record in last]),
            macs_left=Spread.of(left) if len(left) == len(last) else None,
            epoch_seconds=Spread.of([median([r.train_seconds for r in run.records]) for run in started]).mean,
            total_seconds=Spread.of(
                [sum(r.train_seconds + r.test_seconds for r in run.records) for run in started]
            ).mean,
        )


@dataclass(frozen=True)
class Report:
    """Several settings to compare; ``notes`` are remarks for the reader of the table."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...]

    @cached_property
    def signs(self) -> list[SignRow]:
        """The signs of gRDA beside those of SGD, where both were trained alike and kept checkpoints."""
        return list(beside_sgd([each.run for group in self.groups for each in group.runs]))

    @property
    def rows(self) -> list[ReportRow]:
        return [group.row for group in self.groups]

    @property
    def tested_on(self) -> str:
        """The data on which accuracies and losses are measured: one of `TESTED_ON`."""
        test, validation, either = TESTED_ON
        held_out = {bool(group.runs[0].recipe.task.validation) for group in self.groups}
        return either if len(held_out) > 1 else validation if True in held_out else test

    @property
    def cells(self) -> list[dict[str, str]]:
        """The rows as text by column."""
        return [row.cells(self.tested_on) for row in self.rows]

    @cached_property
    def layers(self) -> dict[str, dict[str, list[SparsityReport]]]:
        """Network → label with the epoch → one `SparsityReport` per seed; checkpoints are read once.

        A run that has only its initial weights is left out, because nothing is pruned yet.
        """
        networks: dict[str, dict[str, list[SparsityReport]]] = {}
        for group in self.groups:
            known = (run for run in group.runs if run.run.saved or _zeros_at_the_end(run))
            counted = [(epoch, zeros) for epoch, zeros in map(layerwise, known) if epoch]
            if not counted:
                continue
            epochs = sorted({epoch for epoch, _ in counted})
            when = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]}–{epochs[-1]}"
            labels = networks.setdefault(group.runs[0].recipe.model, {})
            labels[f"{group.label}, {when}"] = [zeros for _, zeros in counted]
        return networks

    def to_dict(self) -> dict[str, Any]:
        """Return the rows and notes as plain values for JSON; numbers that are not finite become None."""
        rows = [
            {**asdict(group.row), "label": group.label, "runs": [str(run.folder) for run in group.runs]}
            for group in self.groups
        ]
        signs = [asdict(row) for row in self.signs]
        plain: dict[str, Any] = finite({"rows": rows, "notes": self.notes, "signs": signs})
        return plain


def report(folders: Sequence[Path]) -> Report:
    """Read runs of any recipes, finished or not, and group those that differ only in the seed.

    Args:
        folders: run directories; duplicates count once.

    Raises:
        FileNotFoundError: one of them is not a run.
        ValueError: there are none, or a file of a run cannot be read.
    """
    if not folders:
        raise ValueError("folders is empty; name at least one run directory, as made by `dirprune train`")
    found = [runs.load(folder).read() for folder in {folder.resolve(): folder for folder in folders}.values()]
    by_setting: dict[Recipe, list[History]] = {}
    for run in found:
        by_setting.setdefault(_without_seed(run.recipe), []).append(run)
    texts = settings(list(by_setting))
    several = len({recipe.name for recipe in by_setting}) > 1
    groups = []
    for text, (recipe, members) in zip(texts, by_setting.items(), strict=True):
        members.sort(key=lambda run: run.recipe.seed)
        label = f"{recipe.name}: {text}" if several else text
        groups.append(Group(text, label, tuple(members)))
    return Report(tuple(groups), tuple(note for group in groups for note in _notes(group)))


def layerwise(run: History) -> tuple[int, SparsityReport]:
    """Return (epoch, sparsity) at the end of a run, or of the newest checkpoint if the run has not ended.

    Old outcomes lack the zero channels, which the last checkpoint gives if it is there. An earlier one would contradict
    the other numbers of the run.
    """
    ended = _zeros_at_the_end(run)
    if ended is None:
        epoch, state = runs.state_of(run.run)
        return epoch, priced(sparsity(runs.parameters_in(state)), run.recipe)
    if any(layer.is_weight and layer.output_channels is None for layer in ended.layers):
        with suppress(OSError, ValueError, checkpoint.CorruptCheckpoint):
            weights = runs.weights_of(run.run, run.recipe.epochs)[1]
            if all(layer.name in weights for layer in ended.layers):
                ended = priced(sparsity({layer.name: weights[layer.name] for layer in ended.layers}), run.recipe)
    return run.recipe.epochs, ended


def _zeros_at_the_end(run: History) -> SparsityReport | None:
    return priced(run.outcome.zeros, run.recipe) if run.outcome and run.outcome.zeros else None


def settings(recipes: Sequence[Recipe]) -> list[str]:
    """Return the shortest descriptions that distinguish recipes of the same name, beginning with `Recipe.setting`.

    Example:
        >>> from dirprune.lab.training.recipes import get
        >>> sparse = get("digits").but(c=0.01, mu=0.7)
        >>> dense = sparse.but(optimizer="sgd")
        >>> settings([dense, sparse]), settings([dense, dense.but(lr=0.2)])
        (['SGD', 'gRDA c=0.01 μ=0.7'], ['SGD, lr=0.1', 'SGD, lr=0.2'])
    """
    names = list(dict.fromkeys(recipe.name for recipe in recipes))
    if len(names) > 1:  # the name distinguishes them already
        told = {name: iter(settings([r for r in recipes if r.name == name])) for name in names}
        return [next(told[recipe.name]) for recipe in recipes]
    texts = [recipe.setting for recipe in recipes]

    def told_apart() -> int:
        return len(set(texts))

    every = [recipe.values() for recipe in recipes]
    for field in (name for name in dict.fromkeys(chain(*every)) if name not in {*_NAMELESS, *_TOLD}):
        before, known = texts, told_apart()
        if known == len(recipes):
            break
        texts = [f"{text}, {field}={_show(r.get(field, ()))}" for text, r in zip(texts, every, strict=True)]
        if told_apart() == known:
            texts = before
    return texts


def _last_of_all(every: Sequence[Sequence[EpochRecord]]) -> int:
    """Return the last epoch that all of them have recorded; 0 if there is none."""
    shared = [{record.epoch for record in records} for records in every]
    return max(set.intersection(*shared), default=0) if shared else 0


def _without_seed(recipe: Recipe) -> Recipe:
    """Return the recipe without its seed and fields that do not affect results; equal ones belong to one group."""
    return replace(recipe, **_NAMELESS)


def _notes(group: Group) -> list[str]:
    """Return remarks on a group that its row does not show."""
    recipe, row, notes = group.runs[0].recipe, group.row, []
    for run in group.runs:
        records = run.records
        if run.outcome and run.outcome.diverged:
            notes.append(
                f"{run.folder} diverged: {run.outcome.diverged}; train again with a smaller --lr, or another --seed"
            )
        elif run.outcome and len(records) < recipe.epochs:
            notes.append(
                f"{run.folder} has ended, but its metrics.jsonl holds {len(records)} of {recipe.epochs} epochs"
            )
        elif not records:
            notes.append(f"{run.folder} has no finished epoch yet and is left out")
        elif len(records) < recipe.epochs:
            command = f"dirprune resume {runs.quoted(run.folder)}"
            notes.append(f"{run.folder} has {len(records)} of {recipe.epochs} epochs; `{command}`")
    if row.epoch and any(records and records[-1].epoch > row.epoch for records in group.records):
        notes.append(f"{group.label}: its seeds are compared at epoch {row.epoch}, the last that all of them have")
    if repeated := sorted({seed for seed in row.seeds if row.seeds.count(seed) > 1}):
        seeds = ", ".join(map(str, repeated))
        notes.append(f"{group.label}: seed {seeds} occurs more than once, so ± is not that of independent runs")
    if recipe.task.validation:
        notes.append(
            f"{group.label}: accuracy and loss are those of the {recipe.task.validation:.0%} held out of train"
        )
    return notes


def _show(value: Any) -> str:
    """Return a recipe value as text for a label; for a schedule or an execution, only the fields that are set."""
    if isinstance(value, (Schedule, Execution)):
        parts = {name: part for name, part in asdict(value).items() if part}
        return "/".join(
            name if part is True else f"{name}={part}" if isinstance(part, int) else _show(part)
            for name, part in parts.items()
        )
    return ("+".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"
