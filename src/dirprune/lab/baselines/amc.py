"""AMC: an agent learns how sparse each layer of a trained network can be, then the pruned network is fine-tuned.

An episode goes through the layers in order; for each the agent sees what the layer is and how much has been pruned, and
answers with a sparsity between bounds that make every episode end at the target exactly: with n the size of a layer, z
the zeros it has already, p the weights pruned in the layers before it, r the size of those after it and y their zeros,
T the target and m the greatest sparsity allowed,

    max(z, T − p − m·r) / n  ≤  sparsity  ≤  min(m, (T − p − y) / n).

The smallest weights of each layer go, the network is scored on held-out data, that score is the episode's reward, and
the weights come back. The best episode decides the masks with which training goes on.

A network that loses nearly all of its weights at once is no better than chance, however they are shared, and its score
says nothing. So there are several stages, with training in between; in each the same fraction of the weights that are
left goes: of k stages the i-th ends at the sparsity 1 − (1 − s)^(i/k).

Preset: the sparsity, and a reward: e.g. the accuracy on data that is neither trained nor tested on.

Reference: He, Lin, Liu, Wang, Li & Han, "AMC: AutoML for model compression and acceleration on mobile devices", ECCV
2018, in its fine-grained, resource-constrained form, which for ResNet50 has four stages too. Theirs clips the agent's
sparsity to the bounds; here its answer is the place between them, so that the critic never has to judge what cannot be
done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dirprune.lab.baselines.ddpg import Agent
from dirprune.lab.baselines.magnitude import layer_masks
from dirprune.lab.baselines.masks import Masked
from dirprune.lab.baselines.method import Weight, check_fraction, check_sparsity, prunable
from dirprune.modes import seeded

NOISE = 0.5
NOISE_DECAY = 0.95
LEARNING_STEPS = 15
"""Steps of actor and critic after an episode."""


def describe(weights: Mapping[str, Weight]) -> Tensor:
    """Return what the agent sees of each layer: place, kind, outputs, inputs, kernel, stride, size; at most 1 each."""
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
    """Return the states and actions of one episode, and the sparsities that they mean."""
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
    """Return the layers' sparsities in the best episode, the last of which is the agent's own, without noise.

    Args:
        features: a row a layer, of numbers about 1.
        sizes: weights of every layer.
        reward: of sparsities, higher is better; any scale.
        sparsity: of all layers together, which every episode meets.
        zeros: weights of every layer that are pruned already, and stay so; by default none.
        most: greatest sparsity of a layer.
        warmup: episodes before learning begins.
        episodes: those that follow, with noise that fades.
        seed: of the agent and its noise; the caller's random state is left alone.

    >>> search(torch.eye(2), [100, 100], lambda s: s[0] - s[1], sparsity=0.5, warmup=5, episodes=5)[0] > 0.5
    True
    """
    _check_reachable(sparsity, most)
    if warmup < 1 or episodes < 1:
        raise ValueError(f"warmup={warmup}, episodes={episodes}: give at least one of each")
    zeros = zeros or [0] * len(sizes)
    best: list[float] = []
    best_reward = -float("inf")
    with seeded(seed):
        agent = Agent(features=features.shape[1] + 3)
        for number in range(warmup + episodes):
            noise = NOISE * NOISE_DECAY ** max(0, number - warmup) if number < warmup + episodes - 1 else 0.0
            states, actions, sparsities = play(agent, features, sizes, zeros, sparsity=sparsity, most=most, noise=noise)
            earned = reward(sparsities)
            agent.remember(states, actions, earned)
            if not best or earned > best_reward:
                best, best_reward = sparsities, earned
            if number >= warmup - 1:
                agent.learn(LEARNING_STEPS)
    return best


class Amc(Masked):
    """Layer sparsities by reinforcement learning, in stages, and fine-tuning in between and afterwards.

    Args:
        sparsity: of the prunable weights.
        reward: of a model, higher is better, e.g. ``lambda model: evaluate(model, held_out).accuracy``; among several
            processes it must be the same in all.
        at: when the first stage is, as a fraction of training; 0 for a network that is already trained.
        stages: how many searches; the last is half-way from the first to the end of training. 1 prunes all at once.
        most: greatest sparsity of a layer; by default 0.99, and where the target is above 0.98 half-way from it to 1.
        warmup, episodes: of random and of learning search in every stage; each calls the reward once.
        seed: of the agent.

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
        self.most = max(0.99, (1 + sparsity) / 2) if most is None else most
        _check_reachable(sparsity, self.most)
        if stages < 1:
            raise ValueError(f"stages={stages}: give at least one, e.g. 4")
        self.final = sparsity
        self.reward = reward
        self.at = check_fraction(at, "at")
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
        """Return when a stage is, as a fraction of training."""
        return self.at + (1 - self.at) / 2 * stage / max(self.stages - 1, 1)

    def _prune(self, sparsity: float) -> None:
        """Search for masks of this sparsity within those there are, and set them."""
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
        """Give the model these weights under these masks."""
        for name, weight in self.layer_weights.items():
            weight.copy_(weights[name] * masks[name])


def _check_reachable(sparsity: float, most: float) -> None:
    """Raise unless layers of at most this sparsity can be so sparse together."""
    if not check_sparsity(sparsity) <= check_sparsity(most, "most"):
        raise ValueError(f"sparsity={sparsity} cannot be reached with at most most={most} in each layer; raise most")
