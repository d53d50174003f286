"""Train on several processes with DDP; nothing about gRDA changes. Start it with

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dirprune import GRDA, prunable_groups, sparsity


def main(epochs: int = 3) -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    digits = load_digits()
    train = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)  # of each process

    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = GRDA(prunable_groups(model), lr=0.1, momentum=0.9, target=0.9, steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    zeros = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(zeros, torch.tensor(sparsity(model).zeros))
    if dist.get_rank() == 0:
        print(f"zeros in each process: {[int(each) for each in zeros]}; {optimizer.progress()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
