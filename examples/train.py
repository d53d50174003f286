"""Train a classifier so that 90% of its weights end exactly at zero. What is new in the script is the optimizer."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dirprune import GRDA, SparsityReport, macs, prunable_groups, sparsity


def main(epochs: int = 15) -> tuple[float, SparsityReport]:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(images[:1400], labels[:1400]), (images[1400:], labels[1400:])
    loader = DataLoader(train, batch_size=32, shuffle=True)

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    )
    steps = epochs * len(loader)
    optimizer = GRDA(prunable_groups(model), lr=0.05, momentum=0.9, target=0.9, steps=steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for epoch in range(1, epochs + 1):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: {accuracy_of(model, *test):.1%} correct; {optimizer.progress()}")

    report = sparsity(model, cost=macs(model, images[:1]))
    print(report)
    return accuracy_of(model, *test), report


def accuracy_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model.eval()(inputs).argmax(1) == targets).float().mean())


if __name__ == "__main__":
    main()
