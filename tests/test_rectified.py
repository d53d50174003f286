"""BatchNorm with relu in Triton, compared with torch's own: interpreted on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import rectified as benchmark
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune import GRDA
from dirprune.batchnorm import batchnorms, estimate_statistics
from dirprune.lab import models
from dirprune.lab.execution import Execution
from dirprune.lab.lean import Lean
from dirprune.lab.models import rectified
from dirprune.lab.models import rectified_kernels as kernels
from dirprune.lab.models import rectified_ops as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = dict(kernels.TILES)
EPS = 1e-5
SHAPES = [(3, 160, 7, 5), (3, 7, 25, 7), (4, 64, 8, 8), (5, 16, 9, 7), (2, 1, 1, 1)]
"""Channels with an odd factor, odd ones, powers of two; pixels that fill tiles and that do not."""


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    """Interpret the kernels where they cannot be compiled, which is decided on import; large tiles make it faster."""
    if DEVICE == "cpu":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(kernels)
            patch.setattr(kernels, "TILES", {name: replace(tile, rows=64) for name, tile in kernels.TILES.items()})
            yield
        importlib.reload(kernels)
    else:
        yield


@pytest.fixture
def _room() -> Iterator[None]:
    """Reset the compiler after the test: torch compiles a function for at most eight kinds of arguments."""
    yield
    torch.compiler.reset()


@pytest.fixture(params=[4, 1])
def _many(request: pytest.FixtureRequest, _kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several programs, of four warps or of one, share the same columns and process several tiles each."""
    tiles = {name: replace(tile, rows=4, per_sm=2, warps=request.param) for name, tile in TILES.items()}
    monkeypatch.setattr(kernels, "TILES", tiles)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 5)


@pytest.fixture
def _allowed(_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the operators, as `rectified.kernels` does on a GPU only."""
    monkeypatch.setattr(rectified, "_ops", ops)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", dynamic=False)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values.to(DEVICE, dtype)
    if values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    return values.requires_grad_(grad)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS))


def parameters(channels: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return tensor(channels, seed=1, dtype=dtype), tensor(channels, seed=2, dtype=dtype)


def compare(ours: list[Tensor], theirs: list[Tensor], inputs: list[Tensor], **tolerance: float) -> None:
    """Compare values, and the gradients of a sum of them with weights of either sign."""
    weighed = [
        sum((y * tensor(*y.shape, seed=9 + i, dtype=y.dtype, grad=False)).sum() for i, y in enumerate(outputs))
        for outputs in (ours, theirs)
    ]
    torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(*(list(torch.autograd.grad(total, inputs)) for total in weighed), **tolerance)


@pytest.mark.usefixtures("_many")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    x, (weight, bias) = tensor(*shape), parameters(shape[1])
    y, _ = ops.rectify(x, None, weight, bias, EPS)
    assert y.is_contiguous(memory_format=torch.channels_last)
    compare([y], [plain(x, weight, bias)], [x, weight, bias], rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("_many")
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize(("biased", "goes_on"), [(False, True), (True, True), (True, False)])
def test_a_sum_and_its_shortcut(shape: tuple[int, ...], biased: bool, goes_on: bool) -> None:
    a, b, offset = tensor(*shape), tensor(*shape, seed=3), tensor(shape[1], seed=4) if biased else None
    weight, bias = parameters(shape[1])
    total, y, _ = ops.rectify_sum(a, b, offset, weight, bias, EPS)
    sum_ = a + b if offset is None else a + b + offset[:, None, None]
    ours, theirs = [y, *[total] * goes_on], [plain(sum_, weight, bias), *[sum_] * goes_on]
    inputs = [a, b, weight, bias, *([] if offset is None else [offset])]
    compare(ours, theirs, inputs, rtol=1e-7, atol=1e-7)


def test_derivatives_are_differences() -> None:
    a, b, offset, (weight, bias) = tensor(2, 3, 2, 2), tensor(2, 3, 2, 2, seed=3), tensor(3, seed=4), parameters(3)
    check = partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda *of: ops.rectify(*of, EPS)[0], (a, offset, weight, bias))
    assert check(lambda *of: ops.rectify_sum(*of, EPS)[:2], (a, b, offset, weight, bias))


@pytest.mark.parametrize("mean", [0.0, 1e3, -1e5])
def test_a_large_mean_cancels_nothing(mean: float) -> None:
    """In float32, compared with float64 on the same numbers: only as far off as the mean is rounded."""
    x = (mean + tensor(4, 24, 17, 5, grad=False)).float()
    weight, bias = (p.detach().float() for p in parameters(24))
    numbers = ops.rectify(x, None, weight, bias, EPS)[1]
    exact = x.double()
    torch.testing.assert_close(numbers[0].double(), exact.mean((0, 2, 3)), rtol=2e-7, atol=1e-6)
    torch.testing.assert_close(numbers[4].double(), exact.var((0, 2, 3)), rtol=5e-6, atol=0)
    y = ops.rectify(x, None, weight, bias, EPS)[0]
    expected = plain(exact, weight.double(), bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6 + 1e-6 * abs(mean))


def test_a_first_pixel_far_from_all_others() -> None:
    """Nearly √P deviations: the most by Samuelson's inequality. The error is then of the order of P roundings."""
    x = tensor(4, 8, 16, 16, dtype=torch.float32, grad=False)
    x[0, :, 0, 0] = 1e3
    weight, bias = (p.detach().float() for p in parameters(8))
    numbers = ops.rectify(x, None, weight, bias, EPS)[1]
    torch.testing.assert_close(numbers[4].double(), x.double().var((0, 2, 3)), rtol=1e-3, atol=0)


def test_constant_channels_and_pruned_weights() -> None:
    x = tensor(3, 6, 5, 5)
    with torch.no_grad():
        x[:, :2] = torch.tensor([1 / 3, 1e4], dtype=x.dtype, device=DEVICE)[:, None, None]
    weight, bias = parameters(6)
    with torch.no_grad():
        weight[3:5], bias[4] = 0, 0
    y, numbers = ops.rectify(x, None, weight, bias, EPS)
    assert (numbers[4, :2] == 0).all()
    assert not y[:, 4].any()
    compare([y], [plain(x, weight, bias)], [x, weight, bias], rtol=1e-6, atol=1e-6)


def test_not_a_number_is_not_hidden() -> None:
    x = tensor(2, 3, 4, 4, grad=False)
    x[1, 1, 2, 2] = float("nan")
    weight, bias = parameters(3)
    y = ops.rectify(x, None, weight, bias, EPS)[0]
    assert y[:, 1].isnan().all()
    assert not y[:, [0, 2]].isnan().any()


@pytest.mark.parametrize("adds", [False, True])
def test_bfloat16_is_rounded_once(adds: bool) -> None:
    """Compare with float64 on the same numbers; the interpreter truncates where the hardware rounds."""
    shape = (4, 160, 8, 8)
    a, b = (tensor(*shape, seed=s, dtype=torch.bfloat16) for s in (0, 3))
    weight, bias = parameters(160, torch.float32)
    inputs = [a, weight, bias] + [b] * adds
    exact = [t.detach().double().requires_grad_() for t in inputs]
    if adds:
        total, y, _ = ops.rectify_sum(a, b, None, weight, bias, EPS)
        sum_ = exact[0] + exact[3]
        expected = plain(sum_ + (total.double() - sum_).detach(), *exact[1:3])
    else:
        y, _ = ops.rectify(a, None, weight, bias, EPS)
        expected = plain(*exact)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-5)
    dy = tensor(*shape, seed=5, dtype=torch.bfloat16, grad=False)
    ours, theirs = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double())
    for mine, exactly in zip(ours, theirs, strict=True):
        tolerance = {"rtol": 2**-6, "atol": 1e-3} if mine.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 2e-2}
        torch.testing.assert_close(mine.double(), exactly, **tolerance)


Layers = Callable[..., Any]


def block(layers: Any, x: Tensor, rectified: Layers, summed: Layers) -> Tensor:
    """Return a value that depends on all results of ``rectified`` and ``summed``."""
    total, y = summed(((layers[0], x), (layers[1], x)), layers[2])
    stem, z = summed(((layers[1], x),), layers[3])
    return rectified(layers[0], layers[2], x) + rectified(layers[1], layers[3], x) * y + total + stem * z


def plain_rectified(convolution: nn.Module, norm: nn.Module, inputs: Tensor) -> Tensor:
    return F.relu(norm(convolution(inputs)))


def plain_summed(branches: rectified.Branches, norm: nn.Module) -> tuple[Tensor, Tensor]:
    total = sum(layer(inputs) for layer, inputs in branches)
    return total, F.relu(norm(total))


# Torch warns where it breaks a graph: at BatchNorm with momentum=None.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("_room", "_allowed")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"training": False},
        {"padding_mode": "circular"},
        {"replaced": True},
        {"affine": False},
        {"track_running_stats": False},
        {"untracked": True},
        {"hook": True},
        {"watched": True},
        {"patched": True, "training": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1, "dilation": 1, "groups": 2},
    ],
    ids=lambda options: ",".join(options) or "as-in-the-network",
)
def test_any_layers_compiled_are_the_layers_themselves(options: dict[str, Any]) -> None:
    """They have the same values, running statistics and gradients."""
    torch.manual_seed(0)
    of_norms = {key: options[key] for key in ("affine", "track_running_stats", "momentum", "eps") if key in options}
    of_conv = {key: options[key] for key in ("bias", "padding_mode", "dilation", "groups") if key in options}
    training = options.get("training", True)
    first: nn.Module = nn.Conv2d(4, 8, 3, padding=1, **of_conv)
    layers = nn.ModuleList([nn.Sequential(first) if "replaced" in options else first, nn.Conv2d(4, 8, 1)])
    layers.extend(nn.BatchNorm2d(8, **of_norms) for _ in range(2))
    layers = layers.to(DEVICE, torch.float64, memory_format=torch.channels_last).train(training)
    for p in layers[2:].parameters():
        nn.init.normal_(p)
    for norm in layers[2:]:
        norm.track_running_stats &= "untracked" not in options
    if "hook" in options:  # torch's older weight norm is such a hook
        first.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    if "patched" in options:
        first.forward = lambda x, own=first: F.conv2d(3 * x, own.weight, own.bias, padding=1)
    if "watched" in options:
        layers[2].register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    same, x = deepcopy(layers), tensor(4, 4, 7, 6)
    candidate = compiled(lambda: block(same, x, rectified.rectified, rectified.summed))
    with torch.set_grad_enabled(training):
        for _ in range(3):
            expected, result = block(layers, x, plain_rectified, plain_summed), candidate()
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(same.state_dict(), layers.state_dict())
    if training:
        (result**3).sum().backward()
        (expected**3).sum().backward()
        for (name, p), q in zip(same.named_parameters(), layers.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_room", "_allowed")
def test_a_norm_with_a_forward_of_its_own_keeps_it() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    convolution, norm = nn.Conv2d(1, 2, 3).to(DEVICE), Doubled(2).to(DEVICE)
    x = tensor(4, 1, 8, 8, dtype=torch.float32)
    result = compiled(lambda: rectified.rectified(convolution, norm, x))()
    torch.testing.assert_close(result, F.relu(norm(convolution(x))))


@pytest.mark.usefixtures("_room", "_allowed")
def test_the_bias_before_a_norm_has_a_gradient_and_it_is_zero() -> None:
    convolution, norm = nn.Conv2d(2, 3, 3).to(DEVICE), nn.BatchNorm2d(3).to(DEVICE)
    x = tensor(2, 2, 5, 5, dtype=torch.float32)
    compiled(lambda: rectified.rectified(convolution, norm, x))().square().sum().backward()
    assert convolution.bias is not None
    assert convolution.bias.grad is not None
    assert not convolution.bias.grad.any()
    assert norm.bias.grad.all()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return models.build("wrn10x1", 4).to(DEVICE, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.usefixtures("_room", "_allowed")
def test_a_wide_network_trains_as_the_plain_one() -> None:
    plain_, fast = network(), network()
    images, targets = tensor(2, 3, 32, 32, grad=False), torch.arange(2, device=DEVICE)
    for model, forward in ((plain_, plain_), (fast, compiled(fast))):
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(forward(images), targets).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
    torch.testing.assert_close(fast.state_dict(), plain_.state_dict(), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(fast.eval())(images), plain_.eval()(images), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_room", "_allowed")
def test_estimated_statistics_are_those_of_the_biased_values() -> None:
    plain_, fast = network().eval(), network().eval()
    with torch.no_grad():
        for model in (plain_, fast):
            model.get_parameter("layer2.0.conv1.bias").fill_(5.0)
    batches = [(tensor(n, 3, 32, 32, seed=n, grad=False), torch.zeros(n)) for n in (2, 3)]
    for model, forward in ((plain_, plain_), (fast, compiled(fast))):
        estimate_statistics(batchnorms(model), batches, lambda x, _, f=forward: f(x))  # type: ignore[misc]
    assert plain_.get_buffer("layer2.0.bn2.running_mean").mean() > 4
    torch.testing.assert_close(fast.state_dict(), plain_.state_dict(), rtol=1e-6, atol=1e-6)


Graphs = list[list[str]]


def watched(model: nn.Module, graphs: Graphs) -> Callable[..., Any]:
    """Return the compiled model, which records what each of its graphs calls."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: graph(*inputs)

    return torch.compile(model, backend=backend, dynamic=False)


def rectifying(model: nn.Module, images: Tensor) -> int:
    """Return how often a compiled pass calls the kernels."""
    graphs: Graphs = []
    watched(model, graphs)(images)
    return sum("rectify" in name for graph in graphs for name in graph)


@pytest.mark.usefixtures("_room", "_allowed")
@pytest.mark.parametrize("training", [True, False])
def test_kernels_are_used_where_they_are_allowed(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is in training, and in evaluation without gradients: they lack the second derivatives that Hessians need."""
    model, images = network(torch.float32).train(training), tensor(2, 3, 32, 32, dtype=torch.float32, grad=False)
    assert rectifying(model, images) == (7 if training else 0)
    with torch.no_grad():
        assert rectifying(model, images) == 7
        other = deepcopy(model).to(memory_format=torch.contiguous_format)
        assert rectifying(other, images.contiguous()) == 0
        monkeypatch.setattr(rectified, "_ops", None)
        assert rectifying(model, images) == 0


def test_only_what_an_execution_compiles_may_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen = Execution(compile=True).compiled(lambda x: (x, rectified._ops))
    assert seen(1) == (1, ops)
    assert Execution().compiled(lambda: rectified._ops)() is None
    assert rectified._ops is None


@pytest.mark.usefixtures("_room", "_allowed")
def test_what_is_compiled_changes_hands_with_the_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: Graphs = []
    forward = watched(network(torch.float32), graphs)
    for permission in (None, ops, None, ops):
        monkeypatch.setattr(rectified, "_ops", permission)
        forward(tensor(2, 3, 32, 32, dtype=torch.float32, grad=False))
    assert [sum("rectify" in name for name in graph) for graph in graphs] == [0, 7]


@pytest.mark.usefixtures("_room", "_allowed")
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"stride": 2, "dilation": 2, "groups": 2}], ids=str)
def test_a_norm_that_is_folded_into_its_convolution(options: dict[str, Any]) -> None:
    """In evaluation in bfloat16, the result is about as far from that in float64 as without folding."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(16, 32, 3, padding=1, **options), nn.BatchNorm2d(32)
    x = tensor(8, 16, 9, 9, dtype=torch.bfloat16, grad=False)
    for t in (norm.weight.data, norm.bias.data, norm.running_mean):
        t.normal_()
    norm.running_var.uniform_(0.1, 3)
    layers = nn.ModuleList([convolution, norm]).to(DEVICE, memory_format=torch.channels_last).eval()
    exact = deepcopy(layers).double()
    exact[0].weight.data = layers[0].weight.to(torch.bfloat16).double()
    graphs: Graphs = []
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        folded = watched(lambda x: rectified.rectified(*layers, x), graphs)(x)
    with torch.no_grad():
        expected = plain_rectified(*exact, x.double())
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            unfolded = plain_rectified(*layers, x)
    assert sum("convolve_relu" in name for graph in graphs for name in graph) == 1
    assert folded.is_contiguous(memory_format=torch.channels_last)
    off, plainly_off = ((y.double() - expected).norm() / expected.norm() for y in (folded, unfolded))
    assert off < 1.5 * plainly_off < 0.02


def test_cudnn_is_called_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fused operator ignores torch's flags, and does not exist in builds for other GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    on_gpu: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert ops.fuses(on_gpu)
    assert not ops.fuses(torch.zeros(1, device="cpu"))
    for owner, name, value in (
        (torch.backends.cudnn, "enabled", False),
        (torch.backends.cudnn, "deterministic", True),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (torch.version, "hip", "7.0"),
        (torch.cuda, "get_device_capability", lambda _: (7, 5)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not ops.fuses(on_gpu)


if DEVICE == "cuda":  # elsewhere cuDNN is not called

    def test_memory_that_held_no_numbers_does_no_harm() -> None:
        """Torch passes the output to cuDNN, before it is written, as a tensor to be added with factor 0."""
        x, weight = (tensor(*shape, dtype=torch.bfloat16, grad=False) for shape in ((8, 16, 32, 32), (16, 16, 3, 3)))
        bias, options = tensor(16, dtype=torch.bfloat16, grad=False), ([1, 1], [1, 1], [1, 1], 1)
        for _ in range(3):
            left = torch.full_like(x, math.nan)
            del left  # so that the output gets this memory
            result = ops.convolve_relu(x, weight, bias, *options)
            torch.testing.assert_close(result, F.relu(F.conv2d(x, weight, bias, *options)), rtol=2**-6, atol=2**-6)
        x[0, 0, 0, 0] = math.nan
        # NaN in the input must reach the output, so that divergence is noticed.
        assert ops.convolve_relu(x, weight, bias, *options)[0, :, 0, 0].isnan().all()


@pytest.mark.usefixtures("_room", "_allowed")
def test_what_is_folded_is_rounded_first_by_inductor_too() -> None:
    """Inductor drops a cast to bfloat16 and back; here only the rounded bias equals the running mean."""
    convolution, norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
    with torch.no_grad():
        convolution.weight.zero_()
        norm.running_mean.copy_(convolution.bias.to(torch.bfloat16))
        norm.running_var.zero_()
        norm.bias.fill_(1.0)
    layers = nn.ModuleList([convolution, norm]).to(DEVICE, memory_format=torch.channels_last).eval()
    x = tensor(2, 4, 8, 8, dtype=torch.bfloat16, grad=False)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        result = torch.compile(lambda x: rectified.rectified(*layers, x), dynamic=False)(x)
    assert (result == 1).all()


@pytest.mark.usefixtures("_room", "_allowed")
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_and_one_too_large_go_the_plain_way(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(torch.float32).train(training)
    with torch.no_grad():
        assert compiled(model)(tensor(0, 3, 32, 32, dtype=torch.float32, grad=False)).shape == (0, 4)
        monkeypatch.setattr(ops, "MOST", 2 * 32**2 * 16 + 1)  # the size of the stem's output is allowed, and no more
        found = rectifying(model, tensor(2, 3, 32, 32, dtype=torch.float32, grad=False))
    assert found == 5  # of 7: two have inputs for which 32 channels of 32×32 pixels would be possible


@pytest.mark.usefixtures("_room", "_allowed")
def test_weights_in_bfloat16_train_bit_for_bit_as_float32_ones_under_autocast() -> None:
    images, targets = tensor(4, 3, 32, 32, dtype=torch.float32, grad=False), torch.arange(4, device=DEVICE)
    states = []
    for lean in (True, False):
        model = network(torch.float32)
        optimizer = GRDA(model.parameters(), lr=0.1, c=0.01, mu=0.6)
        forward = compiled(model)
        with Lean(model, optimizer) if lean else nullcontext():
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = F.cross_entropy(forward(images).float(), targets)
                loss.backward()
                optimizer.step()
        states.append(model.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert any(p.abs().max() > 0 for name, p in states[0].items() if name.endswith("conv2.bias"))


@pytest.mark.filterwarnings("ignore:invalid value")  # from the interpreter
def test_an_infinite_value_is_not_hidden_from_the_statistics() -> None:
    x = tensor(2, 3, 4, 4, grad=False)
    x[1, 1, 2, 2] = float("inf")
    numbers = ops.rectify(x, None, *parameters(3), EPS)[1]
    assert numbers[4, 1].isnan()
    assert numbers[4, [0, 2]].isfinite().all()


def test_the_operators_keep_torchs_rules() -> None:
    """Schemas, registered derivatives and the shapes of fake tensors are right."""
    a, b, offset, (weight, bias) = tensor(2, 3, 2, 2), tensor(2, 3, 2, 2, seed=3), tensor(3, seed=4), parameters(3)
    numbers = ops.rectify(a, None, weight, bias, EPS)[1].detach()
    still = a.detach(), b.detach()
    running, batches = (torch.zeros_like(numbers[0]), torch.ones_like(numbers[0])), torch.tensor(0, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    check = partial(torch.library.opcheck, test_utils=tests)
    check(ops.rectify, (a, offset, weight, bias, EPS))
    check(ops.rectify_sum, (a, b, offset, weight, bias, EPS))
    check(ops.rectify_backward, (*still, still[1], numbers, True))
    one = [1, 1]
    check(ops.convolve_relu, (still[0], numbers.new_ones(4, 3, 1, 1), numbers.new_ones(4), one, [0, 0], one, 1))
    check(ops.rounded, (still[0],))
    check(ops.track, (*running, batches, numbers, offset.detach(), 0.1))
    for addend in (still[1], None):
        check(ops.rectify_evaluated, (still[0], addend, None, weight.detach(), bias.detach(), *running, EPS))


def test_one_pixel_and_other_layouts_are_refused() -> None:
    weight, bias = parameters(3)
    with pytest.raises(ValueError, match="one value per channel"):
        ops.rectify(tensor(1, 3, 1, 1), None, weight, bias, EPS)
    with pytest.raises(AssertionError):
        ops.rectify(tensor(2, 3, 4, 4).contiguous(), None, weight, bias, EPS)


def test_tensors_of_the_networks_fill_their_tiles() -> None:
    """No mask is needed, for full batches and an epoch's last one, on a GPU of 132 multiprocessors."""
    for tile, (channels, height), batch in product(TILES.values(), benchmark.SHAPES, (benchmark.BATCH, 80)):
        pixels = batch * height**2
        plan = kernels.plan(tile, pixels * channels, channels, 132)
        assert plan.sizes["EVEN"]
        assert plan.grid[0] <= tile.per_sm * 132
        assert 8 * plan.rows <= pixels  # the sums are small beside the tensor


@pytest.mark.parametrize("kernel", benchmark.TRIED)
def test_the_benchmark_launches_every_kernel(kernel: str) -> None:
    """Each kernel writes the tensor that it has to write, and none that it only reads."""
    written = {"moments": 0, "sum": 3, "map": 2, "products": 0, "gradient": 4}[kernel]
    for tile in (TILES[kernel], benchmark.TRIED[kernel][0]):
        tensors = [tensor(1024, seed=i, dtype=torch.bfloat16, grad=False) for i in range(5)]
        before = [t.clone() for t in tensors]
        benchmark.launched(kernel, tile, tensors, 16, empty=True)(0)
        assert all(t.equal(old) for t, old in zip(tensors, before, strict=True))
        benchmark.launched(kernel, tile, tensors, 16)(0)
        changed = [i + 1 for i, (t, old) in enumerate(zip(tensors, before, strict=True)) if not t.equal(old)]
        assert changed == ([written] if written else [])


@pytest.mark.skipif(DEVICE == "cuda", reason="there the benchmark would run")
def test_the_benchmark_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rectified.py"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "needs a CUDA device" in capsys.readouterr().err


VECTORS = """
import re, subprocess, tempfile, triton, triton.language as tl
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dirprune.lab.models import rectified_kernels as kernels
KINDS = dict(C="i32", period="i32", elements="i32", tiles="i32", eps="fp32")
HALF = ("a", "b", "total", "x", "y", "dy", "beside", "dx")
READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def compiled(size, kernel, reads, writes, **flags):
    tile = kernels.TILES[size]
    flags |= dict(ACC=tl.float32, ROWS=tile.rows, WIDTH=kernels.WIDTH, FOLD=1)
    chosen = {name: flags[name] for name in kernel.arg_names if name in flags}
    types = {name: KINDS.get(name, "*bf16" if name in HALF else "*fp32") for name in kernel.arg_names}
    types |= dict.fromkeys(chosen, "constexpr")
    known = [name for name in kernel.arg_names if types[name] not in ("constexpr", "fp32") and name != "tiles"]
    where = kernel.arg_names.index
    source = ASTSource(kernel, types, {(where(name),): value for name, value in chosen.items()},
                       {(where(name),): [["tt.divisibility", 16]] for name in known})
    options = dict(num_warps=tile.warps, **kernels._COMPILATION)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([READER, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(re.search(key + r":(\\d+)", told)[1]) for key in ("REG", "STACK"))
    a_tensor = tile.rows * kernels.WIDTH // (8 * 32 * tile.warps)
    found = [re.findall(way + r"\\.global(\\S*)", made.asm["ptx"]) for way in ("ld", "st")]
    read, written = ([".v4" in access for access in accesses] for accesses in found)
    wide = sum(read) >= reads * a_tensor and sum(written) >= writes * a_tensor
    narrow = read.count(False) <= 5 and all(written)  # nothing but numbers of a channel, before the loop
    fit = 65536 // (tile.per_sm * 32 * tile.warps)
    shared = tile.per_sm * made.metadata.shared < 227 * 1024
    print(size, wide, narrow, stack, registers <= fit, shared)

compiled("moments", kernels._moments_kernel, 1, 0, ADDS=False, BIASED=False, EVEN=True)
compiled("sum", kernels._moments_kernel, 2, 1, ADDS=True, BIASED=True, EVEN=False)
compiled("map", kernels._forward_kernel, 1, 1, EVEN=True)
compiled("products", kernels._products_kernel, 2, 0, EVEN=True)
compiled("gradient", kernels._gradient_kernel, 3, 1, BESIDE=True, BIASED=True, EVEN=True)
compiled("evaluation", kernels._evaluation_kernel, 2, 2, ADDS=True, BIASED=True, EVEN=True)
"""


def test_compiled_kernels_move_16_bytes_a_thread_and_spill_nothing() -> None:
    """Tensors are read and written in vectors of eight, nothing is spilled, and all planned programs fit at once."""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", VECTORS], capture_output=True, text=True, check=True, env=compiling)
    assert done.stdout.splitlines() == [f"{kernel} True True 0 True True" for kernel in TILES]
