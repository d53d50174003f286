"""Deep deterministic policy gradient for episodes with one action in [0, 1] per step and a reward at the end.

    critic:  minimise ((R − b)/d − Q(s, a))²       actor:  maximise Q(s, μ(s))

R is the reward of the episode in which s and a occurred; b and d are mean and standard deviation of the remembered
rewards, so that their scale does not matter. There is no discount and no reward before the end, so R is the return of
every step, and the critic learns from it directly. The original uses the estimate of a slowly updated target critic,
which endless episodes need, but which hides which step deserved the reward.

Reference: Lillicrap, Hunt, Pritzel, Heess, Erez, Tassa, Silver & Wierstra, "Continuous control with deep reinforcement
learning", ICLR 2016.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

HIDDEN = 64
BATCH = 64
MEMORY = 100
"""The number of episodes that are remembered."""


class Agent:
    """Actor, critic, and the episodes they learn from; small, on the CPU, with torch's global random state.

    >>> 0 <= Agent(features=3).act(torch.zeros(3), noise=0.5) <= 1
    True
    """

    def __init__(self, *, features: int) -> None:
        self.actor = nn.Sequential(_network(features), nn.Sigmoid())
        self.critic = _network(features + 1)
        # The critic has to be right before the actor follows it.
        self.actor_optimizer = Adam(self.actor.parameters(), lr=3e-4, fused=True)
        self.critic_optimizer = Adam(self.critic.parameters(), lr=3e-3, fused=True)
        self.episodes: list[tuple[Tensor, Tensor, float]] = []

    @torch.no_grad()
    def act(self, state: Tensor, *, noise: float = 0.0) -> float:
        """Return the action, drawn from a normal distribution around μ(s), truncated to [0, 1]."""
        mean = self.actor(state)
        return float(nn.init.trunc_normal_(torch.empty(1), mean.item(), noise, 0.0, 1.0) if noise else mean)

    def remember(self, states: Tensor, actions: Tensor, reward: float) -> None:
        """Add an episode, one row per step, and forget the oldest if there are too many.

        A reward of −∞, of an episode that failed, counts as the worst of the others.
        """
        self.episodes = [*self.episodes, (states, actions, reward)][-MEMORY:]

    def learn(self, times: int) -> None:
        """Take ``times`` optimizer steps of critic and actor, each on a random batch of remembered steps."""
        states = torch.cat([states for states, _, _ in self.episodes])
        actions = torch.cat([actions for _, actions, _ in self.episodes])[:, None]
        earned = [reward for _, _, reward in self.episodes]
        rewards = torch.tensor(earned).clamp(min=min(filter(math.isfinite, earned), default=0.0))
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
        returns = advantages.repeat_interleave(len(self.episodes[0][1]))[:, None]
        for _ in range(times):
            drawn = torch.randint(len(states), (BATCH,))
            seen = states[drawn]
            value = self.critic(torch.cat([seen, actions[drawn]], 1))
            _minimise(mse_loss(value, returns[drawn]), self.critic_optimizer)
            _minimise(-self.critic(torch.cat([seen, self.actor(seen)], 1)).mean(), self.actor_optimizer)


def _network(inputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )


def _minimise(loss: Tensor, optimizer: Adam) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
