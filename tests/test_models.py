from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dirprune.lab import models, trust
from dirprune.lab.models import (
    NAMES,
    build,
    narrower,
    resnet18,
    resnet50,
    resnet_small,
    small,
    vgg16,
    wide_resnet,
)
from dirprune.lab.models.weights import size

Weights = dict[str, Tensor]


def seeded(name: str, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return build(name, classes)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# --- parameter counts, names and shapes ---


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (partial(build, "vgg16", 10), 15_245_130),
        (partial(build, "wrn28x10", 10), 36_489_290),
        (partial(build, "wrn28x10", 100), 36_546_980),
        (partial(build, "resnet50", 1000), 25_557_032),
        (partial(build, "resnet18", 10), 11_173_962),
        (partial(build, "small", 10), 40_394),
        (partial(resnet18, classes=1000, small_images=False), 11_689_512),  # torchvision's
    ],
)
def test_parameter_counts_are_the_published_ones(make: Callable[[], nn.Module], count: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(make).parameters()) == count


def norm_layout(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{entry}", (width,)
    yield f"{name}.num_batches_tracked", ()


def torchvision_layout(
    counts: tuple[int, ...], *, bottleneck: bool, stem: int, classes: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes in torchvision's state_dict of a ResNet, in order, from the paper's Table 1."""
    yield "conv1.weight", (64, 3, stem, stem)
    yield from norm_layout("bn1", 64)
    channels = 64
    for stage, blocks in enumerate(counts):
        width = 64 * 2**stage
        out = 4 * width if bottleneck else width
        for block in range(blocks):
            at = f"layer{stage + 1}.{block}"
            shapes = [(width, channels, 3), (width, width, 3)]
            if bottleneck:
                shapes = [(width, channels, 1), (width, width, 3), (out, width, 1)]
            for number, (to, source, kernel) in enumerate(shapes, start=1):
                yield f"{at}.conv{number}.weight", (to, source, kernel, kernel)
                yield from norm_layout(f"{at}.bn{number}", to)
            if channels != out:
                yield f"{at}.downsample.0.weight", (out, channels, 1, 1)
                yield from norm_layout(f"{at}.downsample.1", out)
            channels = out
    yield "fc.weight", (classes, channels)
    yield "fc.bias", (classes,)


def layout(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]


@pytest.mark.parametrize(
    ("make", "counts", "options", "entries"),
    [
        (resnet50, (3, 4, 6, 3), {"bottleneck": True, "stem": 7, "classes": 1000}, 320),
        (partial(resnet18, classes=7), (2, 2, 2, 2), {"bottleneck": False, "stem": 3, "classes": 7}, 122),
        (
            partial(resnet18, classes=7, small_images=False),
            (2, 2, 2, 2),
            {"bottleneck": False, "stem": 7, "classes": 7},
            122,
        ),
    ],
    ids=["resnet50", "resnet18", "resnet18-imagenet"],
)
def test_resnets_have_torchvisions_state_dict(
    make: Callable[[], nn.Module], counts: tuple[int, ...], options: dict[str, Any], entries: int
) -> None:
    found = layout(on_meta(make))
    assert found == list(torchvision_layout(counts, **options))
    assert len(found) == entries


def test_vgg16_numbers_its_convolutions_as_torchvision() -> None:
    shapes = dict(layout(on_meta(vgg16)))
    numbers = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    widths = dict(zip(numbers, (64,) * 2 + (128,) * 2 + (256,) * 3 + (512,) * 6, strict=True))
    assert {name for name in shapes if name.startswith("features")} == {
        f"features.{number}.{entry}" for number in widths for entry in ("weight", "bias")
    }
    assert all(shapes[f"features.{number}.weight"][0] == width for number, width in widths.items())


# --- forward values, against the same networks written as plain functions of their weights ---


def conv(weights: Weights, name: str, x: Tensor, stride: int = 1) -> Tensor:
    weight = weights[f"{name}.weight"]
    return F.conv2d(x, weight, weights.get(f"{name}.bias"), stride=stride, padding=weight.shape[-1] // 2)


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    mean, var, scale, shift = (
        weights[f"{name}.{entry}"][:, None, None] for entry in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def plain_vgg16(weights: Weights, x: Tensor) -> Tensor:
    for group in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)):
        for number in group:
            x = conv(weights, f"features.{number}", x).clamp(min=0)
        x = F.max_pool2d(x, 2)
    x = x.squeeze((2, 3))
    for number in (1, 4):
        x = linear(weights, f"classifier.{number}", x).clamp(min=0)
    return linear(weights, "classifier.6", x)


def plain_wide_resnet(weights: Weights, x: Tensor) -> Tensor:
    x = conv(weights, "conv1", x)
    blocks = sorted({name.rpartition(".bn1.")[0] for name in weights if name.startswith("layer") and ".bn1." in name})
    for block in blocks:
        stride = 2 if block in ("layer2.0", "layer3.0") else 1
        out = conv(weights, f"{block}.conv1", norm(weights, f"{block}.bn1", x).clamp(min=0))
        out = conv(weights, f"{block}.conv2", norm(weights, f"{block}.bn2", out).clamp(min=0), stride)
        x = out + (conv(weights, f"{block}.shortcut", x, stride) if block.endswith(".0") else x)
    return linear(weights, "linear", norm(weights, "bn1", x).clamp(min=0).mean((2, 3)))


def plain_resnet(weights: Weights, x: Tensor) -> Tensor:
    imagenet = weights["conv1.weight"].shape[-1] == 7
    x = norm(weights, "bn1", conv(weights, "conv1", x, 2 if imagenet else 1)).clamp(min=0)
    if imagenet:
        x = F.max_pool2d(x, 3, 2, 1)
    blocks = sorted({name.rpartition(".conv1.")[0] for name in weights if ".conv1." in name})
    for block in blocks:
        stage, _, place = block.partition(".")  # the small one has a block a stage, without a number
        stride = 2 if place in ("", "0") and stage != "layer1" else 1
        last = 3 if f"{block}.conv3.weight" in weights else 2
        out = x
        for number in range(1, last + 1):
            # The 3×3 convolution strides: the first of a basic block, the second of a bottleneck.
            out = conv(weights, f"{block}.conv{number}", out, stride if number == last - 1 else 1)
            out = norm(weights, f"{block}.bn{number}", out)
            out = out.clamp(min=0) if number < last else out
        if f"{block}.downsample.0.weight" in weights:
            x = norm(weights, f"{block}.downsample.1", conv(weights, f"{block}.downsample.0", x, stride))
        x = (out + x).clamp(min=0)
    return linear(weights, "fc", x.mean((2, 3)))


def plain_small(weights: Weights, x: Tensor) -> Tensor:
    x = conv(weights, "conv1", x).clamp(min=0)
    x = F.max_pool2d(conv(weights, "conv2", x).clamp(min=0), 2)
    x = F.max_pool2d(conv(weights, "conv3", x).clamp(min=0), 2)
    return linear(weights, "fc2", linear(weights, "fc1", x.flatten(1)).clamp(min=0))


def stir(model: nn.Module) -> None:
    """Move biases and BatchNorm away from 0 and 1, because these values would hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.ndim == 1:
                shift = torch.rand(tensor.shape, generator=generator) - 0.5
                tensor.add_(shift.abs() if name.endswith("running_var") else shift)


@pytest.mark.parametrize(
    ("model", "plain", "shape"),
    [
        (lambda: vgg16(), plain_vgg16, (2, 3, 32, 32)),
        (lambda: wide_resnet(depth=16, width=2, classes=5), plain_wide_resnet, (2, 3, 32, 32)),
        (lambda: resnet50(classes=12), plain_resnet, (1, 3, 64, 64)),
        (lambda: resnet18(classes=12, small_images=False), plain_resnet, (2, 3, 64, 64)),
        (lambda: resnet18(), plain_resnet, (1, 3, 16, 16)),
        (lambda: resnet_small(), plain_resnet, (2, 3, 16, 16)),
        (lambda: small(), plain_small, (4, 1, 8, 8)),
        (lambda: small(classes=3, channels=2), plain_small, (4, 2, 8, 8)),
    ],
    ids=["vgg16", "wrn16x2", "resnet50", "resnet18-imagenet", "resnet18", "resnet-small", "small", "small-2-channels"],
)
def test_forward_equals_the_network_as_a_plain_function(
    model: Callable[[], nn.Module], plain: Callable[[Weights, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    network = model().eval()
    stir(network)
    inputs = images(*shape)
    with torch.no_grad():
        logits = network(inputs)
        expected = plain(network.state_dict(), inputs)
    assert logits.shape == (shape[0], list(network.parameters())[-1].numel())
    scale = float(expected.std())
    torch.testing.assert_close(logits / scale, expected / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("wrn10x2", (1, 3, 32, 32), (0.043543, 0.005222)),
        ("resnet18", (1, 3, 32, 32), (-0.150382, -0.058522)),
        ("small", (1, 1, 8, 8), (0.522983, -1.259164)),
    ],
)
def test_forward_value_of_seed_0_is_pinned(name: str, shape: tuple[int, ...], expected: tuple[float, float]) -> None:
    with torch.no_grad():
        logits = seeded(name).eval()(images(*shape))
    assert logits.shape == (1, 10)
    assert logits[0, [0, -1]].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)


# --- what the forward value in eval mode does not show ---


def test_vgg16_drops_half_before_each_hidden_layer_when_training() -> None:
    model = seeded("vgg16").train()
    inputs: list[Tensor] = []
    for number in (1, 4):
        model.get_submodule(f"classifier.{number}").register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e-3)  # every unit is then positive, so a zero is a dropped unit
        model(torch.ones(8, 3, 32, 32))
    for dropped in inputs:
        assert float((dropped == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert len(inputs) == 2


def test_only_the_final_batchnorm_of_a_wide_resnet_has_momentum_09() -> None:
    model = seeded("wrn10x1").train()
    seen: dict[str, Tensor] = {}
    for name in ("bn1", "layer1.0.bn1"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, inputs, name=name: seen.update({name: inputs[0].detach().mean((0, 2, 3))})
        )
    model(images(2, 3, 32, 32))
    buffers = dict(model.named_buffers())
    torch.testing.assert_close(buffers["bn1.running_mean"], 0.9 * seen["bn1"])
    torch.testing.assert_close(buffers["layer1.0.bn1.running_mean"], 0.1 * seen["layer1.0.bn1"])


# --- initial weights ---


def assert_variance(tensor: Tensor, variance: float, kurtosis: float) -> None:
    """Check that sample mean and variance are within 5 standard errors; Var(s²) ≈ (kurtosis − 1)·σ⁴/n."""
    tensor, n = tensor.detach(), tensor.numel()
    assert abs(float(tensor.mean())) < 5 * (variance / n) ** 0.5
    assert float(tensor.square().mean()) == pytest.approx(variance, rel=5 * ((kurtosis - 1) / n) ** 0.5)


def assert_default(layer: nn.Conv2d | nn.Linear) -> None:
    """Check for PyTorch's default: weights and biases uniform within ± fan_in^-½."""
    fan_in = layer.weight[0].numel()
    assert layer.bias is not None
    for tensor in (layer.weight.detach(), layer.bias.detach()):
        assert float(tensor.abs().max()) <= fan_in**-0.5
        assert_variance(tensor, 1 / (3 * fan_in), kurtosis=1.8)


def layers(model: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("vgg16", lambda layer: 2 / (9 * layer.out_channels) if isinstance(layer, nn.Conv2d) else None),
        ("wrn16x4", lambda layer: None),
        ("resnet18", lambda layer: 2 / fan_out(layer) if isinstance(layer, nn.Conv2d) else None),
        ("resnet50", lambda layer: 2 / fan_out(layer) if isinstance(layer, nn.Conv2d) else None),
        ("small", lambda layer: 2 / layer.weight[0].numel() if len(layer.weight) != 100 else None),
    ],
)
def test_initial_weights_are_normal_with_the_published_variance_or_pytorchs_default(
    name: str, gain: Callable[[nn.Module], float | None]
) -> None:
    for layer in layers(seeded(name, 100)):
        if (variance := gain(layer)) is None:
            assert_default(layer)
        else:
            assert_variance(layer.weight, variance, kurtosis=3.0)
            assert layer.bias is None or not layer.bias.any()


def fan_out(layer: nn.Module) -> int:
    return layer.out_channels * layer.weight[0, 0].numel()  # type: ignore[union-attr, operator, index, return-value]


@pytest.mark.parametrize("name", ["resnet18", "wrn10x1"])
def test_batchnorm_starts_as_the_identity(name: str) -> None:
    for module in seeded(name).modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert not module.bias.any()


@pytest.mark.parametrize("name", ["wrn10x1", "small"])
def test_weights_depend_on_torchs_seed_alone(name: str) -> None:
    def weights(seed: int, other_seed: int) -> Tensor:
        random.seed(other_seed)
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(name, 10).parameters()).detach()

    assert weights(1, other_seed=1).equal(weights(1, other_seed=2))
    assert not weights(1, other_seed=1).equal(weights(2, other_seed=1))


# --- building by name ---


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_name_builds_with_the_asked_for_classes(name: str) -> None:
    assert list(on_meta(partial(build, name, 7)).parameters())[-1].shape[0] == 7


def test_wide_resnets_of_any_size_build_by_name() -> None:
    wide = on_meta(partial(build, "wrn16x3", 10))
    assert len([layer for layer in layers(wide) if layer.weight.ndim == 4 and layer.weight.shape[-1] == 3]) == 16 - 3
    assert wide.get_submodule("layer3.1.conv2").weight.shape == (192, 192, 3, 3)


def test_a_network_that_memory_cannot_hold_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._FAMILIES, "wrn", lambda *_: torch.empty(2**60))
    with pytest.raises(ValueError, match=r"model='wrn10x99' cannot be built: .*; take a smaller one"):
        build("wrn10x99", 10)


@pytest.mark.parametrize(
    ("name", "classes", "words"),
    [
        *((f"wrn{depth}x1", 10, f"depth={depth} is not 6n") for depth in (4, 9, 27, 29)),
        ("wrn40000x1", 10, "there is no model 'wrn40000x1'"),
        ("wrn28x0", 10, "width=0"),
        *(
            (name, 10, rf"no model '{name}'. Did you mean '{nearest}'\?.*{', '.join(NAMES)}")
            for name, nearest in (
                ("vgg-16", "vgg16"),
                ("VGG16", "vgg16"),
                ("resnet5", "resnet50"),
                ("wrn-28-10", "wrn28x10"),
                ("smal", "small"),
            )
        ),
        ("transformer", 10, r"'transformer'\. Known: resnet18, resnet18-imagenet, resnet50"),
        ("small", 0, "classes=0 must be at least 1"),
        ("small", -1, "classes=-1 must be at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(name: str, classes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, classes)


OWN_MODELS = """
from torch import nn

def with_num_classes(num_classes=10): return nn.Linear(2, num_classes)
def with_classes(depth=3, *, classes): return nn.Linear(2, classes)
def with_both(classes=1, num_classes=1): return nn.Linear(classes, num_classes)
def with_any_keyword(*, weights=None, **settings): return nn.Linear(2, settings["num_classes"])
def without(): return nn.Linear(2, 10)
class Net(nn.Linear):
    def __init__(self, num_classes): super().__init__(2, num_classes)

def needs_more(num_classes, width): return nn.Linear(width, num_classes)
def returns_a_number(): return 3
number = 3
def bare(): return nn.Flatten()
def leaves(): exit(0)
def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_a_user.py").write_text(OWN_MODELS)
    (tmp_path / "models_that_lack_a_package.py").write_text("import no_such_package")
    (tmp_path / "models_with_a_slip.py").write_text("def net():\n    return (\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("attribute", "shape"),
    [
        ("with_num_classes", (7, 2)),
        ("with_classes", (7, 2)),
        ("with_both", (7, 1)),
        ("with_any_keyword", (7, 2)),
        ("without", (10, 2)),
        ("Net", (7, 2)),
    ],
)
def test_a_users_callable_gets_the_classes_as_it_wants_them(attribute: str, shape: tuple[int, int]) -> None:
    trust.allow(f"models_of_a_user:{attribute}")
    assert build(f"models_of_a_user:{attribute}", 7).weight.shape == shape


def test_a_users_module_may_lie_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part_of_it.py").write_text("from torch.nn import Linear")
    (tmp_path / "net_right_here.py").write_text(
        "def net(classes):\n    from part_of_it import Linear\n    return Linear(2, classes)"
    )
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")  # must not replace the standard library's json
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    for spec in ("net_right_here:net", "json:net"):
        trust.allow(spec)
    assert build("net_right_here:net", 3).weight.shape == (3, 2)
    assert sys.path == before
    with pytest.raises(ValueError, match="'json' has no attribute 'net'"):
        build("json:net", 3)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("no_such_module:net", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("models_that_lack_a_package:net", "No module named 'no_such_package'"),
        ("models_of_a_user:nothing", "has no attribute 'nothing'"),
        ("models_of_a_user:number", "not a callable object"),
        ("models_of_a_user:needs_more", "missing 1 required positional argument: 'width'"),
        ("models_of_a_user:broken", "RuntimeError: no weights here"),
        ("models_with_a_slip:net", r"SyntaxError: .*never closed \(models_with_a_slip.py, line 2\)"),
        ("models_of_a_user:returns_a_number", "of type int; it must return a torch.nn.Module"),
        ("models_of_a_user:bare", "of type Flatten; .* with parameters to train"),
        ("sys:exit", "raised SystemExit"),
        ("models_of_a_user:leaves", "raised SystemExit: 0"),
    ],
)
def test_a_users_callable_that_cannot_work_is_named_with_the_remedy(spec: str, problem: str) -> None:
    trust.allow(spec)
    with pytest.raises(ValueError, match=f"model='{spec}'.*{problem}"):
        build(spec, 7)


@pytest.mark.parametrize(
    ("name", "classes", "shape", "dtype"),
    [
        ("small", 10, (1, 8, 8), torch.float32),
        ("resnet-small", 10, (3, 16, 16), torch.float32),
        ("gpt64x2", 256, (12,), torch.int64),
    ],
)
@pytest.mark.parametrize("sparsity", [0.8, 0.95])
def test_a_narrow_network_has_at_most_the_weights_that_are_left_and_the_next_one_more(
    name: str, classes: int, shape: tuple[int, ...], dtype: torch.dtype, sparsity: float
) -> None:
    whole = on_meta(partial(build, name, classes))
    left = (1 - sparsity) * size(whole)
    narrow = narrower(name, classes, left)
    width = int(re.findall(r"\d+", narrow)[0])
    wider = narrow.replace(str(width), str(width + (2 if name.startswith("gpt") else 1)), 1)
    assert size(on_meta(partial(build, narrow, classes))) <= left < size(on_meta(partial(build, wider, classes)))
    assert build(narrow, classes).eval()(torch.zeros(2, *shape, dtype=dtype)).shape[:2] == (2, classes)


@pytest.mark.parametrize(
    ("name", "weights", "words"), [("vgg16", 1e4, "no narrow form"), ("small", 10, "at most 10 w")]
)
def test_without_a_narrow_form_it_says_so(name: str, weights: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        narrower(name, 10, weights)


def test_the_usual_width_of_the_small_networks_is_sixteen() -> None:
    for name, make in (("small", small), ("resnet-small", resnet_small)):
        named, usual = seeded(f"{name}16").state_dict(), seeded(name).state_dict()
        torch.testing.assert_close(named, usual, rtol=0, atol=0)
        assert [tuple(p.shape) for p in make().parameters()] == [tuple(p.shape) for p in seeded(name).parameters()]
