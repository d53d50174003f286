"""BatchNorm with relu in Triton, interpreted on the CPU, against torch's own; compiled where there is a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import rectified as benchmark
import rectified_kernels as kernels
import rectified_networks as networks
import rectified_ops as ops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune.lab import models
from dirprune.lab.models.resnet import BasicBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = dict(kernels.ROWS)
EPS = 1e-5
SHAPES = [(3, 160, 7, 5), (3, 7, 25, 7), (4, 64, 8, 8), (5, 16, 9, 7), (2, 1, 1, 1)]
"""Channels with an odd factor, odd ones, powers of two; pixels that fill tiles and that do not."""


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    """Interpret the kernels where they cannot be compiled; the choice is made when their module is imported."""
    if DEVICE == "cpu":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(kernels)
            patch.setattr(kernels, "ROWS", dict.fromkeys(kernels.ROWS, 64))  # interpreting costs by the tile
            yield
        importlib.reload(kernels)
    else:
        yield


@pytest.fixture
def _room() -> Iterator[None]:
    """Torch compiles a function for eight kinds of arguments at most: leave that room to other tests."""
    yield
    torch.compiler.reset()


@pytest.fixture
def _many(_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for the same columns, of several tiles each."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "ROWS", dict.fromkeys(kernels.ROWS, 4))
        monkeypatch.setattr(kernels, "PER_SM", dict.fromkeys(kernels.PER_SM, 2))
        monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 5)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values.to(DEVICE, dtype)
    if values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    return values.requires_grad_(grad)


def plain(x: Tensor, skip: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    normed = F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)
    return F.relu(normed if skip is None else normed + skip)


def parameters(channels: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return tensor(channels, seed=1, dtype=dtype), tensor(channels, seed=2, dtype=dtype)


def compare(ours: list[Tensor], theirs: list[Tensor], inputs: list[Tensor], **tolerance: float) -> None:
    """Values, and the gradients of a sum of them with weights of either sign."""
    weighed = [
        sum((y * tensor(*y.shape, seed=9 + i, dtype=y.dtype, grad=False)).sum() for i, y in enumerate(outputs))
        for outputs in (ours, theirs)
    ]
    torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(*(list(torch.autograd.grad(total, inputs)) for total in weighed), **tolerance)


@pytest.mark.usefixtures("_many")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("skips", [False, True])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], skips: bool) -> None:
    x, skip = tensor(*shape), tensor(*shape, seed=3) if skips else None
    weight, bias = parameters(shape[1])
    y, _ = ops.rectify(x, skip, None, weight, bias, EPS)
    assert y.is_contiguous(memory_format=torch.channels_last)
    inputs = [x, weight, bias, *([] if skip is None else [skip])]
    compare([y], [plain(x, skip, weight, bias)], inputs, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("_many")
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize(("biased", "goes_on"), [(False, True), (True, True), (True, False)])
def test_a_sum_and_its_shortcut(shape: tuple[int, ...], biased: bool, goes_on: bool) -> None:
    a, b, offset = tensor(*shape), tensor(*shape, seed=3), tensor(shape[1], seed=4) if biased else None
    weight, bias = parameters(shape[1])
    total, y, _ = ops.rectify_sum(a, b, offset, weight, bias, EPS)
    sum_ = a + b if offset is None else a + b + offset[:, None, None]
    ours, theirs = [y, *[total] * goes_on], [plain(sum_, None, weight, bias), *[sum_] * goes_on]
    inputs = [a, b, weight, bias, *([] if offset is None else [offset])]
    compare(ours, theirs, inputs, rtol=1e-7, atol=1e-7)


def test_derivatives_are_differences() -> None:
    x, skip, offset, (weight, bias) = tensor(2, 3, 2, 2), tensor(2, 3, 2, 2, seed=3), tensor(3, seed=4), parameters(3)
    check = partial(torch.autograd.gradcheck, fast_mode=True)
    assert check(lambda *of: ops.rectify(*of, EPS)[0], (x, skip, offset, weight, bias))
    assert check(lambda *of: ops.rectify_sum(*of, EPS)[:2], (x, skip, offset, weight, bias))


@pytest.mark.parametrize("mean", [0.0, 1e3, -1e5])
def test_a_large_mean_cancels_nothing(mean: float) -> None:
    """In float32, against float64 on the same numbers: as far off as the rounding of the mean is, and no farther."""
    x = (mean + tensor(4, 24, 17, 5, grad=False)).float()
    weight, bias = (p.detach().float() for p in parameters(24))
    numbers = ops.rectify(x, None, None, weight, bias, EPS)[1]
    exact = x.double()
    torch.testing.assert_close(numbers[0].double(), exact.mean((0, 2, 3)), rtol=2e-7, atol=1e-6)
    torch.testing.assert_close(numbers[4].double(), exact.var((0, 2, 3)), rtol=5e-6, atol=0)
    y = ops.rectify(x, None, None, weight, bias, EPS)[0]
    expected = plain(exact, None, weight.double(), bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6 + 1e-6 * abs(mean))


def test_a_first_pixel_far_from_all_others() -> None:
    """Nearly as far as can be: √P deviations. What is lost is of the order of P roundings, as the inequality says."""
    x = tensor(4, 8, 16, 16, dtype=torch.float32, grad=False)
    x[0, :, 0, 0] = 1e3
    weight, bias = (p.detach().float() for p in parameters(8))
    numbers = ops.rectify(x, None, None, weight, bias, EPS)[1]
    torch.testing.assert_close(numbers[4].double(), x.double().var((0, 2, 3)), rtol=1e-3, atol=0)


def test_constant_channels_and_pruned_weights() -> None:
    x = tensor(3, 6, 5, 5)
    with torch.no_grad():
        x[:, :2] = torch.tensor([1 / 3, 1e4], dtype=x.dtype, device=DEVICE)[:, None, None]
    weight, bias = parameters(6)
    with torch.no_grad():
        weight[3:5], bias[4] = 0, 0
    y, numbers = ops.rectify(x, None, None, weight, bias, EPS)
    assert (numbers[4, :2] == 0).all()
    assert not y[:, 4].any()
    compare([y], [plain(x, None, weight, bias)], [x, weight, bias], rtol=1e-6, atol=1e-6)


def test_not_a_number_is_not_hidden() -> None:
    x = tensor(2, 3, 4, 4, grad=False)
    x[1, 1, 2, 2] = float("nan")
    weight, bias = parameters(3)
    y = ops.rectify(x, None, None, weight, bias, EPS)[0]
    assert y[:, 1].isnan().all()
    assert not y[:, [0, 2]].isnan().any()


@pytest.mark.parametrize("form", ["alone", "skip", "sum"])
def test_bfloat16_is_rounded_once(form: str) -> None:
    """Against float64 on the same numbers; the interpreter truncates where the hardware rounds."""
    shape = (4, 160, 8, 8)
    a, b = (tensor(*shape, seed=s, dtype=torch.bfloat16) for s in (0, 3))
    weight, bias = parameters(160, torch.float32)
    inputs = [a, weight, bias] + [b] * (form != "alone")
    exact = [t.detach().double().requires_grad_() for t in inputs]
    if form == "sum":
        total, y, _ = ops.rectify_sum(a, b, None, weight, bias, EPS)
        sum_ = exact[0] + exact[3]
        rounded = sum_ + (total.double() - sum_).detach()
        expected = plain(rounded, None, *exact[1:3])
    else:
        y, _ = ops.rectify(a, b if form == "skip" else None, None, weight, bias, EPS)
        expected = plain(exact[0], exact[3] if form == "skip" else None, *exact[1:3])
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-5)
    dy = tensor(*shape, seed=5, dtype=torch.bfloat16, grad=False)
    ours, theirs = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double())
    for mine, exactly in zip(ours, theirs, strict=True):
        tolerance = {"rtol": 2**-6, "atol": 1e-3} if mine.dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 2e-2}
        torch.testing.assert_close(mine.double(), exactly, **tolerance)


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize(
    ("training", "compiling", "biased"),
    [(True, False, False), (True, True, True), (False, False, True), (False, True, False)],
)
def test_layers_go_on_as_before(training: bool, compiling: bool, biased: bool) -> None:
    """Values, running statistics and gradients of what the networks are made of."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Conv2d(5, 9, 3, padding=1, bias=biased), nn.Conv2d(5, 9, 1), nn.BatchNorm2d(9)])
    layers.append(nn.BatchNorm2d(9, momentum=0.7))
    layers = layers.to(DEVICE, torch.float64, memory_format=torch.channels_last).train(training)
    for norm in layers[2:]:
        nn.init.normal_(norm.weight)
        norm.running_mean.normal_()
    same, x, z = deepcopy(layers), tensor(4, 5, 7, 6), tensor(4, 9, 7, 6, seed=3)

    def work(c: Any, rectified: Callable[..., Tensor], summed: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        total, y = summed(((c[0], x), (c[1], x)), c[2])
        return rectified(c[0], c[2], x) + rectified(c[1], c[3], x, z) * y + total

    candidate = lambda: work(same, networks.rectified, networks.summed)  # noqa: E731
    if compiling:
        candidate = torch.compile(candidate, backend="aot_eager", dynamic=False)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            expected, result = work(layers, networks.plain_rectified, networks.plain_summed), candidate()
            torch.testing.assert_close(result, expected)
    torch.testing.assert_close(same.state_dict(), layers.state_dict())
    if training:
        (result**3).sum().backward()
        (expected**3).sum().backward()
        for (name, p), q in zip(same.named_parameters(), layers.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_the_bias_before_a_norm_has_a_gradient_and_it_is_zero() -> None:
    convolution, norm = nn.Conv2d(2, 3, 3).to(DEVICE), nn.BatchNorm2d(3).to(DEVICE)
    networks.rectified(convolution, norm, tensor(2, 2, 5, 5, dtype=torch.float32)).sum().backward()
    assert convolution.bias.grad is not None
    assert not convolution.bias.grad.any()


def residual() -> nn.Module:
    body = BasicBlock(4, 4, 1), BasicBlock(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *body)


@pytest.mark.parametrize(
    ("build", "size"), [(partial(models.build, "wrn10x1", 4), 32), (residual, 8)], ids=["wide", "residual"]
)
def test_a_network_trains_as_the_plain_one(build: Callable[[], nn.Module], size: int) -> None:
    torch.manual_seed(0)
    network = build().to(DEVICE, torch.float64, memory_format=torch.channels_last)
    images, targets = tensor(2, 3, size, size), torch.arange(2, device=DEVICE)
    results = []
    for model, context in ((network, nullcontext()), (deepcopy(network), networks.swapped())):
        with context:
            logits = model(images)
            F.cross_entropy(logits, targets).backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            with torch.no_grad():
                results.append((logits.detach(), gradients, model.eval()(images), model.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_room")
def test_what_is_compiled_changes_hands_with_the_context() -> None:
    model = models.build("wrn10x1", 4).to(DEVICE, memory_format=torch.channels_last)
    names: list[list[str]] = []

    def watched(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        names.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: graph(*inputs)

    forward = torch.compile(model, backend=watched, dynamic=False)
    with torch.no_grad():
        for context in (nullcontext(), networks.swapped(), nullcontext()):
            with context:
                forward(tensor(2, 3, 32, 32, dtype=torch.float32, grad=False))
    assert [sum("rectify" in name for name in graph) for graph in names] == [0, 7]


def test_the_operators_keep_torchs_rules() -> None:
    """Their schemas, shapes without values, derivatives and traces agree."""
    x, skip, offset, (weight, bias) = tensor(2, 3, 2, 2), tensor(2, 3, 2, 2, seed=3), tensor(3, seed=4), parameters(3)
    numbers = ops.rectify(x, None, None, weight, bias, EPS)[1].detach()
    still = [t.detach() for t in (x, skip, numbers)]
    mean, variance, batches = torch.zeros_like(weight), torch.ones_like(weight), torch.tensor(0, device=DEVICE)
    running = mean.detach(), variance.detach()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    check = partial(torch.library.opcheck, test_utils=tests)
    check(ops.rectify, (x, skip, offset, weight, bias, EPS))
    check(ops.rectify_sum, (x, skip, offset, weight, bias, EPS))
    check(ops.rectify_backward, (*still[:2], still[1], numbers, True))
    check(ops.rectify_skip_backward, (*still[:2], still[1], numbers))
    check(ops.track, (*running, batches, numbers, offset.detach(), 0.1))
    parameters_ = weight.detach(), bias.detach(), *running
    check(ops.rectify_evaluated, (*still[:2], None, *parameters_, EPS, True))


def test_one_pixel_and_other_layouts_are_refused() -> None:
    weight, bias = parameters(3)
    with pytest.raises(ValueError, match="one value a channel"):
        ops.rectify(tensor(1, 3, 1, 1), None, None, weight, bias, EPS)
    with pytest.raises(AssertionError):
        ops.rectify(tensor(2, 3, 4, 4).contiguous(), None, None, weight, bias, EPS)


def test_tensors_of_the_networks_fill_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask anywhere, for whole batches and the last one of an epoch; on a GPU of 132 multiprocessors."""
    for kernel, rows in ROWS.items():
        monkeypatch.setitem(kernels.ROWS, kernel, rows)
        for (channels, height), batch in product(benchmark.SHAPES, (benchmark.BATCH, 80)):
            pixels = batch * height**2
            plan = kernels.plan(kernel, pixels * channels, channels, 132)
            assert plan.sizes["EVEN"]
            assert plan.grid[0] <= kernels.PER_SM[kernel] * 132
            assert 8 * plan.rows <= pixels  # the sums are small beside the tensor


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
import rectified_kernels as kernels
KINDS = dict(C="i32", period="i32", elements="i32", tiles="i32", eps="fp32")
HALF = ("a", "b", "total", "x", "skip", "y", "dy", "g", "beside", "dx")
READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def compiled(size, kernel, **flags):
    flags |= dict(ACC=tl.float32, ROWS=kernels.ROWS[size], WIDTH=kernels.WIDTH)
    chosen = {name: flags[name] for name in kernel.arg_names if name in flags}
    types = {name: KINDS.get(name, "*bf16" if name in HALF else "*fp32") for name in kernel.arg_names}
    types |= dict.fromkeys(chosen, "constexpr")
    known = [name for name in kernel.arg_names if types[name] not in ("constexpr", "fp32") and name != "tiles"]
    where = kernel.arg_names.index
    source = ASTSource(kernel, types, {(where(name),): value for name, value in chosen.items()},
                       {(where(name),): [["tt.divisibility", 16]] for name in known})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels._COMPILATION)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([READER, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(re.search(key + r":(\\d+)", told)[1]) for key in ("REG", "STACK"))
    a_tensor = kernels.ROWS[size] * kernels.WIDTH // (8 * 32 * kernels._COMPILATION["num_warps"])
    counts = [len(re.findall(way + r"\\.global\\S*\\.v4", made.asm["ptx"])) / a_tensor for way in ("ld", "st")]
    fit = 65536 // (kernels.PER_SM[size] * 32 * kernels._COMPILATION["num_warps"])
    print(*counts, stack, registers <= fit)

compiled("moments", kernels._moments_kernel, ADDS=False, BIASED=False, FOLD=1, EVEN=True)
compiled("sum", kernels._moments_kernel, ADDS=True, BIASED=True, FOLD=1, EVEN=False)
compiled("map", kernels._forward_kernel, SKIPS=False, EVEN=True)
compiled("products", kernels._products_kernel, SKIPS=False, FOLD=1, EVEN=True)
compiled("products", kernels._products_kernel, SKIPS=True, FOLD=1, EVEN=True)
compiled("gradient", kernels._gradient_kernel, MASKED=True, BESIDE=True, BIASED=True, FOLD=1, EVEN=True)
compiled("sum", kernels._evaluation_kernel, ADDS=True, SKIPS=False, BIASED=True, EVEN=True)
"""


def test_compiled_kernels_move_16_bytes_a_thread_and_spill_nothing() -> None:
    """Tensors read and written in vectors of eight, bytes of the stack, and whether as many programs fit at once."""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiling["PYTHONPATH"] = os.path.dirname(kernels.__file__)
    done = subprocess.run([sys.executable, "-c", VECTORS], capture_output=True, text=True, check=True, env=compiling)
    expected = [(1, 0), (2, 1), (1, 1), (2, 0), (3, 1), (3, 1), (2, 2)]
    assert done.stdout.splitlines() == [f"{float(read)} {float(written)} 0 True" for read, written in expected]
