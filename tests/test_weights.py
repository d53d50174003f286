from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dirprune.weights import combine, flatten, put, stateless, take, unflatten


def test_take_and_put_round_trip_without_sharing_memory() -> None:
    model = nn.Linear(3, 2)
    point = take(model)
    nn.init.zeros_(model.weight)
    assert point["weight"].abs().sum() > 0
    put(model, point)
    assert torch.equal(model.weight, point["weight"])
    assert model.weight.requires_grad


def test_flatten_follows_the_order_of_named_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    vector = flatten(take(model))
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(vector, expected)
    again = unflatten(vector, take(model))
    assert all(torch.equal(again[name], p) for name, p in model.named_parameters())


def test_combine_is_linear() -> None:
    a, b, c = ({"x": torch.randn(2, 2, dtype=torch.float64), "y": torch.randn(3)} for _ in range(3))
    mixed = combine([0.25, -1.0, 2.0], [a, b, c])
    for name in a:
        torch.testing.assert_close(mixed[name], 0.25 * a[name] - b[name] + 2 * c[name])


class Shared(nn.Module):
    """One layer and one BatchNorm registered twice, and a tensor that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.second = self.first
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def test_a_model_with_shared_parts_is_evaluated_elsewhere_and_left_as_it_was() -> None:
    model, inputs = Shared().eval(), torch.randn(5, 3)
    state = {name: torch.rand_like(t) for name, t in [*model.named_parameters(), *model.named_buffers()] if t.ndim}
    expected = copy.deepcopy(model)
    expected.load_state_dict(state, strict=False)
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    values = copy.deepcopy(model.state_dict())
    call = stateless(model)
    for _ in range(2):
        torch.testing.assert_close(call(state, inputs), expected(inputs))
        assert [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)] == before
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


def test_buffers_are_no_weights() -> None:
    model = Shared()
    for name, weights in (
        ("first.1.running_mean", dict(model.state_dict())),
        ("second.0.weight", dict(model.named_parameters(remove_duplicate=False))),
    ):
        with pytest.raises(ValueError, match=rf"'{name}' in weights is a buffer .*give take\(model\) and not"):
            put(model, weights)


def test_what_does_not_fit_is_named() -> None:
    model = nn.Linear(3, 2)
    before = take(model)
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\) in the model and \(2, 4\) in weights"):
        put(model, {"bias": torch.ones(2), "weight": torch.ones(2, 4)})
    with pytest.raises(ValueError, match="'extra' is in weights but not in the model"):
        put(model, {**before, "extra": torch.ones(1)})
    with pytest.raises(ValueError, match="a flat one of 8 elements"):
        unflatten(torch.ones(7), before)
    with pytest.raises(ValueError, match="2 coefficients for 1 points"):
        combine([1.0, 2.0], [before])
    assert torch.equal(model.weight, before["weight"])
