"""AMC: an agent learns how sparse each layer of a trained network can be, then the pruned network is fine-tuned.

An episode goes through the layers in order. For each layer the agent sees a description of it and how much has been
pruned, and answers with a sparsity. Bounds on the sparsity make every episode end exactly at the target. With n the
size of a layer, z its zeros so far, p the weights pruned in the layers before it, r the size of those after it and y
their zeros, T the target and m the greatest sparsity allowed,

    max(z, T − p − m·r) / n  ≤  sparsity  ≤  min(m, (T − p − y) / n).

The smallest weights of each layer are removed and the network is scored on held-out data. That score is the episode's
reward, and the weights are restored. The masks of the best episode are used in the training that follows.

A network that loses nearly all of its weights at once is no better than chance, whatever the layers' shares, and its
score says nothing. So there are several stages, with training in between. Each removes the same fraction of the weights
that are left: of k stages the i-th ends at the sparsity 1 − (1 − s)^(i/k).

Preset: the sparsity, and a reward, e.g. the accuracy on data that are used neither for training nor for testing.

Reference: He, Lin, Liu, Wang, Li & Han, "AMC: AutoML for model compression and acceleration on mobile devices", ECCV
2018, in its fine-grained, resource-constrained form, which also has four stages for ResNet50. Theirs clips the agent's
sparsity to the bounds. Here the agent's answer is the position between them, so that the critic never has to judge
actions that are impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune._support.modes import seeded
from dirprune.lab.methods.ddpg import Agent
from dirprune.lab.methods.magnitude import layer_masks
from dirprune.lab.methods.masks import Masked
from dirprune.lab.models.weights import PrunableWeight, prunable
from dirprune.lab.ranges import BELOW_ONE, COUNT, FRACTION, SEED, check

NOISE = 0.5
NOISE_DECAY = 0.95
LEARNING_STEPS = 15
"""Steps of actor and critic after each episode."""


def describe(weights: Mapping[str, PrunableWeight]) -> Tensor:
    """Return the features of each layer: place, kind, outputs, inputs, kernel, stride, size; scaled to at most 1."""
    rows = []
    for place, weight in enumerate(weights.values(), start=1):
        outputs, inputs = weight.parameter.shape[:2]
        kernel = weight.parameter[0, 0].numel()
        stride = getattr(weight.places[0][0], "stride", 1)
        stride = stride[0] if isinstance(stride, tuple) else stride
        size = weight.parameter.numel()
        rows.append([place, weight.parameter.dim() == 2, outputs, inputs, kernel, stride, size])
    features = torch.tensor(rows, dtype=torch.float32)
    return features / features.amax(0).clamp_min(1.0)


def play(
    agent: Agent,
    features: Tensor,
    sizes: Sequence[int],
    zeros: Sequence[int],
    *,
    sparsity: float,
    most: float,
    noise: float,
) -> tuple[Tensor, Tensor, list[float]]:
    """Play one episode; return its states, its actions and the resulting sparsities."""
    total = sum(sizes)
    target, pruned, rest, action = sparsity * total, 0.0, float(total), 0.0
    lost = sum(zeros)
    states, actions, sparsities = [], [], []
    for row, size, gone in zip(features, sizes, zeros, strict=True):
        state = torch.cat([row, torch.tensor([pruned / total, rest / total, action])])
        rest -= size
        lost -= gone
        low = max(gone, target - pruned - most * rest) / size
        high = max(low, min(most, (target - pruned - lost) / size))
        action = agent.act(state, noise=noise)
        sparsities.append(low + action * (high - low))
        pruned += sparsities[-1] * size
        states.append(state)
        actions.append(action)
    return torch.stack(states), torch.tensor(actions), sparsities


def search(
    features: Tensor,
    sizes: Sequence[int],
    reward: Callable[[list[float]], float],
    *,
    sparsity: float,
    zeros: Sequence[int] | None = None,
    most: float = 0.99,
    warmup: int = 20,
    episodes: int = 80,
    seed: int = 0,
) -> list[float]:
    """Return the layers' sparsities in the best episode; the last episode is played without noise.

    Args:
        features: one row per layer, of numbers of the order of 1.
        sizes: the number of weights of each layer.
        reward: a function of the sparsities, on any scale; higher is better.
        sparsity: that of all layers together, which every episode meets.
        zeros: the number of weights of each layer that are pruned already and stay pruned; by default none.
        most: the greatest sparsity of a layer.
        warmup: the number of episodes before learning begins.
        episodes: the number of episodes after that, with decaying noise.
        seed: that of the agent and its noise; the caller's random state does not change.

    >>> search(torch.eye(2), [100, 100], lambda s: s[0] - s[1], sparsity=0.5, warmup=5, episodes=5)[0] > 0.5
    True
    """
    _check_reachable(sparsity, most)
    check(locals(), warmup=COUNT, episodes=COUNT)
    zeros = zeros or [0] * len(sizes)
    best: list[float] = []
    best_reward = -math.inf
    with seeded(seed):
        agent = Agent(features=features.shape[1] + 3)
        for number in range(warmup + episodes):
            noise = NOISE * NOISE_DECAY ** max(0, number - warmup) if number < warmup + episodes - 1 else 0.0
            states, actions, sparsities = play(agent, features, sizes, zeros, sparsity=sparsity, most=most, noise=noise)
            earned = reward(sparsities)
            if math.isnan(earned):  # the loss of a network that is pruned beyond repair
                earned = -math.inf
            agent.remember(states, actions, earned)
            if not best or earned > best_reward:
                best, best_reward = sparsities, earned
            if number >= warmup - 1:
                agent.learn(LEARNING_STEPS)
    return best


class Amc(Masked):
    """Layer sparsities by reinforcement learning, in stages, with fine-tuning between and after them.

    Args:
        sparsity: the fraction of the prunable weights to remove.
        reward: a function of a model, higher is better, e.g. ``lambda model: evaluate(model, held_out).accuracy``; it
            must return the same in all processes.
        at: the time of the first stage, as a fraction of training; 0 for a network that is already trained.
        stages: the number of searches; the last is half-way from the first to the end of training. 1 prunes at once.
        most: the greatest sparsity of a layer; by default 0.99, or half-way from the target to 1 if that is more.
        warmup, episodes: numbers of random and of learning episodes in each stage; each calls the reward once.
        seed: that of the agent.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> method = Amc(sparsity=0.5, reward=lambda m: m[0].weight.abs().sum().item(), at=0, stages=1)
        >>> method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=10, examples=100)
        >>> method.sparsity().weight_fraction
        0.5
    """

    name = "amc"
    knob = "sparsity"

    def __init__(
        self,
        *,
        sparsity: float,
        reward: Callable[[nn.Module], float],
        at: float = 0.5,
        stages: int = 4,
        most: float | None = None,
        warmup: int = 20,
        episodes: int = 80,
        seed: int = 0,
    ) -> None:
        ours = {"sparsity": BELOW_ONE, "most": BELOW_ONE, "at": FRACTION}
        check(locals(), **ours, stages=COUNT, warmup=COUNT, episodes=COUNT, seed=SEED)
        self.most = max(0.99, (1 + sparsity) / 2) if most is None else most
        _check_reachable(sparsity, self.most)
        self.final = sparsity
        self.reward = reward
        self.at = at
        self.stages = stages
        self.warmup = warmup
        self.episodes = episodes
        self.seed = seed

    def attach(self, model: nn.Module, optimizer: Optimizer, *, steps: int, examples: int) -> None:
        super().attach(model, optimizer, steps=steps, examples=examples)
        self.after_step(0)

    def after_step(self, step: int) -> None:
        for stage in range(self.stages):
            if step == round(self._time(stage) * self.steps):
                self._prune(1 - (1 - self.final) ** ((stage + 1) / self.stages))

    def _time(self, stage: int) -> float:
        """Return the time of a stage, as a fraction of training."""
        return self.at + (1 - self.at) / 2 * stage / max(self.stages - 1, 1)

    def _prune(self, sparsity: float) -> None:
        """Search for masks of this sparsity within the present ones, and set them."""
        weights = {name: weight.detach().clone() for name, weight in self.layer_weights.items()}

        def earn(sparsities: list[float]) -> float:
            self._put(weights, layer_masks(weights, dict(zip(weights, sparsities, strict=True))))
            return float(self.reward(self.model))

        try:
            found = search(
                describe(prunable(self.model)),
                [weight.numel() for weight in weights.values()],
                earn,
                sparsity=sparsity,
                zeros=[int((~mask).sum()) for mask in self.masks.values()],
                most=self.most,
                warmup=self.warmup,
                episodes=self.episodes,
                seed=self.seed,
            )
        finally:
            self._put(weights, self.masks)
        self.set_masks(layer_masks(weights, dict(zip(weights, found, strict=True))))

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """Write these weights, masked, to the model."""
        for name, weight in self.layer_weights.items():
            weight.copy_(weights[name] * masks[name])


def _check_reachable(sparsity: float, most: float) -> None:
    """Raise unless layers of at most the sparsity ``most`` can reach ``sparsity`` together."""
    check(locals(), sparsity=BELOW_ONE, most=BELOW_ONE)
    if sparsity > most:
        raise ValueError(f"sparsity={sparsity} cannot be reached with at most most={most} in each layer; raise most")
