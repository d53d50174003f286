"""AC/DC: training alternates between all weights and the largest ones.

After a dense start, compressed phases, in which only the largest weights of the network are kept, alternate with
decompressed ones, in which the others come back at zero. Momentum starts anew with every decompressed phase. The last
phase is a longer compressed one.

Preset: the sparsity, with one threshold on |w| for all layers.

Reference: Peste, Iofinova, Vladu & Alistarh, "AC/DC: Alternating compressed/decompressed training of deep neural
networks", NeurIPS 2021. The defaults are the fractions of their 100 epochs on ImageNet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dirprune.lab.methods.magnitude import global_masks
from dirprune.lab.methods.masks import Masked
from dirprune.lab.ranges import BELOW_ONE, FRACTION, UP_TO_ONE, check


class Acdc(Masked):
    """AC/DC to a preset sparsity.

    Args:
        sparsity: the fraction of the prunable weights to remove.
        start: when the first compressed phase begins, as a fraction of training; so are the others.
        phase: the length of a phase.
        dense: when the last decompressed phase begins.
        end: when the last compressed phase begins.

    Example:
        >>> method = Acdc(sparsity=0.9)
        >>> [(step, "compressed" if compressed else "dense") for step, compressed in method.switches(100).items()][-3:]
        [(70, 'compressed'), (75, 'dense'), (85, 'compressed')]
    """

    name = "acdc"
    knob = "sparsity"

    def __init__(
        self, *, sparsity: float, start: float = 0.1, phase: float = 0.05, dense: float = 0.75, end: float = 0.85
    ) -> None:
        check(locals(), sparsity=BELOW_ONE, phase=UP_TO_ONE, start=FRACTION, dense=FRACTION, end=FRACTION)
        if not start < dense < end:
            raise ValueError(f"start={start}, dense={dense}, end={end} must follow one another")
        self.final = sparsity
        self.start = start
        self.phase = phase
        self.dense = dense
        self.end = end

    def switches(self, steps: int) -> dict[int, bool]:
        """Return the steps after which a phase begins, and whether it is a compressed one."""
        found = {}
        for number in range(round((self.dense - self.start) / self.phase)):
            found[round((self.start + number * self.phase) * steps)] = number % 2 == 0
        return found | {round(self.dense * steps): False, round(self.end * steps): True}

    def after_step(self, step: int) -> None:
        compressed = self.switches(self.steps).get(step)
        if compressed:
            self.set_masks(global_masks(self.layer_weights, self.final))
        elif compressed is not None:
            self._decompress()

    @torch.no_grad()
    def _decompress(self) -> None:
        """Let all weights train, from zero momentum."""
        for mask in self.masks.values():
            mask.fill_(True)
        for parameter, state in self.optimizer.state.items():
            for tensor in state.values():
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    tensor.zero_()
