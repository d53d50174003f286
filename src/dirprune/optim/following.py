"""How an optimizer follows the plan of a target: looks at its weights, raises thresholds, and fixes the zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dirprune.optim.outlook import warn_of_stillness
from dirprune.optim.selection import Member, Sample, smallest, summed
from dirprune.optim.state import fix_zeros, local
from dirprune.optim.target import Plan, TargetProgress

if TYPE_CHECKING:
    from torch import Tensor

    from dirprune.optim.base import Thresholded


class Follower:
    """What an optimizer remembers on the way to its target, beside the plan, which its groups hold and save."""

    def __init__(self) -> None:
        self._sample: tuple[list[Tensor], Sample] | None = None
        self._stillness: Tensor | None = None

    def tell_of_stillness(self, *, wait: bool = True, becomes_hard: bool = False) -> bool:
        """Warn once if soft thresholding will fail, and return whether it was so found now.

        Without ``wait``, leave it for when the host waits anyway.
        """
        if not wait or self._stillness is None:
            return False
        relative, self._stillness = float(self._stillness), None
        return warn_of_stillness(relative, becomes_hard=becomes_hard)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def raise_thresholds(self, plan: Plan, optimizer: Thresholded) -> None:
        """Follow the plan up to the next step's threshold."""
        if plan.step == 0:
            members = optimizer._members()
            plan.check(members)
            plan.start = self._sampled(members).few(members)
        if plan.looks:
            self._look(plan, optimizer)
        if plan.advance():
            parts = optimizer._thresholded()
            thresholds = [optimizer.begin(p, group)["threshold"] for p, group, *_ in parts]
            plan.place(thresholds[0].device)  # a loaded plan may be elsewhere
            scaled = {scale: plan.threshold * scale for scale in {scale for _, _, scale, _ in parts}}
            torch._foreach_copy_(thresholds, [scaled[scale] for _, _, scale, _ in parts])

    def _look(self, plan: Plan, optimizer: Thresholded) -> None:
        """Aim at the threshold that the plan wants at the end of the steps that this look serves."""
        members = optimizer._members()
        sample = self._sampled(members)
        if plan.is_halfway:
            self._adapt(plan, optimizer, sample.moved(members, plan.start))
        plan.place(optimizer.state[members[0].p]["threshold"].device)
        plan.aim(sample.threshold(members, plan.share(plan.step + plan.horizon)))

    def _adapt(self, plan: Plan, optimizer: Thresholded, moved: Tensor | None) -> None:
        """Look once whether weights have moved enough for a soft threshold, and if not, say so or take a hard one."""
        plan.start = None
        soft = [group for group in optimizer.param_groups if group["shape"] == "soft" and not group.get("rescale")]
        if moved is None or not soft:
            return
        self._stillness = moved / plan.threshold.to(moved)
        adapts = plan.adapts and not optimizer.is_recorded
        if self.tell_of_stillness(wait=adapts or moved.is_cpu, becomes_hard=adapts) and adapts:
            for group in soft:
                group["shape"] = "hard"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fix_zeros(self, plan: Plan, optimizer: Thresholded) -> None:
        """Fix the zeros after the step that the plan says."""
        if plan.step != plan.last:
            return
        self.tell_of_stillness()
        members = optimizer._members()
        plan.check(members)
        zeros = smallest(members, plan.goal(members), plan.least(members))
        plan.threshold = torch.maximum(plan.threshold, zeros.top.to(plan.threshold))
        for (p, group, *_), m, mask, bound in zip(
            optimizer._thresholded(), members, zeros.masks, zeros.bounds.unbind(), strict=True
        ):
            tau = torch.where(bound < zeros.top, bound, plan.threshold.to(bound)) * m.scale
            fix_zeros(p, optimizer.state[p], mask, tau, group["shape"], rescale=group.get("rescale", False))

    def _sampled(self, members: Sequence[Member]) -> Sample:
        if self._sample is None or [id(m.p) for m in members] != list(map(id, self._sample[0])):
            self._sample = [m.p for m in members], Sample(members)
        return self._sample[1]


def progress(plan: Plan, members: Sequence[Member]) -> TargetProgress:
    """Return how far the target is reached."""
    counts = [int(summed((local(m.p) == 0).sum(), m.shards)) for m in members]
    total = sum(m.total for m in members)
    share = sum(zeros * m.cost for zeros, m in zip(counts, members, strict=True)) / total if total else 0.0
    weights = sum(m.p.numel() for m in members)
    return TargetProgress(plan.step, plan.length, sum(counts), weights, share, plan.target, plan.of, plan.is_fixed)
