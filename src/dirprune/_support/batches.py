"""Batches: pairs (inputs, targets), each a tensor or tensors in any nesting; and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Batch = tuple[Any, Any]
Loss = Callable[[Any, Any], Tensor]


def refuse_iterator(batches: object, name: str) -> None:
    """Raise a ValueError if the batches can be iterated only once."""
    if isinstance(batches, Iterator):
        raise ValueError(f"{name} is an iterator, spent after one pass; give a list or a DataLoader")


def pairs(batches: Iterable[Any], name: str) -> Iterator[Batch]:
    """Yield the batches, or raise a ValueError at the first that is not a pair.

    >>> list(pairs([["inputs", "targets"]], "batches"))
    [('inputs', 'targets')]
    """
    for batch in batches:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            size = f" of {len(batch)}" if isinstance(batch, tuple | list | Mapping) else ""
            raise ValueError(
                f"{name} gave a {type(batch).__name__}{size}; a batch must be a pair (inputs, targets), and either may "
                "hold several tensors, e.g. ((a, b), targets)"
            )
        yield batch[0], batch[1]


def examples_in(targets: Any) -> int:
    """Return the number of examples: the length of the targets, or that of the tensors in them.

    Raises:
        ValueError: if tensors have different lengths, or the targets have no length.

    >>> examples_in(torch.zeros(5)), examples_in({"class": torch.zeros(5)}), examples_in((torch.zeros(5, 2),) * 2)
    (5, 5, 5)
    >>> examples_in([{"boxes": torch.zeros(7, 4)}, {"boxes": torch.zeros(2, 4)}])          # a list of examples
    2
    """
    if isinstance(targets, Mapping):
        return _common_length(targets.values())
    if isinstance(targets, tuple | list) and any(isinstance(each, Tensor) for each in targets):
        return _common_length(targets)
    try:
        return len(targets)
    except TypeError as error:
        raise ValueError(
            f"the targets are {type(targets).__name__} without a length; their first dimension must count the examples"
        ) from error


def _common_length(parts: Iterable[Any]) -> int:
    lengths = {examples_in(part) for part in parts}
    if len(lengths) != 1:
        raise ValueError(
            f"the targets hold parts of {' and '.join(map(str, sorted(lengths))) or 'no'} examples; give every part "
            "one entry per example, or give a list with a dict for each example"
        )
    return lengths.pop()


def moved(data: Any, device: torch.device) -> Any:
    """Return the data with everything that can be moved on the device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            there = leaf.to(device, non_blocking=True)
            return there.clone() if there.is_inference() else there  # inference tensors cannot be differentiated
        if isinstance(leaf, Mapping):  # some move in place, which would change the user's own
            return {key: moved(value, device) for key, value in leaf.items()}
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    # An object with `to` moves as a whole: a part of a PackedSequence must stay on the host.
    return tree_map(move, data, is_leaf=lambda node: hasattr(node, "to"))


def mean_loss(loss_fn: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return ``loss_fn(outputs, targets)``; raise if it is a sum or not a scalar, which would be taken for a mean."""
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ValueError(
            "loss_fn has reduction='sum'; it must be the mean over the batch, which is weighted by its number of "
            "targets here: leave reduction out"
        )
    loss = loss_fn(outputs, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn returned a {found}; it must return a tensor of one number, the mean over the batch: "
            "leave out reduction='none', or end with .mean()"
        )
    return loss.reshape(())
