"""Methods on networks that are no plain stacks of layers: tied, frozen, recurrent, transposed, subclassed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from dirprune.lab.methods import Amc, Magnitude, Method, RigL, Str, VariationalDropout
from dirprune.lab.models.weights import prunable

STEPS = 12


class Tied(nn.Module):
    """Two consecutive layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.second(self.first(inputs).tanh()).tanh())
        return outputs


class Language(nn.Module):
    """An embedding that shares its weight with the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs.abs().mul(2).long().clamp_max(4)
        outputs: Tensor = self.head(self.body(self.embedding(words)).relu().mean(1))[:, :3]
        return outputs


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.cells(inputs.unsqueeze(2))[0][:, -1])
        return outputs


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs.view(-1, 2, 4)).flatten(1))
        return outputs


class Own(nn.Linear):
    """A user's own layer."""


class Striding(nn.Module):
    """A user's own module with a weight; its ``stride`` is a number, not a tuple as in torch's convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.stride, self.head = nn.Parameter(torch.randn(4, 8)), 2, nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs @ self.weight.T)
        return outputs


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "language": Language,
    "recurrent": Recurrent,
    "attentive": Attentive,
    "transposed": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.ConvTranspose1d(2, 4, 3),
        nn.Conv1d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ),
    "subclassed": lambda: nn.Sequential(Own(8, 16), nn.ReLU(), nn.Linear(16, 3)),
    "normed": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3)),
    "striding": Striding,
    "twice": lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 3)))(nn.Linear(8, 8)),
}
PRESET: dict[str, Callable[[], Method]] = {
    "magnitude": partial(Magnitude, sparsity=0.75),
    "global": partial(Magnitude, sparsity=0.75, allocation="global"),
    "rigl": partial(RigL, sparsity=0.75),
    "amc": partial(Amc, sparsity=0.75, reward=lambda model: 0.0, warmup=1, episodes=1),
}
METHODS: dict[str, Callable[[], Method]] = PRESET | {
    "variational-dropout": partial(VariationalDropout, beta=0.1, start=-3.0),
    "str": partial(Str, start=-2.5),
}


def trained(model: nn.Module, method: Method) -> Tensor:
    """Attach the method, train for a few steps, and return the network's `answers`."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=1e-3)
    method.attach(model, optimizer, steps=STEPS, examples=100)
    inputs, targets = torch.randn(16, 8), torch.arange(16) % 3
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss, penalty = cross_entropy(model.train()(inputs), targets), method.penalty()
        (loss if penalty is None else loss + penalty).backward()
        optimizer.step()
        method.after_step(step)
    return answers(model)


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = model.eval()(torch.linspace(-1, 1, 40).view(5, 8))
    return outputs


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", METHODS)
def test_the_plain_network_at_the_end_is_the_one_that_was_evaluated(name: str, network: str) -> None:
    model, method = NETWORKS[network](), METHODS[name]()
    parameters = dict(model.named_parameters())
    before = trained(model, method)
    weights, zeros = method.weights(), method.sparsity()
    saved = NETWORKS[network]()
    saved.load_state_dict(method.plain_state())  # what a checkpoint during training holds
    torch.testing.assert_close(answers(saved), before, rtol=1e-5, atol=1e-6)
    method.finish()
    torch.testing.assert_close(answers(model), before, rtol=1e-5, atol=1e-6)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    torch.testing.assert_close(weights, {name: p.detach() for name, p in model.named_parameters()}, rtol=0, atol=0)
    assert zeros.total == sum(p.numel() for p in parameters.values())  # tied weights are counted once
    if name in PRESET:
        assert zeros.weight_fraction == pytest.approx(
            0.75, abs=1 / sum(w.parameter.numel() for w in prunable(model).values())
        )
    else:
        assert zeros.weight_fraction > 0


@pytest.mark.parametrize("name", METHODS)
def test_what_is_frozen_stays_as_it_is(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    method = METHODS[name]()
    trained(model, method)
    method.finish()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", METHODS)
def test_a_network_with_nothing_to_prune_is_refused(name: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="nothing to prune"):
        METHODS[name]().attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)


@pytest.mark.parametrize("steps", [45, 225])
def test_gradual_methods_act_about_ten_times_however_short_training_is(steps: int) -> None:
    for method in (Magnitude(sparsity=0.9), RigL(sparsity=0.9)):
        model = nn.Linear(32, 32)
        method.attach(model, SGD(model.parameters(), lr=0.1), steps=steps, examples=1)
        acts = 0
        for step in range(1, steps + 1):
            model.weight.grad = torch.randn_like(model.weight)
            before = method.masks[""].clone()
            method.after_step(step)
            acts += not torch.equal(method.masks[""], before)
        assert 9 <= acts <= 15
