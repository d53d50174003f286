"""BatchNorm's estimated statistics, compared with those of all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dirprune.connect.batchnorm import batchnorms, estimate_statistics


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
    norm.num_batches_tracked.fill_(7)  # with momentum=None, this count is the weight of the batches so far
    wide = [*batches(4), (torch.zeros(4, 9), torch.zeros(4))]
    for data, words in ((wide, "running_mean"), (batches(1, 1), "only one per batch"), ([], "no examples")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            estimate_statistics([norm], data, lambda inputs, _: norm(inputs))
        assert norm.running_mean.tolist() == [2.0, 2.0, 2.0]
        assert norm.running_var.tolist() == [1.0, 1.0, 1.0]
        assert (norm.momentum, norm.training, norm.num_batches_tracked) == (None, False, 7)


class Uncounted(nn.BatchNorm1d):
    """A BatchNorm that does not count its batches."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, training=self.training, momentum=self.momentum
        )


class Rebinding(Uncounted):
    """A BatchNorm that replaces its counter by a new tensor in every pass, as torch once did."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_batches_tracked = self.num_batches_tracked + 1
        return super().forward(inputs)


@pytest.mark.parametrize("kind", [Rebinding, Uncounted])
def test_statistics_do_not_depend_on_how_a_layer_counts_its_batches(kind: type[nn.BatchNorm1d]) -> None:
    norm, plain = kind(3), nn.BatchNorm1d(3)
    for each in (norm, plain):
        estimate_statistics([each], batches(4, 7), lambda inputs, _, each=each: each(inputs))
    torch.testing.assert_close((norm.running_mean, norm.running_var), (plain.running_mean, plain.running_var))
    assert not torch.equal(norm.running_mean, torch.zeros(3))


def test_a_layer_that_no_pass_uses_keeps_its_statistics() -> None:
    used, idle = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    idle(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    before = {name: buffer.clone() for name, buffer in idle.named_buffers()}
    estimate_statistics([used, idle], batches(4, 7), lambda inputs, _: used(inputs))
    torch.testing.assert_close(dict(idle.named_buffers()), before, rtol=0, atol=0)
    assert used.num_batches_tracked == 2
    torch.testing.assert_close(used.running_mean, torch.cat([inputs for inputs, _ in batches(4, 7)]).mean(0))


def test_layers_without_statistics_are_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3))
    assert batchnorms(model) == [model[0]]


def test_a_batch_of_one_example_has_no_variance_and_is_left_out() -> None:
    norm, data = nn.BatchNorm1d(3), batches(4, 1, 7)
    estimate_statistics([norm], data, lambda inputs, _: norm(inputs))
    torch.testing.assert_close(norm.running_mean, torch.cat([data[0][0], data[2][0]]).mean(0))


def test_one_image_has_a_variance_and_counts() -> None:
    norm = nn.BatchNorm2d(3)
    images = torch.randn(6, 3, 5, 5)
    estimate_statistics([norm], [(images[:1], torch.zeros(1)), (images[1:], torch.zeros(5))], lambda x, _: norm(x))
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))


@pytest.mark.parametrize("wrap", [lambda x: (x, x, x), lambda x: {"x": x}], ids=["tuple", "dict"])
def test_the_targets_tell_how_many_examples_there_are(wrap: Callable[[Tensor], Any]) -> None:
    plain, norm, data = nn.BatchNorm1d(3), nn.BatchNorm1d(3), batches(4, 7, 12)
    estimate_statistics([plain], data, lambda inputs, _: plain(inputs))
    nested = [(wrap(inputs), {"y": targets}) for inputs, targets in data]
    estimate_statistics([norm], nested, lambda inputs, _: norm(tree_leaves(inputs)[0]))
    assert torch.equal(norm.running_mean, plain.running_mean)
