"""The cost of a target: a training step with ``target=`` beside one with a fixed ``c``, as ratios measured in one run.

    python benchmarks/target.py [--rounds 40]

Each turn is 20 training steps, the interval in which a target looks at the weights once. Each of the three
phases of the plan is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from turns import turns

from dirprune import GRDA
from dirprune.lab.models import build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONG = 1_000_000
PHASES = {  # steps of the plan such that the whole measurement stays within one phase
    "before": {"prune_from": 0.5, "prune_until": 0.9},
    "while the zeros come": {"prune_from": 0.0, "prune_until": 0.9},
    "after": {"prune_from": 0.0, "prune_until": 1e-9},
}


def training(name: str, batch: torch.Tensor, **options: object) -> Callable[[], None]:
    """Return a training step of a network whose weights are pruned."""
    torch.manual_seed(0)
    model = build(name, 10).to(DEVICE)
    targets = torch.arange(len(batch), device=DEVICE) % 10
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = GRDA([{"params": weights}, {"params": others, "c": 0.0}], lr=1e-3, momentum=0.9, **options)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch), targets).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--large", action="store_true", help="also ResNet-18, for a GPU")
    args = parser.parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    cases = [("small", torch.randn(32, 1, 8, 8, device=DEVICE))]
    if args.large:
        cases.append(("resnet18", torch.randn(128, 3, 32, 32, device=DEVICE)))
    for name, batch in cases:
        works = {"fixed c": training(name, batch, c=1e-3), "fixed c, again": training(name, batch, c=1e-3)}
        for phase, options in PHASES.items():
            works[phase] = training(name, batch, target=0.9, steps=LONG, **options)
        times = turns(works, args.rounds, repeats=20, warm=3)
        print(f"{name}: {times['fixed c']:.3f} ms a training step with a fixed c; with a target, in units of that:")
        for phase, ms in times.items():
            print(f"  {phase:24}{ms / times['fixed c']:8.3f}")


if __name__ == "__main__":
    main()
