"""Latent weights: the optimizer moves these, at the gradient of the sparse weights that the network computes with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dirprune.lab.methods.method import Method
from dirprune.lab.models.weights import prunable


class Latent(Method):
    """A method whose weights are a function of latent ones, `sparsify`, that is applied after every step.

    The latent weights stand in for the weights during the optimizer's step, so momentum and weight decay act on them.
    """

    layer_weights: dict[str, Tensor]
    latent: dict[str, Tensor]
    _hooks: tuple[RemovableHandle, ...]

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self.layer_weights = {name: weight.parameter for name, weight in prunable(model).items()}
        self.latent = {name: weight.detach().clone() for name, weight in self.layer_weights.items()}
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
        )

    def sparsify(self) -> None:
        """Set the weights from the latent ones, in place."""
        raise NotImplementedError

    def finish(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Tensor]:
        return {f"latent.{name}": tensor for name, tensor in self.latent.items()}

    @torch.no_grad()
    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch._foreach_copy_(list(self.layer_weights.values()), list(self.latent.values()))

    @torch.no_grad()
    def _after_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch._foreach_copy_(list(self.latent.values()), list(self.layer_weights.values()))
        self.sparsify()
