"""The methods that gRDA is compared with, for one training loop; one file per method.

An optimizer that prunes by itself is no method: see `dirprune.lab.training.optimizers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dirprune.lab.methods.acdc import Acdc
from dirprune.lab.methods.amc import Amc
from dirprune.lab.methods.ham import Ham
from dirprune.lab.methods.linbreg import LinBreg
from dirprune.lab.methods.magnitude import Magnitude
from dirprune.lab.methods.method import Method
from dirprune.lab.methods.narrow import Narrow
from dirprune.lab.methods.pat import Pat
from dirprune.lab.methods.random_mask import RandomMask
from dirprune.lab.methods.rigl import RigL
from dirprune.lab.methods.soft_threshold import Str
from dirprune.lab.methods.variational_dropout import VariationalDropout
from dirprune.lab.names import unknown
from dirprune.lab.ranges import BadValue

__all__ = [
    "METHODS",
    "Acdc",
    "Amc",
    "Ham",
    "LinBreg",
    "Magnitude",
    "Method",
    "MethodSpec",
    "Narrow",
    "Pat",
    "RandomMask",
    "RigL",
    "Str",
    "Variant",
    "VariationalDropout",
]

Option = float | str
"""The value of a method's option: a type that survives a round trip through JSON."""


@dataclass(frozen=True)
class Variant:
    """A method as users know it: its class, its title in figures, what it needs besides the epochs that all have."""

    kind: type[Method]
    title: str
    cost: str
    fixed: Mapping[str, Option] = field(default_factory=dict)
    """The options that make it this variant."""
    is_control: bool = False
    """Whether it only shows what a method of the same density has to beat."""

    @property
    def knob(self) -> str | None:
        return self.kind.knob


METHODS: dict[str, Variant] = {
    "magnitude": Variant(Magnitude, "magnitude", "sorting each layer's weights, every 100 steps or more often"),
    "magnitude-global": Variant(
        Magnitude, "magnitude, global", "sorting all weights, every 100 steps or more often", {"allocation": "global"}
    ),
    "magnitude-scored": Variant(
        Magnitude,
        "magnitude, scored",
        "sorting all weights, every 100 steps or more often; for optimizers of Adam's kind",
        {"allocation": "global", "score": "scaled"},
    ),
    "magnitude-one-shot": Variant(
        Magnitude,
        "magnitude, one-shot",
        "nothing: it trains densely for the first half of the epochs, prunes once and fine-tunes for the second half",
        {"allocation": "global", "start": 0.5, "end": 0.5},
    ),
    "variational-dropout": Variant(
        VariationalDropout, "variational dropout", "twice the parameters, and a second product per layer"
    ),
    "rigl": Variant(
        RigL,
        "RigL",
        "sorting each layer's weights twice, every 100 steps or more often; its first weights are divided by √density "
        "in networks without normalisation",
    ),
    "amc": Variant(
        Amc,
        "AMC",
        "4 searches of 100 evaluations each: it trains densely for the first half of the epochs, prunes in four stages "
        "until three quarters of them and fine-tunes for the rest",
    ),
    "str": Variant(Str, "STR", "one more parameter per layer, and a threshold in every forward pass"),
    "pat": Variant(Pat, "PAT", "one more copy of the weights, and sorting all of them in every step until 75%"),
    "acdc": Variant(Acdc, "AC/DC", "sorting all weights eight times"),
    "ham": Variant(Ham, "HAM on AC/DC", "one more pass over the weights in every step, and AC/DC's sorting"),
    "linbreg": Variant(LinBreg, "LinBreg", "one more copy of the weights; it starts with 5% of them"),
    "random": Variant(
        RandomMask, "random mask, ERK", "nothing: its mask, of ERK densities, never changes", is_control=True
    ),
    "shuffled": Variant(
        RandomMask, "shuffled mask", "the run whose mask it shuffles within each layer", is_control=True
    ),
    "narrow": Variant(
        Narrow, "small dense", "nothing: it is a dense network with as many weights as a sparse one", is_control=True
    ),
}


@dataclass(frozen=True)
class MethodSpec:
    """A method as a part of a recipe: its name, and its own options.

    >>> MethodSpec.of("rigl", sparsity=0.9).setting
    'rigl sparsity=0.9'
    """

    name: str
    options: tuple[tuple[str, Option], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise unknown("method", self.name, METHODS)
        ordered = sorted(dict(self.options).items(), key=lambda option: (option[0] != self.knob, option[0]))
        object.__setattr__(self, "options", tuple(ordered))
        self.make(seed=0, reward=lambda model: 0.0)  # the class checks its options

    @staticmethod
    def of(name: str, **options: Option) -> MethodSpec:
        return MethodSpec(name, tuple(options.items()))

    @staticmethod
    def recognised(name: str, options: Mapping[str, Option]) -> MethodSpec:
        """Return the method that a file describes by all options of its class, from before variants had names."""
        alike = {
            each: variant.fixed
            for each, variant in METHODS.items()
            if variant.kind.name == name and variant.fixed.items() <= options.items()
        }
        chosen = max(alike, key=lambda each: len(alike[each]), default=name)
        rest = {key: value for key, value in options.items() if key not in alike.get(chosen, {})}
        return MethodSpec.of(chosen, **rest)

    @property
    def variant(self) -> Variant:
        return METHODS[self.name]

    @property
    def label(self) -> str:
        """The name, with the options besides the knob, which tell it from the usual method of that name."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options if name != self.knob)])

    @property
    def title(self) -> str:
        return self.variant.title

    @property
    def cost(self) -> str:
        return self.variant.cost

    @property
    def knob(self) -> str | None:
        return self.variant.knob

    @property
    def value(self) -> float | None:
        """The value of the knob, None if it has its default."""
        value = dict(self.options).get(self.knob or "")
        return None if value is None else float(value)

    @property
    def setting(self) -> str:
        """A short description of how the network is pruned."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options)])

    @property
    def tag(self) -> str:
        """The same for the name of a folder."""
        return "-".join([self.name, *(f"{name}{value}" for name, value in self.options)])

    def make(self, *, seed: int, reward: Callable[[nn.Module], float]) -> Method:
        """Return the method, not yet attached.

        Args:
            seed: for methods that use random numbers.
            reward: a function that scores a model, higher is better, for methods that search.

        Raises:
            BadValue: the method does not take these options, or lacks a required one.
        """
        kind = self.variant.kind
        known = inspect.signature(kind).parameters
        given: dict[str, Any] = {"seed": seed, "reward": reward}
        options = {name: value for name, value in given.items() if name in known}
        options |= self.variant.fixed
        options |= dict(self.options)
        missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
        if missing or not options.keys() <= known.keys():
            takes = ", ".join(name for name in known if name != "reward")
            raise BadValue("options", dict(self.options), f"{self.name} takes {takes}")
        return kind(**options)
