"""The interface between pruning methods and the training loop, which is the same for all of them.

A method is created with its options and attached to a model and its optimizer. It may then act in these places:

- inside every step, with hooks on the optimizer that work in place on fixed tensors, so that a CUDA graph records them;
- inside every step, with `Method.penalty`, a term that is added to the loss;
- between steps, with `Method.after_step`, which may run any Python, again in place on the same tensors;
- at the end, with `Method.finish`, which leaves a plain model with zeros in its weights.

Methods that prune layer by layer prune the trainable weights (`prunable`). Biases, other vectors and frozen parameters
are left alone. A preset sparsity is a fraction of these weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune import SparsityReport, sparsity
from dirprune.lab.models.weights import PrunableWeight


class Method:
    """Dense training, and the base class of the methods that prune; each overrides what it needs.

    ``name`` is the name that users give, ``knob`` the option that decides the sparsity: "sparsity" itself if it is
    preset, None if nothing is pruned. ``makes_classes`` says that it creates new classes of layers in every run.
    """

    name: ClassVar[str] = "sgd"
    knob: ClassVar[str | None] = None
    makes_classes: ClassVar[bool] = False

    model: nn.Module
    optimizer: Optimizer
    steps: int
    examples: int

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        """Prepare the model and the optimizer for training; a saved state is loaded after this.

        Args:
            model: on its device; its layers may be replaced by others that hold the same parameters.
            optimizer: over the model's parameters; may get hooks and parameters.
            steps: the number of steps of the whole training.
            examples: the size of the training set.
        """
        if steps < 1 or examples < 1:
            raise ValueError(f"steps={steps}, examples={examples}: training needs at least one of each")
        self.model, self.optimizer, self.steps, self.examples = model, optimizer, steps, examples

    def check_attached(self, model: nn.Module) -> None:
        """Raise a ValueError unless this method is attached to the model."""
        if getattr(self, "model", None) is not model:
            raise ValueError(f"method={self.name} is not attached to this model; call attach before training")

    def penalty(self) -> Tensor | None:
        """Return the term that is added to the loss in each step, or None."""
        return None

    def after_step(self, step: int) -> None:
        """Act after ``step`` steps; the gradients are still those of the last one."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the network computes with, by the names they have after `finish`."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def plain_state(self) -> dict[str, Tensor]:
        """Return the state of the plain network that is evaluated, with tied weights under all of their names."""
        state: dict[str, Tensor] = self.model.state_dict()
        return state

    def sparsity(self) -> SparsityReport:
        """Return the zeros of the weights that the network computes with."""
        return sparsity(self.weights())

    def finish(self) -> None:
        """Leave a plain model, and detach from the optimizer."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that must be saved, besides model and optimizer, to resume later."""
        return {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state, in place, where a recorded step reads it."""
        own = self.state_dict()
        if own.keys() != state.keys():
            raise ValueError(
                f"state has {sorted(state)}, and {self.name} needs {sorted(own)}; attach it as when it was saved"
            )
        for key, tensor in own.items():
            if not isinstance(state[key], Tensor) or state[key].shape != tensor.shape:
                raise ValueError(
                    f"state has {key} that is no tensor of shape {tuple(tensor.shape)}, as {self.name} needs"
                )
            tensor.copy_(state[key])


class Reparametrised(Method):
    """A method that trains other tensors in place of some weights; the network computes with those of `replaced`."""

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self._plain = dict(model.named_parameters())
        first = {id(p): name for name, p in self._plain.items()}
        self._names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._buffers = [name for name in model.state_dict() if name not in self._names]

    def train_besides(self, parameters: list[nn.Parameter], *, weight_decay: float) -> None:
        """Add the method's own parameters to the optimizer; gRDA must not threshold them."""
        exempt = {"c": 0.0} if "c" in self.optimizer.defaults else {}
        self.optimizer.add_param_group({"params": parameters, "weight_decay": weight_decay, **exempt})

    def replaced(self) -> list[tuple[PrunableWeight, Tensor]]:
        """Return the weights that are not trained directly, each with the tensor that the network computes with."""
        raise NotImplementedError

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        replaced = {weight.name: tensor for weight, tensor in self.replaced()}
        return {name: replaced.get(name, p.detach()) for name, p in self._plain.items()}

    def plain_state(self) -> dict[str, Tensor]:
        weights, state = self.weights(), self.model.state_dict()
        plain = {name: weights[first] for name, first in self._names.items()}
        return {name: state[name] for name in self._buffers} | plain
