"""The runtime against torch in float64, layer by layer and network by network."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune import deploy
from dirprune.deploy import InvalidFile, Runtime, Unsupported, building
from dirprune.deploy.network import Activation, Layer, Network, Pair, Value, Weight, Window
from dirprune.deploy.packing import pack
from dirprune.lab import models

pytestmark = pytest.mark.skipif(not building.compilers(), reason="no C compiler")


def weight(tensor: Tensor) -> Weight:
    return Weight(tuple(tensor.shape), pack(tensor.contiguous().numpy().ravel().view(np.uint32)))


def sparse(*shape: int, density: float) -> Tensor:
    return torch.randn(shape) * (torch.rand(shape) < density)


def assert_close(found: np.ndarray, wanted: Tensor) -> None:
    want = wanted.double().numpy()
    assert found.shape == want.shape
    assert np.abs(found - want).max(initial=0) <= 1e-5 * max(1.0, np.abs(want).max(initial=0))


def whole(n: int, low: int, high: int) -> list[int]:
    return torch.randint(low, high + 1, (n,)).tolist()


def run(layers: list[Layer], x: Tensor, **options: int | bool) -> np.ndarray:
    """Run layers in a row on checked kernels, which compare every access with its bounds."""
    given = Value(tuple(x.shape[1:]), x.dim() == 4)
    runtime = Runtime(Network((given,), tuple(layers), (len(layers),)), checked=True, **options)
    found = runtime(x)
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_convolutions_of_any_shape(seed: int) -> None:
    torch.manual_seed(seed)
    groups = whole(1, 1, 3)[0] if seed % 3 == 0 else 1
    cin, cout, height, width = whole(1, 1, 9)[0] * groups, whole(1, 1, 40)[0] * groups, *whole(2, 1, 40)
    size = whole(2, 1, min(7, height, width))
    stride, padding = whole(2, 1, 4), [whole(1, 0, k + 1)[0] for k in size]
    if seed % 2:  # square ones, for which most kernels are made
        size, stride, padding = [size[0]] * 2, [1 + seed % 4 // 2] * 2, [min(padding[0], size[0] // 2)] * 2
    w, b = sparse(cout, cin // groups, *size, density=(0.02, 0.2, 1)[seed % 3]), torch.randn(cout)
    x = torch.randn(3, cin, height, width)
    wanted = F.conv2d(x.double(), w.double(), b.double(), stride, padding, groups=groups)
    other = torch.randn(3, cout, *wanted.shape[2:])
    window = Window(Pair(*size), Pair(*stride), Pair(*padding))
    made = Value(tuple(wanted.shape[1:]), True)
    layer = Layer(
        "conv", "c", (0, 1), made, window, groups, activation=Activation(0.0), weight=weight(w), bias=b.numpy()
    )
    network = Network((Value(tuple(x.shape[1:]), True), made), (layer,), (2,))
    runtime = Runtime(network, threads=1 + seed % 3, checked=True)
    assert_close(runtime(x, other), (wanted + other).relu())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_an_even_window_pads_the_same_as_torch() -> None:
    conv, x = nn.Conv2d(4, 6, (4, 2), padding="same"), torch.randn(2, 4, 9, 11)
    found = deploy.compile(conv, x, checked=True)(x)
    assert isinstance(found, np.ndarray)
    assert_close(found, conv.double()(x.double()).detach())


@pytest.mark.parametrize("average", [False, True], ids=["max", "average"])
@pytest.mark.parametrize("seed", range(15))
def test_pools_of_any_shape(seed: int, average: bool) -> None:
    torch.manual_seed(seed)
    height, width = whole(2, 4, 35)
    size, stride, ceil = whole(2, 1, 4), whole(2, 1, 4), bool(seed % 2)
    padding = [whole(1, 0, k // 2)[0] for k in size]
    x = torch.randn(2, 5, height, width) - 3  # below zero: what pads a maximum must not be zero
    if average:
        pooled = F.avg_pool2d(x.double(), size, stride, padding, ceil, count_include_pad=seed % 3 == 0)
    else:
        pooled = F.max_pool2d(x.double(), size, stride, padding, ceil_mode=ceil)
    window = Window(Pair(*size), Pair(*stride), Pair(*padding))
    made = Value(tuple(pooled.shape[1:]), True)
    layer = Layer("average_pool" if average else "max_pool", "p", (0,), made, window, count_padding=seed % 3 == 0)
    assert_close(run([layer], x, threads=1 + seed % 2), pooled)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("examples", [1, 2, 5, 40, 300])
def test_linear_layers_of_any_shape(seed: int, examples: int) -> None:
    torch.manual_seed(seed)
    features, out = whole(2, 1, 90)
    w, b = sparse(out, features, density=(0.05, 0.2, 0.9)[seed % 3]), torch.randn(out)
    x = torch.randn(examples, features)
    wanted = F.leaky_relu(F.linear(x.double(), w.double(), b.double()), 0.1)
    leaky = Activation(0.0, slope=0.1)
    layer = Layer("linear", "l", (0,), Value((out,), False), activation=leaky, weight=weight(w), bias=b.numpy())
    assert_close(run([layer], x, threads=1 + seed % 3), wanted)


class Everything(nn.Module):
    """All operations that are known, in the ways in which models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 7, 2, 3, bias=False), nn.BatchNorm2d(24), nn.ReLU6(), nn.MaxPool2d(3, 2, 1)
        )
        self.norm, self.same = nn.BatchNorm2d(24), nn.Conv2d(24, 24, (3, 1), padding="same", groups=2)
        self.down, self.pool = nn.Conv2d(24, 16, 1, stride=2), nn.AvgPool2d(3, 2, 1)
        self.head = nn.Sequential(
            nn.Linear(40 * 12, 50), nn.BatchNorm1d(50), nn.Hardtanh(-1, 2), nn.Dropout(), nn.Linear(50, 50)
        )
        self.last = nn.Linear(90, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        x = x + F.leaky_relu(self.same(F.relu(self.norm(x))), 0.2)
        joined = torch.cat([F.relu_(self.down(x)), self.pool(x)], 1)
        image = F.adaptive_max_pool2d(joined, (3, 4))
        rows = self.head(image.reshape(x.size(0), -1).contiguous())
        rows = rows + rows.clamp(min=0)
        return self.last(torch.cat([rows, joined.mean((2, 3))], 1)), F.adaptive_avg_pool2d(joined, (4, 5))


@pytest.fixture(scope="module")
def everything() -> nn.Module:
    torch.manual_seed(0)
    return thin(Everything(), 0.3)


def thin(model: nn.Module, density: float) -> nn.Module:
    """Prune a model at random, and give BatchNorm statistics that matter."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.weight *= (torch.rand_like(module.weight) < density) / density**0.5
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm1d)):
                for values in (module.running_mean, module.bias):
                    values.normal_(0, 0.2)
                for values in (module.running_var, module.weight):
                    values.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("threads", [1, 2])
def test_a_network_of_every_operation(everything: nn.Module, threads: int) -> None:
    x = torch.randn(1, 3, 61, 75)
    runtime = deploy.compile(everything, x, threads=threads, checked=True)
    assert everything.training
    double = everything.eval().double()
    for examples in (1, 2, 3, 20, 0):
        x = torch.randn(examples, 3, 61, 75)
        for found, wanted in zip(
            runtime(x), double(x.double()) if examples else (torch.empty(0, 7), torch.empty(0, 40, 4, 5)), strict=True
        ):
            assert_close(found, wanted.detach())
    everything.train().float()


@pytest.mark.parametrize(
    ("name", "size", "density"), [("resnet18", 32, 0.1), ("vgg16", 32, 0.05), ("resnet50", 65, 0.1)]
)
def test_published_networks(name: str, size: int, density: float) -> None:
    torch.manual_seed(0)
    model = thin(models.build(name, 10), density).eval()
    x = torch.randn(2, 3, size, size)
    runtime = deploy.compile(model, x[:1], threads=2)
    with torch.no_grad():
        assert_close(runtime(x), model(x))


def test_the_report_says_what_runs_and_why(everything: nn.Module) -> None:
    runtime = deploy.compile(everything, torch.zeros(1, 3, 61, 75))
    report = {row.layer: row for row in runtime.report(repeats=3) if row.layer and row.multiplications}
    same = everything.same.weight
    assert report["same"].multiplications == int(same.count_nonzero()) * 16 * 19
    assert report["same"].density == pytest.approx(float(same.count_nonzero()) / same.numel())
    assert report["same"].kernel.startswith(("sparse", "dense"))
    assert "density" in report["same"].reason
    assert all(row.microseconds >= 0 for row in report.values())
    rows = {"head.0", "head.4", "last"}
    assert {"stem.0", "same", "down", *rows} == set(report)  # BatchNorm is folded, activations are fused


def test_dense_and_sparse_kernels_are_both_taken() -> None:
    kernels = []
    for density in (0.1, 1.0):
        torch.manual_seed(0)
        model = thin(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)), density)
        kernels.append(deploy.compile(model, torch.zeros(1, 32, 32, 32)).report(repeats=1)[1].kernel.split()[0])
    assert kernels == ["sparse", "dense"]


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softmax(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Unknown(), r"'block\.1'.*softmax"),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), "'0'.*conv_transpose2d"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2)), "'0'.*conv2d.*dilation"),
        (nn.Sequential(nn.Linear(8, 4)), "has a weight for|needs rows|rows"),
        (nn.Sequential(nn.ReLU(), Row()), "'1'.*test_runtime.py, line"),
    ],
    ids=["softmax", "transposed", "dilated", "linear", "batch"],
)
def test_what_is_unknown_is_named_with_its_place(model: nn.Module, said: str) -> None:
    x = torch.zeros(1, 3, 8, 8)
    if isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Linear):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), *model)
    with pytest.raises(Unsupported, match=said):
        deploy.compile(model, x)


@pytest.mark.parametrize("shape", [(3, 61, 75), (1, 3, 61, 74), (1, 4, 61, 75)])
def test_inputs_that_do_not_fit_are_named(everything: nn.Module, shape: tuple[int, ...]) -> None:
    runtime = deploy.compile(everything, torch.zeros(1, 3, 61, 75))
    with pytest.raises(ValueError, match=r"input 0 has shape .* \(examples, 3, 61, 75\)"):
        runtime(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="takes 1 inputs, not 0"):
        runtime()


def test_a_saved_runtime_runs_without_torch(everything: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 3, 61, 75)
    runtime = deploy.compile(everything, x)
    runtime.save(tmp_path / "net.safetensors")
    np.save(tmp_path / "x.npy", x.numpy())
    code = """if True:
        import sys
        sys.modules["torch"] = None
        import numpy as np
        from dirprune import deploy
        runtime = deploy.load("net.safetensors", threads=2)
        np.savez("y.npz", *runtime(np.load("x.npy")))
        runtime.save("again.safetensors")
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    for found, wanted in zip(np.load(tmp_path / "y.npz").values(), runtime(x), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_two_threads_of_python_may_share_a_runtime(everything: nn.Module) -> None:
    from concurrent.futures import ThreadPoolExecutor

    runtime = deploy.compile(everything, torch.zeros(1, 3, 61, 75), threads=2)
    xs = [torch.randn(2, 3, 61, 75) for _ in range(8)]
    wanted = [runtime(x)[0] for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for found, want in zip(pool.map(lambda x: runtime(x)[0], xs), wanted, strict=True):
            np.testing.assert_array_equal(found, want)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins threads as Linux does")
def test_a_thread_that_does_not_run_holds_up_nobody() -> None:
    code = """if True:
        import os, sys, time
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the threads and the spinning process share one CPU
        from dirprune.deploy.network import Layer, Network, Value, Weight
        from dirprune.deploy import Runtime
        from dirprune.deploy.packing import pack
        import numpy as np
        weight = Weight((8, 8), pack(np.ones(64, np.float32).view(np.uint32)))
        value = Value((8,), False)
        layers = tuple(Layer("linear", "", (i,), value, weight=weight) for i in range(400))
        best = {}
        for threads in (1, 2):
            runtime = Runtime(Network((value,), layers, (400,)), threads=threads)
            took = []
            for _ in range(7):
                began = time.perf_counter()
                runtime(np.ones((1, 8), np.float32))
                took.append(time.perf_counter() - began)
            best[threads] = min(took)
        sys.exit(best[2] > 3 * best[1] + 0.3)  # to wait for a turn of the CPU at each layer would take a second
    """
    spinning = subprocess.Popen(
        [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"]
    )
    try:
        subprocess.run([sys.executable, "-c", code], check=True)
    finally:
        spinning.kill()
        spinning.wait()


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "compilers", list)
    monkeypatch.setattr(building, "KERNELS", building.KERNELS / ".." / "kernels")
    with pytest.raises(deploy.NoKernels, match=r"apt install gcc.*ziglang"):
        building.built(building.variant(), checked=True)


def test_a_nan_is_not_hidden() -> None:
    x = torch.tensor([[math.nan, -1.0, 2.0]]).reshape(1, 3, 1, 1)
    for model in (nn.ReLU(), nn.MaxPool2d(1), nn.Hardtanh()):
        found = deploy.compile(nn.Sequential(model), x)(x)
        np.testing.assert_array_equal(found, model(x).numpy())


def test_a_foreign_network_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    deploy.save_sparse(nn.Linear(3, 3), path)
    with pytest.raises(InvalidFile, match=r"weights\.safetensors"):
        deploy.load(path)
