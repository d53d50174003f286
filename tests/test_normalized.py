"""A convolution and BatchNorm in compiled code against the layers as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune.batchnorm import batchnorms, estimate_statistics
from dirprune.lab.models import wide_resnet
from dirprune.lab.models.normalized import convolved

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """Torch compiles a function for eight kinds of arguments at most: leave that room to other tests."""
    yield
    torch.compiler.reset()


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager", dynamic=False)


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)
    return images, torch.arange(count) % 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return wide_resnet(depth=10, width=1, classes=4).double()


def test_a_compiled_wide_resnet_trains_as_the_plain_one() -> None:
    plain, fast = network(), network()
    images, targets = batch()
    for model, forward in ((plain, plain), (fast, compiled(fast))):
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(forward(images), targets).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
    torch.testing.assert_close(fast.state_dict(), plain.state_dict())
    biases = [fast.get_parameter(f"layer{i}.0.conv1.bias") for i in (1, 2, 3)]
    assert all(bias.grad is not None and not bias.grad.any() for bias in biases)  # no rounding left
    assert any(plain.get_parameter(f"layer{i}.0.conv1.bias").grad.any() for i in (1, 2, 3))
    torch.testing.assert_close(compiled(fast.eval())(images), plain.eval()(images))


def test_compiled_statistics_are_those_of_the_biased_values() -> None:
    plain, fast = network().eval(), network().eval()
    with torch.no_grad():
        for model in (plain, fast):
            model.get_parameter("layer2.0.conv1.bias").fill_(5.0)
    for model, forward in ((plain, plain), (fast, compiled(fast))):
        estimate_statistics(batchnorms(model), [batch(4), batch(6)], lambda x, _, f=forward: f(x))  # type: ignore[misc]
    assert plain.get_buffer("layer2.0.bn2.running_mean").mean() > 4
    torch.testing.assert_close(fast.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # where torch itself breaks a graph: "cumulative"
@pytest.mark.parametrize(
    ("convolution", "norm"),
    [
        (nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=None)),
        (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3).eval()),
        (nn.Sequential(nn.Conv2d(2, 3, 3)), nn.BatchNorm2d(3)),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2), nn.BatchNorm2d(4, momentum=0.3, eps=0.1)),
    ],
    ids=["unbiased", "circular", "not-affine", "no-statistics", "cumulative", "eval", "replaced", "every-option"],
)
def test_any_layers_compiled_are_the_layers_themselves(convolution: nn.Module, norm: nn.BatchNorm2d) -> None:
    pair = nn.ModuleList([convolution, norm])
    same = deepcopy(pair)
    x = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        expected = norm(convolution(x))
        result = compiled(lambda x: convolved(*same, x))(x)
        torch.testing.assert_close(result, expected)
    (expected**3).sum().backward()
    (result**3).sum().backward()
    torch.testing.assert_close(same.state_dict(), pair.state_dict())
    for p, q in zip(same.parameters(), pair.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=2e-4, rtol=2e-4)


def test_a_norm_with_a_forward_of_its_own_keeps_it() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    convolution, norm = nn.Conv2d(1, 2, 3), Doubled(2)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(compiled(lambda x: convolved(convolution, norm, x))(x), norm(convolution(x)))
