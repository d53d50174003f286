"""Dense training, the baseline for all other methods.

    w ← w − γ ∇f(w)

Preset: nothing; nothing is pruned. Momentum and weight decay are the recipe's.

Reference: Robbins & Monro, "A stochastic approximation method", 1951.
"""

from __future__ import annotations

from dirprune.lab.methods.method import Method


class Sgd(Method):
    """Plain training with the given optimizer.

    >>> Sgd().knob is None
    True
    """

    name = "sgd"
