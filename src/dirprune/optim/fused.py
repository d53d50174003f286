"""The step of GRDA or AdamGRDA on all tensors in one Triton launch, for CUDA; imported only when used.

The addresses of each tensor are a row of a table on the device. The table is sent again only when an address or a
number in it changes. A program of the kernel handles one chunk of one tensor: it reads g and v, writes v and w, and
nothing else (with Adam, its moments). Step and threshold of every parameter are on the device too, so that the host
never waits.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dirprune._support.graphs import is_capturing
from dirprune.optim.state import check_devices, check_shapes
from dirprune.optim.update import Rule, Tensors

CHUNK = 8192
"""Elements per program: enough to make up for reading the addresses and computing the threshold."""
BLOCK = 1024
"""Elements that a program loads at once."""
_COMPILATION = {"num_warps": 4, "enable_fp_fusion": True}
"""Fused multiply-add rounds once, as in torch's own CUDA kernels."""
_SPARES = 4
"""Tables allocated ahead, since a capture may not allocate: this many captures can follow one uncaptured step."""
_COLUMNS = tl.constexpr(9)  # param, grad, accumulator, buffer, square, pruned, elements, step, threshold
_HEADER = tl.constexpr(8)  # lr, c, mu, momentum, weight decay, both betas, eps, as float64
_DTYPE, _KIND = attrgetter("dtype"), attrgetter("device", "dtype")
_TRITON = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def obstacle(params: Iterable[Tensor]) -> str | None:
    """Return why the kernel cannot run on these parameters, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for device, dtype in set(map(_KIND, params)):
        if device.type != "cuda" and not (interpreted and device.type == "cpu"):
            return f"a parameter is on {device}, and the kernel needs CUDA"
        if dtype not in _TRITON:
            return f"a parameter is of {dtype}, and the kernel takes float16, bfloat16, float32 and float64"
    return None


@triton.jit
def _float64(address):  # type: ignore[no-untyped-def]
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _pointer(cell, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pointer in a cell of the table; if it is aligned, each thread moves 16 bytes at a time."""
    address = tl.load(cell).to(tl.pointer_type(KIND))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _grown(table, lr, n, tau):  # type: ignore[no-untyped-def]
    """Return the threshold of step n, given that of the step before.

    At n = 1 the second power is 0^μ = 0: its logarithm must not be taken, nor that of a rate of 0. There are no
    branches, so that the first elements are loaded while this is computed.
    """
    c = _float64(table + 1)
    mu = _float64(table + 2)
    rate = lr / (1.0 - _float64(table + 3))
    before = tl.where(n > 1, tl.exp2(mu * tl.log2(tl.maximum(n - 1, 1.0))), 0.0)
    power = tl.where(rate > 0, tl.exp2((mu + 0.5) * tl.log2(tl.where(rate > 0, rate, 1.0))), 0.0)
    return tau + c * power * (tl.exp2(mu * tl.log2(n)) - before)


@triton.jit  # type: ignore[untyped-decorator]
def _take(  # type: ignore[no-untyped-def]
    param,
    grad,
    accumulator,
    buffer,
    square,
    pruned,
    offsets,
    inside,
    other,
    lr,
    bound,
    momentum,
    decay,
    rest,
    beta2,
    rest2,
    correction,
    eps,
    ADAM: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PRUNED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Step the elements at ``offsets``, or only those ``inside`` the tensor; without a shape, leave the weights alone.

    g and v are not read before the next step. They are evicted from the cache first, to leave room for w, which is.
    With Adam, ``momentum`` is β₁, ``rest`` 1 − β₁ (rounded once), ``rest2`` 1 − β₂, and ``decay`` what v is scaled by;
    ``lr`` is divided by the correction of the mean, and ``correction`` is the root of that of the square.
    """
    PARAM = param.dtype.element_ty
    STATE = accumulator.dtype.element_ty
    g = tl.load(grad + offsets, mask=inside, other=other, eviction_policy="evict_first").to(STATE)
    if MAXIMIZE:
        g = -g
    v = tl.load(accumulator + offsets, mask=inside, other=other, eviction_policy="evict_first")
    if ADAM:
        mean = tl.load(buffer + offsets, mask=inside, other=other)
        mean += rest * (g - mean)
        s = tl.load(square + offsets, mask=inside, other=other) * beta2 + rest2 * g * g
        tl.store(buffer + offsets, mean, mask=inside)
        tl.store(square + offsets, s, mask=inside)
        v = v * decay - lr * mean / (tl.sqrt(s) / correction + eps)
    else:
        if WEIGHT_DECAY:
            g += tl.load(param + offsets, mask=inside, other=other).to(STATE) * decay
        if MOMENTUM:
            velocity = tl.load(buffer + offsets, mask=inside, other=other) * momentum + g
            tl.store(buffer + offsets, velocity, mask=inside)
            g = g + velocity * momentum if NESTEROV else velocity
        v = v - lr * g
    if PRUNED:
        v = tl.where(tl.load(pruned + offsets, mask=inside, other=other) != 0, 0.0, v)
    tl.store(accumulator + offsets, v, mask=inside, eviction_policy="evict_first")
    if SHAPE != "":  # a compiled string is neither true nor false
        # Written so that |v| ≤ τ gives +0.0 and a NaN stays one.
        if SHAPE == "soft":
            w = tl.where(v > bound, v - bound, tl.where(v < -bound, v + bound, tl.where(v == v, 0.0, v)))
        else:
            left = v - bound * bound / tl.where(v == 0.0, 1.0, v) if SHAPE == "garrote" else v
            w = tl.where(tl.abs(v) <= bound, 0.0, left)
        w = w.to(PARAM)
        if PARAM != STATE:  # a value that underflows in the cast keeps its sign
            w = tl.where(w == 0.0, 0.0, w)
        tl.store(param + offsets, w, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _grda_kernel(  # type: ignore[no-untyped-def]
    table,
    chunk_tensor,
    chunk_index,
    chunk_count,
    arrivals,
    lr_address,
    fine_address,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADAM: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PRUNED: tl.constexpr,
    SHAPE: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    GUARDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if GUARDED and tl.load(fine_address) == 0:  # a gradient is not finite: no program does anything
        return
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensor + program)
    row = table + _HEADER + tensor * _COLUMNS
    param = _pointer(row, PARAM, ALIGNED)
    grad = _pointer(row + 1, GRAD, ALIGNED)
    accumulator = _pointer(row + 2, STATE, ALIGNED)
    buffer = _pointer(row + 3, STATE, ALIGNED) if MOMENTUM or ADAM else accumulator
    square = _pointer(row + 4, STATE, ALIGNED) if ADAM else accumulator
    first = tl.load(chunk_index + program).to(tl.int64) * CHUNK
    pruned = _pointer(row + 5, tl.int8, False) if PRUNED else accumulator
    elements = tl.load(row + 6)

    lr = tl.load(lr_address).to(tl.float64) if LR_TENSOR else _float64(table)
    step = _pointer(row + 7, tl.float64, False)
    threshold = _pointer(row + 8, tl.float64, False)
    n = tl.load(step) + 1.0
    tau = _grown(table, lr, n, tl.load(threshold))

    bound = tau.to(STATE)
    decay = _float64(table + 4)
    m = _float64(table + 5 if ADAM else table + 3)
    beta2 = _float64(table + 6)
    rest = (1.0 - m).to(STATE)
    rest2 = (1.0 - beta2).to(STATE)
    correction = rest2
    if ADAM:
        decay = 1.0 - lr * decay
        lr = lr / (1.0 - tl.exp2(n * tl.log2(tl.maximum(m, 1e-300))))
        correction = tl.sqrt(1.0 - tl.exp2(n * tl.log2(tl.maximum(beta2, 1e-300)))).to(STATE)
    gamma = lr.to(STATE)
    m = m.to(STATE)
    decay = decay.to(STATE)
    beta2 = beta2.to(STATE)
    eps = _float64(table + 7).to(STATE)
    # With a mask each thread moves one element at a time instead of 16 bytes: only a tensor's last chunk needs it.
    if first + CHUNK <= elements:
        for start in range(0, CHUNK, BLOCK):
            offsets = first + start + tl.arange(0, BLOCK)
            _take(param, grad, accumulator, buffer, square, pruned, offsets, None, None, gamma, bound, m, decay, rest,
                  beta2, rest2, correction, eps, ADAM, MOMENTUM, NESTEROV, WEIGHT_DECAY, MAXIMIZE, PRUNED,
                  SHAPE)  # fmt: skip
    else:
        for start in range(0, CHUNK, BLOCK):
            offsets = first + start + tl.arange(0, BLOCK)
            _take(param, grad, accumulator, buffer, square, pruned, offsets, offsets < elements, 0.0, gamma, bound, m,
                  decay, rest, beta2, rest2, correction, eps, ADAM, MOMENTUM, NESTEROV, WEIGHT_DECAY, MAXIMIZE, PRUNED,
                  SHAPE)  # fmt: skip

    # Every program of a tensor has read n and τ before it reports here; the last one to report writes them.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tensor, 1)
    if arrived == tl.load(chunk_count + tensor) - 1:
        tl.store(arrivals + tensor, 0)
        tl.store(step, n)
        tl.store(threshold, tau)


class _Launch(NamedTuple):
    """One launch of the kernel."""

    tensors: tuple[Tensor, ...]
    """The kernel's arguments that lie on the device."""
    kinds: dict[str, Any]
    """Its arguments that are compiled in."""


_Moved = tuple[Tensor, Tensor, Tensor]
"""A parameter, its copy, and its gradient or a copy of that."""


class Launcher:
    """Launches the kernel for one parameter group, and keeps its maps of chunks and tables of addresses.

    Call it like `dirprune.optim.update.take_step`. It launches once per combination of dtypes, of which there is
    usually one. It must outlive the CUDA graphs that it was captured in: they read its tables.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, ...]] = {}
        self._spare: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._aside: Any = None  # a stream for copies that a capture must not record
        self._captured: list[Any] = []
        self._signature: tuple[Any, ...] | None = None
        self._launches: list[_Launch] = []
        self._held: tuple[Any, ...] = ()

    def __call__(self, tensors: Tensors, rule: Rule, fine: Tensor | None = None) -> None:
        """Take one step, unless ``fine`` says on the device that it must not be taken."""
        device = tensors.params[0].device
        lr = rule.lr
        if isinstance(lr, Tensor) and lr.device != device:
            lr = float(lr) if lr.is_cpu else lr.to(device)
        moved: list[_Moved] = []
        signature = (
            lr.data_ptr() if isinstance(lr, Tensor) else lr,
            rule[1:],
            fine is None or fine.data_ptr(),
            _stream(device),
            *_whereabouts(tensors),
        )
        if signature != self._signature:
            self._launches, moved = self._plan(tensors, rule, lr, fine)
            self._signature = None if moved else signature
            # An address identifies a tensor only as long as it lives.
            self._held = (*map(list, tensors[2:]), lr, fine)
        if is_capturing(device):
            self._captured.append((self._launches, self._held))  # what a graph reads must live as long as the graph
        for launch in self._launches:
            grid = (launch.tensors[1].numel(),)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                _grda_kernel[grid](*launch.tensors, **launch.kinds, CHUNK=CHUNK, BLOCK=BLOCK, **_COMPILATION)
        for p, w, _ in moved:
            p.copy_(w)
        torch.autograd.graph.increment_version(tensors.params)  # autograd does not see a kernel's writes

    def _plan(
        self, tensors: Tensors, rule: Rule, lr: float | Tensor, fine: Tensor | None
    ) -> tuple[list[_Launch], list[_Moved]]:
        """Return the launches of a step, one for each combination of dtypes, and what they move to another layout."""
        params, grads, accumulators = tensors[:3]
        check_shapes(params, accumulators)
        flags = {
            "ADAM": rule.betas is not None,
            "MOMENTUM": rule.momentum != 0,
            "NESTEROV": rule.nesterov,
            "WEIGHT_DECAY": rule.weight_decay != 0,
            "MAXIMIZE": rule.maximize,
            "PRUNED": bool(tensors.pruned),
            "SHAPE": rule.shape,
            "LR_TENSOR": isinstance(lr, Tensor),
            "GUARDED": fine is not None,
        }
        rate = 0.0 if isinstance(lr, Tensor) else lr
        betas = rule.betas or (0.0, 0.0)
        scalars = [rate, rule.c, rule.mu, rule.momentum, rule.weight_decay, *betas, rule.eps]
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
        for i, (p, g, v) in enumerate(zip(params, grads, accumulators, strict=True)):
            kinds.setdefault((p.device, p.dtype, g.dtype, v.dtype), []).append(i)
        launches: list[_Launch] = []
        moved: list[_Moved] = []
        for (device, param_dtype, grad_dtype, state_dtype), members in kinds.items():
            rows = [self._row(tensors, i, moved) for i in members]
            table = self._send([*map(_bits, scalars), *(cell for row in rows for cell in row)], device)
            types = {"PARAM": _TRITON[param_dtype], "GRAD": _TRITON[grad_dtype], "STATE": _TRITON[state_dtype]}
            aligned = all(address % 16 == 0 for row in rows for address in row[:5])
            chunks = self._map(tuple(row[6] for row in rows), device)
            given = (table, *chunks, lr if isinstance(lr, Tensor) else table, table if fine is None else fine)
            launches.append(_Launch(given, {**types, **flags, "ALIGNED": aligned}))
        return launches, moved

    def _row(self, tensors: Tensors, i: int, moved: list[_Moved]) -> list[int]:
        """Return a parameter's row of the table; what is not laid out as the accumulator is goes to a copy that is."""
        p, grad, v = (tensors[k][i] for k in range(3))
        buffer, square = (each[i] if each else v for each in (tensors.buffers, tensors.squares))
        step, threshold = tensors.steps[i], tensors.thresholds[i]
        pruned = tensors.pruned[i] if tensors.pruned else v
        check_devices(p, grad, v, buffer, square, pruned, step, threshold)
        w, g = (t if _same_layout(t, v) else torch.empty_like(v, dtype=t.dtype).copy_(t) for t in (p, grad))
        if w is not p or g is not grad:
            moved.append((p, w, g))
        per_element = map(Tensor.data_ptr, (w, g, v, buffer, square, pruned))
        return [*per_element, v.numel(), step.data_ptr(), threshold.data_ptr()]

    def _map(self, sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensor and the chunk of each program, the number of programs per tensor, and arrival counters."""
        if (device, sizes) not in self._maps:
            _refuse_capture(device)
            # A tensor without elements still steps: it gets one program with all elements masked.
            counts = [max(1, -(-size // CHUNK)) for size in sizes]
            tensor = [t for t, count in enumerate(counts) for _ in range(count)]
            index = [i for count in counts for i in range(count)]
            arrivals = [0] * len(sizes)
            self._maps[device, sizes] = tuple(
                torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (tensor, index, counts, arrivals)
            )
        return self._maps[device, sizes]

    def _send(self, cells: list[int], device: torch.device) -> Tensor:
        """Copy the cells to the device; the host waits for that only during a capture."""
        host = torch.tensor(cells, dtype=torch.int64, device="cpu")
        if device.type != "cuda":
            return host
        spares = self._spare.setdefault(len(cells), [])
        if not is_capturing(device):
            self._aside = self._aside or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            while len(spares) < _SPARES:  # memory for captures, which may not allocate it
                echo = torch.zeros_like(host, pin_memory=True)
                spares.append((host.pin_memory(), torch.empty_like(host, device=device), echo))
                self._aside.wait_stream(torch.cuda.current_stream(device))
            return host.pin_memory().to(device, non_blocking=True)
        if not spares:
            _refuse_capture(device)
        # On a stream that is not captured: a replay needs the table, but not the copy.
        pinned, table, echo = spares.pop()
        pinned.copy_(host)
        with torch.cuda.stream(self._aside):
            table.copy_(pinned, non_blocking=True)
            echo.copy_(table, non_blocking=True)
        while not torch.equal(echo, host):  # waiting for a stream is forbidden while another one is captured
            time.sleep(0)
        return table


def _whereabouts(tensors: Tensors) -> Iterator[list[Any]]:
    """Yield all that decides where the kernel reads and writes; with `map`, because it runs in every step."""
    for per_element in (*tensors[:4], tensors.pruned, tensors.squares):
        yield list(map(Tensor.data_ptr, per_element))
    yield list(map(Tensor.numel, tensors.params))
    for replaceable in tensors[:2]:  # others may replace parameters and gradients
        yield list(map(Tensor.stride, replaceable))
        yield list(map(_DTYPE, replaceable))
    for scalars in tensors[4:6]:  # kept alive while their addresses are in use, so identity is enough
        yield list(map(id, scalars))


def _stream(device: torch.device) -> int:
    """Return the stream that steps run on: a table belongs to the stream it was sent on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _refuse_capture(device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError("take an optimizer step on the same parameters outside the CUDA graph before each capture")


def _bits(value: float) -> int:
    """Return the bits of a float64 as an int64, to store a number in a table of addresses."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _same_layout(tensor: Tensor, like: Tensor) -> bool:
    """Return whether the elements are in memory in the order of ``like``, an accumulator, which is always dense."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())
