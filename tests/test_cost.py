from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dirprune import macs, sparsity
from dirprune.lab.models import build


class Calls(nn.Module):
    """A network that is a function of its own parameters and the input."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = forward
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def tied(model: nn.Sequential) -> nn.Sequential:
    model[-1].weight = model[0].weight
    return model


def steps(cell: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 4)
    for _ in range(3):
        h = torch.tanh(x @ cell.w_in + h @ cell.w_hidden)
    return h


@torch.inference_mode()
def in_inference_mode(model: Any, x: Tensor) -> Tensor:
    return F.linear(F.conv1d(x, model.kernel), model.weight)


@torch.autocast("cpu", torch.bfloat16)
def in_bfloat16(model: Any, x: Tensor) -> Tensor:
    return (F.linear(x, model.weight) @ model.weight)[:, 0]


@torch.enable_grad()
def with_gradients(model: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: x @ model.weight.t(), x, use_reentrant=False)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.5)


# A network, the shape of one example, and how often each weight is used, counted by hand.
NETWORKS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], dict[str, float]]] = [
    ("conv", lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 7, 9), {"weight": 4 * 5}),
    ("conv without padding", lambda: nn.Conv2d(2, 4, 3, dilation=2), (2, 7, 9), {"weight": 3 * 5}),
    ("groups", lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 5, 5), {"weight": 9}),
    ("conv1d", lambda: nn.Conv1d(2, 4, 3), (2, 8), {"weight": 6}),
    ("conv3d", lambda: nn.Conv3d(2, 4, 2), (2, 3, 4, 5), {"weight": 2 * 3 * 4}),
    ("transposed", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 7), {"weight": 35}),
    ("linear", lambda: nn.Linear(3, 5), (3,), {"weight": 1}),
    ("linear on tokens", lambda: nn.Linear(3, 5), (2, 7, 3), {"weight": 14}),
    ("bilinear", lambda: Calls(lambda m, x: F.bilinear(x, x, m.w), w=(5, 3, 3)), (3,), {"w": 1}),
    ("F.linear", lambda: Calls(lambda m, x: F.linear(x, m.w) + F.linear(x, m.w), w=(3, 3)), (3,), {"w": 2}),
    ("transposed weight", lambda: Calls(lambda m, x: x @ m.w.t().contiguous(), w=(5, 3)), (4, 3), {"w": 4}),
    ("weight first", lambda: Calls(lambda m, x: m.w @ x.mT, w=(5, 3)), (4, 3), {"w": 4}),
    ("einsum", lambda: Calls(lambda m, x: torch.einsum("bti,hio->btho", x, m.w), w=(2, 3, 4)), (5, 3), {"w": 5}),
    ("half of it", lambda: Calls(lambda m, x: x @ m.w[:2], w=(4, 3)), (2,), {"w": 0.5}),
    ("joined", lambda: Calls(lambda m, x: x @ torch.cat([m.a, m.b], 1), a=(3, 1), b=(3, 4)), (3,), {"a": 1, "b": 1}),
    ("tied", lambda: tied(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))), (6, 3), {"0.weight": 12}),
    ("recurrent by hand", lambda: Calls(steps, w_in=(3, 4), w_hidden=(4, 4)), (3,), {"w_in": 3, "w_hidden": 3}),
    ("gated", lambda: Calls(lambda m, x: x * m.gate, gate=(3,)), (3,), {}),
    ("norms", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)), (2, 2, 2), {"0.weight": 4}),
    (
        "inference",
        lambda: Calls(in_inference_mode, kernel=(4, 2, 3), weight=(2, 6)),
        (2, 8),
        {"kernel": 6, "weight": 4},
    ),
    ("autocast", lambda: Calls(in_bfloat16, weight=(5, 3)), (3,), {"weight": 2}),
    ("checkpoint", lambda: Calls(with_gradients, weight=(5, 3)), (3,), {"weight": 1}),
    ("vmap", lambda: Calls(lambda m, x: torch.vmap(lambda row: m.w @ row)(x), w=(5, 3)), (3,), {"w": 1}),
    (
        "weight norm",
        lambda: parametrizations.weight_norm(nn.Conv2d(2, 4, 3)),
        (2, 5, 5),
        {"parametrizations.weight.original1": 9},
    ),
    (
        "spectral norm",
        lambda: parametrizations.spectral_norm(nn.Linear(3, 5)),
        (3,),
        {"parametrizations.weight.original": 1},
    ),
    (
        "orthogonal",
        lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
        (4,),
        {"parametrizations.weight.original": 1},
    ),
    ("pruned", lambda: pruned(nn.Linear(3, 5)), (3,), {"weight_orig": 1}),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("network", "shape", "uses"), [case[1:] for case in NETWORKS], ids=[n[0] for n in NETWORKS])
def test_uses_of_a_weight(
    network: Callable[[], nn.Module], shape: tuple[int, ...], uses: dict[str, float], batch: int
) -> None:
    model = network()
    found = macs(model, torch.randn(batch, *shape))
    assert found == {name: uses.get(name, 0.0) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_uses_every_weight_once_per_step(kind: Any) -> None:
    found = macs(kind(3, 4, num_layers=2, bidirectional=True), torch.randn(7, 2, 3), examples=2)
    assert found == {name: 0.0 if "bias" in name else 7.0 for name in found}


@pytest.mark.parametrize("frozen", [False, True])  # a frozen layer takes torch's fused path
def test_attention(frozen: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(not frozen)
    found = macs(nn.TransformerEncoder(layer, 2, enable_nested_tensor=frozen), torch.randn(3, 5, 8))
    assert found == {name: 0.0 if name.endswith("bias") or "norm" in name else 5.0 for name in found}


def test_attention_between_sequences_gives_the_mean_over_its_input_weights() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.attention(x, y, y)[0]

    found = macs(Cross(), torch.randn(2, 5, 8), torch.randn(2, 11, 8))
    assert found["attention.in_proj_weight"] == pytest.approx((5 + 11 + 11) / 3)
    assert found["attention.out_proj.weight"] == 5


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("vgg16", 32), ("wrn28x10", 32), ("resnet50", 224)])
def test_totals_are_those_of_torchs_counter(name: str, size: int) -> None:
    with torch.device("meta"):
        model, x = build(name, 10).eval(), torch.randn(2, 3, size, size)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
    found = macs(model, x)
    assert sum(found[name] * p.numel() for name, p in model.named_parameters()) * 2 * 2 == counter.get_total_flops()


def test_the_model_is_left_as_it_was() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, max_norm=0.1)  # scales its weights in the forward pass
            self.norm = nn.BatchNorm1d(3)
            self.head = pruned(nn.Linear(3, 2))  # whose weight is made before every pass
            self.register_buffer("calls", torch.zeros(()))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.calls = self.calls + 1
            self.last = F.dropout(self.norm(self.table(x)), training=True)
            return self.head(self.last)

    model = Odd()
    model.norm.eval()
    model(torch.arange(4))[0].sum().backward()
    model.register_forward_hook(lambda *_: None)
    attributes = [{name: value for name, value in vars(m).items() if name != "_buffers"} for m in model.modules()]
    buffers, state = list(model.buffers()), {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    random, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    found = macs(model, torch.arange(4))
    assert found["head.weight_orig"] == 1
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
    for module, before in zip(model.modules(), attributes, strict=True):
        assert all(vars(module)[name] is value for name, value in before.items())
    assert model.training
    assert not model.norm.training
    assert torch.equal(torch.get_rng_state(), random)
    assert (torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()) == (fast, True)
    assert torch.backends.cudnn.enabled
    assert torch.backends.mkldnn.enabled


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        macs(model, torch.zeros(2, 3))
    assert model.training
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: macs(torch.zeros(3)), r"model=tensor\(.*pass the model itself"),
        (lambda: macs(nn.Linear(2, 2)), "give it an input"),
        (lambda: macs(nn.Linear(2, 2), torch.zeros(0, 2)), "hold 0 examples"),
        (lambda: macs(nn.LazyLinear(2), torch.zeros(1, 2)), "'weight' has no shape yet; run the model once"),
        (lambda: sparsity(nn.Linear(2, 2), cost={"wieght": 1.0}), "cost names 'wieght'"),
    ],
)
def test_refusals(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_what_is_left_of_the_cost() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.Flatten(), pruned(nn.Linear(36, 10)))
    with torch.no_grad():
        model[0].weight[0] = 0
    report = sparsity(model, cost=macs(model, torch.zeros(5, 2, 5, 5)))
    assert {layer.name: (layer.cost, layer.cost_left) for layer in report.layers} == {
        "0.weight": (72 * 9, 54 * 9),
        "2.weight": (360, 180),
        "2.bias": (0, 0),
    }
    assert (report.cost, report.cost_left) == (648 + 360, 486 + 180)
    assert (report.to_dict()["cost_left"], report.to_dict()["layers"][0]["cost"]) == (666, 648)
    *_, everything, _, _, note = str(report).splitlines()
    assert everything.split()[-1] == "666"
    assert note == "cost left: 666 of 1.01k (66.1%)"
    assert sparsity(model).cost is None
    assert "cost" not in str(sparsity(model))


def test_the_table_with_costs_fits_a_terminal() -> None:
    model = build("resnet18", 10)
    nn.init.zeros_(model.conv1.weight)  # so that the columns for channels appear
    report = sparsity(model, cost=macs(model, torch.zeros(1, 3, 32, 32)))
    assert max(map(len, str(report).splitlines())) <= 80
