"""A recipe: everything that decides a training run, made of parts that check themselves.

A recipe is data. `dirprune.lab.training.experiment` turns it into a model, an optimizer and loaders.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dirprune.lab import trust
from dirprune.lab.methods import MethodSpec
from dirprune.lab.ranges import COUNT, SEED, BadValue, check
from dirprune.lab.records.columns import plain, record, types
from dirprune.lab.tasks import TASKS, Images, Task
from dirprune.lab.text import printable
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.optimizers import OPTIMIZERS, Grda, OptimizerSpec, as_known, optimizer
from dirprune.lab.training.schedules import Schedule

PLAIN = Execution(channels_last=True)  # the fastest format for convolutions on a CPU, too
FAST = Execution(precision="bfloat16", channels_last=True, compile=True, capture=True, lean=True)

FREE_TO_CHANGE = {"about", "keep", "published", "cpu", "cuda"}
"""Options that may change between sessions of a run: how it is executed, and those that do not affect the results."""

PARTS = ("task", "optimizer", "method")


@dataclass(frozen=True)
class Recipe:
    """A training run, except for where it runs and where its files go.

    ``task`` is what is learned; ``optimizer`` trains, and prunes unless a ``method`` does. ``start`` is a run or a file
    whose weights training starts from. ``keep`` lists the epochs whose checkpoints are kept, ``published`` the (c, μ)
    of the paper's runs. ``cpu`` and ``cuda`` say how steps run on these devices.
    """

    name: str
    task: Task
    model: str
    epochs: int
    optimizer: OptimizerSpec = field(default_factory=Grda)
    method: MethodSpec | None = None
    schedule: Schedule = field(default_factory=Schedule)
    batch_size: int = 128
    seed: int = 0
    start: str = ""
    keep: tuple[int, ...] = ()
    about: str = ""
    published: tuple[tuple[float, float], ...] = ()
    cpu: Execution = PLAIN
    cuda: Execution = FAST

    def __post_init__(self) -> None:
        check(vars(self), epochs=COUNT, batch_size=COUNT, seed=SEED)
        object.__setattr__(self, "keep", tuple(self.keep))
        if not all(epoch >= 0 for epoch in self.keep):
            raise BadValue("keep", self.keep, "epochs are numbered from 0, the initial weights")
        for name, kind in (("task", Task), ("optimizer", OptimizerSpec), ("method", MethodSpec | None)):
            if not isinstance(value := getattr(self, name), kind):
                raise BadValue(name, value, "give a part of a recipe, e.g. Images('digits'), Grda(c=1e-3)")
        if self.method and self.optimizer.knob:
            raise BadValue(
                "optimizer",
                self.optimizer.name,
                f"{self.method.name} prunes by itself; train with {self.optimizer.dense}",
            )

    def execution(self, device_type: str) -> Execution:
        """Return how steps run on this kind of device."""
        return self.cuda if device_type == "cuda" else self.cpu

    @property
    def pruner(self) -> OptimizerSpec | MethodSpec:
        """What prunes: the method, or the optimizer if there is none."""
        return self.method or self.optimizer

    @property
    def setting(self) -> str:
        """A short description of how the run is pruned.

        >>> from dirprune.lab.training.recipes import get
        >>> get("digits").setting
        'gRDA c=0.016 μ=0.7'
        """
        return self.pruner.setting

    @property
    def code(self) -> tuple[str, ...]:
        """What the recipe names of somebody's own code, as package.module:callable."""
        return tuple(spec for spec in (self.model, self.task.data) if ":" in spec)

    def values(self) -> dict[str, Any]:
        """Return every value under the name by which users know it, with those of the parts among the recipe's own."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in PARTS}
        method = {"method": self.method.name, "options": self.method.options} if self.method else {}
        return {
            **own,
            **vars(self.task),
            "optimizer": self.optimizer.name,
            **vars(self.optimizer),
            **({"method": "", "options": ()} | method),
        }

    def but(self, **changes: Any) -> Recipe:
        """Return the recipe with other values, each under the name that `values` gives it.

        A new ``optimizer`` keeps the options that it shares with the present one. ``precision``, ``compile`` and
        ``lean`` are those of both kinds of device.

        >>> from dirprune.lab.training.recipes import get
        >>> get("digits").but(optimizer="sgd", lr=0.2).optimizer
        Sgd(lr=0.2, weight_decay=0.0, momentum=0.0, nesterov=False)
        """
        if isinstance(schedule := changes.get("schedule"), str):
            changes["schedule"] = Schedule.of(schedule)
        chosen = changes.pop("optimizer", self.optimizer)
        if isinstance(chosen, str):
            present = vars(self.optimizer)
            takes = {f.name for f in fields(OPTIMIZERS[chosen])} if chosen in OPTIMIZERS else set()
            shared = {name: value for name, value in present.items() if name in takes and value != ()}
            chosen = optimizer(chosen, **shared)
        own, task = {f.name for f in fields(self)}, {f.name for f in fields(self.task)}
        running = {f.name for f in fields(Execution)}
        of_task = {name: changes.pop(name) for name in list(changes) if name in task}
        execution = {name: changes.pop(name) for name in list(changes) if name in running}
        of_optimizer = {name: changes.pop(name) for name in list(changes) if name not in own}
        if execution:
            changes |= {name: replace(getattr(self, name), **execution) for name in ("cpu", "cuda")}
        if of_optimizer:
            chosen = optimizer(chosen.name, **(vars(chosen) | of_optimizer))
        task_part = replace(self.task, **of_task) if of_task else self.task
        return replace(self, **{"task": task_part, "optimizer": chosen} | changes)

    def to_dict(self) -> dict[str, Any]:
        parts = {name: {"name": part.name, **vars(part)} for name in PARTS if (part := getattr(self, name))}
        return {**asdict(self), **parts}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with these values from `to_dict` or JSON. Fields missing from old files get defaults."""
        made = _with_parts(values) if isinstance(values["optimizer"], str) else dict(values)
        known = {f.name for f in fields(Recipe)}
        if strange := [f"{printable(name)}={value!r}" for name, value in made.items() if name not in known]:
            raise ValueError(
                f"{', '.join(strange)}: this version of dirprune has no such recipe field; remove it, or use the "
                "version that wrote it"
            )
        task = dict(made["task"])
        made["task"] = record(TASKS[task.pop("name")], task)
        made["optimizer"] = as_known(**made["optimizer"])
        if method := made.get("method"):
            made["method"] = MethodSpec(method["name"], tuple((name, value) for name, value in method["options"]))
        hints = types(Recipe)
        made |= {name: plain(name, hints[name], value) for name, value in made.items() if name not in PARTS}
        return Recipe(**made)


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file from before recipes had parts, in which all options lie side by side."""
    rest = dict(values)
    name, pruner = rest.pop("optimizer"), rest.pop("method", "")
    options = dict(rest.pop("options", ()))
    if pruner == "rda":  # a method that took gRDA's place
        name, pruner = pruner, ""
        rest |= options
    every = {f.name for kind in OPTIMIZERS.values() for f in fields(kind)}
    takes = {f.name for f in fields(OPTIMIZERS[name])} if name in OPTIMIZERS else every
    given = {key: rest.pop(key) for key in every if key in rest}
    method = MethodSpec.recognised(pruner, options) if pruner else None
    return {
        "task": {"name": Images.name, **{f.name: rest.pop(f.name) for f in fields(Images) if f.name in rest}},
        "optimizer": {"name": name, **{key: value for key, value in given.items() if key in takes}},
        "method": method and {"name": method.name, "options": method.options},
        **rest,
    }


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with all changes that are not None, which come from command-line options.

    Errors name the option as the user types it, and code of the user's own (``model``, ``data``) is trusted, because
    the command names it.

    >>> from dirprune.lab.training.recipes import get
    >>> changed(get("digits"), lr=0.2, epochs=None, lean=True).cuda.lean
    True
    """
    given = {name: value for name, value in changes.items() if value is not None}
    for name in ("model", "data"):
        if name in given:
            trust.allow(given[name])
    try:
        return recipe.but(**given)
    except BadValue as error:
        if error.name not in given:
            raise
        value = f"{error.value:g}" if isinstance(error.value, float) else error.value
        raise ValueError(f"--{error.name.replace('_', '-')} {value} cannot be used; {error.remedy}") from error


def differing(one: Recipe, other: Recipe, free: Container[str] = ()) -> list[str]:
    """Return the names of the options in which two recipes differ, except those in ``free``.

    Options that only one of their optimizers has do not count: the optimizer's name tells them.

    >>> from dirprune.lab.training.recipes import get
    >>> differing(get("digits"), get("digits").but(seed=3, lr=0.2), free={"seed"})
    ['lr']
    """
    ours, theirs = one.values(), other.values()
    return [name for name in ours if name not in free and name in theirs and ours[name] != theirs[name]]
