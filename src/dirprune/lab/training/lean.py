"""Weights in bfloat16 while gRDA trains: the accumulator is the float32 copy that mixed precision needs.

Under autocast a convolution reads float32 weights, rounds them, and returns a rounded gradient that is widened again.
If the weights are stored rounded, the numbers are the same, bit for bit, and all of that memory traffic is saved.
(Compiled code may skip a cast to bfloat16 and back, and so round less often; up to that the numbers are the same.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from dirprune import GRDA
from dirprune.lab.training.execution import Execution
from dirprune.optim.threshold import shrink


class Lean:
    """A context in which the convolutional and linear weights of a model under gRDA are bfloat16.

    Inside, they have the same memory every time, so that a recorded step can read it. Outside, they are the float32
    weights that gRDA would have without it. Groups with weight decay stay in float32, because weight decay reads the
    weights and rounding would change it.

    >>> model = nn.Linear(4, 2)
    >>> with Lean(model, GRDA(model.parameters(), lr=0.1)):
    ...     inside = model.weight.dtype
    >>> inside, model.weight.dtype
    (torch.bfloat16, torch.float32)
    """

    def __init__(self, model: nn.Module, optimizer: GRDA) -> None:
        layers = [module for module in model.modules() if isinstance(module, (nn.Linear, _ConvNd))]
        low = {p for layer in layers for p in layer.parameters(recurse=False) if p.dtype == torch.float32}
        groups = [group for group in optimizer.param_groups if not group["weight_decay"]]
        self._members = [(p, group) for group in groups for p in group["params"] if p in low]
        self._optimizer = optimizer
        self._low: dict[Tensor, Tensor] = {}

    def __enter__(self) -> None:
        for p, group in self._members:
            self._optimizer.begin(p, group)
            if p not in self._low:
                self._low[p] = p.detach().to(torch.bfloat16)
            p.grad, p.data = None, self._low[p]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for p, group in self._members:
            state = self._optimizer.begin(p, group)
            exact = torch.empty_like(state["accumulator"])
            tau = state["threshold"].to(exact.device)
            shrink(state["accumulator"], tau, group["shape"], rescale=group["rescale"], out=exact)
            p.grad, p.data = None, exact


def lowered(model: nn.Module, optimizer: Optimizer, execution: Execution) -> AbstractContextManager[None]:
    """Return the context to train in: `Lean` if the execution asks for it and the optimizer is gRDA."""
    wanted = execution.lean and execution.precision == "bfloat16"
    return Lean(model, optimizer) if wanted and isinstance(optimizer, GRDA) else nullcontext()
