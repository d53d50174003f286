"""A target of zeros, met exactly: how many weights are zero after which step, and the threshold that makes them so.

Three phases. Until ``prune_from`` the weights train as without pruning. Then the threshold rises so that the share of
weights that are left falls geometrically, fast first::

    1 − s(n) = (1 − S)^(1 − (1 − u)²),    u = the part of this phase that has passed,    S = the target.

At ``prune_until`` the target is reached, and at ``fix_at``, which is the same unless given, the zeros are fixed: the
accumulator becomes the weights, and those that are left train on without a threshold, so that nothing pulls them
towards zero any more. In between, weights still come and go.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dirprune._support.rates import number
from dirprune.optim.selection import Member

EVERY = 20
"""Steps between two looks at the weights; in between, the threshold grows evenly."""
LEAST = 0.1
"""No tensor is left with fewer of its weights than this part of the average, nor with none: it would be lost for good,
and with it all that runs through it."""
RAMPS = ("geometric", "cubic")
MEASURES = ("weights", "cost")


@dataclass
class Plan:
    """The options of a target, and how far it has been followed."""

    target: float
    steps: int | None = None
    of: str = "weights"
    prune_from: float = 0.1
    prune_until: float = 0.7
    ramp: str = "geometric"
    fix_at: float | None = None
    adapts: bool = False
    """Whether a soft threshold becomes hard halfway, if the weights have moved too little for it."""
    step: int = 0
    threshold: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    """τ, of weights whose scale is 1."""
    growth: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    """What each step adds to it until the next look at the weights."""
    start: Tensor | None = None
    """Where a sample of the weights was before the first step, until it has told how far they have moved."""

    def __post_init__(self) -> None:
        if not (isinstance(self.target, (int, float)) and 0 < self.target < 1):
            raise ValueError(f"target={self.target!r} is not a share; give a number between 0 and 1, e.g. target=0.95")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise ValueError(f"steps={self.steps!r} is not a number of optimizer steps; give e.g. steps=10_000")
        if not isinstance(self.of, str) or self.of not in MEASURES:
            raise ValueError(f"of={self.of!r} is not known; the target is a share of {' or of '.join(MEASURES)}")
        if not isinstance(self.ramp, str) or self.ramp not in RAMPS:
            raise ValueError(f"ramp={self.ramp!r} is not known; take one of {', '.join(RAMPS)}")
        part = self.prune_from, self.prune_until
        if not all(isinstance(end, (int, float)) for end in part) or not 0 <= part[0] < part[1] <= 1:
            raise ValueError(
                f"prune_from={self.prune_from} and prune_until={self.prune_until} are no part of the run; give "
                "0 ≤ prune_from < prune_until ≤ 1, e.g. 0.1 and 0.7"
            )
        if self.fix_at is not None and not (
            isinstance(self.fix_at, (int, float)) and self.prune_until <= self.fix_at <= 1
        ):
            raise ValueError(
                f"fix_at={self.fix_at} is not between prune_until={self.prune_until} and 1; the zeros are fixed when "
                "their number is reached, or later"
            )

    @property
    def length(self) -> int:
        """The number of steps of the run."""
        if self.steps is None:
            raise ValueError(
                f"target={self.target} needs the number of optimizer steps of the run; give steps=…, or call "
                "optimizer.plan(steps=…) before the first step"
            )
        return self.steps

    @property
    def first(self) -> int:
        """The last step without a threshold."""
        return int(self.prune_from * self.length)

    @property
    def reached(self) -> int:
        """The step by which the target is reached."""
        return max(1, round(self.prune_until * self.length))

    @property
    def last(self) -> int:
        """The step after which the zeros are fixed."""
        return self.reached if self.fix_at is None else max(1, round(self.fix_at * self.length))

    @property
    def is_fixed(self) -> bool:
        """Whether the zeros are fixed."""
        return self.steps is not None and self.step >= self.last

    @property
    def looks(self) -> bool:
        """Whether the next step looks at the weights before it is taken."""
        return self.first <= self.step < self.last - 1 and (self.step - self.first) % EVERY == 0

    @property
    def is_halfway(self) -> bool:
        """Whether the zeros of the target have come by half of their phase, at a look at the weights."""
        return self.looks and 0 <= 2 * self.step - self.first - self.reached < 2 * EVERY

    @property
    def horizon(self) -> int:
        """How many steps a look serves."""
        return min(EVERY, self.last - 1 - self.step)

    def share(self, n: int) -> float:
        """Return the planned share of zeros after step n."""
        passed = min(max((n - self.first) / (self.reached - self.first), 0.0), 1.0)
        if self.ramp == "cubic":
            return self.target * (1 - (1 - passed) ** 3)
        left: float = (1 - self.target) ** (1 - (1 - passed) ** 2)
        return 1 - left

    def aim(self, threshold: Tensor) -> None:
        """Reach this threshold at the end of the horizon; it never falls."""
        gap = threshold.to(self.threshold) - self.threshold
        self.growth = gap.clamp(min=0).nan_to_num(nan=0.0, posinf=0.0) / self.horizon

    def advance(self) -> bool:
        """Count a step; return whether the threshold has grown."""
        self.step += 1
        if not self.first < self.step < self.last:
            return False
        self.threshold = self.threshold + self.growth
        return True

    def goal(self, members: Sequence[Member]) -> float:
        """Return what the zeros have to cost in the end: their number, or the share of the cost."""
        total = sum(m.total for m in members)
        return round(self.target * total) if self.of == "weights" else self.target * total

    def least(self, members: Sequence[Member]) -> list[int]:
        """Return how many weights each tensor keeps at least."""
        return [min(m.p.numel(), math.ceil(LEAST * (1 - self.target) * m.p.numel())) for m in members]

    def check(self, members: Sequence[Member]) -> None:
        """Raise if the members cannot give the zeros that are asked for."""
        if not any(m.total for m in members):
            raise ValueError(
                f"target={self.target}, and there is no weight to prune: every group has c=0, or its weights need "
                "no gradient; leave some group without c, e.g. with prunable_groups(model)"
            )
        least = self.least(members)
        if sum((m.p.numel() - n) * m.cost for m, n in zip(members, least, strict=True)) < self.goal(members):
            raise ValueError(
                f"target={self.target} cannot be met: each of the {len(members)} tensors keeps a weight, "
                f"{sum(least)} of {sum(m.p.numel() for m in members)} in all; give a lower target"
            )

    def place(self, device: torch.device) -> None:
        """Keep the threshold on this device, so that no step waits for it."""
        self.threshold, self.growth = self.threshold.to(device), self.growth.to(device)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Plan:
        """Return a saved plan; a ValueError names what is wrong with it."""
        saved = {name: value for name, value in saved.items() if name != "zeros"}  # those of the weights count
        unknown = saved.keys() ^ {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"the plan of state_dict has not the entries of a plan: {', '.join(map(str, unknown))}")
        plan = cls(**saved)
        for name in ("threshold", "growth"):
            value = getattr(plan, name)
            if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.is_floating_point()):
                raise ValueError(f"the plan of state_dict has a {type(value).__name__} as {name}; give a number")
            if (isinstance(value, Tensor) and value.dim()) or not 0 <= number(value) < math.inf:
                raise ValueError(f"the plan of state_dict has {name}={value!r}; give a finite number ≥ 0")
            setattr(plan, name, torch.as_tensor(value, dtype=torch.float64).detach().clone())
        if not isinstance(plan.adapts, bool):
            raise ValueError(f"the plan of state_dict has adapts={plan.adapts!r}; give True or False")
        plan.start = _decoded(plan.start)
        if not isinstance(plan.step, int) or plan.step < 0:
            raise ValueError(f"the plan of state_dict has step={plan.step!r}; give a number of steps")
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values and tensors of one element, to be saved: DCP checks the sizes of tensors."""
        scalars = {"threshold": self.threshold.clone(), "growth": self.growth.clone()}
        return {**asdict(replace(self, start=None)), **scalars, "start": _encoded(self.start)}


def _encoded(start: Tensor | None) -> str:
    return "" if start is None else b64encode(array("f", start.tolist()).tobytes()).decode("ascii")


def _decoded(text: Any) -> Tensor | None:
    values = array("f")
    try:
        values.frombytes(b64decode(text, validate=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the plan of state_dict has a start that cannot be read ({error}); give ''") from error
    return torch.tensor(values) if values else None


@dataclass(frozen=True)
class TargetProgress:
    """How far a target is reached: ``print`` it, or read its fields."""

    step: int
    steps: int
    zeros: int
    weights: int
    share: float
    """The share of zeros, in what the target is given in."""
    target: float
    of: str
    is_fixed: bool

    def __str__(self) -> str:
        state = "fixed" if self.is_fixed else "not fixed yet"
        return (
            f"step {self.step:,} of {self.steps:,}: {self.zeros:,} of {self.weights:,} weights are zero, "
            f"{self.share:.2%} of the {self.of} (target {self.target:.2%}, {state})"
        )
