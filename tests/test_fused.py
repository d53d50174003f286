"""The Triton kernel: interpreted on the CPU, compiled where there is a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_optim import SGD_OPTIONS, drive, gradients, parameters, saved_and_loaded
from torch import nn

from dirprune import GRDA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED: list[dict[str, Any]] = [{"fused": True}, {"fused": True, "capturable": True}]


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    """Interpret the kernel where it cannot be compiled; the choice is made when its module is imported."""
    from dirprune import _fused

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(_fused)
        yield
    if DEVICE == "cpu":
        importlib.reload(_fused)


def on_device(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    # One tensor of several chunks, and one that is not a multiple of anything.
    extra = [nn.Parameter(torch.randn(9001, generator=torch.Generator().manual_seed(5)).to(dtype))]
    return [nn.Parameter(p.detach().to(DEVICE)) for p in [*parameters(dtype), *extra]]


def step_both(a: tuple[GRDA, list[nn.Parameter]], b: tuple[GRDA, list[nn.Parameter]], steps: range) -> None:
    for step in steps:
        grads = gradients(step, a[1])
        for optimizer, params in (a, b):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(p.device)
            optimizer.step()


@pytest.mark.parametrize("path", FUSED)
@pytest.mark.parametrize("options", SGD_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equals_the_single_tensor_path(path: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    common = {"lr": 0.05, "c": 0.05, "mu": 0.6, **options}
    fused_params, plain_params = on_device(dtype), on_device(dtype)
    fused = GRDA(fused_params, **common, **path)
    plain = GRDA(plain_params, **common, foreach=False, fused=False)
    step_both((fused, fused_params), (plain, plain_params), range(6))
    fused.param_groups[0]["lr"] *= 0.1
    plain.param_groups[0]["lr"] *= 0.1
    step_both((fused, fused_params), (plain, plain_params), range(6, 9))
    zeros = 0
    # The interpreter truncates to bfloat16 where the hardware rounds; weight decay feeds that back.
    loose = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 and DEVICE == "cpu" else {}
    for p, q in zip(fused_params, plain_params, strict=True):
        for key in ("accumulator", "momentum_buffer", "step", "threshold"):
            if key in fused.state[p]:
                torch.testing.assert_close(fused.state[p][key].cpu(), plain.state[q][key].cpu(), **loose)
        torch.testing.assert_close(p, q)
        zeros += int((p == 0).sum())
        assert not torch.signbit(p[p == 0]).any()
    assert 0 < zeros < sum(p.numel() for p in fused_params)


@pytest.mark.parametrize("path", FUSED)
def test_not_a_number_is_not_hidden_and_pruned_is_plus_zero(path: dict[str, Any]) -> None:
    p = nn.Parameter(torch.tensor([0.1, -0.1, -0.0, 3.0, -3.0, float("nan")], device=DEVICE))
    optimizer = GRDA([p], lr=1.0, c=1.0, mu=0.6, **path)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p[:5].tolist() == [0.0, 0.0, 0.0, 2.0, -2.0]
    assert not torch.signbit(p[:3]).any()
    assert p[5].isnan()


@pytest.mark.parametrize("path", FUSED)
def test_parameters_with_their_own_step_counts_and_memory_layouts(path: dict[str, Any]) -> None:
    def make() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(2)
        values = torch.randn(4, 3, 5, 5, generator=generator)
        strided = torch.empty(4, 3, 5, 10)[..., ::2].copy_(values)
        return [
            nn.Parameter(t.to(DEVICE))
            for t in (values.clone(), values.clone().to(memory_format=torch.channels_last), strided)
        ]

    fused_params, plain_params = make(), make()
    fused = GRDA(fused_params, c=0.1, momentum=0.9, **path)
    plain = GRDA(plain_params, c=0.1, momentum=0.9, foreach=False, fused=False)
    for step in range(6):
        for optimizer, params in ((fused, fused_params), (plain, plain_params)):
            for i, p in enumerate(params):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                p.grad = grad.to(DEVICE) if step >= i else None
            optimizer.step()
    for p, q in zip(fused_params, plain_params, strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(fused.state[p]["threshold"].cpu(), plain.state[q]["threshold"].cpu())
        assert p.stride() == q.stride()
    assert [float(fused.state[p]["step"]) for p in fused_params] == [6, 5, 4]


@pytest.mark.parametrize("source", [*FUSED, {"foreach": True}, {"foreach": False, "fused": False}])
@pytest.mark.parametrize("target", [*FUSED, {"foreach": True}, {"foreach": False, "fused": False}])
def test_a_state_saved_by_one_path_continues_on_another(source: dict[str, Any], target: dict[str, Any]) -> None:
    params = on_device()
    first = GRDA(params, c=0.05, momentum=0.9, **source)
    drive_on_device(first, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    second = GRDA(others, c=0.05, momentum=0.9, **target)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    drive_on_device(first, params, range(5, 10))
    drive_on_device(second, others, range(5, 10))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def drive_on_device(optimizer: GRDA, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, grad in zip(params, gradients(step, params), strict=True):
            p.grad = grad.to(DEVICE)
        optimizer.step()


if torch.cuda.is_available():  # a CUDA graph exists nowhere else

    @pytest.mark.parametrize("options", SGD_OPTIONS)
    def test_a_captured_step_follows_the_schedule(options: dict[str, Any]) -> None:
        graphed, plain_params = on_device(), on_device()
        optimizer = GRDA(graphed, lr=0.05, c=0.05, mu=0.6, capturable=True, **options)
        plain = GRDA(plain_params, lr=0.05, c=0.05, mu=0.6, foreach=False, fused=False, **options)
        for p in graphed:
            p.grad = torch.zeros_like(p)
        inputs = [torch.zeros_like(p) for p in graphed]
        step_both((optimizer, graphed), (plain, plain_params), range(1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for p, static in zip(graphed, inputs, strict=True):
                p.grad = static * 1.0  # allocated in the graph's own memory
            optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 3, gamma=0.5)
        for step in range(1, 12):
            for static, q, grad in zip(inputs, plain_params, gradients(step, graphed), strict=True):
                static.copy_(grad)
                q.grad = grad.to(DEVICE)
            graph.replay()
            plain.step()
            scheduler.step()
            plain_scheduler.step()
        for p, q in zip(graphed, plain_params, strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(optimizer.state[p]["threshold"].cpu(), plain.state[q]["threshold"].cpu())

    def test_the_default_on_cuda_is_one_launch_without_synchronisation() -> None:
        params = on_device()
        optimizer = GRDA(params, c=0.05)
        drive_on_device(optimizer, params, range(2))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kernels = [e.name for e in profile.events() if "memcpy" not in e.name.lower()]
        assert sum("grda" in name for name in kernels) == 1

    def test_capturing_before_any_step_is_refused() -> None:
        params = on_device()
        optimizer = GRDA(params, c=0.05, capturable=True, fused=True)
        for p in params:
            p.grad = torch.zeros_like(p)
        with pytest.raises(RuntimeError, match="outside the CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_a_copy_makes_its_own_tables() -> None:
    params = on_device()
    optimizer = GRDA(params, c=0.05, fused=True)
    drive(optimizer, params, range(1)) if DEVICE == "cpu" else drive_on_device(optimizer, params, range(1))
    twin = GRDA.__new__(GRDA)
    twin.__setstate__(optimizer.__getstate__())
    assert twin._launchers == {}
