"""What optimizers that threshold an accumulator share: its state, the target, and how a step goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dirprune._support.graphs import is_capturing
from dirprune._support.rates import number, place_lr
from dirprune.optim.adoption import Written, adopt_weights
from dirprune.optim.following import Follower, progress
from dirprune.optim.guard import Guard
from dirprune.optim.options import check_options
from dirprune.optim.outlook import OUTLOOK_AFTER, warn_of_extremes
from dirprune.optim.paths import check_parameters, fused_obstacle, scalar_device
from dirprune.optim.selection import Member
from dirprune.optim.state import Loading, check_form, first_state, local, widen
from dirprune.optim.target import Plan, TargetProgress
from dirprune.optim.threshold import are_numbers, readable

# Read from every tensor at every step, with `map`: a Python loop would take longer than the update on the device.
_VERSION = attrgetter("_version")


class Thresholded(Optimizer):
    """An optimizer that trains accumulators, and whose parameters are what a threshold leaves of them.

    A subclass takes the step of a parameter group (`_step_group`). Groups with ``c = 0`` are not thresholded. The
    target, if there is one, is an option of all groups, the same `Plan` in each.
    """

    PER_ELEMENT: ClassVar[tuple[str, ...]] = ("accumulator",)
    """What the state of every parameter holds for each of its elements."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_options(defaults)
        self._launchers: dict[tuple[int, torch.device], Any] = {}
        self._versions: list[list[int]] = []
        self._taken = 0
        self._is_recording = self.is_recorded = False
        self._guard = Guard()
        self._follower = Follower()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = []
        self._taken = 0
        self._is_recording = self.is_recorded = False
        self._follower = Follower()
        self.__dict__.setdefault("_launchers", {})  # kept when a state is loaded: captured graphs read their tables
        self.__dict__.setdefault("_guard", Guard())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        With a fixed ``c`` its parameters start at threshold 0, however late they are added; with a target they join at
        the common threshold, and have to be added before the zeros are fixed.
        """
        plan = self._plan
        if plan is not None and param_group.get("c", 0.0) != 0:
            raise ValueError(
                f"c={param_group['c']} and target={plan.target} exclude each other; give one of them (in groups that "
                "stay dense, c=0)"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            check_parameters(group, self._fused_obstacle)
            if plan is not None and plan.is_fixed and group["c"]:
                raise ValueError(
                    f"the zeros of target={plan.target} were fixed after step {plan.last}, and new weights cannot join "
                    "them; add the group earlier, or with c=0"
                )
        except Exception:
            self.param_groups.pop()
            raise
        place_lr(group)

    @property
    def _plan(self) -> Plan | None:
        plan: Plan | None = self.defaults["plan"]
        return plan

    @property
    def _is_without_thresholds(self) -> bool:
        """Whether the plan of a target has all thresholds at 0 in this step, before its zeros come or after them."""
        plan = self._plan
        if plan is None or torch.compiler.is_compiling() or self._is_recording:
            return False
        return not plan.first < plan.step <= plan.last

    def plan(self, *, steps: int) -> None:
        """Say how many steps the run takes, if this was not known when the optimizer was made with a target."""
        plan = self._plan
        if plan is None:
            raise ValueError(f"steps={steps} are planned for a target, and there is none; give e.g. target=0.95")
        if plan.step and steps != plan.steps:
            raise ValueError(
                f"steps={steps} comes after {plan.step} of {plan.steps} steps; call plan before the first one"
            )
        Plan(plan.target, steps)  # checks it
        plan.steps = steps

    def progress(self) -> TargetProgress:
        """Return how far the target is reached."""
        self.skipped()
        self._follower.tell_of_stillness()
        if self._plan is None:
            raise ValueError("progress is that of a target, and there is none; for its zeros, see sparsity(model)")
        return progress(self._plan, self._members())

    def relative_threshold(self) -> float:
        """Return τ/rms(v) over all weights that are thresholded: it says how strong pruning is in any network.

        If v were Gaussian, a share erf(τ/rms(v)/√2) of the weights would be zero.
        """
        members, parts = self._members(), self._thresholded()
        if not members:
            return 0.0
        counts = [m.v.numel() for m in members]
        squares = sum(float(m.v.double().square().sum()) for m in members)
        taus = sum(float(self.state[p]["threshold"]) * n for (p, *_), n in zip(parts, counts, strict=True))
        return taus / sum(counts) / math.sqrt(squares / sum(counts)) if squares else 0.0

    @torch.no_grad()
    def c_max(self, steps: int) -> float:
        """Return the smallest ``c`` that makes every weight zero in so many steps at the present rates.

        It supposes that the accumulators stay as they are: an upper end for a search for ``c``.
        """
        largest = 0.0
        for m, (p, group, scale, _) in zip(self._members(), self._thresholded(), strict=True):
            rate, mu, state = number(group["lr"]) / (1 - group.get("momentum", 0.0)), group["mu"], self.state[p]
            tau, n = float(state["threshold"]), float(state["step"])
            height = float((m.v.abs() / (m.scale / scale)).max()) if m.v.numel() else 0.0  # q > 0 of AdamGRDA
            growth = scale * max(rate, 0.0) ** (mu + 0.5) * ((n + steps) ** mu - n**mu)
            gap = max(0.0, height - tau)
            largest = max(largest, gap / growth if growth > 0 else math.inf)
        return largest

    def skipped(self) -> int:
        """Return how many steps ``skip_nonfinite`` has skipped."""
        return self._guard.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the plan of a target as plain values, and how many steps were skipped.

        The plan tells the zeros that are reached, unless parameters are sharded: counting those needs all ranks.
        """
        state, skipped = super().state_dict(), self.skipped()
        self._follower.tell_of_stillness()
        pruned = [] if self._plan is None else [p for p, *_ in self._thresholded()]
        spread = any(hasattr(p, "placements") for p in pruned)
        told = {"zeros": None, "start": ""} if spread else {"zeros": sum(int((p == 0).sum()) for p in pruned)}
        for group in state["param_groups"]:
            if group["plan"] is not None:
                group["plan"] = {**group["plan"].to_dict(), **told}
            if group["skip_nonfinite"] or skipped:
                group["skipped"] = skipped
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state, in the precision it was saved in; it may come from another path or device.

        The mathematical options (lr, c, mu, target, …) come from the saved state. The options of execution (foreach,
        fused, capturable, skip_nonfinite) stay as they are in this optimizer. If the state does not fit, nothing
        changes.
        """
        check_form(state_dict, type(self).__name__)  # torch copies it first
        loading = Loading(self, self._scalar_device)
        # torch casts every state tensor to its parameter's dtype. These two hooks undo that. The first one runs last
        # before loading, so that it sees the state as other hooks left it. The second one runs first after loading.
        hooks = (
            self.register_load_state_dict_pre_hook(loading.check),
            self.register_load_state_dict_post_hook(loading.finish, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
            self._guard = Guard(max(group.pop("skipped", 0) for group in self.param_groups))
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter of a group, creating it from the present weights if there is none.

        The first step does this by itself. Call it earlier if the weights are about to be cast to a lower precision:
        the accumulator then keeps what the cast loses.
        """
        state: dict[str, Any] = self.state[p]
        if "accumulator" not in state:  # a wrapper may keep entries of its own there
            place_lr(group)  # again: the parameters may have been on "meta" when the group was added
            state.update(first_state(p, self._scalar_device(group, p)))
        elif p.dtype is torch.float64 and state["accumulator"].dtype is not torch.float64:  # after model.double()
            widen(state)
        return state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; a closure re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            for group in self.param_groups:
                check_options(group, wait=False)
        is_planned = not self._leaves_plan()
        if is_planned:
            self._adopt()
            if self._plan is not None:
                self._follower.raise_thresholds(self._plan, self)
        fine = self._look_at_gradients()
        if fine is not False:
            for index, group in enumerate(self.param_groups):
                self._step_group(index, group, fine)
            self._threshold_all()
        if is_planned and self._plan is not None:
            self._follower.fix_zeros(self._plan, self)
        if not torch.compiler.is_compiling():
            self._versions = [_versions(group) for group in self.param_groups]
            self._taken += 1
            if self._taken == OUTLOOK_AFTER and self._plan is None:
                warn_of_extremes(self._thresholded(), self.state)
        return loss

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step in a CUDA graph, or rehearse it, in this context: a target then takes no notice of it.

        Replays of the graph belong into `replaying`.
        """
        before, self._is_recording = self._is_recording, True
        self.is_recorded = True
        try:
            for p, group, *_ in self._thresholded() if self._plan is not None else ():
                state = self.begin(p, group)  # a graph has to know the zeros before they are fixed
                state.setdefault("pruned", torch.zeros_like(state["accumulator"], dtype=torch.bool))
            yield
        finally:
            self._is_recording = before

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay a CUDA graph of one step in this context, in which what a graph cannot do is done.

        Before the replay, weights that others have written are noticed and the thresholds of a target grow; after it,
        its zeros are fixed if it is time. Only then, once in a run, does the host wait for the device.
        """
        with torch.no_grad():
            self._adopt()
            if self._plan is not None:
                self._follower.raise_thresholds(self._plan, self)
        yield
        with torch.no_grad():
            if self._plan is not None:
                self._follower.fix_zeros(self._plan, self)
        self._versions = [_versions(group) for group in self.param_groups]

    def _leaves_plan(self) -> bool:
        """Return whether this step is recorded or rehearsed, and leaves the plan of a target as it is."""
        plan = self._plan
        if plan is None or torch.compiler.is_compiling() or self._is_recording:
            return self._is_recording
        if any(is_capturing(p.device) for p, *_ in self._thresholded()[:1]):
            raise RuntimeError(
                f"a CUDA graph of this step would repeat one threshold of target={plan.target} for ever; record it in "
                "the context of optimizer.recording(), and replay it in that of optimizer.replaying()"
            )
        return False

    def _look_at_gradients(self) -> Tensor | Literal[False] | None:
        """Return False if the step has to be skipped, or a tensor that says on the device whether it may be taken."""
        guarded = [
            p
            for group in self.param_groups
            if group["skip_nonfinite"]
            for p in group["params"]
            if p.grad is not None and not p.is_meta
        ]
        if not guarded:
            return None
        fine = self._guard.look(guarded)
        if torch.compiler.is_compiling() or not fine.is_cpu or any(g["capturable"] for g in self.param_groups):
            return fine
        if fine:
            return None
        self.skipped()  # which warns
        return False

    def _step_group(self, index: int, group: dict[str, Any], fine: Tensor | None) -> None:
        """Step the parameters of a group, unless ``fine`` is 0 on their device."""
        raise NotImplementedError

    def _launcher(self, index: int, device: torch.device) -> Any:
        key = (index, device)
        if key not in self._launchers:
            from dirprune.optim.fused import Launcher

            self._launchers[key] = Launcher()
        return self._launchers[key]

    def _fused_obstacle(self, params: Iterable[Tensor]) -> str | None:
        """Return why the fused path cannot run on these parameters, or None."""
        return fused_obstacle(params)

    def _scalar_device(self, group: dict[str, Any], p: Tensor) -> torch.device:
        """Return the device for a parameter's step and threshold."""
        return scalar_device(group, p)

    def _threshold_all(self) -> None:
        """Set the parameters from their accumulators, unless `_step_group` has done so."""

    def _adopt(self) -> None:
        """Move the accumulators of parameters that something else has written to since the last step.

        If nothing is known of that step, as after loading a state, all accumulators are compared with their weights.
        """
        if torch.compiler.is_compiling():
            return
        scales: dict[Tensor, float | Tensor] | None = None
        written: list[Written] = []
        for index, group in enumerate(self.param_groups):
            params, now = group["params"], _versions(group)
            before = self._versions[index] if index < len(self._versions) else []
            if before == now or any(is_capturing(p.device) for p in params):
                continue
            for p, old, new in zip_longest(params, before[: len(params)], now):
                if old != new and "accumulator" in self.state.get(p, ()):
                    scales = self._scales() if scales is None else scales
                    state = self.state[p]
                    v, threshold = local(state["accumulator"]), state["threshold"]
                    tau = threshold.to(v) * scales[p] if p in scales else threshold
                    if tau is threshold and are_numbers([tau]):
                        (tau,) = readable([tau])
                    written.append(Written(local(p), v, tau, group["shape"], group.get("rescale", False)))
        adopt_weights(written)

    def _thresholded(self) -> list[tuple[Tensor, dict[str, Any], float, float]]:
        """Return (parameter, group, scale, cost) of all weights that are thresholded."""
        counts_cost = self._plan is not None and self._plan.of == "cost"
        return [
            (p, group, group["scale"], group["cost"] if counts_cost else 1.0)
            for group in self.param_groups
            if group["c"]
            for p in group["params"]
            if p.requires_grad
        ]

    def _scales(self) -> dict[Tensor, float | Tensor]:
        """Return by what the thresholds of single elements differ from their parameter's; nothing if they do not."""
        return {}

    def _members(self) -> list[Member]:
        parts = self._thresholded()
        vs = [local(self.begin(p, group)["accumulator"]) for p, group, *_ in parts]
        scales = self._scales()
        return [
            Member(p, v, scale * scales[p] if p in scales else scale, cost)
            for (p, _, scale, cost), v in zip(parts, vs, strict=True)
        ]


def planned(target: float | None, steps: int | None, c: float | None, of: str, **phases: Any) -> Plan | None:
    """Return the plan of a target, or None without one; c and a target exclude each other."""
    if target is None:
        if steps is not None:
            raise ValueError(f"steps={steps} belongs to a target, and there is none; give e.g. target=0.95")
        return None
    if c is not None:
        raise ValueError(f"c={c} and target={target} exclude each other: the target finds c by itself; give one")
    return Plan(target, steps, of, **phases)


def _versions(group: dict[str, Any]) -> list[int]:
    """Return how often each parameter has been written to in place, as autograd counts it."""
    return list(map(_VERSION, group["params"]))
