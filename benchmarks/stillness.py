"""When does a soft threshold fail? How far weights move, against the threshold, beside the accuracy that is left.

    python benchmarks/stillness.py > stillness.jsonl

Digits, an MLP of 64-96-48-10 from He's initial weights, 600 images to train on and 400 others to score; each line is a
run with each shape of the threshold. ``moved`` is what `dirprune.optim.outlook` warns by: the distance (root
mean square) from the initial weights over the threshold, halfway through the phase in which the zeros come.
"""

from __future__ import annotations

import json
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dirprune import GRDA, prunable_groups

SETTINGS = [  # steps, rate, one-cycle, momentum
    *((300, 0.03, cycle, False) for cycle in (False, True)),
    *((steps, 0.01, True, True) for steps in (300, 1000)),
    *((300, 0.1, False, False), (300, 0.02, True, True), (1000, 0.03, False, False)),
    *((2000, 0.1, False, False), (2000, 0.02, True, True)),
]


def network() -> nn.Sequential:
    layers = [nn.Linear(64, 96), nn.Linear(96, 48), nn.Linear(48, 10)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def run(
    seed: int, steps: int, lr: float, cycle: bool, momentum: bool, target: float, shape: str
) -> tuple[float, float]:
    """Return the accuracy in percent, and how far the weights had moved."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=random)
    training, held = order[:600], order[600:1000]
    torch.manual_seed(seed)
    model = network()
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4} if momentum else {}
    optimizer = GRDA(prunable_groups(model), lr=lr, target=target, steps=steps, shape=shape, **options)
    weights = [p for p in model.parameters() if p.dim() > 1]
    start, moved = flat([p.detach() for p in weights]), 0.0
    for n in range(steps):
        warm = n / (0.3 * steps)
        factor = warm if warm < 1 else 0.5 * (1 + math.cos(math.pi * (n - 0.3 * steps) / (0.7 * steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr * (factor if cycle else 1.0)
        batch = training[torch.randint(600, (64,), generator=random)]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        if n + 1 == int(0.4 * steps):
            distance = flat([optimizer.state[p]["accumulator"] for p in weights]) - start
            moved = float(distance.square().mean().sqrt()) / float(optimizer.state[weights[0]]["threshold"])
    with torch.no_grad():
        return 100 * float((model(images[held]).argmax(1) == labels[held]).float().mean()), moved


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def main() -> None:
    torch.set_num_threads(1)
    for setting in SETTINGS:
        for target in (0.8, 0.95, 0.98):
            for seed in (40, 41):
                found = {shape: run(seed, *setting, target, shape) for shape in ("auto", "soft", "garrote", "hard")}
                accuracies = {shape: round(accuracy, 1) for shape, (accuracy, _) in found.items()}
                row = {"setting": setting, "target": target, "seed": seed, "moved": round(found["soft"][1], 3)}
                print(json.dumps({**row, **accuracies}), flush=True)


if __name__ == "__main__":
    main()
