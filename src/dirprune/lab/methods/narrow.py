"""A small dense network with as many weights as a sparse one has nonzeros: the control that every pruner has to beat.

The network of the recipe is the narrow one; nothing of it is pruned. ``sparsity`` is what it stands for, and ``of``
the network that it stands beside.
"""

from __future__ import annotations

from dirprune.lab.methods.method import Method
from dirprune.lab.ranges import BELOW_ONE, check


class Narrow(Method):
    """Dense training of a narrow network.

    Args:
        sparsity: the sparsity at which the wide network would have as many weights, or more.
        of: the wide network.
    """

    name = "narrow"
    knob = "sparsity"

    def __init__(self, *, sparsity: float, of: str = "") -> None:
        check(locals(), sparsity=BELOW_ONE)
        self.of = of
