"""Train and eval modes, lent and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode, and give each its own mode back: some may have been frozen on purpose.

    Set directly, because users may override `nn.Module.train`.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with eval_mode(model):
    ...     inside = [module.training for module in model]
    >>> inside, [module.training for module in model]
    ([False, False], [True, False])
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
