"""Prune a network that is trained already: fine-tune it with gRDA to 95% zeros, and save it as a small file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from dirprune import GRDA, prunable_groups
from dirprune.deploy import load_sparse, save_sparse


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def main(folder: Path) -> tuple[float, float]:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

    model = network()  # stands for any trained network: load its weights before the optimizer is made
    fit(model, torch.optim.AdamW(model.parameters()), *train, steps=600)
    dense = accuracy_of(model, *test)
    torch.save(model.state_dict(), folder / "dense.pt")

    steps = 1000
    # "hard" leaves the weights that stay as they are, which suits weights that are good already.
    optimizer = GRDA(prunable_groups(model), lr=0.02, momentum=0.9, target=0.95, steps=steps, shape="hard")
    fit(model, optimizer, *train, steps=steps)
    save_sparse(model, folder / "sparse.safetensors")

    shipped = network()
    shipped.load_state_dict(load_sparse(folder / "sparse.safetensors"))
    sparse = accuracy_of(shipped, *test)
    before, after = ((folder / name).stat().st_size for name in ("dense.pt", "sparse.safetensors"))
    print(f"{dense:.1%} correct in {before:,} bytes before, {sparse:.1%} in {after:,} bytes after")
    return dense, sparse


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, steps: int) -> None:
    for batch in torch.randint(len(inputs), (steps, 64)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()


def accuracy_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
