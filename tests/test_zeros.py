from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dirprune import SparsityReport, sparsity
from dirprune.lab.models import resnet18
from dirprune.weights import take
from dirprune.zeros import LayerSparsity


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
        model[0].weight[1] = 0  # an output channel
        model[0].weight[0, 1] = 0  # an input channel, but not for every output
        model[1].bias.zero_()
        model[2].weight[:, 2] = -0.0  # an output channel of a transposed convolution: its second dimension
        model[4].weight[:, 3] = 0  # an input channel
    return model


def test_counts_per_tensor_and_in_all() -> None:
    report = sparsity(network())
    assert isinstance(report, SparsityReport)
    layers = {layer.name: layer for layer in report.layers}
    assert layers["0.weight"].zeros == 18 + 9
    assert (layers["0.weight"].zero_output_channels, layers["0.weight"].output_channels) == (1, 3)
    assert (layers["0.weight"].zero_input_channels, layers["0.weight"].input_channels) == (0, 2)
    assert layers["1.bias"].zeros == 3
    assert layers["1.bias"].fraction == 1.0
    assert layers["1.bias"].output_channels is None
    assert (layers["2.weight"].zero_output_channels, layers["2.weight"].output_channels) == (1, 4)
    assert (layers["2.weight"].zero_input_channels, layers["2.weight"].input_channels) == (0, 3)
    assert (layers["4.weight"].zero_input_channels, layers["4.weight"].input_channels) == (1, 4)
    weights = 54 + 48 + 8
    assert report.zeros == 27 + 3 + 12 + 2
    assert report.total == weights + 3 + 6 + 4 + 2
    assert report.fraction == report.zeros / report.total
    assert report.weight_fraction == (27 + 12 + 2) / weights


def test_weights_by_name_give_the_same_counts() -> None:
    model = network()
    report = sparsity(take(model))
    assert report.zeros == sparsity(model).zeros
    assert [layer.name for layer in report.layers] == [name for name, _ in model.named_parameters()]


def test_table_and_dictionary() -> None:
    report = sparsity(network())
    table = str(report)
    assert "0.weight" in table
    assert "3×2×3×3" in table
    *_, everything, weights, note = table.splitlines()
    assert everything.split() == ["all", "parameters", "125", "44", f"{report.fraction:.2%}"]
    assert weights.split() == ["weights", "alone", "110", "41", f"{report.weight_fraction:.2%}"]
    assert note == "outputs, inputs: channels that are wholly zero"
    data = json.loads(json.dumps(report.to_dict()))
    assert data["zeros"] == report.zeros
    assert data["layers"][0]["zero_output_channels"] == 1


@pytest.mark.parametrize("zero_channel", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.transformer.encoder.blocks.11.feed_forward.intermediate."])
def test_the_table_of_a_large_network_fits_a_terminal(prefix: str, zero_channel: bool) -> None:
    weights = {f"{prefix}{name}": p for name, p in take(resnet18(10)).items()}
    name = f"{prefix}layer4.0.downsample.0.weight"
    weights[name].zero_()
    if not zero_channel:  # ones on a diagonal: then no whole channel is zero
        weights[name].view(512, 256)[torch.arange(512), torch.arange(512) % 256] = 1
    lines = str(sparsity(weights)).splitlines()
    assert max(map(len, lines)) <= 80
    assert ("outputs" in lines[0]) == zero_channel
    assert (lines[-1] == "No output or input channel is wholly zero.") != zero_channel
    [line] = [line for line in lines if "512×256×1×1" in line]
    shown = line.split()[0]
    head, _, tail = shown.partition("…")
    assert shown == name or (prefix and name.startswith(head) and name.endswith(tail) and len(tail) >= 10)
    assert len(lines) == len(weights) + 6


def test_of_channels_that_were_not_counted_the_table_says_nothing() -> None:
    table = str(SparsityReport((LayerSparsity("weight", (2, 2), 4),)))
    assert "channel" not in table
    assert "outputs" not in table
    assert table.splitlines()[-1].endswith("100.00%")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2).parameters(), "model=<generator"),
        (None, "model=None"),
        (torch.zeros(3), r"model=tensor\("),
        ({"a": [1, 2]}, r"model\['a'\]=\[1, 2\] is not a tensor"),
    ],
)
def test_what_has_no_named_tensors_is_refused(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}.*; pass the model itself, or a mapping of names to tensors$"):
        sparsity(model)


def test_what_there_is_nothing_of() -> None:
    assert sparsity(nn.ReLU()).fraction == 0.0
    odd = {"scalar": torch.tensor(0.0), "empty": torch.empty(0), "no rows": torch.empty(0, 3)}
    report = sparsity(odd)
    assert (report.zeros, report.total) == (1, 1)
    assert "scalar" in str(report)


def test_what_is_not_a_number_is_not_zero() -> None:
    assert sparsity({"weight": torch.tensor([0.0, float("nan"), float("inf")])}).zeros == 1


def test_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any) -> Any:
            waits.append(name)
            return original(tensor, *args)

        return call

    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    assert sparsity(network()).zeros == 44
    assert waits == ["tolist"]


def test_the_model_is_left_as_it_was() -> None:
    model = network()
    before = take(model)
    sparsity(model)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_channels_of_an_empty_tensor_are_not_zero() -> None:
    (layer,) = sparsity({"w": torch.zeros(3, 0)}).layers
    assert (layer.zero_output_channels, layer.zero_input_channels) == (0, 0)


def test_zero_input_channels_alone_are_told() -> None:
    text = str(sparsity({"w": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}))
    assert "1/2" in text
    assert "No output or input channel" not in text


@pytest.mark.parametrize("transposed", [False, True])
def test_channels_of_a_grouped_convolution(transposed: bool) -> None:
    """Compare with the layer's behaviour: outputs that are always zero, inputs that change nothing."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 12, 3, groups=4, bias=False).double()
    with torch.no_grad():
        layer.weight[:2] = 0
        layer.weight[:, 1] = 0
        layer.weight[5] = 0
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    outputs = (layer(x) == 0).all(0).flatten(1).all(1).sum()
    inputs = sum(torch.equal(layer(x), layer(x.index_fill(1, torch.tensor([i]), 0.0))) for i in range(8))
    found = sparsity(layer).layers[0]
    assert (found.output_channels, found.zero_output_channels) == (12, outputs)
    assert (found.input_channels, found.zero_input_channels) == (8, inputs)
    assert outputs
    assert inputs


def test_the_table_can_be_printed_by_any_terminal() -> None:
    str(sparsity(nn.Conv2d(3, 2, 1))).encode("cp1252")


def test_what_torch_prunes_counts_as_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    prune.l1_unstructured(model[0], "weight", amount=6)
    report = sparsity(model)
    assert {layer.name: layer.zeros for layer in report.layers} == {
        "0.bias": 0,
        "0.weight": 6,
        "1.weight": 0,
        "1.bias": 0,
    }
    prune.remove(model[0], "weight")
    assert sparsity(model).zeros == report.zeros


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_are_stored_sparsely_are_counted_as_what_they_are() -> None:
    weight = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    report = sparsity({"coo": weight.to_sparse(), "csr": weight.to_sparse_csr()})
    assert [(layer.zeros, layer.zero_output_channels, layer.zero_input_channels) for layer in report.layers] == [
        (5, 1, 2),
        (5, 1, 2),
    ]
