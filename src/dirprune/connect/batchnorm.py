"""BatchNorm's statistics, re-estimated for given weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dirprune._support.batches import Batch, examples_in, pairs


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of the model that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None]


def lacks_variance(error: ValueError) -> bool:
    """Return whether BatchNorm refused to train on a single value per channel, as in a batch of one example."""
    return "more than 1 value per channel" in str(error)


@torch.no_grad()
def estimate_statistics(
    norms: Sequence[_BatchNorm],
    batches: Iterable[Batch],
    forward: Callable[[Any, Any], object],
) -> None:
    """Replace the running statistics by the mean and variance of each batch, averaged over the samples.

    Batches must mix the classes, as in training. Batches sorted by class lack the variance between classes. Adding the
    variance of their means would correct only the first layer: later ones see inputs normalised class by class.

    If a pass uses a layer more than once, the last use counts. A batch of one example that gives a layer one value per
    channel has no variance, and is left out. If a pass fails, the statistics stay as they were. So do those of a layer
    that no pass uses, such as a head for training only.

    Args:
        norms: from `batchnorms`; the modes of all other modules are up to the caller.
        batches: pairs (inputs, targets); the targets give the number of samples.
        forward: ``forward(inputs, targets)`` passes a batch through the network.

    >>> norm = nn.BatchNorm1d(1).eval()
    >>> data = [(torch.tensor([[1.0], [3.0]]), torch.zeros(2)), (torch.tensor([[5.0]]).expand(4, 1), torch.zeros(4))]
    >>> estimate_statistics([norm], data, lambda inputs, targets: norm(inputs))
    >>> norm.running_mean, norm.training
    (tensor([4.]), False)
    """
    before = [(norm, norm.momentum, norm.training) for norm in norms]
    statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var) if s is not None]
    result = [statistic.clone() for statistic in statistics]
    counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    counted = [counter.clone() for counter in counters]
    sums, seen = [torch.zeros_like(s, dtype=torch.promote_types(s.dtype, torch.float32)) for s in statistics], 0
    try:
        for norm in norms:
            norm.reset_running_stats()  # NaN would stay: 0 · NaN = NaN
            norm.momentum, norm.training = 1.0, True  # the buffers then hold the statistics of the last batch only
        for inputs, targets in pairs(batches, "batches"):
            try:
                forward(inputs, targets)
            except ValueError as error:
                if not lacks_variance(error):
                    raise
                continue
            samples = examples_in(targets)
            torch._foreach_add_(sums, statistics, alpha=samples)
            seen += samples
        if not seen:
            raise ValueError(
                "batches holds no examples, or only one per batch, so there is nothing to estimate statistics from; "
                "give larger batches"
            )
        # Judged by what the reset left, not by the counters, which a subclass need not keep.
        means, variances = statistics[::2], statistics[1::2]
        unused = [((m == 0) & (v == 1)).all() for m, v in zip(means, variances, strict=True)]
        twice = [each for each in unused for _ in ("mean", "variance")]
        averages = torch._foreach_div(sums, seen)
        result = [torch.where(*each) for each in zip(twice, result, averages, strict=True)]
        counted = [torch.where(*each) for each in zip(unused, counted, counters, strict=True)]
    finally:
        torch._foreach_copy_(statistics + counters, result + counted)
        for norm, momentum, mode in before:
            norm.momentum, norm.training = momentum, mode
