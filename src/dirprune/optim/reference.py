"""gRDA as the paper states it, to be read first; every fast path is tested against it, step by step."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class ReferenceGRDA(Optimizer):
    """The paper's optimizer in float64, one tensor at a time: slow, and nothing but the equations.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.01]))
    >>> optimizer = ReferenceGRDA([weight], lr=0.1, c=0.2, mu=0.6)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()  # 1 − .1·2 = .8, less τ₁ = .2·.1^1.1 = .0159; the second weight is pruned
    [0.7841134071350098, 0.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        *,
        c: float = 5e-4,
        mu: float = 0.51,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        sgd = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**sgd, "c": c, "mu": mu})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        """Take one step."""
        for group in self.param_groups:
            lr, momentum, c, mu = (float(group[name]) for name in ("lr", "momentum", "c", "mu"))
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                if not state:  # the accumulator starts at the weights, the threshold at 0
                    v = w.detach().double().clone()
                    state.update(step=0, threshold=0.0, accumulator=v, momentum_buffer=torch.zeros_like(v))

                # What SGD would subtract from the weights, up to the rate
                direction = -w.grad.double() if group["maximize"] else w.grad.double()
                direction = direction + group["weight_decay"] * w
                if momentum:
                    buffer = state["momentum_buffer"].mul_(momentum).add_(direction)
                    direction = direction + momentum * buffer if group["nesterov"] else buffer

                # vₙ = vₙ₋₁ − γₙ·direction
                v = state["accumulator"].sub_(lr * direction)

                # τₙ = τₙ₋₁ + c·γₙ^(μ+½)·(n^μ − (n−1)^μ), with the effective rate of momentum
                n = state["step"] = state["step"] + 1
                rate = max(lr, 0.0) / (1 - momentum)
                state["threshold"] += c * rate ** (mu + 0.5) * (n**mu - (n - 1) ** mu)

                # wₙ = sign(vₙ)·max(|vₙ| − τₙ, 0)
                w.copy_(v.sign() * (v.abs() - state["threshold"]).clamp(min=0))
