"""The optimizers to train with, as parts of a recipe: each is a name with its own options, and makes the real one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dirprune import GRDA, AdamGRDA, macs, prunable_groups
from dirprune.lab.names import unknown
from dirprune.lab.ranges import BELOW_ONE, BETWEEN, FRACTION, NOT_NEGATIVE, POSITIVE, UP_TO_ONE, BadValue, check
from dirprune.lab.records.columns import plain, types

MEASURES = {"weights": "weights", "macs": "cost"}
"""What the share of a target may be measured in, and what the optimizers call it."""


@dataclass(frozen=True)
class TrainingPlan:
    """What an optimizer may have to know of the training that it is made for.

    Args:
        steps: the length of the whole training.
        example: one example of the inputs.
        captured_on: the device on which steps are captured, if they are; the learning rate then lies there.
    """

    steps: int
    example: Tensor
    captured_on: torch.device | None = None


def check_measure(of: str) -> None:
    if of not in MEASURES:
        raise BadValue("of", of, f"take {' or '.join(MEASURES)}")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as a part of a recipe.

    ``name`` is what users type, ``label`` and ``title`` what tables and figures show, ``cost`` what it needs besides
    the epochs that all have, ``decides`` the options on which the sparsity depends, and ``knob`` the one to vary, None
    if nothing is pruned. ``dense`` names the optimizer that does the same without pruning, ``targeted`` the one that
    meets a target. ``fine_tuning`` holds the options that suit trained weights.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    title: ClassVar[str]
    cost: ClassVar[str] = "nothing: it does not prune"
    decides: ClassVar[tuple[str, ...]] = ()
    knob: ClassVar[str | None] = None
    dense: ClassVar[str]
    targeted: ClassVar[str]
    fine_tuning: ClassVar[Mapping[str, Any]] = {}

    lr: float
    weight_decay: float

    @property
    def value(self) -> float | None:
        """The value of the knob."""
        return vars(self)[self.knob] if self.knob else None

    @property
    def setting(self) -> str:
        """A short description of how it prunes: "gRDA c=0.016 μ=0.7"."""
        told = {name: "unknown" if vars(self)[name] is None else vars(self)[name] for name in self.decides}
        words = [f"{'μ' if name == 'mu' else name}={value}" for name, value in told.items()]
        return " ".join([self.label, *words, *(["of macs"] if vars(self).get("of") == "macs" else [])])

    @property
    def tag(self) -> str:
        """The same for the name of a folder: "grda-c0.016-mu0.7"."""
        words = [f"{name}{vars(self)[name]:g}" for name in self.decides]
        return "-".join([self.name, *words, *(["macs"] if vars(self).get("of") == "macs" else [])])

    @property
    def effective_lr(self) -> float:
        """The rate of a long run of equal gradients."""
        return self.lr

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of a model, which is on its device, for steps that run as planned."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sgd(OptimizerSpec):
    """Dense training, the reference for all that prunes: w ← w − γ ∇f(w), with the options of torch's SGD."""

    name: ClassVar[str] = "sgd"
    label: ClassVar[str] = "SGD"
    title: ClassVar[str] = "SGD (dense)"
    dense: ClassVar[str] = "sgd"
    targeted: ClassVar[str] = "grda-target"

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check(vars(self), lr=POSITIVE, momentum=BELOW_ONE, weight_decay=NOT_NEGATIVE)
        if self.nesterov and not self.momentum:
            raise BadValue("nesterov", self.nesterov, "it needs a momentum, e.g. 0.9")

    @property
    def effective_lr(self) -> float:
        return self.lr / (1 - self.momentum)

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        captured_on = plan.captured_on if plan else None
        lr = self.lr if captured_on is None else torch.tensor(self.lr, device=captured_on)
        return SGD(model.parameters(), lr=lr, fused=True if captured_on else None, **self._inertia())

    def _inertia(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class Grda(Sgd):
    """gRDA, which prunes from the first step on; ``exempt`` is what it keeps dense (`prunable_groups`)."""

    name: ClassVar[str] = "grda"
    label: ClassVar[str] = "gRDA"
    title: ClassVar[str] = "gRDA"
    cost: ClassVar[str] = "one more copy of the weights, the accumulator"
    decides: ClassVar[tuple[str, ...]] = ("c", "mu")
    knob: ClassVar[str | None] = "c"

    c: float = 5e-4
    mu: float = 0.51
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(vars(self), c=NOT_NEGATIVE, mu=UP_TO_ONE)
        object.__setattr__(self, "exempt", tuple(self.exempt))  # a list, in a file of the user's own

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        return _thresholding(self, model, self.c, self.mu, plan)


@dataclass(frozen=True)
class Rda(Sgd):
    """ℓ₁-RDA: regularised dual averaging, which is gRDA at μ = 1 with c = λ/√γ.

        vₙ = vₙ₋₁ − γ ∇f(wₙ₋₁),   wₙ = sign(vₙ) max(|vₙ| − nγλ, 0)

    The threshold grows in proportion to time, as the pull of an ℓ₁ penalty of weight λ adds up; that of gRDA with μ < 1
    grows ever more slowly. γ is the effective rate. When a schedule lowers it, the threshold grows as gRDA's does.

    Reference: Xiao, "Dual averaging methods for regularized stochastic learning and online optimization", JMLR 2010.
    """

    name: ClassVar[str] = "rda"
    label: ClassVar[str] = "rda"
    title: ClassVar[str] = "RDA (ℓ₁)"
    cost: ClassVar[str] = Grda.cost
    decides: ClassVar[tuple[str, ...]] = ("lam",)
    knob: ClassVar[str | None] = "lam"

    lam: float = 1e-5
    exempt: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check(vars(self), lam=NOT_NEGATIVE)
        object.__setattr__(self, "exempt", tuple(self.exempt))

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        return _thresholding(self, model, self.lam / math.sqrt(self.effective_lr), 1.0, plan)


def _thresholding(spec: Grda | Rda, model: nn.Module, c: float, mu: float, plan: TrainingPlan | None) -> GRDA:
    groups = prunable_groups(model, c, spec.exempt) if spec.exempt else model.parameters()
    captured = plan is not None and plan.captured_on is not None
    return GRDA(groups, lr=spec.lr, c=c, mu=mu, capturable=captured, **spec._inertia())


@dataclass(frozen=True)
class TargetGrda(Sgd):
    """gRDA that ends with exactly this share of zeros, ``of`` the weights that are not exempt or of their macs."""

    name: ClassVar[str] = "grda-target"
    label: ClassVar[str] = "gRDA"
    title: ClassVar[str] = "gRDA target"
    cost: ClassVar[str] = f"{Grda.cost}, and a look at all weights every 20 steps"
    decides: ClassVar[tuple[str, ...]] = ("sparsity",)
    knob: ClassVar[str | None] = "sparsity"

    sparsity: float = 0.9
    of: str = "weights"
    shape: str = "auto"
    prune_from: float = 0.1
    prune_until: float = 0.7
    fix_at: float | None = None
    ramp: str = "geometric"
    rescale: bool = False
    decay: str = "weights"
    exempt: tuple[str, ...] = ("bias", "norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_measure(self.of)
        check(vars(self), sparsity=BETWEEN, prune_from=FRACTION, prune_until=UP_TO_ONE, fix_at=UP_TO_ONE)
        object.__setattr__(self, "exempt", tuple(self.exempt))

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        groups = _to_prune(model, self.exempt, self.of, plan)
        how = ("prune_from", "prune_until", "fix_at", "ramp", "shape", "rescale", "decay")
        options: Any = {name: vars(self)[name] for name in how} | _following(plan) | self._inertia()
        return GRDA(groups, lr=self.lr, target=self.sparsity, of=MEASURES[self.of], **options)


@dataclass(frozen=True)
class MacsGrda(TargetGrda):
    """gRDA at a target of the multiplications, which a comparison has beside that of the weights."""

    name: ClassVar[str] = "grda-macs"
    title: ClassVar[str] = "gRDA MACs target"

    of: str = "macs"


@dataclass(frozen=True)
class St3(TargetGrda):
    """ST-3 (Vanderschueren and De Vleeschouwer, WACV 2023), which gRDA is with these options."""

    name: ClassVar[str] = "st3"
    label: ClassVar[str] = "ST-3"
    title: ClassVar[str] = "ST-3"

    shape: str = "soft"
    prune_from: float = 0.05
    prune_until: float = 0.5
    fix_at: float | None = 1.0
    ramp: str = "cubic"
    rescale: bool = True
    decay: str = "accumulator"


def _following(plan: TrainingPlan | None) -> dict[str, Any]:
    """Return the options that an optimizer with a target takes from the plan of the training."""
    return {"steps": plan.steps, "capturable": plan.captured_on is not None} if plan else {}


def _to_prune(model: nn.Module, exempt: tuple[str, ...], of: str, plan: TrainingPlan | None) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with a target, with what each weight costs if the target counts that."""
    if of == "weights":
        return prunable_groups(model, exempt=exempt)
    if plan is None:
        raise ValueError(f"of={of!r} needs an example of the inputs; give a plan")
    return prunable_groups(model, exempt=exempt, cost=macs(model, plan.example))


@dataclass(frozen=True)
class Adamw(OptimizerSpec):
    """Dense training with torch's AdamW; gradients are clipped to norm ``clip``, unless it is 0."""

    name: ClassVar[str] = "adamw"
    label: ClassVar[str] = "AdamW"
    title: ClassVar[str] = "AdamW (dense)"
    dense: ClassVar[str] = "adamw"
    targeted: ClassVar[str] = "adamgrda"

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        check(vars(self), lr=POSITIVE, beta1=BELOW_ONE, beta2=BELOW_ONE, weight_decay=NOT_NEGATIVE, clip=NOT_NEGATIVE)

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        captured_on = plan.captured_on if plan else None
        on_device = captured_on is not None
        lr = torch.tensor(self.lr, device=captured_on) if on_device else self.lr
        fused = next(model.parameters()).is_cuda
        return self._clipped(AdamW(model.parameters(), lr=lr, fused=fused, capturable=on_device, **self._moments()))

    def _moments(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "weight_decay": self.weight_decay}

    def _clipped(self, made: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.clip:
            parameters = [p for group in made.param_groups for p in group["params"]]
            made.register_step_pre_hook(lambda *_: _clip(parameters, self.clip))
        return made


def _clip(parameters: list[Tensor], norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters, norm)


@dataclass(frozen=True)
class TargetAdamGrda(Adamw):
    """AdamGRDA that ends with exactly this share of zeros, ``of`` the weights that are not exempt or of their macs."""

    name: ClassVar[str] = "adamgrda"
    label: ClassVar[str] = "AdamGRDA"
    title: ClassVar[str] = "AdamGRDA"
    cost: ClassVar[str] = TargetGrda.cost
    decides: ClassVar[tuple[str, ...]] = ("sparsity",)
    knob: ClassVar[str | None] = "sparsity"
    fine_tuning: ClassVar[Mapping[str, Any]] = {"power": 0.5, "shape": "hard", "prune_until": 0.5, "fix_at": 0.55}

    sparsity: float = 0.9
    of: str = "weights"
    power: float = 0.0
    shape: str = "auto"
    prune_until: float = 0.25
    fix_at: float = 0.8
    exempt: tuple[str, ...] = ("bias", "norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_measure(self.of)
        check(vars(self), sparsity=BETWEEN, power=FRACTION, prune_until=UP_TO_ONE, fix_at=UP_TO_ONE)
        object.__setattr__(self, "exempt", tuple(self.exempt))

    def make(self, model: nn.Module, plan: TrainingPlan | None = None) -> torch.optim.Optimizer:
        phases = {
            "target": self.sparsity,
            "of": MEASURES[self.of],
            "prune_until": self.prune_until,
            "fix_at": self.fix_at,
        }
        options: Any = {**phases, **_following(plan), "power": self.power, "shape": self.shape}
        made = AdamGRDA(_to_prune(model, self.exempt, self.of, plan), lr=self.lr, **options, **self._moments())
        return self._clipped(made)


OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    kind.name: kind for kind in (Grda, TargetGrda, MacsGrda, Sgd, Rda, St3, TargetAdamGrda, Adamw)
}


def optimizer(name: str, **options: Any) -> OptimizerSpec:
    """Return the optimizer called ``name`` with these options; raise if it does not take one of them.

    >>> optimizer("grda", lr=0.2, c=1e-3).setting
    'gRDA c=0.001 μ=0.51'
    """
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    takes = [field.name for field in fields(OPTIMIZERS[name])]
    for option, value in options.items():
        if option not in takes:
            raise BadValue(option, value, f"{name} takes {', '.join(takes)}")
    return OPTIMIZERS[name](**options)


def as_known(name: str, **options: Any) -> OptimizerSpec:
    """Return the optimizer that a file describes; an option that decides the sparsity and is not there stays unknown.

    >>> as_known("grda", c=1e-3).setting
    'gRDA c=0.001 μ=unknown'
    """
    kind: Any = OPTIMIZERS.get(name, Sgd)
    hints = types(kind)
    given = {key: plain(key, hints[key], value) if key in hints else value for key, value in options.items()}
    return optimizer(name, **(dict.fromkeys(kind.decides) | given))
