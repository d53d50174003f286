"""AMC: episodes that meet the target, an agent that learns, and what it finds in a network with a redundant layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim import SGD, Adam

from dirprune.lab import data, models
from dirprune.lab.methods.amc import NOISE, Amc, describe, play, search
from dirprune.lab.methods.ddpg import MEMORY, Agent
from dirprune.lab.methods.magnitude import Magnitude
from dirprune.lab.models.weights import prunable


class Redundant(nn.Module):
    """A network whose largest layer, ``idle``, does not affect the output, although its weights are not small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.idle = nn.Linear(24, 160)
        self.last = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = relu(self.first(images.flatten(1)))
        logits: Tensor = self.last(hidden) + 0.0 * self.idle(hidden).sum()
        return logits


def trained(inputs: Tensor, targets: Tensor) -> Redundant:
    torch.manual_seed(0)
    model = Redundant()
    optimizer = Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return 100 * (model(batch[0]).argmax(1) == batch[1]).double().mean().item()


def test_the_agent_beats_uniform_sparsity_where_one_layer_is_redundant() -> None:
    loaders = data.load("digits", batch_size=2000, seed=0, validation=0.3)
    assert loaders.validation is not None
    train_batch, test_batch = next(iter(loaders.train)), next(iter(loaders.test))
    held_out = next(iter(loaders.validation))
    results = {}
    rewards: list[float] = []

    def reward(model: nn.Module) -> float:
        rewards.append(accuracy(model, held_out))
        return rewards[-1]

    for name, method in (
        ("amc", Amc(sparsity=0.85, reward=reward, at=0.0, stages=1)),
        ("uniform", Magnitude(sparsity=0.85, start=0.0, end=0.0)),
    ):
        model = trained(*train_batch)
        dense = accuracy(model, test_batch)
        method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
        assert method.sparsity().weight_fraction == pytest.approx(0.85, abs=1e-3)
        layers = {layer.name: layer.fraction for layer in method.sparsity().layers if layer.is_weight}
        results[name] = accuracy(model, test_batch), layers
    assert len(rewards) == 100
    assert results["amc"][0] > results["uniform"][0] + 5
    assert results["amc"][0] > dense - 15
    assert results["amc"][1]["idle.weight"] > 0.9
    assert results["amc"][1]["last.weight"] < 0.6
    # The agent learned, and was not just lucky once: its last episodes earn more than its first ones.
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 5


@pytest.mark.parametrize(
    ("sparsity", "gone"),
    [
        (0.0, [0, 0, 0, 0, 0]),
        (0.3, [0, 0, 0, 0, 0]),
        (0.3, [9, 0, 39, 3, 1000]),
        (0.9, [0, 490, 0, 6, 2000]),
        (0.98, [0, 0, 0, 0, 2900]),
        (0.99, [0, 0, 0, 0, 0]),
    ],
)
def test_every_episode_meets_the_target_within_the_bounds(sparsity: float, gone: list[int]) -> None:
    sizes = [10, 500, 40, 7, 3000]
    torch.manual_seed(0)
    agent = Agent(features=5 + 3)
    for noise in (0.0, 0.1, 10.0, 10.0, 10.0):
        states, actions, found = play(agent, torch.eye(5), sizes, gone, sparsity=sparsity, most=0.99, noise=noise)
        zeros = sum(n * s for n, s in zip(sizes, found, strict=True))
        assert zeros == pytest.approx(sparsity * sum(sizes), abs=1e-6)
        assert all(z / n - 1e-9 <= s <= 0.99 + 1e-9 for s, n, z in zip(found, sizes, gone, strict=True))
        assert ((actions >= 0) & (actions <= 1)).all()
        assert states.shape == (5, 8)


def test_the_agent_learns_what_is_rewarded_at_the_end() -> None:
    torch.manual_seed(0)
    agent, wanted = Agent(features=3), torch.tensor([0.9, 0.1, 0.6])
    states, earned = torch.eye(3), []
    for number in range(70):
        noise = 0.5 * 0.95 ** max(0, number - 20)
        actions = torch.tensor([agent.act(state, noise=noise) for state in states])
        earned.append(-1000 * (actions - wanted).square().sum().item())
        agent.remember(states, actions, earned[-1])
        if number >= 20:
            agent.learn(15)
    assert sum(earned[-20:]) > 0.4 * sum(earned[:20])
    found = [agent.act(state) for state in states]
    assert found[0] > found[2] > found[1]


@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
def test_episodes_without_a_reward_are_neither_best_nor_the_end_of_learning(broken: float) -> None:
    """The first episode, and every one that prunes the first layer by more than half, has no finite reward."""
    seen: list[float] = []

    def reward(sparsities: list[float]) -> float:
        seen.append(sparsities[0])
        return broken if len(seen) == 1 or sparsities[0] > 0.5 else -sparsities[0]

    best = search(torch.eye(2), [100, 100], reward, sparsity=0.5, warmup=10, episodes=40)
    assert best[0] == min(value for value in seen[1:] if value <= 0.5)
    assert max(seen[-20:]) <= 0.5  # the agent has learned from the failures
    assert search(torch.eye(2), [100, 100], lambda _: broken, sparsity=0.5, warmup=2, episodes=2)


def test_the_search_leaves_random_state_and_weights_alone() -> None:
    state = torch.get_rng_state()
    options = {"sparsity": 0.5, "warmup": 3, "episodes": 3}
    first = search(torch.eye(3), [5, 6, 7], sum, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert search(torch.eye(3), [5, 6, 7], sum, **options) == first

    model = models.build("small", 10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fails(model: nn.Module) -> float:
        raise RuntimeError("no reward today")

    with pytest.raises(RuntimeError, match="no reward today"):
        Amc(sparsity=0.5, reward=fails, at=0.0).attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)


def test_layers_are_described_between_zero_and_one() -> None:
    features = describe(prunable(models.build("resnet18", 10)))
    assert features.shape == (21, 7)
    assert features.min() >= 0
    assert features.max() == 1
    assert features[:, 1].tolist() == [0.0] * 20 + [1.0]


def test_bad_options_are_refused() -> None:
    for options, message in (
        ({"sparsity": 0.9, "most": 0.5}, r"most=0\.5"),
        ({"sparsity": 1.0}, r"sparsity=1\.0"),
        ({"sparsity": 0.5, "warmup": 0}, "warmup=0"),
    ):
        with pytest.raises(ValueError, match=message):
            search(torch.eye(2), [5, 5], sum, **options)
    with pytest.raises(ValueError, match=r"at=1\.5"):
        Amc(sparsity=0.5, reward=lambda model: 0.0, at=1.5)
    with pytest.raises(ValueError, match=r"most=0\.5"):  # already here, not when pruning begins during training
        Amc(sparsity=0.9, reward=lambda model: 0.0, most=0.5)
    with pytest.raises(ValueError, match="stages=0"):
        Amc(sparsity=0.9, reward=lambda model: 0.0, stages=0)


def test_any_sparsity_can_be_reached_without_saying_how_sparse_a_layer_may_be() -> None:
    model = models.build("small", 10)
    method = Amc(sparsity=0.997, reward=lambda model: 0.0, at=0.0, warmup=1, episodes=1)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    assert method.sparsity().weight_fraction == pytest.approx(0.997, abs=1e-4)


def test_stages_prune_the_same_fraction_each_time_and_bring_nothing_back() -> None:
    model = models.build("small", 10)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = Amc(sparsity=0.9, reward=lambda model: 0.0, at=0.4, stages=4, warmup=1, episodes=1)
    method.attach(model, optimizer, steps=100, examples=100)
    sparsities, masks = {}, {name: mask.clone() for name, mask in method.masks.items()}
    for number in range(1, 101):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        method.after_step(number)
        now = method.sparsity().weight_fraction
        if not sparsities or now != list(sparsities.values())[-1]:
            sparsities[number] = now
        for name, mask in method.masks.items():
            assert not (mask & ~masks[name]).any()
            masks[name].copy_(mask)
    assert list(sparsities) == [1, 40, 50, 60, 70]
    expected = [0.0, *(1 - 0.1 ** (i / 4) for i in (1, 2, 3, 4))]
    assert list(sparsities.values()) == pytest.approx(expected, abs=1e-4)


def test_all_stages_come_even_if_training_is_shorter_than_they_are_many() -> None:
    model, rewards = models.build("small", 10), []
    method = Amc(sparsity=0.9, reward=lambda model: rewards.append(1) or 0.0, at=0.0, stages=3, warmup=1, episodes=1)
    method.attach(model, SGD(model.parameters(), lr=0.1), steps=1, examples=1)
    assert len(rewards) == 6
    assert method.sparsity().weight_fraction == pytest.approx(0.9, abs=1e-4)


def test_the_last_episode_is_the_agent_s_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    noises: list[float] = []
    act = Agent.act

    def watched(self: Agent, state: Tensor, *, noise: float = 0.0) -> Tensor:
        noises.append(noise)
        return act(self, state, noise=noise)

    monkeypatch.setattr(Agent, "act", watched)
    search(torch.eye(2), [100, 100], sum, sparsity=0.5, warmup=2, episodes=3)
    assert noises[:2] == [NOISE] * 2
    assert noises[-2:] == [0.0, 0.0]


def test_the_memory_forgets_the_oldest_episode() -> None:
    agent = Agent(features=1)
    for i in range(MEMORY + 1):
        agent.remember(torch.zeros(1, 1), torch.zeros(1), float(i))
    assert [agent.episodes[0][2], agent.episodes[-1][2]] == [1.0, float(MEMORY)]


def test_the_unit_of_the_reward_does_not_matter() -> None:
    found = [
        search(torch.eye(2), [100, 100], lambda s, k=k: k * (s[0] - 2 * s[1]), sparsity=0.5, warmup=5, episodes=10)
        for k in (1.0, 1024.0)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-3)
