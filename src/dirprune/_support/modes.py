"""Context managers that restore the caller's state: modes of modules and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode, and restore each one's own mode: some may have been frozen on purpose.

    The modes are set directly, because users may override `nn.Module.train`.

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


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run the body with its own random seed, on the host and on the device; restore the random state afterwards.

    >>> before = torch.get_rng_state()
    >>> with seeded(0):
    ...     first = torch.rand(())
    >>> with seeded(0):
    ...     assert torch.rand(()) == first
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # Not torch.manual_seed, which also seeds devices whose state is not restored.
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            index = torch.cuda.current_device() if each.index is None else each.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
