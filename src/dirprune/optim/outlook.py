"""Warnings early in a run: its fixed c prunes next to nothing or all, or its weights move too little for a target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dirprune._support.graphs import is_capturing
from dirprune.optim.state import local

OUTLOOK_AFTER = 300
"""Steps after which an optimizer looks once at what its c does."""
_LONGER = 100
"""The outlook is for a run of that many times the steps, at the present rate."""
_LITTLE = 0.01


class Outlook(UserWarning):
    """A fixed c prunes next to nothing or has emptied a tensor, or a soft threshold takes too much."""


MOVED = 0.2
"""A soft threshold τ takes τ off every weight that is left, and an accumulator has to move about as far to make up for
it. Halfway through the phase in which the zeros come, on digits (benchmarks/stillness.py, n = 54): where they had moved
by less than .2 τ (32 runs), soft thresholding ended at 8 to 70% accuracy and a hard threshold 47 points higher on
average; by .3 τ or more (22 runs), at 82 to 96% and 3 points higher."""


def warn_of_stillness(moved: float, *, becomes_hard: bool = False) -> bool:
    """Warn if accumulators have moved by a small part of the threshold, halfway to the zeros of a target; return it."""
    if not moved < MOVED:  # nor if it is NaN
        return False
    warnings.warn(
        f"halfway to the target, weights have moved by {moved:.2f} of the threshold: too little to make up for "
        "what a soft threshold takes off those that are left; "
        + ("it is hard from here on, and " if becomes_hard else "")
        + 'better take shape="hard" from the start, a larger lr or more steps',
        Outlook,
        stacklevel=6,
    )
    return True


@torch.no_grad()
def warn_of_extremes(
    parts: Sequence[tuple[Tensor, dict[str, Any], float, float]], states: Mapping[Tensor, Any]
) -> None:
    """Warn if all of some tensor is zero, or if even a run 100 times as long would prune less than 1%.

    Each of ``parts`` begins with a parameter that is thresholded and its group.
    """
    stepped = [(p, group, states[p]) for p, group, *_ in parts if states.get(p) and p.numel()]
    if not stepped or is_capturing(stepped[0][0].device):
        return
    dead = [tuple(p.shape) for p, *_ in stepped if p.numel() > 1 and not local(p).any()]
    if dead:
        warnings.warn(
            f"after {OUTLOOK_AFTER} steps {len(dead)} of {len(stepped)} tensors that are pruned are entirely zero, "
            f"e.g. one of shape {dead[0]}: give a smaller c, or ask for a share of zeros with target=…",
            Outlook,
            stacklevel=4,
        )
        return
    soon = total = 0
    for _, group, state in stepped:
        v = local(state["accumulator"])
        tau = float(state["threshold"]) * _LONGER ** group["mu"]  # n^μ, if the rate stays
        soon, total = soon + int((v.abs() <= tau).sum()), total + v.numel()
    if soon < _LITTLE * total:
        warnings.warn(
            f"c={stepped[0][1]['c']:g} prunes next to nothing at this rate: after {_LONGER * OUTLOOK_AFTER:,} steps "
            f"some {soon / total:.1%} of the weights would be zero; ask for a share of zeros with target=…, or give a "
            "larger c",
            Outlook,
            stacklevel=4,
        )
