"""The Triton kernel: interpreted on the CPU, compiled where there is a GPU."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from marks import GPU
from test_optim import SGD_OPTIONS, assert_old_graphs_are_refused, gradients, parameters, saved_and_loaded
from torch import nn

from dirprune import GRDA, AdamGRDA
from dirprune.optim.base import Thresholded

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED: list[dict[str, Any]] = [{"fused": True}, {"fused": True, "capturable": True}]
KINDS: list[Any] = [GRDA, partial(AdamGRDA, lr=0.1)]
CASES: list[tuple[Any, dict[str, Any], torch.dtype]] = [
    *((GRDA, options, dtype) for options in SGD_OPTIONS for dtype in DTYPES),
    *(
        (AdamGRDA, {"betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": True, "shape": "hard"}, dtype)
        for dtype in DTYPES
    ),
    (AdamGRDA, {"power": 0.5}, torch.float32),
    (AdamGRDA, {"betas": (0.0, 0.0), "shape": "garrote"}, torch.float32),
]


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    """Interpret the kernel if it cannot be compiled; this is decided when its module is imported."""
    from dirprune.optim import fused

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(fused)
            patch.setattr(fused, "CHUNK", 1024)  # small, because interpreting is slow
            patch.setattr(fused, "BLOCK", 512)
        yield
    if DEVICE == "cpu":
        importlib.reload(fused)


def on_device(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    from dirprune.optim import fused

    size = 2 * fused.CHUNK + 17  # so that three programs of the kernel share this parameter
    extra = [nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(5)).to(dtype))]
    return [nn.Parameter(p.detach().to(DEVICE)) for p in [*parameters(dtype), *extra]]


Both = tuple[Thresholded, list[nn.Parameter]]


def step_both(a: Both, b: Both, steps: range) -> None:
    for step in steps:
        grads = gradients(step, a[1])
        for optimizer, params in (a, b):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(p.device)
            optimizer.step()


@pytest.mark.parametrize(
    ("path", "kind", "options", "dtype"),
    [(path, *case) for case in CASES for path in FUSED if "capturable" not in path or case[2] is torch.float32],
)
def test_equals_the_single_tensor_path(
    path: dict[str, Any], kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    common = {"lr": 0.05, "c": 0.05 if kind is GRDA else 0.2, "mu": 0.6, **options}
    fused_params, plain_params = on_device(dtype), on_device(dtype)
    fused = kind(fused_params, **common, **path)
    plain = kind(plain_params, **common, foreach=False, fused=False)
    step_both((fused, fused_params), (plain, plain_params), range(6))
    fused.param_groups[0]["lr"] *= 0.1
    plain.param_groups[0]["lr"] *= 0.1
    step_both((fused, fused_params), (plain, plain_params), range(6, 9))
    zeros = 0
    # The interpreter truncates to bfloat16 where the hardware rounds; weight decay feeds that back.
    loose = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 and DEVICE == "cpu" else {}
    for p, q in zip(fused_params, plain_params, strict=True):
        assert fused.state[p].keys() == plain.state[q].keys()
        for key in fused.state[p]:
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


ALL: list[dict[str, Any]] = [*FUSED, {"foreach": True}, {"foreach": False, "fused": False}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source", "target"), [*pairwise([*ALL, ALL[0]]), *pairwise([*ALL[::-1], ALL[-1]])])
def test_a_state_saved_by_one_path_continues_on_another(
    source: dict[str, Any], target: dict[str, Any], kind: Any
) -> None:
    params = on_device()
    first = kind(params, c=0.05, **source)
    drive_on_device(first, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    second = kind(others, c=0.05, **target)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    drive_on_device(first, params, range(5, 10))
    drive_on_device(second, others, range(5, 10))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)


def drive_on_device(optimizer: Thresholded, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, grad in zip(params, gradients(step, params), strict=True):
            p.grad = grad.to(DEVICE)
        optimizer.step()


@GPU
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


@GPU
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
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in launched if "memcpy" not in name.lower()]
    assert len(kernels) == 1, kernels
    assert "grda" in kernels[0]


@GPU
def test_a_rate_on_the_host_and_a_group_on_two_devices() -> None:
    params = [nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu")]
    optimizer = GRDA(params, lr=torch.tensor(0.1), c=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(params[0].cpu(), params[1])


@GPU
def test_two_graphs_of_two_dtypes_take_turns() -> None:
    def make() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        kinds = (torch.float32, torch.bfloat16)
        return [nn.Parameter(torch.randn(5, generator=generator).to("cuda", dtype)) for dtype in kinds]

    graphed, plain_params = make(), make()
    optimizer = GRDA(graphed, c=0.05, capturable=True)
    plain = GRDA(plain_params, c=0.05, foreach=False, fused=False)
    step_both((optimizer, graphed), (plain, plain_params), range(1))
    inputs = [torch.zeros_like(p) for p in graphed]
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for p, static in zip(graphed, inputs, strict=True):
                p.grad = static * 1.0
            optimizer.step()
        graphs.append(graph)
    for step in range(1, 9):
        for static, q, grad in zip(inputs, plain_params, gradients(step, graphed), strict=True):
            static.copy_(grad)
            q.grad = grad.to(DEVICE)
        graphs[step % 2].replay()
        plain.step()
        if step == 5:  # the graphs must use the loaded state
            optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for p, q in zip(graphed, plain_params, strict=True):
        torch.testing.assert_close(p, q)
        assert float(optimizer.state[p]["step"]) == 9


@GPU
def test_capturing_without_capturable_is_refused() -> None:
    params = on_device()
    optimizer = GRDA(params, c=0.05)
    drive_on_device(optimizer, params, range(1))
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@GPU
def test_capturing_before_any_step_is_refused() -> None:
    params = on_device()
    optimizer = GRDA(params, c=0.05, capturable=True, fused=True)
    for p in params:
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="outside the CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("path", FUSED)
def test_what_underflows_in_half_precision_is_plus_zero(path: dict[str, Any]) -> None:
    p = nn.Parameter(torch.tensor([-0.1], dtype=torch.float16, device=DEVICE))
    optimizer = GRDA([p], lr=1.0, c=float(-p.detach().float()) - 1e-8, mu=0.6, **path)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.item() == 0.0
    assert not torch.signbit(p).any()


def replaced_accumulator(optimizer: GRDA, p: nn.Parameter) -> None:
    optimizer.state[p]["accumulator"] = torch.full_like(p, 5.0).detach()


def cleared_state(optimizer: GRDA, p: nn.Parameter) -> None:
    optimizer.state.clear()


def loaded_state(optimizer: GRDA, p: nn.Parameter) -> None:
    state = saved_and_loaded(optimizer.state_dict())
    state["state"][0]["accumulator"].fill_(3.0)
    optimizer.load_state_dict(state)


def transposed_gradient(optimizer: GRDA, p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad.reshape(-1).view(p.shape[1], p.shape[0]).t()


def other_weights(optimizer: GRDA, p: nn.Parameter) -> None:
    p.data = p.data.clone()


def option(name: str, value: Any) -> Any:
    return lambda optimizer, p: optimizer.param_groups[0].update({name: value})


def rate_in_a_tensor(optimizer: GRDA, p: nn.Parameter) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.4, device=DEVICE)


@pytest.mark.parametrize("path", FUSED)
@pytest.mark.parametrize(
    "change",
    [
        replaced_accumulator,
        cleared_state,
        loaded_state,
        transposed_gradient,
        other_weights,
        rate_in_a_tensor,
        option("lr", 0.4),
        option("momentum", 0.0),
        option("c", 0.2),
        option("mu", 0.8),
        option("weight_decay", 0.1),
        option("nesterov", True),
        option("maximize", True),
    ],
)
def test_the_table_follows_what_changes_between_steps(path: dict[str, Any], change: Any) -> None:
    results = []
    for options in (path, {"foreach": False, "fused": False}):
        p = nn.Parameter(torch.arange(5.0, 11.0, device=DEVICE).view(2, 3))
        optimizer = GRDA([p], lr=0.1, c=0.05, momentum=0.5, **options)
        # The gradient stays at one address, so that the table of addresses is not sent again for its sake.
        p.grad = torch.arange(6.0, device=DEVICE).view(2, 3)
        for step in range(6):
            if step == 3:
                change(optimizer, p)
            optimizer.step()
        results.append([p.detach(), *(optimizer.state[p][key].cpu() for key in ("accumulator", "step", "threshold"))])
        assert p.any()
    for fused, single in zip(*results, strict=True):
        torch.testing.assert_close(fused, single)


def test_what_a_table_points_to_is_kept() -> None:
    """Otherwise a new tensor could get the address and the id of a deleted one, and be taken for it."""
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    p.grad = torch.ones_like(p)
    optimizer = GRDA([p], fused=True)
    optimizer.step()
    kept = [weakref.ref(tensor) for tensor in optimizer.state[p].values()]
    optimizer.state.clear()
    assert all(reference() is not None for reference in kept)


def test_a_load_leaves_the_tables_that_captured_graphs_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from dirprune.optim import fused

    tables: list[weakref.ref[torch.Tensor]] = []
    send = fused.Launcher._send

    def watched(launcher: Any, cells: list[int], device: torch.device) -> torch.Tensor:
        table = send(launcher, cells, device)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(fused.Launcher, "_send", watched)
    params = on_device()
    optimizer = GRDA(params, fused=True)
    drive_on_device(optimizer, params, range(1))
    optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert tables
    assert tables[-1]() is not None


def test_empty_parameters_that_take_turns_keep_their_own_count() -> None:
    a, b = (nn.Parameter(torch.empty(0, device=DEVICE)) for _ in range(2))
    optimizer = GRDA([a, b], fused=True)
    for first in (True, False, False):
        a.grad, b.grad = (torch.empty(0, device=DEVICE), None) if first else (None, torch.empty(0, device=DEVICE))
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (a, b)] == [1, 2]


def test_a_state_loaded_from_another_memory_layout() -> None:
    values = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    results = []
    for options in ({"fused": True}, {"foreach": False, "fused": False}):
        source, target = nn.Parameter(values.to(memory_format=torch.channels_last)), nn.Parameter(values.clone())
        first, second = GRDA([source], momentum=0.9, **options), GRDA([target], **options)
        for optimizer, p in ((first, source), (second, target)):
            p.grad = values.sin()
            optimizer.step()
        second.load_state_dict(first.state_dict())
        second.step()
        results.append(target.detach())
    torch.testing.assert_close(results[0], results[1])


def test_the_default_device_does_not_matter() -> None:
    results = []
    for device in ("meta", "cpu"):  # tensors that a step made on the default device meta would have no values
        p = nn.Parameter(torch.ones(5, device=DEVICE))
        p.grad = torch.ones_like(p)
        with torch.device(device):
            GRDA([p], lr=0.1, c=0.1, fused=True).step()
        results.append(p.detach())
    torch.testing.assert_close(results[0], results[1])


def test_a_copy_steps_on_its_own() -> None:
    params = on_device()
    optimizer = GRDA(params, c=0.05, fused=True)
    drive_on_device(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    drive_on_device(optimizer, params, range(2, 4))
    drive_on_device(twin, twin.param_groups[0]["params"], range(2, 4))
    for p, q in zip(params, twin.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q)


VECTORS = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dirprune.optim.fused import BLOCK, CHUNK, _COMPILATION, _grda_kernel as kernel
always = dict(PARAM=tl.float32, GRAD=tl.float32, STATE=tl.float32, ALIGNED=True, SHAPE='soft', CHUNK=CHUNK, BLOCK=BLOCK)
vectors = BLOCK // (4 * 32 * _COMPILATION["num_warps"])  # of four float32, that a thread has of a block
for also in ({}, {"ADAM": True, "GUARDED": True}, {"ADAM": True, "SHAPE": ""}):
    chosen = always | also
    kinds = {name: chosen.get(name, False) for name in kernel.arg_names if name.isupper()}
    signature = {name: "constexpr" if name in kinds else "*i32" for name in kernel.arg_names} | {"table": "*i64"}
    constants = {(kernel.arg_names.index(name),): value for name, value in kinds.items()}
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in range(7)})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_COMPILATION).asm["ptx"]
    print(*(len(re.findall(rf"{way}\\.global\\S*\\.v4", ptx)) / vectors for way in ("ld", "st")))
"""


def test_the_compiled_kernel_moves_16_bytes_a_thread() -> None:
    """It reads gradient and accumulator and writes accumulator and parameter; with a mask, it would move 4 bytes.

    With Adam it reads and writes two moments as well; where thresholds vary, it leaves the parameter to others.
    """
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", VECTORS], capture_output=True, text=True, check=True, env=compiling)
    assert done.stdout.split() == ["2.0", "2.0", "4.0", "4.0", "4.0", "3.0"]


@pytest.mark.parametrize("path", FUSED)
def test_memory_beside_a_parameter_that_was_resized_is_left_alone(path: dict[str, Any]) -> None:
    flat = torch.zeros(6, device=DEVICE)
    weight = nn.Parameter(torch.ones(6, device=DEVICE))
    optimizer = GRDA([weight], lr=0.1, c=0.0, **path)
    for memory in (weight.data, flat[:2], weight.data[:1]):
        weight.data, weight.grad = memory, torch.ones_like(memory)
        if memory.numel() == 6:
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match=r"had the shape \(6,\)"):
            optimizer.step()
    assert not flat.any()


@pytest.mark.parametrize("path", FUSED)
def test_accumulators_of_several_precisions_share_no_launch(path: dict[str, Any]) -> None:
    early, late = (nn.Parameter(torch.ones(8, dtype=dtype, device=DEVICE)) for dtype in (torch.float32, torch.float64))
    optimizer = GRDA([early, late], lr=0.1, c=0.0, **path)
    early.grad = torch.ones_like(early)
    optimizer.step()
    early.data = early.data.double()  # as model.double() does; the accumulator stays in float32
    early.grad, late.grad = (torch.ones(8, dtype=torch.float64, device=DEVICE) for _ in range(2))
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full_like(late, 0.9))
    torch.testing.assert_close(early.detach(), torch.full_like(early, 0.8), rtol=1e-6, atol=0)


def test_a_state_in_another_memory_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = GRDA([weight], lr=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weight]["accumulator"] = torch.ones(4, device="meta")
    with pytest.raises(RuntimeError, match=r"state on meta; move the model first"):
        optimizer.step()


@pytest.mark.parametrize("path", FUSED)
def test_autograd_sees_what_the_kernel_writes(path: dict[str, Any]) -> None:
    assert_old_graphs_are_refused(path, DEVICE)


@pytest.mark.parametrize("path", FUSED)
def test_weights_that_others_write_are_where_the_next_step_starts(path: dict[str, Any]) -> None:
    common = {"lr": 0.05, "c": 0.2, "mu": 0.6, "momentum": 0.9}
    fused_params, plain_params = on_device(), on_device()
    fused, plain = GRDA(fused_params, **common, **path), GRDA(plain_params, **common, foreach=False, fused=False)
    for start in (0, 3, 6):
        step_both((fused, fused_params), (plain, plain_params), range(start, start + 3))
        with torch.no_grad():
            for p in (*fused_params, *plain_params):
                p.clamp_(-0.5, 0.3)
    step_both((fused, fused_params), (plain, plain_params), range(9, 11))
    for p, q in zip(fused_params, plain_params, strict=True):
        torch.testing.assert_close(p, q)
        assert (p <= 0.5).all()  # near the clamped weights, not where the accumulators would be without clamping


@pytest.mark.parametrize("path", FUSED)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((GRDA, {"shape": shape, "momentum": 0.9}) for shape in ("soft", "garrote", "hard")),
        *((AdamGRDA, {"power": power, "prune_until": 0.7, "fix_at": 0.9}) for power in (0.0, 0.5)),
    ],
)
def test_a_target_is_met_as_on_the_single_tensor_path(kind: Any, options: dict[str, Any], path: dict[str, Any]) -> None:
    fused_params, plain_params = on_device(), on_device()
    common = {"lr": 0.05, "target": 0.7, "steps": 10, **options}
    fused = kind(fused_params, **common, **path)
    plain = kind(plain_params, **common, foreach=False, fused=False)
    for steps in (range(5), range(5, 9), range(9, 11)):  # until zeros come, until they are fixed, and after
        step_both((fused, fused_params), (plain, plain_params), steps)
        for p, q in zip(fused_params, plain_params, strict=True):
            torch.testing.assert_close(p, q)
            assert torch.equal(p == 0, q == 0)
    assert fused.progress().zeros == round(0.7 * fused.progress().weights)


@pytest.mark.parametrize("path", FUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(kind: Any, path: dict[str, Any]) -> None:
    params, twins = on_device(), on_device()
    optimizer, plain = (
        kind(params, c=0.05, skip_nonfinite=True, **path),
        kind(twins, c=0.05, foreach=False, fused=False),
    )
    for step in (0, 1, 2, 3):
        if step in (1, 3):
            for p, grad in zip(params, gradients(step, params), strict=True):
                p.grad = grad.to(DEVICE)
            params[-1].grad[5] = (float("nan"), -float("inf"))[step // 2]
            if path.get("capturable"):
                optimizer.step()
            else:  # on a CPU the host sees it at once
                with pytest.warns(UserWarning, match="skipped"):
                    optimizer.step()
        else:
            step_both((optimizer, params), (plain, twins), range(step, step + 1))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)
        for key, value in plain.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key].cpu(), value.cpu())
    if path.get("capturable"):
        with pytest.warns(UserWarning, match="2 steps were skipped so far"):
            assert optimizer.skipped() == 2
    assert optimizer.state_dict()["param_groups"][0]["skipped"] == 2
