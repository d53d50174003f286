"""BatchNorm, relu and the sum before them, for channels_last activations: Triton kernels with minimal memory traffic.

Over the P pixels of a channel, with the statistics of the batch in training and the running ones in evaluation:

    y = relu(x·scale + shift)      scale = γ·r, shift = β − mean·scale, r = (variance + ε)^-½
    x = a + b + bias               where BatchNorm follows a sum, which a shortcut uses too

    g = dy where y > 0       dβ = Σ g,  dγ = r·Σ g·(x − mean)
    dx = scale·(g − dβ/P − (x − mean)·r·dγ/P) = scale·g + slope·x + level      + the gradient of the sum's shortcut

Each direction is one pass that reduces and one that maps; a small kernel computes the few numbers per channel in
between. The moments are sums of x − x₀ and of its square, x₀ being the channel's first pixel. A large mean then causes
no cancellation, and by Samuelson's inequality |x₀ − mean| ≤ σ·√P bounds the error that an outlier x₀ can cause.

A tensor is read in memory order, as rows of lcm(C, 256) elements: each column belongs to one channel, whatever C is. A
program takes 256 columns, in bfloat16 16 bytes per thread for a warp's row, and every `strips`-th tile of rows.
It holds the numbers of its columns in registers, and no lane is idle. The map passes go backwards from the end, where
the reduction has just been, and find that part of the tensors in the cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDTH = 256
"""The number of columns of a tile."""


@dataclass(frozen=True)
class Tile:
    """The tile that a program processes at a time, and how many programs run at once."""

    rows: int
    """64 to 128 bytes in flight per thread, as many as registers allow."""
    per_sm: int
    """Programs per multiprocessor, so that all run at once."""
    warps: int
    """One for kernels that sum columns: a single warp holds whole columns, and needs no shared memory."""


TILES = {
    "moments": Tile(rows=4, per_sm=16, warps=1),
    "sum": Tile(rows=8, per_sm=16, warps=1),
    "map": Tile(rows=16, per_sm=8, warps=4),
    "products": Tile(rows=8, per_sm=12, warps=1),
    "gradient": Tile(rows=4, per_sm=16, warps=1),
    "evaluation": Tile(rows=8, per_sm=5, warps=4),
}
SETTLED = {"HEIGHT": 512, "CHANNELS": 8}
"""Rows and channels that a program of the small kernels sums at a time."""
_COMPILATION = {"enable_fp_fusion": True}
"""Fused multiply-add rounds once, as in torch's own CUDA kernels."""
_MEAN, _INVERSE, _SCALE, _SHIFT, _VARIANCE = (tl.constexpr(i) for i in range(5))  # rows of `numbers`


@triton.jit
def _columns(period, C, WIDTH: tl.constexpr):
    """Return this program's first tile, the step to its next one, its columns and their channels.

    Kernels keep what they read per channel as vectors until they use it: if each were expanded to a row of a tile at
    once, every load would wait for the one before.
    """
    blocks = period // WIDTH
    columns = tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH)
    return tl.program_id(0) // blocks, tl.num_programs(0) // blocks, columns, columns % C


@triton.jit
def _cells(tile, period, columns, ROWS: tl.constexpr):
    rows = tile * ROWS + tl.arange(0, ROWS)
    return rows[:, None] * period + columns[None, :]


@triton.jit
def _read(pointer, cells, elements, EVEN: tl.constexpr, LAST: tl.constexpr, ACC: tl.constexpr):
    """Return the elements; with LAST, they are not read again and are evicted from the cache first."""
    policy: tl.constexpr = "evict_first" if LAST else ""
    if EVEN:
        values = tl.load(pointer + cells, eviction_policy=policy)
    else:
        values = tl.load(pointer + cells, mask=cells < elements, other=0.0, eviction_policy=policy)
    return values.to(ACC)


@triton.jit
def _write(pointer, cells, values, elements, EVEN: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + cells, values)
    else:
        tl.store(pointer + cells, values, mask=cells < elements)


@triton.jit
def _down(values):
    """Return the sum of each column, as `tl.sum`, which only works interpreted if triton was imported for that."""
    return tl.reduce(values, 0, tl.standard._sum_combine)


@triton.jit
def _write_sums(sums, which, strip, strips, period, columns, total, FOLD: tl.constexpr, WIDTH: tl.constexpr):
    """Write the sums of this program's columns, or of its channels if 256 columns repeat them."""
    if FOLD > 1:
        total = _down(tl.reshape(total, (FOLD, WIDTH // FOLD)))
        columns = tl.arange(0, WIDTH // FOLD)
    tl.store(sums + (which * strips + strip) * (period // FOLD) + columns, total)


@triton.jit
def _read_sums(sums, rows, C, TWO: tl.constexpr, HEIGHT: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the first and second sums of all programs for this program's channels, in float64 and in a fixed order."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.full((HEIGHT, CHANNELS), 0.0, tl.float64)
    second = tl.full((HEIGHT, CHANNELS), 0.0, tl.float64)
    for start in range(0, rows, HEIGHT):
        row = start + tl.arange(0, HEIGHT)
        inside = (row < rows)[:, None] & (channel < C)[None, :]
        cells = sums + row[:, None] * C + channel[None, :]
        first += tl.load(cells, mask=inside, other=0.0)
        if TWO:
            second += tl.load(cells + rows * C, mask=inside, other=0.0)
    return _down(first), _down(second)


@triton.jit
def _added(x, b, offset, total, cells, elements, BIASED: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr):
    """Write x + b + offset, and return it as the next pass will read it: rounded."""
    x += _read(b, cells, elements, EVEN, True, ACC)
    if BIASED:
        x += offset[None, :]
    rounded = x.to(total.dtype.element_ty)
    _write(total, cells, rounded, elements, EVEN)
    return rounded.to(ACC)


@triton.jit
def _relu(z):
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)  # NaN must not be hidden


@triton.jit(do_not_specialize=["tiles"])
def _moments_kernel(
    a, b, bias, total, sums, C, period, elements, tiles,
    ADDS: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum x − x₀ and its square; with ADDS, also write x = a + b + bias."""
    strip, strips, columns, channels = _columns(period, C, WIDTH)
    first = tl.load(a + channels).to(ACC)
    offset = tl.load(bias + channels).to(ACC)
    if ADDS:
        first += tl.load(b + channels).to(ACC)
        if BIASED:
            first += offset
        first = first.to(total.dtype.element_ty).to(ACC)
    one = tl.full((WIDTH,), 0.0, ACC)
    two = tl.full((WIDTH,), 0.0, ACC)
    for tile in tl.range(strip, tiles, strips, num_stages=1):
        cells = _cells(tile, period, columns, ROWS)
        x = _read(a, cells, elements, EVEN, ADDS, ACC)
        if ADDS:
            x = _added(x, b, offset, total, cells, elements, BIASED, EVEN, ACC)
        distance = x - first[None, :]
        if not EVEN:
            distance = tl.where(cells < elements, distance, 0.0)
        one += _down(distance)
        two += _down(distance * distance)
    _write_sums(sums, 0, strip, strips, period, columns, one, FOLD, WIDTH)
    _write_sums(sums, 1, strip, strips, period, columns, two, FOLD, WIDTH)


@triton.jit(do_not_specialize=["rows", "pixels"])
def _moments_settled(
    sums, x, weight, bias, numbers, C, rows, pixels, eps, HEIGHT: tl.constexpr, CHANNELS: tl.constexpr
):
    """Compute `numbers` of each channel, one row each, from the moments of the batch."""
    TYPE: tl.constexpr = numbers.dtype.element_ty
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    gamma = tl.load(weight + channel, mask=inside, other=0.0).to(TYPE)
    beta = tl.load(bias + channel, mask=inside, other=0.0).to(TYPE)
    start = tl.load(x + channel, mask=inside, other=0.0).to(tl.float64)
    count = pixels.to(tl.float64)
    share, unbiased = 1.0 / count, count / (count - 1.0)
    one, two = _read_sums(sums, rows, C, True, HEIGHT, CHANNELS)
    distance = one * share
    mean = (start + distance).to(TYPE)
    variance = tl.maximum(two * share - distance * distance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = 1.0 / tl.sqrt(variance.to(TYPE) + eps)
    scale = gamma * inverse
    at = numbers + channel
    tl.store(at + _MEAN * C, mean, mask=inside)
    tl.store(at + _INVERSE * C, inverse, mask=inside)
    tl.store(at + _SCALE * C, scale, mask=inside)
    tl.store(at + _SHIFT * C, beta - mean * scale, mask=inside)
    tl.store(at + _VARIANCE * C, variance * unbiased, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def _forward_kernel(
    x, y, numbers, C, period, elements, tiles,
    EVEN: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write y = relu(x·scale + shift)."""
    strip, strips, columns, channels = _columns(period, C, WIDTH)
    scale = tl.load(numbers + _SCALE * C + channels)
    shift = tl.load(numbers + _SHIFT * C + channels)
    for tile in tl.range(strip, tiles, strips, num_stages=1):
        cells = _cells(tiles - 1 - tile, period, columns, ROWS)
        z = _read(x, cells, elements, EVEN, True, ACC) * scale[None, :] + shift[None, :]
        _write(y, cells, _relu(z), elements, EVEN)


@triton.jit(do_not_specialize=["tiles"])
def _products_kernel(
    x, dy, sums, numbers, C, period, elements, tiles,
    EVEN: tl.constexpr, FOLD: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum g and g·(x − mean)."""
    strip, strips, columns, channels = _columns(period, C, WIDTH)
    mean = tl.load(numbers + _MEAN * C + channels)
    scale = tl.load(numbers + _SCALE * C + channels)
    shift = tl.load(numbers + _SHIFT * C + channels)
    one = tl.full((WIDTH,), 0.0, ACC)
    two = tl.full((WIDTH,), 0.0, ACC)
    for tile in tl.range(strip, tiles, strips, num_stages=1):
        cells = _cells(tile, period, columns, ROWS)
        value = _read(x, cells, elements, EVEN, False, ACC)
        gradient = _read(dy, cells, elements, EVEN, False, ACC)  # 0 beyond the end, so it adds nothing to the sums
        gradient = tl.where(value * scale[None, :] + shift[None, :] <= 0.0, 0.0, gradient)
        one += _down(gradient)
        two += _down(gradient * (value - mean[None, :]))
    _write_sums(sums, 0, strip, strips, period, columns, one, FOLD, WIDTH)
    _write_sums(sums, 1, strip, strips, period, columns, two, FOLD, WIDTH)


@triton.jit(do_not_specialize=["rows", "pixels"])
def _products_settled(
    sums, numbers, dweight, dbias, line, C, rows, pixels, HEIGHT: tl.constexpr, CHANNELS: tl.constexpr
):
    """Compute the gradients by γ and β, and slope and level of dx, from the sums."""
    TYPE: tl.constexpr = numbers.dtype.element_ty
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    mean = tl.load(numbers + _MEAN * C + channel, mask=inside, other=0.0)
    inverse = tl.load(numbers + _INVERSE * C + channel, mask=inside, other=0.0)
    scale = tl.load(numbers + _SCALE * C + channel, mask=inside, other=0.0)
    share = (1.0 / pixels.to(tl.float64)).to(TYPE)
    one, two = _read_sums(sums, rows, C, True, HEIGHT, CHANNELS)
    to_bias, to_weight = one.to(TYPE), two.to(TYPE) * inverse
    slope = -scale * inverse * (to_weight * share)
    tl.store(dweight + channel, to_weight, mask=inside)
    tl.store(dbias + channel, to_bias, mask=inside)
    tl.store(line + channel, slope, mask=inside)
    tl.store(line + C + channel, -scale * (to_bias * share) - slope * mean, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def _gradient_kernel(
    x, dy, beside, dx, sums, numbers, line, C, period, elements, tiles,
    BESIDE: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Map dy to dx, and add the shortcut's gradient, ``beside``, to it; with BIASED, sum dx over the pixels."""
    strip, strips, columns, channels = _columns(period, C, WIDTH)
    scale = tl.load(numbers + _SCALE * C + channels)
    shift = tl.load(numbers + _SHIFT * C + channels)
    slope = tl.load(line + channels)
    level = tl.load(line + C + channels)
    if BIASED:
        total = tl.full((WIDTH,), 0.0, ACC)
    for tile in tl.range(strip, tiles, strips, num_stages=1):
        cells = _cells(tiles - 1 - tile, period, columns, ROWS)
        value = _read(x, cells, elements, EVEN, True, ACC)
        gradient = _read(dy, cells, elements, EVEN, True, ACC)
        gradient = tl.where(value * scale[None, :] + shift[None, :] <= 0.0, 0.0, gradient)
        gradient = gradient * scale[None, :] + (value * slope[None, :] + level[None, :])
        if BESIDE:
            gradient += _read(beside, cells, elements, EVEN, True, ACC)
        _write(dx, cells, gradient, elements, EVEN)
        if BIASED:
            if not EVEN:
                gradient = tl.where(cells < elements, gradient, 0.0)
            total += _down(gradient)
    if BIASED:
        _write_sums(sums, 0, strip, strips, period, columns, total, FOLD, WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _sums_settled(sums, result, C, rows, HEIGHT: tl.constexpr, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    total, _ = _read_sums(sums, rows, C, False, HEIGHT, CHANNELS)
    tl.store(result + channel, total, mask=channel < C)


@triton.jit(do_not_specialize=["tiles"])
def _evaluation_kernel(
    a, b, bias, total, y, weight, beta, mean, variance, C, period, elements, tiles, eps,
    ADDS: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Map a, or with ADDS x = a + b + bias, to y by the running statistics."""
    strip, strips, columns, channels = _columns(period, C, WIDTH)
    scale = tl.load(weight + channels).to(ACC) / tl.sqrt(tl.load(variance + channels).to(ACC) + eps)
    shift = tl.load(beta + channels).to(ACC) - tl.load(mean + channels).to(ACC) * scale
    offset = tl.load(bias + channels).to(ACC)
    if BIASED and not ADDS:
        shift += offset * scale
    for tile in tl.range(strip, tiles, strips, num_stages=1):
        cells = _cells(tile, period, columns, ROWS)
        x = _read(a, cells, elements, EVEN, True, ACC)
        if ADDS:
            x = _added(x, b, offset, total, cells, elements, BIASED, EVEN, ACC)
        z = x * scale[None, :] + shift[None, :]
        _write(y, cells, _relu(z), elements, EVEN)


@triton.jit
def _tracking_kernel(
    mean, variance, batches, numbers, offset, momentum, C, BIASED: tl.constexpr, CHANNELS: tl.constexpr
):
    """Update running statistics as nn.BatchNorm2d does, with BIASED for x + offset."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    seen = tl.load(numbers + _MEAN * C + channel, mask=inside)
    if BIASED:
        seen += tl.load(offset + channel, mask=inside).to(seen.dtype)
    before = tl.load(mean + channel, mask=inside)
    tl.store(mean + channel, (1.0 - momentum) * before + momentum * seen, mask=inside)
    before = tl.load(variance + channel, mask=inside)
    seen = tl.load(numbers + _VARIANCE * C + channel, mask=inside)
    tl.store(variance + channel, (1.0 - momentum) * before + momentum * seen, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@dataclass(frozen=True)
class Plan:
    """How a tensor is divided among the programs of a kernel."""

    grid: tuple[int]
    sizes: dict[str, Any]
    """Arguments of the kernel."""
    sums: dict[str, int]
    """Further arguments of a kernel that sums columns."""
    rows: int
    """The number of partial sums per channel."""


def plan(tile: Tile, elements: int, channels: int, multiprocessors: int) -> Plan:
    """Return the plan: at most as many programs as run at once, with numbers of tiles that differ by one at most."""
    period = lcm(channels, WIDTH)
    tiles = triton.cdiv(elements, tile.rows * period)
    blocks = period // WIDTH
    most = max(1, tile.per_sm * multiprocessors // blocks)
    strips = triton.cdiv(tiles, triton.cdiv(tiles, most))
    fold = period // channels if blocks == 1 else 1
    sizes = {"C": channels, "period": period, "elements": elements, "tiles": tiles, "WIDTH": WIDTH}
    sizes |= {"EVEN": elements % (tile.rows * period) == 0, "ROWS": tile.rows, "num_warps": tile.warps}
    return Plan((blocks * strips,), sizes, {"FOLD": fold}, strips * (period // fold) // channels)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def planned(kernel: str, x: Tensor) -> Plan:
    return plan(TILES[kernel], x.numel(), x.shape[1], _multiprocessors(x.device))


def accumulated(x: Tensor) -> dict[str, Any]:
    """Return the kernel arguments for the type of sums."""
    return {"ACC": tl.float64 if x.dtype == torch.float64 else tl.float32, **_COMPILATION}


def settled(channels: int) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and tile of the small kernels, which compute a few numbers per channel."""
    return (triton.cdiv(channels, SETTLED["CHANNELS"]),), {**SETTLED, "num_warps": 16, "enable_fp_fusion": True}
