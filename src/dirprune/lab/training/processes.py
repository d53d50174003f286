"""This process in a distributed run, as a thin layer over torch.distributed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Process:
    """One of ``world_size`` processes; the first one writes and prints.

    >>> Process().is_first
    True
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world_size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Wait until all processes reach this point."""
        if self.world_size > 1:
            dist.barrier()

    def tell(self, text: str) -> str:
        """Broadcast the first process's text to all processes."""
        words = [text]
        if self.world_size > 1:
            dist.broadcast_object_list(words)
        return words[0]

    def agree(self, flag: bool) -> bool:
        """Return whether the flag is True in any process."""
        return bool(self.sum(torch.tensor(float(flag))) > 0) if self.world_size > 1 else flag

    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the first process's buffers, so that all evaluate with the buffers that are saved."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the module to call in training: the model itself, or DDP around it."""
        if self.world_size == 1:
            return model
        if device.type != "cuda" and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            warnings.warn(
                "on the CPU every process normalises its own part of a batch: with BatchNorm the result depends on how "
                "many processes there are",
                stacklevel=2,
            )
        if device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Process, torch.device]]:
    """Join the process group if torchrun started this process, and leave it at the end.

    Yields this process and the device that it should use; with several GPUs, its own.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Process(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Process(dist.get_rank(), world_size), device
    finally:
        dist.destroy_process_group()
