"""The gRDA step of all tensors in one Triton launch, for CUDA; imported only when used.

Where each tensor lies is a row of a small table of addresses that travels to the device without the host waiting for
it. A program of the kernel takes one chunk of one tensor: it reads g and v, writes v and w, and nothing else.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16384
"""Elements that one program takes: enough to make up for reading where they lie and computing the threshold."""
BLOCK = 2048
"""Elements in flight at once."""
_WARPS = 4
_COLUMNS = tl.constexpr(7)  # param, grad, accumulator, momentum buffer, elements, step, threshold
_HEADER = tl.constexpr(5)  # lr, c, mu, momentum, weight decay, as float64
_TRITON = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def obstacle(params: Iterable[Tensor]) -> str | None:
    """Return why the kernel cannot run on these parameters, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for p in params:
        if p.device.type != "cuda" and not (interpreted and p.device.type == "cpu"):
            return f"a parameter is on {p.device}, and the kernel needs CUDA"
        if p.dtype not in _TRITON:
            return f"a parameter is of {p.dtype}, and the kernel takes float16, bfloat16, float32 and float64"
    return None


@triton.jit
def _float64(address):  # type: ignore[no-untyped-def]
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _grda_kernel(  # type: ignore[no-untyped-def]
    table,
    chunk_tensor,
    chunk_index,
    chunk_count,
    arrivals,
    lr_address,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensor + program)
    row = table + _HEADER + tensor * _COLUMNS
    param = tl.load(row).to(tl.pointer_type(PARAM))
    grad = tl.load(row + 1).to(tl.pointer_type(GRAD))
    accumulator = tl.load(row + 2).to(tl.pointer_type(STATE))
    if ALIGNED:  # so that each thread moves 16 bytes at a time
        param = tl.multiple_of(param, 16)
        grad = tl.multiple_of(grad, 16)
        accumulator = tl.multiple_of(accumulator, 16)
    first = tl.load(chunk_index + program).to(tl.int64) * CHUNK
    elements = tl.load(row + 4)

    if ON_DEVICE:
        lr = tl.load(lr_address).to(tl.float64)
        step = tl.load(row + 5).to(tl.pointer_type(tl.float64))
        threshold = tl.load(row + 6).to(tl.pointer_type(tl.float64))
        n = tl.load(step) + 1.0
        tau = tl.load(threshold)
        c = _float64(table + 1)
        if c > 0:
            mu = _float64(table + 2)
            rate = lr / (1.0 - _float64(table + 3))
            if rate > 0:
                # At n = 1 the second term is 0^μ = 0, whose logarithm must not be taken.
                before = tl.where(n > 1, tl.exp2(mu * tl.log2(tl.maximum(n - 1, 1.0))), 0.0)
                tau += c * tl.exp2((mu + 0.5) * tl.log2(rate)) * (tl.exp2(mu * tl.log2(n)) - before)
    else:
        lr = _float64(table)
        tau = _float64(row + 6)

    gamma = lr.to(STATE)
    bound = tau.to(STATE)
    if WEIGHT_DECAY:
        decay = _float64(table + 4).to(STATE)
    if MOMENTUM:
        m = _float64(table + 3).to(STATE)
        buffer = tl.load(row + 3).to(tl.pointer_type(STATE))
        if ALIGNED:
            buffer = tl.multiple_of(buffer, 16)
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
        inside = offsets < elements
        g = tl.load(grad + offsets, mask=inside, other=0.0).to(STATE)
        if MAXIMIZE:
            g = -g
        if WEIGHT_DECAY:
            g += tl.load(param + offsets, mask=inside, other=0.0).to(STATE) * decay
        if MOMENTUM:
            velocity = tl.load(buffer + offsets, mask=inside, other=0.0) * m + g
            tl.store(buffer + offsets, velocity, mask=inside)
            g = g + velocity * m if NESTEROV else velocity
        v = tl.load(accumulator + offsets, mask=inside, other=0.0) - gamma * g
        tl.store(accumulator + offsets, v, mask=inside)
        # Written so that |v| ≤ τ gives +0.0 and a NaN stays one.
        w = tl.where(v > bound, v - bound, tl.where(v < -bound, v + bound, tl.where(v == v, 0.0, v)))
        tl.store(param + offsets, w.to(PARAM), mask=inside)

    if ON_DEVICE:
        # Every program of a tensor has read n and τ before it reports here; the last one to report writes them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tensor, 1)
        if arrived == tl.load(chunk_count + tensor) - 1:
            tl.store(arrivals + tensor, 0)
            tl.store(step, n)
            tl.store(threshold, tau)


class Launcher:
    """What one parameter group needs to launch the kernel: the map of chunks, and tables that a CUDA graph can keep."""

    def __init__(self) -> None:
        self._maps: dict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, ...]] = {}
        self._spare: dict[int, tuple[Tensor, Tensor]] = {}
        self._captured: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        buffers: Sequence[Tensor],
        steps: Sequence[Tensor],
        thresholds: Sequence[Tensor] | Sequence[float],
        *,
        lr: float | Tensor,
        c: float,
        mu: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        maximize: bool,
    ) -> None:
        """Take the step of `dirprune.update.grda`: thresholds on the host are the grown ones, on the device the old."""
        on_device = isinstance(thresholds[0], Tensor)
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            kinds.setdefault((p.device, p.dtype, g.dtype), []).append(i)
        scalars = [0.0 if on_device else float(lr), c, mu, momentum, weight_decay]
        for (device, _, _), members in kinds.items():
            lrs = torch.as_tensor(lr, dtype=torch.float64, device=device) if on_device else None
            moved: list[tuple[Tensor, Tensor]] = []
            tensors: list[list[Tensor]] = []
            for i in members:
                p, v = params[i], accumulators[i]
                b = buffers[i] if momentum else v
                g = grads[i] if _same_layout(grads[i], v) else torch.empty_like(v, dtype=grads[i].dtype).copy_(grads[i])
                w = p if _same_layout(p, v) else torch.empty_like(v, dtype=p.dtype).copy_(p)
                if w is not p:
                    moved.append((p, w))
                tensors.append([w, g, v, b])
            rows = [
                [*(t.data_ptr() for t in four), four[0].numel()]
                + ([steps[i].data_ptr(), thresholds[i].data_ptr()] if on_device else [0, _bits(thresholds[i])])  # type: ignore[union-attr,arg-type]
                for i, four in zip(members, tensors, strict=True)
            ]
            self._launch(
                rows,
                scalars,
                lrs,
                device,
                PARAM=_TRITON[tensors[0][0].dtype],
                GRAD=_TRITON[tensors[0][1].dtype],
                STATE=_TRITON[tensors[0][2].dtype],
                ALIGNED=all(address % 16 == 0 for row in rows for address in row[:4]),
                MOMENTUM=momentum != 0,
                NESTEROV=nesterov,
                WEIGHT_DECAY=weight_decay != 0,
                MAXIMIZE=maximize,
                ON_DEVICE=on_device,
            )
            for p, w in moved:
                p.copy_(w)

    def _launch(
        self, rows: list[list[int]], scalars: list[float], lr: Tensor | None, device: torch.device, **kinds: Any
    ) -> None:
        tensor, index, count, arrivals = self._map(tuple(row[4] for row in rows), device)
        if tensor.numel() == 0:
            return
        table = self._send([*map(_bits, scalars), *(cell for row in rows for cell in row)], device)
        context = torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
        with context:
            _grda_kernel[(tensor.numel(),)](
                table,
                tensor,
                index,
                count,
                arrivals,
                table if lr is None else lr,
                **kinds,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=_WARPS,
            )

    def _map(self, sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return which tensor, and which chunk of it, each program takes; and how many programs each tensor has."""
        if (device, sizes) not in self._maps:
            _refuse_capture(device)
            counts = torch.tensor([-(-size // CHUNK) for size in sizes])
            # A tensor without elements still steps: one program for it, all of whose elements are masked.
            counts.clamp_(min=1)
            tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
            index = torch.cat([torch.arange(int(count)) for count in counts])
            arrivals = torch.zeros(len(sizes))
            self._maps[device, sizes] = tuple(t.to(device, torch.int32) for t in (tensor, index, counts, arrivals))
        return self._maps[device, sizes]

    def _send(self, cells: list[int], device: torch.device) -> Tensor:
        """Return the cells on the device, without the host waiting and so that a CUDA graph can repeat it."""
        host = torch.tensor(cells, dtype=torch.int64)
        if device.type != "cuda":
            return host
        size = len(cells)
        if torch.cuda.is_current_stream_capturing():
            # A graph repeats the copy from this very memory, so a capture keeps a pair of buffers for itself alone.
            if size not in self._spare:
                _refuse_capture(device)
            pinned, table = self._spare.pop(size)
            self._captured.append((pinned, table))
            pinned.copy_(host)
            return table.copy_(pinned, non_blocking=True)
        if size not in self._spare:
            self._spare[size] = (host.pin_memory(), torch.empty_like(host, device=device))
        return host.pin_memory().to(device, non_blocking=True)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("take an optimizer step on the same parameters outside the CUDA graph before each capture")


def _bits(value: float) -> int:
    """Return the bits of a float64 as an int64: how a number travels in a table of addresses."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _same_layout(tensor: Tensor, like: Tensor) -> bool:
    """Whether the elements lie in memory in the order of ``like``, an accumulator, which is always dense."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())
