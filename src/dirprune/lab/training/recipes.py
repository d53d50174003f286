"""Recipes: everything that decides a training run, as plain values. There is one function per recipe.

A recipe is data. `dirprune.lab.training.experiment` turns it into a model, an optimizer and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dirprune.lab import methods, trust
from dirprune.lab.data.loader import STATISTICS
from dirprune.lab.names import unknown
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.schedules import Schedule

OPTIMIZERS = ("grda", "sgd")
PLAIN = Execution(channels_last=True)  # the fastest format for convolutions on a CPU, too
FAST = Execution(precision="bfloat16", channels_last=True, compile=True, capture=True, lean=True)

MODERN: dict[str, Any] = {
    "mu": 0.8,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "exempt": ("bias", "norm"),
    "schedule": Schedule("cosine", warmup=1),
}
"""Training beyond the paper's recipe: momentum, weight decay, and a cosine after an epoch of warm-up."""

FREE_TO_CHANGE = {"about", "keep", "published", "cpu", "cuda"}
"""Fields that may change between sessions of a run: how it is executed, and fields that do not affect the results."""

Option = float | str
"""The value of a method's option: a type that survives a round trip through JSON."""


class BadValue(ValueError):
    """A recipe field has a value that is not allowed."""

    def __init__(self, name: str, value: Any, remedy: str) -> None:
        super().__init__(f"{name}={value!r} cannot be used; {remedy}")
        self.name, self.value, self.remedy = name, value, remedy


@dataclass(frozen=True)
class Recipe:
    """A training run, except for where it runs and where its files go.

    ``published`` lists the (c, μ) of the paper's runs. ``exempt`` is what gRDA keeps dense (`prunable_groups`).
    ``method`` names one of `dirprune.lab.methods`, or is "" for the plain optimizer; ``options`` are its arguments.
    ``statistics`` names the normalisation; if empty, the data set's own is used. ``keep`` lists the epochs whose
    checkpoints are kept. ``cpu`` and ``cuda`` say how steps run on these devices.
    """

    name: str
    about: str
    data: str
    model: str
    epochs: int
    batch_size: int = 128
    optimizer: str = "grda"
    lr: float = 0.1
    c: float = 5e-4
    mu: float = 0.51
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    exempt: tuple[str, ...] = ()
    method: str = ""
    options: tuple[tuple[str, Option], ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    statistics: str = ""
    augment: bool = True
    validation: float = 0.0
    seed: int = 0
    keep: tuple[int, ...] = ()
    published: tuple[tuple[float, float], ...] = ()
    cpu: Execution = PLAIN
    cuda: Execution = FAST

    def __post_init__(self) -> None:
        meant_for = methods.get(self.method).trains_with if self.method else self.optimizer
        checks = [
            (self.optimizer in OPTIMIZERS, "optimizer", f"take one of {', '.join(OPTIMIZERS)}"),
            (self.optimizer == meant_for, "optimizer", f"{self.method} trains with {meant_for}"),
            (bool(self.method) or not self.options, "options", "name the method that takes them"),
            (self.epochs >= 1, "epochs", "train for at least one epoch"),
            (self.batch_size >= 1, "batch_size", "a batch needs at least one example"),
            (0 < self.lr < float("inf"), "lr", "give a positive number, e.g. 0.1"),
            (0 <= self.c < float("inf"), "c", "give a number ≥ 0, e.g. 5e-4"),
            (0 < self.mu < float("inf"), "mu", "give a number > 0, typically between 0.5 and 1"),
            (0 <= self.momentum < 1, "momentum", "give a number in [0, 1)"),
            (not self.nesterov or self.momentum > 0, "nesterov", "it needs a momentum, e.g. 0.9"),
            (0 <= self.weight_decay < float("inf"), "weight_decay", "give a number ≥ 0, e.g. 5e-4"),
            (0 <= self.validation < 1, "validation", "give the fraction to hold out, in [0, 1)"),
            (0 <= self.seed < 2**63, "seed", "give a number from 0 to 2^63 − 1"),
            (all(epoch >= 0 for epoch in self.keep), "keep", "epochs are numbered from 0, the initial weights"),
            (self.statistics in ("", *STATISTICS), "statistics", f"take one of {', '.join(STATISTICS)}, or none"),
        ]
        for good, name, remedy in checks:
            if not good:
                raise BadValue(name, getattr(self, name), remedy)

    def execution(self, device_type: str) -> Execution:
        """Return how steps run on this kind of device."""
        return self.cuda if device_type == "cuda" else self.cpu

    @property
    def pruner(self) -> str:
        """The name of what prunes: the method, or the optimizer if there is none."""
        return self.method or self.optimizer

    @property
    def setting(self) -> str:
        """A short description of how the run is pruned.

        >>> get("digits").setting, replace(get("digits"), method="rda", options=(("lam", 1e-3),)).setting
        ('gRDA c=0.016 μ=0.7', 'rda lam=0.001')
        """
        if self.method:
            return " ".join([self.method, *(f"{name}={value}" for name, value in self.options)])
        return "SGD" if self.optimizer == "sgd" else f"gRDA c={self.c} μ={self.mu}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Recipe:
        """Return the recipe with these values from `to_dict` or JSON. Fields missing from old files get defaults."""
        known = {f.name for f in fields(Recipe)}
        if strange := [f"{name}={value!r}" for name, value in values.items() if name not in known]:
            raise ValueError(
                f"{', '.join(strange)}: this version of dirprune has no such recipe field; remove it, or use the "
                "version that wrote it"
            )
        made = dict(values)
        made["schedule"] = Schedule(**{**values["schedule"], "after": tuple(values["schedule"]["after"])})
        made["cpu"], made["cuda"] = Execution(**values["cpu"]), Execution(**values["cuda"])
        made["exempt"], made["keep"] = tuple(values["exempt"]), tuple(values["keep"])
        made["options"] = tuple((name, value) for name, value in values.get("options", ()))
        made["published"] = tuple((c, mu) for c, mu in values["published"])
        return Recipe(**made)


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with all changes that are not None. Precision, compile and lean apply to both device types.

    The changes come from command-line options: errors name the option as the user types it, and a network of the
    user's own (``model``) is trusted, because the command names it.

    >>> changed(get("digits"), lr=0.2, epochs=None, lean=True).cuda.lean
    True
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if execution := {name: given.pop(name) for name in ("precision", "compile", "lean") if name in given}:
        given["cpu"], given["cuda"] = (replace(each, **execution) for each in (recipe.cpu, recipe.cuda))
    if "model" in given:
        trust.allow(given["model"])
    try:
        return replace(recipe, **given)
    except BadValue as error:
        if error.name not in given:
            raise
        value = f"{error.value:g}" if isinstance(error.value, float) else error.value
        raise ValueError(f"--{error.name.replace('_', '-')} {value} cannot be used; {error.remedy}") from error


def differing(one: Recipe, other: Recipe, free: Container[str]) -> list[str]:
    """Return the fields in which two recipes differ, except those in ``free``.

    >>> differing(get("digits"), replace(get("digits"), seed=3, lr=0.2), free={"seed"})
    ['lr']
    """
    names = (field.name for field in fields(Recipe))
    return [name for name in names if name not in free and getattr(one, name) != getattr(other, name)]


def departures(recipe: Recipe, free: Container[str]) -> str:
    """Return where a recipe departs from the registered one of its name, except in ``free`` fields; "" if nowhere.

    >>> departures(replace(get("digits"), epochs=9, seed=3), free={"seed"})
    'epochs=9'
    """
    names = differing(recipe, get(recipe.name), free)
    return " ".join(f"{name}={getattr(recipe, name)}" for name in names)


_RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a recipe under its own ``name``."""
    _RECIPES[function().name] = function
    return function


def names() -> list[str]:
    return list(_RECIPES)


def get(name: str) -> Recipe:
    """Return the recipe called ``name``; if there is none, raise an error that lists the known names."""
    if name in _RECIPES:
        return _RECIPES[name]()
    raise unknown("recipe", name, _RECIPES)


@recipe
def digits() -> Recipe:
    return Recipe(
        name="digits",
        about="a small conv net on scikit-learn's embedded digits: seconds on a CPU, no download",
        data="digits",
        model="small",
        epochs=60,
        batch_size=32,
        c=0.016,
        mu=0.7,
        schedule=Schedule("constant-linear-constant"),
        cpu=Execution(threads=1),  # as fast for such small tensors, and results do not depend on the number of cores
        cuda=Execution(),
    )


@recipe
def vgg16_cifar10() -> Recipe:
    return Recipe(
        name="vgg16-cifar10",
        about="the paper's VGG16 on CIFAR-10",
        data="cifar10",
        model="vgg16",
        epochs=600,
        c=5e-4,
        mu=0.6,
        schedule=Schedule("constant-linear-constant"),
        statistics="imagenet",
        published=((5e-4, 0.4), (5e-4, 0.51), (5e-4, 0.6), (5e-4, 0.7)),
    )


@recipe
def wrn28x10_cifar10() -> Recipe:
    return Recipe(
        name="wrn28x10-cifar10",
        about="the paper's WRN28x10 on CIFAR-10",
        data="cifar10",
        model="wrn28x10",
        epochs=200,
        c=1e-3,
        mu=0.55,
        schedule=Schedule("constant-linear-constant"),
        statistics="cifar",
        published=((1e-3, 0.501), (1e-3, 0.55), (1e-3, 0.6), (1e-3, 0.65)),
    )


@recipe
def wrn28x10_cifar100() -> Recipe:
    return replace(
        wrn28x10_cifar10(),
        name="wrn28x10-cifar100",
        about="the paper's WRN28x10 on CIFAR-100",
        data="cifar100",
    )


@recipe
def resnet50_imagenet() -> Recipe:
    return Recipe(
        name="resnet50-imagenet",
        about="the paper's ResNet50 on ImageNet at a constant learning rate",
        data="imagenet",
        model="resnet50",
        epochs=147,
        batch_size=256,
        c=5e-3,
        mu=0.55,
        statistics="imagenet",
        published=((5e-3, 0.501), (5e-3, 0.51), (5e-3, 0.55), (1e-2, 0.4)),
    )


@recipe
def resnet50_imagenet_drop140() -> Recipe:
    return replace(
        resnet50_imagenet(),
        name="resnet50-imagenet-drop140",
        about="the same with the learning rate ÷10 after epoch 140",
        epochs=153,
        schedule=Schedule("drop", after=(140,)),
        published=(*((5e-3, mu) for mu in (0.501, 0.51, 0.55, 0.6, 0.65, 0.7)), (1e-2, 0.4)),
    )


@recipe
def resnet50_imagenet_every30() -> Recipe:
    return replace(
        resnet50_imagenet(),
        name="resnet50-imagenet-every30",
        about="the same with the learning rate ÷10 after every 30 epochs",
        epochs=120,
        c=4e-3,
        mu=0.65,
        schedule=Schedule("drop", every=30),
        published=(
            *((2e-3, 0.75), (3e-3, 0.7), (3e-3, 0.75), (4e-3, 0.65), (4e-3, 0.7), (4e-3, 0.75)),
            *((5e-3, 0.65), (5e-3, 0.7), (5e-3, 0.75), (5e-3, 0.8), (5e-3, 0.85)),
        ),
    )


@recipe
def resnet18_cifar10() -> Recipe:
    return Recipe(
        name="resnet18-cifar10",
        about="ResNet-18 on CIFAR-10 the modern way: momentum, weight decay, cosine",
        data="cifar10",
        model="resnet18",
        epochs=60,
        c=8e-5,
        statistics="cifar",
        **MODERN,
    )


@recipe
def wrn28x10_cifar10_modern() -> Recipe:
    return replace(
        resnet18_cifar10(),
        name="wrn28x10-cifar10-modern",
        about="WRN28x10 on CIFAR-10 the modern way, at full length",
        model="wrn28x10",
        epochs=200,
    )


@recipe
def vgg16_cifar10_modern() -> Recipe:
    return replace(
        resnet18_cifar10(),
        name="vgg16-cifar10-modern",
        about="VGG16 on CIFAR-10 the modern way, at a rate that a network without BatchNorm tolerates",
        model="vgg16",
        lr=0.03,
        c=1.2e-4,
    )


@recipe
def resnet18_cifar100() -> Recipe:
    return replace(
        resnet18_cifar10(),
        name="resnet18-cifar100",
        about="ResNet-18 on CIFAR-100 the modern way",
        data="cifar100",
    )


@recipe
def wrn28x10_cifar100_modern() -> Recipe:
    return replace(
        wrn28x10_cifar10_modern(),
        name="wrn28x10-cifar100-modern",
        about="WRN28x10 on CIFAR-100 the modern way, at full length",
        data="cifar100",
    )


@recipe
def vgg16_cifar100_modern() -> Recipe:
    return replace(
        vgg16_cifar10_modern(),
        name="vgg16-cifar100-modern",
        about="VGG16 on CIFAR-100 the modern way",
        data="cifar100",
    )


@recipe
def wrn10x1_cifar10_short() -> Recipe:
    return replace(
        wrn28x10_cifar10(),
        name="wrn10x1-cifar10-short",
        about="a thin WRN on CIFAR-10 for 5 epochs: minutes on a CPU, to try things out",
        model="wrn10x1",
        epochs=5,
        c=5e-3,
        published=(),
    )


@recipe
def wrn10x1_cifar100_short() -> Recipe:
    return replace(
        wrn10x1_cifar10_short(),
        name="wrn10x1-cifar100-short",
        about="a thin WRN on CIFAR-100 for 5 epochs: minutes on a CPU, to try things out",
        data="cifar100",
    )


@recipe
def digits_modern() -> Recipe:
    return replace(
        digits(),
        name="digits-modern",
        about="the digits network the modern way: momentum, weight decay, cosine",
        lr=0.05,
        c=2e-3,
        **MODERN,
    )


@recipe
def digits_short() -> Recipe:
    return replace(
        digits(), name="digits-short", about="the digits recipe for 5 epochs: a second on a CPU", epochs=5, c=0.02
    )
