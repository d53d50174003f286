"""Dense training: what all others are measured against.

    w ← w − γ ∇f(w)

Preset: nothing; it prunes nothing. Momentum and weight decay are the recipe's.

Reference: Robbins & Monro, "A stochastic approximation method", 1951.
"""

from __future__ import annotations

from dirprune.lab.baselines.method import Method


class Sgd(Method):
    """The optimizer as it is.

    >>> Sgd().knob is None
    True
    """

    name = "sgd"
