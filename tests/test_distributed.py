"""Compare two gloo processes with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dirprune import GRDA, AdamGRDA, macs, prunable_groups
from dirprune.deploy import keep_zeros, load_sparse, save_sparse
from dirprune.optim.base import Thresholded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed's own warnings

Job = Callable[[int, Path], None]
OPTIONS: dict[str, Any] = {"lr": 0.1, "c": 0.02, "mu": 0.6, "momentum": 0.9}
TARGET: dict[str, Any] = {"lr": 0.1, "target": 0.7, "steps": 12, "momentum": 0.9}
ADAM: dict[str, Any] = {"lr": 0.05, "c": 0.3, "mu": 0.6, "power": 0.5}
ADAM_TARGET: dict[str, Any] = {"lr": 0.05, "target": 0.7, "steps": 12, "power": 0.5, "prune_until": 0.5, "fix_at": 0.8}
WANTED = round(0.7 * (42 + 7 + 21 + 3))


def optimizer_of(model: nn.Module, options: dict[str, Any]) -> Thresholded:
    return AdamGRDA(model.parameters(), **options) if "power" in options else GRDA(model.parameters(), **options)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int = 0, world: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)[rank::world]).square().mean().backward()
        optimizer.step()


def alone(steps: int, options: dict[str, Any] = OPTIONS) -> tuple[nn.Module, Thresholded]:
    model = network()
    optimizer = optimizer_of(model, options)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_equals_alone(model: nn.Module, steps: int, options: dict[str, Any] = OPTIONS) -> None:
    expected = dict(alone(steps, options)[0].named_parameters())
    for name, p in model.named_parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(full, expected[name.removeprefix("module.")], rtol=1e-10, atol=1e-12)
        assert (full == 0).sum() == (expected[name.removeprefix("module.")] == 0).sum()


def sharded(options: dict[str, Any] = OPTIONS) -> tuple[nn.Module, Thresholded]:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, optimizer_of(model, options)


def gather_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Give every process the whole gradient, even if it holds only a shard of the parameter."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad.redistribute(p.device_mesh, [Replicate()])


def thinned() -> nn.Sequential:
    model = network()
    for p in model.parameters():
        p.data.flatten()[1:].masked_fill_(torch.rand(p.numel() - 1) < 0.7, 0)
    return model


def train_sparse(rank: int, folder: Path) -> None:
    """Train a sparse network on, replicated and sharded, and save it: zeros and weights are those of one process."""
    alone = thinned()
    for model in (DistributedDataParallel(thinned()), fully_shard(thinned()), alone):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        keep_zeros(optimizer)
        train(model, optimizer, range(3), *((0, 1) if model is alone else (rank, 2)))
        save_sparse(model, folder.parent / f"{type(model).__name__}-{rank}")
    expected = load_sparse(folder.parent / f"Sequential-{rank}")
    assert all(torch.equal(p == 0, q == 0) for p, q in zip(expected.values(), thinned().parameters(), strict=True))
    for kind in ("DistributedDataParallel", "FSDPSequential"):
        for name, tensor in load_sparse(folder.parent / f"{kind}-{rank}").items():
            torch.testing.assert_close(tensor, expected[name.removeprefix("module.")])
            assert torch.equal(tensor == 0, expected[name.removeprefix("module.")] == 0)


def run_ddp(rank: int, folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of torch's own deprecated parts

    for options in (OPTIONS, ADAM):
        model = DistributedDataParallel(network())
        train(model, optimizer_of(model, options), range(12), rank, 2)
        assert_equals_alone(model, 12, options)
    model = DistributedDataParallel(network())  # every process steps a part of the parameters
    groups = prunable_groups(model.module, exempt=(), named=False)
    train(model, ZeroRedundancyOptimizer(groups, optimizer_class=GRDA, **OPTIONS), range(12), rank, 2)
    assert_equals_alone(model, 12)
    train_sparse(rank, folder)  # in the same two processes, which take seconds to start


def skip_what_one_process_sees(rank: int, options: dict[str, Any]) -> None:
    """A gradient that is not finite in one process's shard skips the step in all of them."""
    model, optimizer = sharded({**options, "skip_nonfinite": True})
    train(model, optimizer, range(2), rank, 2)
    before = [p.to_local().clone() for p in model.parameters()]
    model(batch(2)[rank::2]).square().mean().backward()
    if rank:
        next(model.parameters()).grad.to_local()[0] = float("nan")
    optimizer.step()
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.skipped() == 1
    train(model, optimizer, range(2, 12), rank, 2)
    assert_equals_alone(model, 12, options)


def run_fsdp(rank: int, folder: Path) -> None:
    model, optimizer = sharded()
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is sharded; count before"):
        macs(model, batch(0))
    gathering = optimizer.register_step_pre_hook(gather_gradients)
    train(model, optimizer, range(2), rank, 2)
    gathering.remove()
    train(model, optimizer, range(2, 12), rank, 2)
    assert_equals_alone(model, 12)
    with pytest.raises(ValueError, match="not sharded as the parameter is"):
        optimizer.load_state_dict(alone(1)[1].state_dict())
    for options in (OPTIONS, ADAM):
        skip_what_one_process_sees(rank, options)


def meets_its_target(model: nn.Module, optimizer: Thresholded, options: dict[str, Any], rank: int) -> None:
    for steps in (7, 12):
        train(model, optimizer, range(optimizer.defaults["plan"].step, steps), rank, 2)
        assert_equals_alone(model, steps, options)
    assert optimizer.progress().zeros == WANTED


def run_ddp_target(rank: int, folder: Path) -> None:
    for options in (TARGET, ADAM_TARGET):
        model = DistributedDataParallel(network())
        meets_its_target(model, optimizer_of(model, options), options, rank)


def run_fsdp_target(rank: int, folder: Path) -> None:
    for options in (TARGET, ADAM_TARGET):
        meets_its_target(*sharded(options), options, rank)


def run_fsdp_target_save(rank: int, folder: Path) -> None:
    for steps, name in ((5, "before"), (10, "after")):  # before and after the zeros are fixed
        model, optimizer = sharded(TARGET)
        train(model, optimizer, range(steps), rank, 2)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / name)


def run_fsdp_clamped(rank: int, folder: Path) -> None:
    """Clamp the parameters between steps, sharded and whole: both must train alike."""
    model, optimizer = sharded()
    whole = network()
    other = GRDA(whole.parameters(), **OPTIONS)
    for steps in (range(6), range(6, 12)):
        versions = [p._version for p in model.parameters()]
        train(model, optimizer, steps, rank, 2)
        assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
        train(whole, other, steps)
        with torch.no_grad():
            for p in (*model.parameters(), *whole.parameters()):
                p.clamp_(-0.1, 0.05)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


def run_fsdp_save(rank: int, folder: Path) -> None:
    model, optimizer = sharded()
    train(model, optimizer, range(6), rank, 2)
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
    )


def run_fsdp_load(rank: int, folder: Path) -> None:
    model, optimizer = sharded()
    load(model, optimizer, folder)
    train(model, optimizer, range(6, 12), rank, 2)
    assert_equals_alone(model, 12)


def load(model: nn.Module, optimizer: Thresholded, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def worker(rank: int, jobs: Sequence[Job], folder: Path, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        for job in jobs:
            job(rank, folder)
        (folder.parent / f"passed-{rank}").touch()
    finally:
        dist.destroy_process_group()
    # Skip the interpreter's shutdown: gloo's threads may still have to release the tensors of the last collective. They
    # need the interpreter for that, and abort the process if it is gone.
    os._exit(0)


PASSED = {"passed-0", "passed-1"}


def spawn(folder: Path, *jobs: Job) -> set[str]:
    """Run the jobs, which make their own assertions, in two processes; return what these left after their end."""
    mp.spawn(worker, args=(jobs, folder / "state", str(folder / "rendezvous")), nprocs=2)
    return {path.name for path in folder.glob("passed-*")}


def test_two_processes_equal_one(tmp_path: Path) -> None:
    assert spawn(tmp_path, run_ddp, run_fsdp, run_fsdp_clamped, run_ddp_target, run_fsdp_target) == PASSED


def test_a_state_saved_under_fsdp_loads_in_one_process(tmp_path: Path) -> None:
    assert spawn(tmp_path, run_fsdp_save) == PASSED
    model = network()
    optimizer = GRDA(model.parameters(), **OPTIONS)
    load(model, optimizer, tmp_path / "state")
    assert float(optimizer.state_dict()["state"][0]["step"]) == 6
    train(model, optimizer, range(6, 12))
    assert_equals_alone(model, 12)


def test_a_state_saved_in_one_process_loads_under_fsdp(tmp_path: Path) -> None:
    model, optimizer = alone(6)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "state")
    assert spawn(tmp_path, run_fsdp_load) == PASSED


def test_a_target_saved_under_fsdp_is_met_in_one_process(tmp_path: Path) -> None:
    assert spawn(tmp_path, run_fsdp_target_save) == PASSED
    for steps, name in ((5, "before"), (10, "after")):
        model = network()
        optimizer = GRDA(model.parameters(), **TARGET)
        load(model, optimizer, tmp_path / "state" / name)
        assert optimizer.progress().step == steps
        train(model, optimizer, range(steps, 12))
        assert_equals_alone(model, 12, TARGET)
