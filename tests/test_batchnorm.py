"""BatchNorm's statistics against those of all samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dirprune.batchnorm import batchnorms, estimate_statistics


def batches(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [((5 + torch.randn(n, 3, generator=generator)).to(dtype), torch.zeros(n)) for n in sizes]


def test_the_mean_is_that_of_all_samples_however_they_are_divided() -> None:
    norm, data = nn.BatchNorm1d(3), batches(4, 7, 12)
    estimate_statistics([norm], data, lambda inputs, _: norm(inputs))
    torch.testing.assert_close(norm.running_mean, torch.cat([inputs for inputs, _ in data]).mean(0))
    within = sum(len(inputs) * inputs.var(0) for inputs, _ in data) / 23
    torch.testing.assert_close(norm.running_var, within)
    assert (norm.momentum, norm.training) == (0.1, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_samples_do_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(3).to(dtype).eval()
    estimate_statistics([norm], batches(*[256] * 80, dtype=dtype), lambda inputs, _: norm(inputs))
    torch.testing.assert_close(norm.running_mean.float(), torch.full((3,), 5.0), rtol=0.01, atol=0)


def test_what_fails_leaves_everything_as_it_was() -> None:
    norm = nn.BatchNorm1d(3, momentum=None).eval()
    norm.running_mean.fill_(2.0)
    for data, words in ((batches(4, 1), "more than 1 value"), ([], "no examples")):
        with pytest.raises(ValueError, match=words):
            estimate_statistics([norm], data, lambda inputs, _: norm(inputs))
        assert norm.running_mean.tolist() == [2.0, 2.0, 2.0]
        assert norm.running_var.tolist() == [1.0, 1.0, 1.0]
        assert (norm.momentum, norm.training) == (None, False)


def test_layers_without_statistics_are_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3))
    assert batchnorms(model) == [model[0]]
